"""Manifests that were written under earlier metric names are read under today's."""

from __future__ import annotations

from pathlib import Path

from roundhouse.config.loading import parse_config
from roundhouse.stages.cost import run_totals
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.store.run import open_run
from roundhouse.store.stage import RENAMED_METRICS, current_names, read_manifest


def test_an_earlier_name_is_read_as_todays_and_todays_are_left_alone() -> None:
    earlier = {"seconds/collect": 1.0, "seconds/waited_for_rollouts": 2.0, "staleness/effective_sample/age_1": 0.5}
    assert current_names(earlier) == {"time/collect": 1.0, "time/rollout_wait": 2.0, "staleness/ess/age_1": 0.5}
    today = {"time/collect": 1.0, "reward/mean": 0.5}
    assert current_names(today) == today


def test_the_mean_over_tasks_is_the_one_that_stays_where_both_were_recorded() -> None:
    recorded = {"evaluation/reward/mean": 0.4, "evaluation/reward_mean": 0.5}
    assert current_names(recorded) == {"evaluation/reward/mean": 0.5}


def test_todays_names_are_in_the_catalogue_and_no_earlier_one_is_renamed_twice() -> None:
    assert [name for name in RENAMED_METRICS.values() if meaning_of(name) is None] == []
    assert not RENAMED_METRICS.keys() & set(RENAMED_METRICS.values())


def test_a_report_of_before_counts_in_the_totals_of_its_run(tmp_path: Path) -> None:
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    attempt = run.begin(run.stage(1, "report"), policy_version=1)
    totals = {"wasted_tokens/failed": 7.0, "money": 3.0}
    report = attempt.commit(metrics={"cost/total": 3.0}, details={"totals": totals})
    assert read_manifest(report).metrics == {"cost/total": 3.0}
    assert run_totals(run, 1)["waste/failed_tokens"] == 7
    assert run_totals(run, 1)["money"] == 3
