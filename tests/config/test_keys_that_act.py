"""What single keys change, of keys that no other test shows: each with another value, and the difference."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flows import between_iterations
from roundhouse.cli.reports import run_cost
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.operations import AlertsConfig
from roundhouse.config.rollout import RetryPolicy, RolloutConfig, ValidationConfig
from roundhouse.config.training import ProcessService
from roundhouse.errors import InfraError, TooFewSequences
from roundhouse.health.errors import KL, MISMATCH, REWARD, new_alerts
from roundhouse.infra.kubernetes.job_deadlines import JobDeadlines
from roundhouse.infra.kubernetes.job_status import Waiting
from roundhouse.infra.kubernetes.names import StageIdentity
from roundhouse.infra.kubernetes.train_job import TrainJob
from roundhouse.rollout.collector import RolloutCollection
from roundhouse.stages import evaluate
from roundhouse.stages.cost import BudgetReached, iteration_cost
from roundhouse.stages.validate import _refuse_too_few
from roundhouse.store.run import open_run
from roundhouse.trajectories import validation as trajectories
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.validation import CollectionLimits
from tasks import health
from tests.gym.playground import spec_of
from tests.trajectories.rollouts import rollout
from tests.trajectories.test_validation import break_vocabulary

Tree = dict[str, Any]


def config(**tree: Any) -> RunConfig:
    return parse_config({"run_id": "r", **tree})


# Rollouts ---------------------------------------------------------------------------------------------------------------


async def attempts_of(retry: Tree, rollouts: int = 10, pause: float = 0.0) -> int:
    """How often rollouts are played of which each attempt fails for want of a server."""
    played = 0

    async def play(spec: Any, *, attempt: int, recorded: Any, **given: Any) -> Rollout:
        nonlocal played
        played += 1
        if pause:
            await asyncio.sleep(pause)
        failed = Rollout(spec.group_id, spec.sample, spec.row, "e", Status.FAILED, attempt=attempt)
        failed.failure_kind, failed.failure_code = FailureKind.INFRA, "tool_unreachable"
        return failed

    given = RolloutConfig(retry=RetryPolicy(**{"first_delay_seconds": 1e-6, "max_delay_seconds": 1e-6} | retry))
    specs = [spec_of(sample=number) for number in range(rollouts)]
    await RolloutCollection(specs, play, "e", given, None).run()
    return played


async def test_retries_end_with_their_number_their_share_and_their_time() -> None:
    assert await attempts_of({}) == 30
    assert await attempts_of({"attempts": 5}) == 50
    assert await attempts_of({"budget_fraction": 0.5}) == 10 + 5
    assert await attempts_of({"budget_seconds": 1e-9}) == 10 + 1


@pytest.mark.parametrize("fraction", [0.25, 0.75])
def test_how_much_of_a_group_must_be_left(fraction: float) -> None:
    rollouts = [rollout(sample=number) for number in range(4)]
    terms = CollectionLimits(vocabulary_size=10, policy_version=0, group_size=8)
    found = trajectories.validate(
        rollouts, ValidationConfig(min_group_fraction=fraction), vocabulary_size=10, policy_version=0, terms=terms
    )
    assert found.sequences.num_rows == (4 if fraction < 0.5 else 0)


@pytest.mark.parametrize(
    "limit",
    [{"validation": {"max_quarantine_fraction": 0.2}}, {"failures": {"min_groups": 2}}],
    ids=["max_quarantine_fraction", "min_groups"],
)
def test_how_much_of_an_iteration_must_be_left(limit: Tree) -> None:
    rollouts = [rollout(sample=number) for number in range(4)]
    break_vocabulary(rollouts[0])
    found = trajectories.validate(rollouts, ValidationConfig(), vocabulary_size=10, policy_version=0)
    assert _refuse_too_few(found, config(), "iteration 1", "the store") == 1
    with pytest.raises(TooFewSequences, match=next(iter(limit["validation" if "validation" in limit else "failures"]))):
        _refuse_too_few(found, config(**limit), "iteration 1", "the store")


# What is told ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "metric", "numbers"),
    [
        ("reward_below_best", 0.9, REWARD, [1.0, 0.8]),
        ("reward_below_best", None, REWARD, [1.0, 0.1]),
        ("reward_drop", 0.1, REWARD, [1.0, 0.8]),
        ("reward_window", 3, REWARD, [1.0, 0.1]),
        ("kl_above", 0.1, KL, [0.05, 0.2]),
        ("mismatch_above", 1.01, MISMATCH, [1.0, 1.02]),
    ],
)
def test_when_an_alert_is_told(key: str, value: Any, metric: str, numbers: list[float]) -> None:
    history = [{metric: number} for number in numbers]
    plain = new_alerts(AlertsConfig(reward_window=1), history)
    assert bool(new_alerts(AlertsConfig(**{"reward_window": 1} | {key: value}), history)) is not bool(plain)


def test_what_a_reward_must_reach_to_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tree] = []
    answers = [Rollout("t", number, {}, "e", Status.COMPLETED, reward=0.6) for number in range(4)]
    collection = mock.Mock()
    collection.collect.return_value = mock.Mock(rollouts=answers)
    collection.commit.side_effect = lambda **given: found.append(given["metrics"])
    monkeypatch.setattr(evaluate, "open_collector", lambda *given: collection)
    for number, threshold in enumerate((1.0, 0.5)):
        evaluation = {"success_threshold": threshold, "tasks": 1, "samples": 4}
        settings = {"evaluation": evaluation, "store": str(tmp_path / str(number))}
        evaluate.evaluate_version(open_run(config(**settings)), 0, "http://engine")
    assert [metrics["evaluation/pass_at_1"] for metrics in found] == [0.0, 1.0]


def test_how_often_a_run_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mock.MagicMock()
    monkeypatch.setattr(health, "Heartbeat", opened)
    with health.heartbeat(open_run(config(store=str(tmp_path), failures={"heartbeat_seconds": 77}))):
        assert opened.call_args.args[2] == 77


# Cost -----------------------------------------------------------------------------------------------------------------


def test_prices_and_their_currency(tmp_path: Path) -> None:
    manifest = mock.Mock(resources={"cpu_seconds": 3600.0}, files=[], attempt=1, metrics={})
    prices: Tree = {"cpu_hour": 5, "gpu_hour": 7, "currency": "EUR"}
    given = config(store=str(tmp_path), cost={"prices": prices, "trainer_gpus": 2})
    found = iteration_cost(given, {"collect": manifest}, seconds=3600.0)
    assert found["cost/total"] == 5 + 2 * 7
    assert run_cost(open_run(given))["currency"] == "EUR"


@pytest.mark.parametrize("reached", ["pause", "stop"])
def test_what_happens_when_the_budget_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: str) -> None:
    class Paused(Exception):
        pass

    run = open_run(config(store=str(tmp_path), cost={"budget": {"money": 1}, "on_reached": reached}))
    monkeypatch.setattr(between_iterations, "used_up", lambda run, k: ["all of it"])
    monkeypatch.setattr(between_iterations, "tell", lambda *given: None)
    monkeypatch.setattr(between_iterations, "is_deployed", lambda: True)
    monkeypatch.setattr(between_iterations, "suspend_flow_run", mock.Mock(side_effect=Paused))
    with pytest.raises(Paused if reached == "pause" else BudgetReached):
        between_iterations._stay_within_budget(run, 1)


# Jobs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "waiting"),
    [
        ({"queue": "team", "queue_seconds": 60}, Waiting("", queued=True)),
        ({"trainer": {"image_seconds": 60}}, Waiting("", InfraError("no image"))),
        ({"trainer": {"pending_seconds": 60}}, Waiting("", InfraError("no node"), pending=True)),
    ],
    ids=["queue_seconds", "image_seconds", "pending_seconds"],
)
def test_how_long_a_job_may_wait(given: Tree, waiting: Waiting) -> None:
    def left(**infra: Any) -> float:
        identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
        settings = KubernetesInfra.model_validate(infra)
        plan = TrainJob(identity, settings, ProcessService(), reports="s3://b/r", store="s3://b")
        return JobDeadlines(plan).left(waiting, False, time.monotonic())

    assert left(**given) == pytest.approx(60, abs=5)
    assert left() > 200
