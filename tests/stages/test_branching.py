"""Branches inside an iteration: the chosen turns, the requests to the engine, the training data, and the cost of a kill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.loading import parse_config
from roundhouse.config.rollout import Branching
from roundhouse.errors import ConfigError, FailingRollouts, TooFewSequences
from roundhouse.rollout.plan import recorded_draw
from roundhouse.rollout.recording import FIRST_TOKENS, branch_points
from roundhouse.stages.collect import collect_dataset, collect_iteration, read_rollouts
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest, read_table
from roundhouse.store.verification import verify
from roundhouse.training.algorithms.built_in import GroupRelative
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import Rollout, Status, Turn, groups_with_spread
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table
from tests import fork_server
from tests.stages.test_interrupted_collect import (
    CALLS,
    COLLECTING,
    GROUP,
    GuessingEngine,
    dataset,
    interrupt,
    recorded_seeds,
    settings,
)
from tests.waiting import until

pytestmark = pytest.mark.real

TASKS, SAMPLES = 3, 5
"""More than the rollouts of a task, so that no limit of these is taken for theirs."""
FIRST = TASKS * GROUP * CALLS
"""Model calls of the rollouts that begin with their task."""


@pytest.fixture
def engine() -> Iterator[GuessingEngine]:
    with GuessingEngine().serving() as server:
        yield server
        server.go_on.set()


def tree(store: str, world: str = "", **rollout: Any) -> dict[str, Any]:
    """The configuration of a run; `world`: a class of `branching_worlds` in the place of the guessing game."""
    found = settings(store)
    if world:
        found["environment"] = {
            "kind": "custom",
            "target": f"tests.plugins.example_environments.branching_worlds:{world}",
            "parameters": {"guesses": 9},
        }
    found["rollout"] |= {"prompts_per_iteration": TASKS, "branching": {"samples": SAMPLES}} | rollout
    found["generation"] = {"sampling": {"max_new_tokens": 500}, "max_model_len": 100_000}
    return found


def begun(store: str, **changes: Any) -> tuple[Run, Reference]:
    run = open_run(parse_config(tree(store, **changes)))
    return run, run.begin(run.stage(1, "refit"), policy_version=0).commit()


def of_tasks(rollouts: list[Rollout]) -> list[Rollout]:
    return [each for each in rollouts if each.branched_from is None]


def branches(rollouts: list[Rollout]) -> list[Rollout]:
    return [each for each in rollouts if each.branched_from is not None]


def test_only_new_turns_are_asked_of_the_engine_and_each_group_begins_as_the_rollout_that_it_left(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(str(tmp_path))
    reference = collect_iteration(run, 1, weights, engine.url)
    rollouts, manifest = read_rollouts(reference), read_manifest(reference)
    by_id, turns = {each.rollout_id: each for each in rollouts}, manifest.details["branching"]
    assert {by_id[name].group_id for name in turns} == set(groups_with_spread(of_tasks(rollouts)))
    assert len(turns) > 1, "each group with spread has one rollout that is branched"
    assert (
        len(engine.answered) == len(set(engine.answered)) == FIRST + sum(SAMPLES * (CALLS - n) for n in turns.values())
    )
    assert manifest.counts["requested"] == len(rollouts) == TASKS * GROUP + SAMPLES * len(turns)
    for branch in branches(rollouts):
        left = by_id[branch.branched_from or ""]
        turn = turns[left.rollout_id]
        assert 0 < turn < CALLS
        assert branch.group_id == f"{left.rollout_id}@{turn}"
        assert [each.trained for each in branch.turns] == [number >= turn for number in range(CALLS)]
        for mine, other in zip(branch.turns[:turn], left.turns[:turn], strict=True):
            assert mine.generation_token_ids == other.generation_token_ids
            assert mine.prompt_digest == other.prompt_digest
        assert branch.generated_tokens == sum(len(each.generation_token_ids) for each in branch.turns[turn:])
    assert len({each.seed for each in branches(rollouts)}) == SAMPLES * len(turns)
    assert len({str(each.items) for each in branches(rollouts)}) > len(turns), (
        "seeds of their own make ends of their own"
    )

    numbers = manifest.metrics
    assert numbers["branching/groups"] == len(turns)
    assert numbers["branching/rollouts"] == SAMPLES * len(turns)
    assert numbers["branching/not_rebuilt"] == numbers["branching/failed"] == 0
    assert numbers["branching/turn_mean"] == sum(turns.values()) / len(turns)
    assert numbers["branching/generated_tokens"] == sum(each.generated_tokens for each in branches(rollouts))
    for name, those in (
        ("reward/mean", of_tasks(rollouts)),
        ("branching/reward", branches(rollouts)),
        ("branching/reward_before", [by_id[name] for name in turns]),
    ):
        assert numbers[name] == pytest.approx(np.mean([each.reward for each in those])), name
    assert all(meaning_of(name) for name in numbers), "each of its numbers is on the page of metrics"


def test_the_shared_turns_are_trained_on_once_and_the_advantages_are_those_of_the_siblings(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(str(tmp_path), world="LastGuess")
    reference = collect_iteration(run, 1, weights, engine.url)
    validated = validate_iteration(run, 1, reference, vocabulary_size=256)
    rollouts = {each.rollout_id: each for each in read_rollouts(reference)}
    table = read_table(validated, "sequences")
    assert read_manifest(validated).counts["quarantined"] == 0
    for row in table.to_pylist():
        own = [turn for turn in rollouts[row["rollout_id"]].turns if turn.trained]
        trained = [token for token, on in zip(row["token_ids"], row["loss_mask"], strict=True) if on]
        assert trained == [token for turn in own for token in turn.generation_token_ids]
        assert len(row["token_ids"]) == own[-1].prompt_length + len(own[-1].generation_token_ids), (
            "the prefix is context"
        )
    waste = read_manifest(validated).metrics
    assert waste["cost/generated_tokens"] == waste["validate/trained_tokens"], (
        "each token is generated and trained on once"
    )

    sequences = TrainingSequences.from_table(table)
    shown = GroupRelative(GRPOConfig(normalize_by_std=False)).compute(sequences).sequence_columns["advantage"]
    found = dict(zip(sequences.rollout_ids, shown.tolist(), strict=True))
    differing = 0
    for branch in branches(list(rollouts.values())):
        siblings = [each.reward for each in rollouts.values() if each.group_id == branch.group_id]
        assert len(siblings) == SAMPLES
        compared = [*siblings, rollouts[branch.branched_from or ""].reward]
        alike = len(set(compared)) == 1
        differing += not alike
        assert found[branch.rollout_id] == pytest.approx(0.0 if alike else branch.reward - np.mean(compared))
    assert differing > SAMPLES, "the ends of several groups differ"
    for rollout in of_tasks(list(rollouts.values())):
        others = [each.reward for each in rollouts.values() if each.group_id == rollout.group_id]
        alike = len(set(others)) == 1
        assert found[rollout.rollout_id] == pytest.approx(0.0 if alike else rollout.reward - np.mean(others))


def test_a_kill_amid_the_branches_costs_no_finished_turn_and_leaves_no_trace_in_the_dataset(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(f"{tmp_path}/alone")
    alone = collect_iteration(run, 1, weights, engine.url)
    everything = set(engine.answered)
    engine.answered.clear()
    run, weights = begun(f"{tmp_path}/killed")
    after = FIRST + 8
    assert after < len(everything) - 1
    engine.healthy = after
    command = [sys.executable, "-c", COLLECTING, json.dumps(tree(f"{tmp_path}/killed")), engine.url]
    process, stage = fork_server.start(command, env=os.environ), run.stage(1, "collect")
    try:
        until(
            lambda: len(engine.answered) >= after and set(engine.answered) <= recorded_seeds(stage.location),
            f"{after} answers, written down",
            process=process,
        )
    finally:
        process.kill()
        process.wait()
    before = set(engine.answered)
    engine.healthy = 10**6
    engine.answered.clear()
    resumed = collect_iteration(run, 1, weights, engine.url)
    assert before.isdisjoint(engine.answered), "nothing that was finished is asked again"
    assert before | set(engine.answered) == everything
    assert dataset(resumed) == dataset(alone)
    assert read_manifest(resumed).details["branching"] == read_manifest(alone).details["branching"]
    told = read_manifest(resumed).details["resumptions"]
    assert told["rollouts_resumed"] > 0
    assert told["rollouts_restarted"] == {}
    runs = [open_run(parse_config(tree(f"{tmp_path}/{name}"))) for name in ("alone", "killed")]
    tables = [
        read_table(validate_iteration(each, 1, reference, vocabulary_size=256), "sequences")
        for each, reference in zip(runs, (alone, resumed), strict=True)
    ]
    assert tables[0].equals(tables[1])
    assert verify(f"{tmp_path}/killed").problems == []


@pytest.mark.parametrize("world", ["", "Saved"])
def test_branches_that_a_dead_engine_failed_resume_after_their_finished_turns(
    tmp_path: Path, engine: GuessingEngine, world: str
) -> None:
    run, weights = begun(f"{tmp_path}/alone", world=world)
    alone = collect_iteration(run, 1, weights, engine.url)
    everything = set(engine.answered)
    engine.answered.clear()
    run, weights = begun(f"{tmp_path}/interrupted", world=world)
    interrupt(run, weights, engine, FIRST + 7)
    resumed = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == len(set(engine.answered))
    assert set(engine.answered) == everything
    assert dataset(resumed) == dataset(alone)
    assert read_manifest(resumed).details["resumptions"]["rollouts_restarted"] == {}


@pytest.mark.parametrize("turn", ["random", "uncertain"])
def test_branches_of_several_processes_are_those_of_one(tmp_path: Path, engine: GuessingEngine, turn: str) -> None:
    found = []
    for name, shards in (("one", {}), ("two", {"distribution": {"kind": "process", "shards": 2}})):
        branching = {"samples": SAMPLES, "turn": turn}
        run, weights = begun(f"{tmp_path}/{name}", branching=branching, **shards)
        engine.answered.clear()
        reference = collect_iteration(run, 1, weights, engine.url)
        manifest = read_manifest(reference)
        numbers = {key: value for key, value in manifest.metrics.items() if key.startswith(("branching/", "reward/"))}
        sequences = read_table(validate_iteration(run, 1, reference, vocabulary_size=256), "sequences")
        found.append((dataset(reference), set(engine.answered), manifest.details["branching"], numbers, sequences))
    assert found[0] == found[1]


def test_of_dynamic_sampling_the_groups_that_are_kept_are_branched_and_their_branches_too(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    sampling = {"prompts_per_iteration": 1, "dynamic_sampling": {"max_rounds": 3, "on_exhausted": "continue"}}
    run, weights = begun(str(tmp_path), **sampling)
    reference = collect_iteration(run, 1, weights, engine.url)
    details = read_manifest(reference).details
    (kept,) = details["dynamic_sampling"]["kept"]
    ((name, turn),) = details["branching"].items()
    assert name.rpartition("/")[0] == kept
    failures = run.config.failures.model_copy(update={"min_groups": 2})
    strict = replace(run, config=run.config.model_copy(update={"failures": failures}))
    with pytest.raises(TooFewSequences, match="sequences of 1 groups are left"):
        validate_iteration(strict, 1, reference, vocabulary_size=256)
    groups = read_table(validate_iteration(run, 1, reference, vocabulary_size=256), "sequences")["group_id"].to_pylist()
    assert {group: groups.count(group) for group in groups} == {kept: GROUP, f"{name}@{turn}": SAMPLES}


def test_a_dataset_of_its_own_has_no_branches_and_a_curriculum_counts_none(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(str(tmp_path), curriculum={"kind": "success_band"})
    assert not branches(read_rollouts(collect_dataset(run, "nightly", TaskDraw(1), weights, engine.url)))
    assert branches(read_rollouts(collect_iteration(run, 1, weights, engine.url)))
    history = recorded_draw(run, 1).history
    assert [len(rewards) for groups in history.values() for rewards in groups] == [GROUP] * TASKS


def test_branches_of_a_world_that_answers_otherwise_fail_as_such_and_teach_nothing(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(f"{tmp_path}/strict", world="Drifting")
    with pytest.raises(FailingRollouts, match="not_rebuilt: other_answer: before reply"):
        collect_iteration(run, 1, weights, engine.url)
    run, weights = begun(f"{tmp_path}/lenient", world="Drifting", max_failed_fraction=1.0)
    engine.answered.clear()
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == FIRST, "the engine is asked for no branch"
    manifest, made = read_manifest(reference), branches(read_rollouts(reference))
    assert manifest.metrics["branching/not_rebuilt"] == manifest.counts["failed"] == len(made) > 0
    assert {(each.reward, len(each.turns)) for each in made} == {(None, 0)}
    validated = validate_iteration(run, 1, reference, vocabulary_size=256)
    assert validated.counts["sequences"] == TASKS * GROUP


def played(group: str, sample: int, turns: int, *, status: Status = Status.COMPLETED, lowest: int = 1) -> Rollout:
    """A rollout of `turns` turns; of the first tokens those of turn `lowest` are the least likely, of all tokens another's."""
    made = [
        Turn(number, number - 1 if number else None, [1], 1, "", [2] * 40, [-0.1] * 40, 0, "stop", 0.0)
        for number in range(turns)
    ]
    for number, turn in enumerate(made):
        turn.generation_log_probs = [-0.1] * FIRST_TOKENS + [-3.0 if number != lowest else -0.1] * 24
    if lowest < turns:
        made[lowest].generation_log_probs[:2] = [-1.0, -1.0]
    made[0].generation_log_probs[:2] = [-9.0, -9.0]  # a first turn is none to branch
    reward = None if status is Status.FAILED else float(sample)
    return Rollout(group, sample, {"task_id": group}, "e", status, seed=7, reward=reward, turns=made)


