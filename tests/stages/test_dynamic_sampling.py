"""Rounds of tasks until enough groups have spread: over real HTTP, durable, and the same after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roundhouse.collection import collector
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RolloutConfig
from roundhouse.errors import ConfigError, DataError, InfraError, TooFewSequences
from roundhouse.rollout.plan import RolloutSpec, round_tasks, sample_rounds
from roundhouse.stages.collect import collect_dataset, collect_iteration, read_rollouts
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest, read_part, read_table
from roundhouse.trajectories.records import Rollout, Status, groups_with_spread
from tests.stages.scripted_engine import ScriptedEngine

TASKS, GROUP = 3, 4


def sorted_sometimes(request: dict[str, Any]) -> str:
    """Sort the digits for an even seed, and never if the first digit is odd: those groups have no spread."""
    digits = [word for word in request["messages"][-1]["content"].replace(".", "").split() if word.isdigit()]
    right = int(digits[0]) % 2 == 0 and request["seed"] % 2 == 0
    return " ".join(sorted(digits) if right else digits[::-1])


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(sorted_sometimes).serving() as server:
        yield server


def _run(store: str, monkeypatch: pytest.MonkeyPatch, **sampling: Any) -> tuple[Run, Reference]:
    monkeypatch.setattr(collector, "FLUSH_SECONDS", 0.0)
    rollout = {"prompts_per_iteration": TASKS, "group_size": GROUP, "concurrency": 2, "max_failed_fraction": 0.0}
    rollout |= {"retry": {"attempts": 1, "first_delay_seconds": 0.01}, "dynamic_sampling": sampling}
    environment = {"kind": "sort", "digits": 4}
    run = open_run(parse_config({"run_id": "r", "store": store, "rollout": rollout, "environment": environment}))
    return run, run.begin(run.stage(1, "refit"), policy_version=0).commit()


def test_rounds_go_on_until_enough_groups_have_spread_and_only_those_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    run, weights = _run(str(tmp_path), monkeypatch)
    reference = collect_iteration(run, 1, weights, engine.url)
    manifest, rollouts = read_manifest(reference), read_rollouts(reference)
    rounds = manifest.details["dynamic_sampling"]["rounds"]
    assert rounds > 1
    assert len(rollouts) == rounds * TASKS * GROUP == len(set(engine.seeds))
    assert manifest.counts["requested"] == len(rollouts)
    kept = manifest.details["dynamic_sampling"]["kept"]
    assert len(kept) == TASKS
    assert set(kept) <= set(groups_with_spread(rollouts))
    assert manifest.metrics["dynamic_sampling/num_gen_batches"] == rounds
    discarded = manifest.metrics["dynamic_sampling/num_discarded_groups"]
    assert discarded == rounds * TASKS - len(groups_with_spread(rollouts)) > 0
    own = [rollout.reward for rollout in rollouts if rollout.group_id in kept and rollout.reward is not None]
    assert manifest.metrics["dynamic_sampling/filtered_reward"] == pytest.approx(sum(own) / len(own))

    validated = validate_iteration(run, 1, reference, vocabulary_size=10)
    assert set(read_table(validated, "sequences").column("group_id").to_pylist()) == set(kept)
    counts = read_manifest(validated).counts
    assert counts["requested"] == len(rollouts)
    assert counts["completed"] == TASKS * GROUP
    assert counts["omitted"] == len(rollouts) - TASKS * GROUP
    assert counts["quarantined"] == 0, "nothing is wrong with a group that was put aside"


def test_an_interrupted_sampling_goes_through_the_same_rounds_and_generates_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    run, weights = _run(f"{tmp_path}/a", monkeypatch)
    whole = collect_iteration(run, 1, weights, engine.url)
    made = len(engine.seeds)
    engine.requests.clear()
    engine.healthy = TASKS * GROUP + 3  # the second round is interrupted
    run, weights = _run(f"{tmp_path}/b", monkeypatch)
    with pytest.raises(InfraError, match="out of order"):
        collect_iteration(run, 1, weights, engine.url)
    engine.healthy = 10**6
    resumed = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.seeds) == len(set(engine.seeds)) == made, "each rollout was generated once"
    assert read_manifest(resumed).details["dynamic_sampling"] == read_manifest(whole).details["dynamic_sampling"]
    found, expected = (
        sorted((rollout.rollout_id, rollout.reward) for rollout in read_rollouts(reference))
        for reference in (resumed, whole)
    )
    assert found == expected


def test_each_earlier_part_is_read_once_however_many_rounds_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    run, weights = _run(str(tmp_path), monkeypatch)
    engine.healthy = TASKS * GROUP + 3
    with pytest.raises(InfraError, match="out of order"):
        collect_iteration(run, 1, weights, engine.url)
    engine.healthy, read = 10**6, list[str]()

    def counted(location: Location, name: str, schema: Any) -> Any:
        read.append(name)
        return read_part(location, name, schema)

    monkeypatch.setattr(collector, "read_part", counted)
    reference = collect_iteration(run, 1, weights, engine.url)
    assert read_manifest(reference).details["dynamic_sampling"]["rounds"] > 1
    assert len(read) == len(set(read)) > 0


def test_an_offline_dataset_is_sampled_for_spread_like_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    run, weights = _run(str(tmp_path), monkeypatch)
    offline = read_manifest(collect_dataset(run, "nightly", TaskDraw(1), weights, engine.url))
    online = read_manifest(collect_iteration(run, 1, weights, engine.url))
    assert offline.details["dynamic_sampling"] == online.details["dynamic_sampling"]
    assert offline.details["dynamic_sampling"]["rounds"] > 1


def test_too_few_groups_with_spread_fail_the_stage_or_go_on_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    run, weights = _run(f"{tmp_path}/a", monkeypatch, max_rounds=1)
    with pytest.raises(
        DataError, match=r"of 3 groups have spread after 1 rounds .*max_rounds.*on_exhausted to continue"
    ):
        collect_iteration(run, 1, weights, engine.url)
    run, weights = _run(f"{tmp_path}/b", monkeypatch, max_rounds=1, on_exhausted="continue")
    kept = read_manifest(collect_iteration(run, 1, weights, engine.url)).details["dynamic_sampling"]["kept"]
    assert len(kept) < TASKS


def test_where_no_group_has_spread_nothing_is_trained_on_and_the_error_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedEngine(lambda request: "0 0 0 0").serving() as engine:
        run, weights = _run(str(tmp_path), monkeypatch, max_rounds=1, on_exhausted="continue")
        collected = collect_iteration(run, 1, weights, engine.url)
    assert read_manifest(collected).details["dynamic_sampling"]["kept"] == []
    with pytest.raises(
        TooFewSequences, match=r"0 groups are left.*No group has spread.*max_rounds.*on_too_few to skip"
    ):
        validate_iteration(run, 1, collected, vocabulary_size=10)


def _made(spec: RolloutSpec, reward: float) -> Rollout:
    return Rollout(spec.group_id, spec.sample, spec.row, "e", Status.COMPLETED, reward=reward)


def test_the_one_right_answer_among_wrong_ones_keeps_its_whole_group_and_surplus_is_cut_in_the_order_of_the_draw() -> (
    None
):
    config = RolloutConfig(prompts_per_iteration=2, group_size=4, dynamic_sampling={})
    tasks = [{"task_id": f"t{i}"} for i in range(20)]
    drawn: list[list[str]] = []

    def roll_out(specs: list[RolloutSpec]) -> list[Rollout]:
        drawn.append(list(dict.fromkeys(spec.group_id for spec in specs)))
        flat = drawn[0][0]  # of the first round one group is flat, all others have a single right answer
        return [_made(spec, float(spec.sample == 0 and spec.group_id != flat)) for spec in specs]

    sampled = sample_rounds(tasks, config, 3, 1, roll_out)
    assert sampled.rounds == 2
    assert sampled.kept == [drawn[0][1], drawn[1][0]]
    assert sampled.surplus == [drawn[1][1]]
    assert sampled.metrics()["dynamic_sampling/filtered_reward"] == 0.25
    assert sampled.metrics()["dynamic_sampling/num_discarded_valid_samples"] == 4


def test_a_task_that_a_later_round_draws_again_is_a_group_of_its_own() -> None:
    config = RolloutConfig(
        prompts_per_iteration=2, group_size=2, dynamic_sampling={"max_rounds": 3, "on_exhausted": "continue"}
    )
    sampled = sample_rounds(
        [{"task_id": "a"}, {"task_id": "b"}], config, 0, 1, lambda specs: [_made(spec, 1.0) for spec in specs]
    )
    assert len({rollout.group_id for rollout in sampled.rollouts}) == 6
    assert sampled.kept == []


def test_rounds_draw_different_tasks_and_always_the_same() -> None:
    tasks, config = [{"task_id": f"t{i}"} for i in range(100)], RolloutConfig(prompts_per_iteration=8)
    rounds = [[row["task_id"] for row in round_tasks(tasks, config, 5, 2, number)] for number in (1, 2, 3)]
    assert rounds == [[row["task_id"] for row in round_tasks(tasks, config, 5, 2, number)] for number in (1, 2, 3)]
    assert len({tuple(chosen) for chosen in rounds}) == 3


def test_groups_of_one_cannot_have_spread_and_are_refused_at_load() -> None:
    with pytest.raises((ConfigError, ValidationError), match="wants groups with spread"):
        parse_config({"run_id": "r", "rollout": {"group_size": 1, "dynamic_sampling": {}}})
