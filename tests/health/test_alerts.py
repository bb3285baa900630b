"""An alert fires when a number crosses its limit, once, and only if configured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.config.loading import parse_config
from roundhouse.config.operations import AlertsConfig
from roundhouse.health.errors import AUDITED, KL, MISMATCH, REFUSED, REWARD, new_alerts, tail
from roundhouse.stages.report import AlertWatch
from roundhouse.store.run import open_run


def told(config: AlertsConfig, metric: str, values: list[float]) -> list[tuple[int, str]]:
    """(iteration, alert) of each alert that the history of one metric gives."""
    history = [{metric: value} for value in values]
    return [(k, alert.name) for k in range(1, len(history) + 1) for alert in new_alerts(config, history[:k])]


def test_a_reward_that_falls_below_half_of_its_best_is_told_once_until_it_has_recovered():
    config = AlertsConfig(reward_window=2)
    rewards = [0.2, 0.6, 0.8, 0.7, 0.3, 0.2, 0.2, 0.9, 0.9, 0.1, 0.1]
    assert told(config, REWARD, rewards) == [(6, "reward_collapse"), (11, "reward_collapse")]


def test_one_bad_draw_of_tasks_is_no_collapse():
    assert told(AlertsConfig(), REWARD, [0.8, 0.8, 0.8, 0.3, 0.8, 0.8]) == []


def test_rewards_below_zero_collapse_by_distance():
    assert told(AlertsConfig(reward_window=1), REWARD, [-5.0, -1.0, -9.0]) == []
    assert told(AlertsConfig(reward_window=1, reward_drop=3.0), REWARD, [-5.0, -1.0, -9.0]) == [(3, "reward_collapse")]


@pytest.mark.parametrize(("metric", "name", "key"), [(KL, "kl", "kl_above"), (MISMATCH, "mismatch", "mismatch_above")])
def test_a_number_above_its_limit_is_told_when_it_crosses(metric, name, key):
    config = AlertsConfig(**{key: 2.0})
    assert told(config, metric, [1.0, 2.0, 2.1, 5.0, 1.0, 3.0]) == [(3, name), (6, name)]
    assert told(AlertsConfig(**{key: None}), metric, [9.0]) == []


def hacked(counts: list[tuple[int, int]], **config: Any) -> list[int]:
    """Iterations at which the alert fires, of (audited, refused) in each."""
    history = [{AUDITED: float(audited), REFUSED: float(refused)} for audited, refused in counts]
    fired = [new_alerts(AlertsConfig(**config), history[:k]) for k in range(1, len(history) + 1)]
    return [k for k, alerts in enumerate(fired, 1) if [alert.name for alert in alerts] == ["reward_hacking"]]


def test_refused_rewards_are_told_once_they_are_more_than_chance_would_give():
    assert hacked([(60, 0), (60, 3), (60, 9), (60, 30), (60, 0), (60, 0), (60, 30)]) == [4, 7]
    assert hacked([(16, 4), (16, 4)]) == [2], "neither iteration alone has enough rollouts to tell"
    assert hacked([(60, 60)], audit_refused_above=None) == []
    assert hacked([(60, 1)], audit_refused_above=0.0) == [1], "an audit that is never wrong"


@pytest.mark.parametrize(("trials", "hits", "share"), [(10, 0, 0.3), (10, 4, 0.3), (500, 40, 0.05), (3, 3, 0.5)])
def test_the_tail_is_that_of_the_binomial(trials, hits, share):
    terms = (math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(hits, trials + 1))
    assert tail(trials, hits, share) == pytest.approx(math.fsum(terms), rel=1e-9)


def test_skipped_iterations_and_missing_numbers_tell_nothing():
    config = AlertsConfig(reward_window=1)
    assert new_alerts(config, [{REWARD: 1.0}, {}]) == []
    assert new_alerts(config, []) == []


def test_what_is_not_a_number_is_above_its_limit():
    assert told(AlertsConfig(), KL, [0.1, math.nan, math.nan]) == [(2, "kl")]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=30), st.integers(1, 4))
def test_a_rising_reward_never_alerts(rewards, over):
    assert told(AlertsConfig(reward_window=over), REWARD, sorted(rewards)) == []


@pytest.mark.parametrize(("asynchrony", "alerts"), [({}, ["mismatch"]), ({"mode": "batch-async", "staleness": 1}, [])])
def test_old_rollouts_are_no_mismatch_of_engine_and_trainer(
    tmp_path: Path, asynchrony: dict[str, Any], alerts: list[str]
) -> None:
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path), "asynchrony": asynchrony}))
    run.begin(run.stage(1, "train"), policy_version=0).commit(metrics={MISMATCH: 1.4})
    assert [alert.name for alert in AlertWatch(run).look(1)] == alerts