def chosen(made: list[Rollout], seed: int = 0, iteration: int = 1, **section: Any) -> list[tuple[str, int]]:
    groups = dict.fromkeys(each.group_id for each in made)
    points = branch_points(made, groups, Branching(**section), seed, iteration)
    return [(point.rollout.rollout_id, point.turn) for point in points]


def test_the_same_seed_branches_the_same_turns_and_another_seed_or_iteration_others() -> None:
    rollouts = [played(f"t{group}", sample, 9) for group in range(20) for sample in range(4)]
    found = chosen(rollouts, rollouts=2)
    assert found == chosen(rollouts, rollouts=2)
    assert len(found) == len(set(found)) == 40
    assert {turn for _, turn in found} == set(range(1, 9)), "any turn but the first may be drawn"
    assert len({name for name, _ in found} & {name for name, _ in chosen(rollouts, seed=1, rollouts=2)}) < 40
    assert found != chosen(rollouts, iteration=2, rollouts=2)
    stored = rollouts_from_tables(rollouts_table(rollouts), turns_table(rollouts))
    for turn in ("random", "uncertain"):
        assert chosen(rollouts, turn=turn) == chosen(stored, turn=turn), "as an interrupted stage reads them"


def test_a_rollout_that_fails_or_has_one_turn_is_not_branched_and_its_absence_moves_no_other_choice() -> None:
    whole = [played("t", sample, 3) for sample in range(8)]
    ((name, turn),) = chosen(whole)
    others = [each for each in whole if each.rollout_id != name]
    unfit = [played("t", 8, 1), played("t", 9, 3, status=Status.FAILED), played("t", 10, 3, status=Status.MASKED)]
    assert chosen(unfit) == []
    assert chosen([*whole[4:], *unfit, *whole[:4]]) == [(name, turn)], "in whichever order they finished"
    assert chosen(others, rollouts=7) == [pair for pair in chosen(whole, rollouts=8) if pair[0] != name]


