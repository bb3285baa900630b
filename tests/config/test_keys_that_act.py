"""Effects of single keys that no other test shows: each test changes one value and compares."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mlflow.system_metrics import system_metrics_monitor

from roundhouse.cli.reports import run_cost
from roundhouse.collection import sharded_attempt
from roundhouse.collection.collector import refuse_many_failures
from roundhouse.collection.in_process_runner import RolloutCollection
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.operations import AlertsConfig
from roundhouse.config.rollout import RetryPolicy, RolloutConfig, ValidationConfig
from roundhouse.errors import BudgetReached, FailingRollouts, TooFewRollouts, TooFewSequences
from roundhouse.health.errors import KL, REWARD, new_alerts
from roundhouse.health.policy import Kind, kind_of
from roundhouse.infra import services
from roundhouse.rollout.protocol import retry_delay
from roundhouse.stages import evaluate, freshness, offline, report
from roundhouse.stages.cost import budget_of, iteration_cost, over_budget, totals_after
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.validate import refuse_too_few
from roundhouse.store.directories import CACHE_VARIABLE
from roundhouse.store.run import open_run
from roundhouse.tracking import tracker
from roundhouse.tracking.mlflow import MlflowRun
from roundhouse.trajectories import validation as trajectories
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.validation import CollectionLimits
from roundhouse_flows import between_iterations, train
from roundhouse_flows.iteration import is_evaluated
from roundhouse_tasks import health
from tests.gym.playground import spec_of
from tests.trajectories.rollouts import rollout
from tests.trajectories.test_validation import break_vocabulary

Tree = dict[str, Any]


def config(**tree: Any) -> RunConfig:
    return parse_config({"run_id": "r", **tree})


def from_dataset(**keys: Any) -> Tree:
    """The sections of an offline run."""
    return {"offline": {"datasets": ["d"]} | keys, "train": {"algorithm": {"mismatch_correction": "tis"}}}


# Rollouts ---------------------------------------------------------------------------------------------------------------


async def attempts_of(retry: Tree, rollouts: int = 10, pause: float = 0.0) -> int:
    """Return the number of attempts of rollouts that all fail because their server is missing."""
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
    collection = RolloutCollection(specs, play, "e", given, None)
    await asyncio.gather(*map(collection.roll_out, specs))
    return played


async def test_retries_end_with_their_number_their_share_and_their_time() -> None:
    assert await attempts_of({}) == 30
    assert await attempts_of({"attempts": 5}) == 50
    assert await attempts_of({"budget_fraction": 0.5}) == 10 + 5
    assert await attempts_of({"budget_seconds": 1e-9}) == 10 + 1


def test_each_retry_waits_longer_by_the_factor() -> None:
    waits = [retry_delay(RetryPolicy(factor=factor, max_delay_seconds=1000), 4, seed=1) for factor in (2, 4)]
    assert waits[1] == pytest.approx(2**3 * waits[0])


def test_how_many_rollouts_may_fail() -> None:
    rollouts = [Rollout("t", number, {}, "e", Status.COMPLETED, reward=1.0) for number in range(9)]
    failed = Rollout("t", 9, {}, "e", Status.FAILED, failure_code="tool_unreachable")
    refuse_many_failures([failed, *rollouts], RolloutConfig(), "http://engine")
    with pytest.raises(TooFewRollouts, match=r"max_failed_fraction=0\.05"):
        refuse_many_failures([failed, *rollouts], RolloutConfig(max_failed_fraction=0.05), "http://engine")


def test_failures_that_repeat_are_not_retried() -> None:
    failed = [
        Rollout("t", number, {}, "e", Status.FAILED, failure_kind=FailureKind.DATA, failure_code="bad_reward")
        for number in range(2)
    ]
    with pytest.raises(
        FailingRollouts, match=r"2 of 2 rollouts failed.*The first: bad_reward.*Correct the cause"
    ) as raised:
        refuse_many_failures(failed, RolloutConfig(), "http://engine")
    assert kind_of(raised.value) is Kind.DATA
    failed[1].failure_kind = FailureKind.INFRA
    with pytest.raises(TooFewRollouts) as mixed:
        refuse_many_failures(failed, RolloutConfig(), "http://engine")
    assert kind_of(mixed.value) is Kind.INFRA


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
    assert refuse_too_few(found, config(), "iteration 1", "the store") == 1
    with pytest.raises(TooFewSequences, match=next(iter(limit["validation" if "validation" in limit else "failures"]))):
        refuse_too_few(found, config(**limit), "iteration 1", "the store")


# What is told ---------------------------------------------------------------------------------------------------------


def test_how_far_a_reward_may_fall_below_its_best() -> None:
    def alerts(*rewards: float, **keys: Any) -> int:
        return len(new_alerts(AlertsConfig(reward_window=1, **keys), [{REWARD: reward} for reward in rewards]))

    assert (alerts(1.0, 0.8), alerts(1.0, 0.8, reward_below_best=0.9)) == (0, 1)
    assert (alerts(1.0, 0.1), alerts(1.0, 0.1, reward_below_best=None)) == (1, 0)


EVALUATED: Tree = {
    "environment": {"kind": "sort"},
    "tasks": 3,
    "samples": 5,
    "temperature": 0.25,
    "top_p": 0.75,
    "top_k": 7,
    "max_new_tokens": 9,
    "success_threshold": 0.5,
}
"""Of each key of an evaluation, what changes the answer of `evaluated`."""


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tree]:
    """Return the tasks of an evaluation, the sampling of its answers, and the passed ones."""

    def evaluate_with(evaluation: Tree, name: str | None = None) -> Tree:
        found: Tree = {}

        def collect(specs: Any, sampling: Any, *given: Any, **named: Any) -> Any:
            found["environment"] = specs[0].row["responses_create_params"]["input"][0]["content"][:12]
            found["tasks"] = len({spec.group_id for spec in specs})
            found["samples"] = len(specs) // found["tasks"]
            found.update(sampling.model_dump())
            played = [Rollout(spec.group_id, spec.sample, {}, "e", Status.COMPLETED, reward=0.6) for spec in specs]
            return mock.Mock(rollouts=played)

        collection = mock.Mock()
        collection.collect.side_effect = collect
        metric = "evaluation/pass_at_1" if name is None else f"evaluation/{name}/pass_at_1"
        collection.commit.side_effect = lambda **given: found.update(success_threshold=given["metrics"][metric])
        monkeypatch.setattr(evaluate, "open_collector", lambda *given: collection)
        store = tmp_path / hashlib.sha256(repr(evaluation).encode()).hexdigest()
        run = open_run(config(evaluation={"tasks": 1, "samples": 4} | evaluation, store=str(store)))
        evaluate.evaluate_version(run, 0, "http://engine", name=name)
        return found

    return evaluate_with


def changed_in(plain: Tree, changed: Tree) -> set[str]:
    return {key for key in plain if plain[key] != changed[key]}


@pytest.mark.parametrize("key", [key for key in EVALUATED if key != "environment"])
def test_a_key_of_the_evaluation_changes_it(evaluated: Callable[..., Tree], key: str) -> None:
    assert changed_in(evaluated({}), evaluated({key: EVALUATED[key]})) == {key}


@pytest.mark.parametrize("key", EVALUATED)
def test_a_key_of_an_evaluation_set_changes_that_set(evaluated: Callable[..., Tree], key: str) -> None:
    plain, changed = ({"sets": {"other": given}} for given in ({}, {key: EVALUATED[key]}))
    assert changed_in(evaluated(plain, "other"), evaluated(changed, "other")) == {key}
    assert evaluated(changed) == evaluated({})


def test_which_versions_are_evaluated() -> None:
    def versions(**tree: Any) -> list[int]:
        given = config(iterations=7, **tree)
        return [k for k in range(1, 8) if is_evaluated(given, k)]

    assert versions(evaluation={"every": 3}) == [3, 6, 7]
    assert versions(evaluation={"every": 3}, **from_dataset()) == [3, 6, 7]
    assert versions(evaluation={"every": 3}, **from_dataset(evaluate=False)) == []


@pytest.mark.parametrize("before", [True, False])
def test_whether_the_starting_policy_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    done = {name: mock.Mock() for name in ("evaluate", "promote", "report_iteration", "finish_run")}
    for name, each in done.items():
        monkeypatch.setattr(train, name, each)
    monkeypatch.setattr(train, "next_iteration", lambda run: 99)
    run = open_run(config(store=str(tmp_path), evaluation={"before_training": before}))
    train._iterate(run, mock.Mock())
    assert done["evaluate"].called is before
    assert done["report_iteration"].called


def test_how_often_a_run_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mock.MagicMock()
    monkeypatch.setattr(health, "Heartbeat", opened)
    with health.heartbeat(open_run(config(store=str(tmp_path), failures={"heartbeat_seconds": 77}))):
        assert opened.call_args.args[2] == 77


def test_alerts_of_a_run_are_told_by_its_own_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "watched_metrics", lambda run, iteration: {KL: 0.1 * iteration})
    told = report.AlertWatch(open_run(config(store=str(tmp_path), alerts={"kl_above": 0.15}))).look(2)
    assert [alert.name for alert in told] == ["kl"]


@pytest.mark.parametrize("enabled", [True, False])
def test_whether_a_run_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    monkeypatch.setattr(tracker, "Tracker", mock.Mock())
    run = open_run(config(store=str(tmp_path), tracking={"enabled": enabled, "uri": "http://127.0.0.1:1"}))
    assert (tracker.open_tracker(run) is not None) is enabled


@pytest.mark.parametrize("wanted", [True, False])
def test_whether_the_load_of_the_machine_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monitor = mock.Mock()
    monkeypatch.setattr(system_metrics_monitor, "SystemMetricsMonitor", monitor)
    client = mock.Mock(get_metric_history=mock.Mock(return_value=[]))
    run = open_run(config(store=str(tmp_path), tracking={"system_metrics": wanted}))
    MlflowRun(client, run, "experiment", "run", "http://page").monitor_system()
    assert monitor.called is wanted


@pytest.mark.parametrize("pending", ["continue", "block"])
def test_what_a_run_does_while_a_question_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pending: str
) -> None:
    suspended = mock.Mock()
    monkeypatch.setattr(between_iterations, "open_questions", lambda run: [mock.Mock(version=1)])
    for name in ("settle_expired", "put_to_prefect", "tell"):
        monkeypatch.setattr(between_iterations, name, lambda *given: None)
    monkeypatch.setattr(between_iterations, "is_deployed", lambda: True)
    monkeypatch.setattr(between_iterations, "suspend_flow_run", suspended)
    approval = {"required": True, "while_pending": pending}
    run = open_run(config(store=str(tmp_path), evaluation={"approval": approval}))
    between_iterations.before_iteration(run, 1)
    assert suspended.called is (pending == "block")


# Datasets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "age", "days"), [({"max_age": 3}, 5, 0.0), ({"max_age_days": 3}, 0, 5.0)], ids=["max_age", "max_age_days"]
)
def test_how_old_a_dataset_may_be(limit: Tree, age: int, days: float) -> None:
    found = freshness.Freshness("d", 0, age, days, None)
    plain, limited = (config(**from_dataset(**given)) for given in ({}, limit))
    assert (len(freshness.judge(plain, found)), len(freshness.judge(limited, found))) == (0, 1)


def test_what_becomes_of_a_dataset_that_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    freshness.settle(config(**from_dataset(on_stale="warn")), "Dataset d", ["it is old"])
    assert "it is old" in caplog.text
    with pytest.raises(freshness.StaleData):
        freshness.settle(config(**from_dataset()), "Dataset d", ["it is old"])


def test_how_many_groups_of_a_dataset_an_iteration_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "find_datasets", lambda *given: [mock.Mock()])
    monkeypatch.setattr(offline, "groups_of", lambda reference: [str(number) for number in range(12)])
    run = open_run(config(store=str(tmp_path), **from_dataset(groups=3)))
    assert offline.with_iterations(run).config.iterations == 4


@pytest.mark.parametrize("count", [0, 7])
def test_how_many_rollouts_of_a_dataset_are_looked_at_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    sample = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(
        offline, "read_manifest", lambda reference: mock.Mock(finished_at=time.time(), inputs={}, details={})
    )
    monkeypatch.setattr(offline, "label_of", lambda reference: "d")
    monkeypatch.setattr(offline, "draw_sample", sample)
    run = open_run(config(store=str(tmp_path), **from_dataset(precheck_rollouts=count)))
    with pytest.raises(InterruptedError) if count else nullcontext():
        offline.freshness_of(run, mock.Mock(policy_version=0), mock.Mock())
    assert [call.args[-1] for call in sample.mock_calls] == [count] * (count > 0)


# Cost -----------------------------------------------------------------------------------------------------------------


def test_prices_and_their_currency(tmp_path: Path) -> None:
    manifest = mock.Mock(resources={"cpu_seconds": 3600.0}, files=[], attempt=1, metrics={})
    prices: Tree = {"cpu_hour": 5, "gpu_hour": 7, "currency": "EUR"}
    given = config(store=str(tmp_path), cost={"prices": prices, "trainer_gpus": 2})
    found = iteration_cost(given, {"collect": manifest}, seconds=3600.0)
    assert found["cost/total"] == 5 + 2 * 7
    assert run_cost(open_run(given))["currency"] == "EUR"


def test_every_limit_of_a_budget_is_held(tmp_path: Path) -> None:
    metrics = ("time/iteration", "cost/gpu_seconds", "cost/cpu_seconds", "cost/generated_tokens", "cost/total")
    used = totals_after({}, dict.fromkeys(metrics, 1e9))
    for limit in ("wall_hours", "gpu_hours", "cpu_hours", "generated_tokens", "money"):
        run = open_run(
            parse_config({"run_id": limit.replace("_", "-"), "store": str(tmp_path), "cost": {"budget": {limit: 1.0}}})
        )
        [line] = over_budget(budget_of(run), used)
        assert f"cost.budget.{limit}=1 are used" in line


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
        between_iterations.before_iteration(run, 1)


# Jobs -----------------------------------------------------------------------------------------------------------------


def test_a_collection_over_jobs_is_started_on_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mock.Mock()
    monkeypatch.setattr(sharded_attempt, "open_launcher", opened)
    infra = {"kind": "kubernetes", "collector": {}, "store_claim": "store"}
    distribution = {"kind": "job", "shards": 2}
    generation = {"engine_url": "http://engine:9000"}
    run = open_run(
        config(store=str(tmp_path), infra=infra, rollout={"distribution": distribution}, generation=generation)
    )
    sharded_attempt.ShardedAttempt(run, run.stage(1, "collect"), 0).open_launcher([])
    assert opened.call_args.args[0] == "kubernetes"


# Places ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("infra", [{}, {"kind": "kubernetes", "store_claim": "store"}], ids=["local", "kubernetes"])
def test_where_a_run_keeps_its_state_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, infra: Tree
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CACHE_VARIABLE)
    state = tmp_path / "state"
    policy = {"kind": "warm_start", "steps": 1, "hidden_size": 16, "layers": 1, "intermediate_size": 16}
    generation = {"engine_url": "http://engine:9000"}
    given = config(
        store=str(tmp_path / "store"), infra=infra | {"state": str(state)}, policy=policy, generation=generation
    )
    starting_policy(open_run(given))
    assert (state / "cache/warm-starts").is_dir()


def test_how_long_local_services_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(services, "local_services", asked)
    with pytest.raises(InterruptedError), services.services_of(config(infra={"start_timeout_seconds": 77})):
        pass
    assert asked.call_args.kwargs["time_limit"] == 77


def test_a_run_leaves_the_environment_of_its_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = mock.Mock(state=None, is_coming=lambda name: False)
    running.environment.return_value = {"RAY_ADDRESS": "127.0.0.1:9", "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    monkeypatch.setattr(services, "local_services", lambda *_, **options: nullcontext(running))
    monkeypatch.setenv("RAY_ADDRESS", "of the user")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = dict(os.environ)
    generation = {"engine_url": "http://engine:9000"}
    with services.services_of(config(generation=generation, tracking={"enabled": False})):
        inside = {name: os.environ[name] for name in ("RAY_ADDRESS", "PREFECT_API_URL", "OMP_NUM_THREADS")}
        assert inside == running.environment.return_value | {"OMP_NUM_THREADS": "3"}
    assert dict(os.environ) == before
