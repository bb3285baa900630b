"""Every token is trained on or wasted for one reason, and a budget names the key to raise."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from roundhouse.cli.reports import run_cost
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.stages.cost import (
    budget_of,
    is_waste,
    iteration_cost,
    over_budget,
    raise_budget,
    raises,
    run_totals,
    totals_after,
    used_up,
)
from roundhouse.stages.report import iteration_manifests, report_iteration
from roundhouse.store.run import open_run
from roundhouse.trajectories.records import Rollout, Status, Turn, rollout_waste, untrained_tokens
from roundhouse.trajectories.schemas import QUARANTINE


def rollout(group: str, sample: int, tokens: int, status: Status = Status.COMPLETED, attempt: int = 1) -> Rollout:
    turn = Turn(0, None, [1], 1, "d", [2] * tokens, [-0.1] * tokens, 0, "stop", 0.1)
    return Rollout(group, sample, {"task_id": group}, "e", status, attempt=attempt, turns=[turn])


def refusal(rollout_id: str, outcome: str) -> dict[str, object]:
    return {
        "rollout_id": rollout_id, "group_id": "", "outcome": outcome, "reason": "r", "evidence": "", "turn": None,
    }  # fmt: skip


def test_each_token_is_trained_on_or_wasted_for_one_reason():
    rollouts = [
        rollout("a", 0, 1),
        rollout("a", 1, 10, Status.FAILED, attempt=3),
        rollout("b", 0, 100),
        rollout("b", 1, 1000),
        rollout("c", 0, 10000),
    ]
    refused = [refusal("b/0", "masked"), refusal("b/1", "omitted")]
    found = rollout_waste(rollouts, pa.Table.from_pylist(refused, schema=QUARANTINE))
    sequences = pa.table({"sequence_id": ["a/0", "c/0"], "loss_mask": [[0, 1], [1] * 10000]})
    columns = pa.table({"sequence_id": ["a/0", "c/0"], "trained": [True, False]})
    untrained = untrained_tokens(sequences, columns)
    assert found["waste/failed_tokens"] == 10
    assert found["waste/quarantined_tokens"] == 100
    assert found["waste/omitted_tokens"] == 1000
    assert untrained == 10000
    wasted = sum(value for name, value in found.items() if is_waste(name)) + untrained
    assert found["cost/generated_tokens"] == wasted + 1
    assert found["cost/repeated_rollouts"] == 1


def test_a_step_that_trained_everything_wasted_nothing():
    sequences = pa.table({"sequence_id": ["a"], "loss_mask": [[1, 1]]})
    assert untrained_tokens(sequences, pa.table({"sequence_id": ["a"], "trained": [True]})) == 0


def config(**changes: object):
    return parse_config({"run_id": "r", **changes})


@pytest.mark.parametrize(("service", "held"), [("resident", 60.0), ("process", 0.0)])
def test_gpus_cost_while_they_are_held(service: str, held: float):
    given = config(
        generation={"replicas": 2, "gpus_per_replica": 4},
        cost={"trainer_gpus": 8, "prices": {"gpu_hour": 3.6, "cpu_hour": 0.36}},
        train={"service": {"kind": service}},
    )
    found = iteration_cost(given, {}, seconds=60.0)
    assert found["cost/gpu_seconds"] == 8 * 60 + 8 * held
    assert found["cost/total"] == pytest.approx(found["cost/gpu_seconds"] * 0.001)


def test_without_prices_no_money_is_made_up():
    assert "cost/total" not in iteration_cost(config(), {}, seconds=1.0)


def test_a_budget_that_is_used_up_names_its_key():
    given = {"wall_hours": 1.0, "money": 5.0}
    totals = totals_after({}, {"time/iteration": 1800.0, "cost/total": 2.0})
    assert over_budget(given, totals) == []
    totals = totals_after(totals, {"time/iteration": 2700.0, "cost/total": 2.0, "waste/failed_tokens": 3.0})
    assert over_budget(given, totals) == ["1.25 of cost.budget.wall_hours=1 are used, 0.25 too much"]
    assert totals["waste/failed_tokens"] == 3


def test_totals_grow_from_report_to_report_and_survive_a_repeated_report(tmp_path):
    run = open_run(config(store=str(tmp_path)))
    for iteration in (0, 1, 2):
        validated = run.begin(run.stage(iteration, "validate"), policy_version=iteration)
        validated.commit(metrics={"cost/generated_tokens": 100.0, "waste/failed_tokens": 25.0})
        trained = {"waste/untrained_tokens": 10.0}
        run.begin(run.stage(iteration, "train"), policy_version=iteration).commit(metrics=trained)
        run.begin(run.checkpoint(iteration), policy_version=iteration).commit(
            metrics=trained
        )  # as `publish` repeats them
        report_iteration(run, iteration)
        report_iteration(run, iteration)
    assert run_cost(run)["totals"]["generated_tokens"] == run_totals(run, 2)["generated_tokens"] == 300
    assert run_cost(run)["wasted_tokens"] == {"failed": 75, "untrained": 30}
    assert run_totals(run, 2)["waste/failed_tokens"] == 75
    assert run_totals(run, 2)["waste/untrained_tokens"] == 30
    assert run_totals(run, 7) == totals_after({})
    assert iteration_manifests(run, 2)["report"].metrics["waste/token_fraction"] == 0.35


def test_a_budget_that_does_not_cover_an_iteration_can_be_raised_by_key_or_by_a_persons_word_that_stays(tmp_path):
    run = open_run(config(store=str(tmp_path), cost={"budget": {"generated_tokens": 150}}))
    for iteration in (0, 1):
        validated = run.begin(run.stage(iteration, "validate"), policy_version=iteration)
        validated.commit(metrics={"cost/generated_tokens": 100.0})
        report_iteration(run, iteration)
    assert used_up(run, 1) == []
    assert used_up(run, 2) == ["200 of cost.budget.generated_tokens=150 are used, 50 too much"]
    assert used_up(open_run(config(store=str(tmp_path), cost={"budget": {"generated_tokens": 250}})), 2) == []
    raise_budget(run, {"generated_tokens": 201}, "worth it", "Ada")
    again = open_run(config(store=str(tmp_path), cost={"budget": {"generated_tokens": 150}}))
    assert (used_up(again, 2), budget_of(again)) == ([], {"generated_tokens": 201})
    assert [(each.by, each.comment) for each in raises(again)] == [("Ada", "worth it")]


def test_a_raise_that_raises_nothing_is_refused_with_what_there_is(tmp_path):
    run = open_run(config(store=str(tmp_path), cost={"budget": {"money": 5}}))
    with pytest.raises(ConfigError, match="money=5 does not raise the limit of 5"):
        raise_budget(run, {"money": 5})
    with pytest.raises(ConfigError, match=r"money=inf is not a limit\. Give a finite number"):
        raise_budget(run, {"money": math.inf})
    with pytest.raises(ConfigError, match=r"moneyy is unknown\. Limits: wall_hours"):
        raise_budget(run, {"moneyy": 7})
    assert raises(run) == []