def test_uncertain_is_the_later_turn_whose_first_tokens_were_least_likely() -> None:
    close = played("t", 1, 5, lowest=9)
    close.turns[3].generation_log_probs[0] -= 1e-12  # no difference in the store, which has float32
    assert [turn for _, turn in chosen([close], turn="uncertain")] == [1]
    for lowest in (1, 3, 4):
        assert [turn for _, turn in chosen([played("t", 1, 5, lowest=lowest)], turn="uncertain")] == [lowest]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"environment": {"kind": "command", "command": ["x"], "train_tasks": "rows.jsonl"}},
            "environment.kind is command, whose own program plays.*Set environment.kind to remote or custom",
        ),
        (
            {
                "environment": {
                    "kind": "custom",
                    "target": "tests.plugins.example_environments.lookups:CannotBeReplayed",
                }
            },
            r"environment \(custom\) has the restoration none.*declare it in its class",
        ),
        (
            {"environment": {"kind": "remote", "url": "http://127.0.0.1:1", "train_tasks": "rows.jsonl"}},
            r"environment \(remote\) has the restoration none.*set environment.restore to replay",
        ),
        (
            {"environment": {"kind": "sort"}},
            r"environment \(sort\) offers no tool: a rollout is one turn.*Leave branching out",
        ),
        (
            {"environment": {"kind": "mixture", "environments": {"a": {"kind": "code"}, "b": {"kind": "warehouse"}}}},
            "differ in restoration",
        ),
        ({"rollout": {"max_turns": 1}}, "rollout.max_turns is 1, and a branch begins at a later turn.*Raise it"),
        (
            {
                "rollout": {"group_size": 1},
                "validation": {"min_group_size": 1},
                "train": {"algorithm": {"kind": "ppo"}, "minibatches": 1},
            },
            "rollout.group_size is 1, and branching needs groups with different rewards",
        ),
        (
            {"validation": {"min_group_size": 5}},
            r"min_group_size is 5, above rollout.branching.samples \(4\).*Raise samples",
        ),
        (
            {"asynchrony": {"mode": "batch-async", "staleness": 1}},
            "asynchrony.staleness is 1: overlapped work is planned.*Set asynchrony.staleness to 0",
        ),
        (
            {
                "train": {
                    "algorithm": {"kind": "grpo", "kl_placement": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1"}
                }
            },
            "train.algorithm.kl_placement is reward.*Set train.algorithm.kl_placement to loss",
        ),
    ],
)
def test_what_cannot_be_branched_or_compared_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"task_id": "a", "responses_create_params": {"input": "x"}}\n')
    given = {"run_id": "r", "store": "store", "environment": {"kind": "warehouse"}} | changes
    given["rollout"] = {"branching": {}} | changes.get("rollout", {})
    with pytest.raises(ConfigError, match=f"rollout.branching is set, but .*{error}"):
        refuse_unready(parse_config(given), remote=False)
    given["rollout"].pop("branching")
    if changes.get("validation") is None and "group_size" not in changes.get("rollout", {}):
        parse_config(given)
