"""Stored rollouts judged anew: equal verdicts from the same verifier, the predicted flips from another, reasons to refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

import roundhouse as rh
from roundhouse.config.models import EnvironmentConfig
from roundhouse.config.section import Section
from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.lab.replays.rollouts import Judged
from roundhouse.plugins.lab.replays.verdicts import judge_all, rescore, rescored_inputs
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.datasets import dataset_names, dataset_versions
from roundhouse.stages.offline import find_datasets
from roundhouse.stages.policy import delete_run
from roundhouse.store.run import Run
from roundhouse.store.stage import read_table
from roundhouse.store.verification import verify as verify_store
from roundhouse.trajectories.records import Rollout
from tests.gym.kinds import EACH_KIND, needs, smallest
from tests.gym.recorded import collected, demonstrated, opened

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


def outcomes(judged: list[Judged]) -> set[tuple[str, str]]:
    return {(each.outcome, each.detail) for each in judged}


@pytest.mark.parametrize("config", EACH_KIND)
@pytest.mark.parametrize("limits", [{}, {"max_turns": 1}, {"max_tokens": 1200}], ids=str)
def test_each_kind_judges_its_own_rollouts_as_it_did(config: type[Section], limits: dict[str, int]) -> None:
    environment = smallest(config)
    rollouts = demonstrated(environment, tasks=4, size=2, **limits)
    assert rollouts
    judged = judge_all(rollouts, environment)
    assert outcomes(judged) <= {("equal", "")} | {("unrewarded", f"it is failed: {r.failure_code}") for r in rollouts}
    for each in judged:
        if each.after is not None:
            assert each.after == each.before, "turns, items, components, metrics and finish are as they were"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Rollout]]:
    """A run with the rollouts of two iterations of the calculator."""
    environment = {"kind": "calculator"}
    run = opened(tmp_path_factory.mktemp("rescore"), environment)
    rollouts = demonstrated(CONFIG.validate_python(environment), tasks=8)
    for k in (1, 2):
        collected(run, k, rollouts[k - 1 :: 2])
    return run, rollouts


LOOKUPS = "plugins.example_environments.lookups"
MUTATED = 'environment={"kind": "custom", "target": "tests.%s"}'


def test_rollouts_with_the_runs_system_prompt_are_rebuilt_with_it() -> None:
    """It is not a key of the environment: the recorded row has it."""
    environment = CONFIG.validate_python({"kind": "calculator"})
    rollouts = demonstrated(environment, tasks=1, size=2, system_prompt="Be brief.")
    judged = judge_all(rollouts, environment)
    assert outcomes(judged) == {("equal", "")}
    for each in (*rollouts, *(each.after for each in judged if each.after is not None)):
        assert each.task["responses_create_params"]["instructions"] == "Be brief."


def test_an_unchanged_verifier_gives_a_dataset_with_the_same_rows(recorded: tuple[Run, list[Rollout]]) -> None:
    run, rollouts = recorded
    diff = rescore(run.config.store, run.run_id, "same")
    assert diff.counts == {"equal": len(rollouts), "flipped": 0, "refused": 0, "unrewarded": 0}
    for k, version in zip((1, 2), diff.versions, strict=True):
        before, after = run.stage(k, "collect").reference(), dataset_versions(run.config.store, "same")[k - 1]
        assert before is not None
        assert after.uri == version
        for name in ("rollouts", "turns"):
            assert read_table(after, name).equals(read_table(before, name))


def test_a_changed_verifier_flips_exactly_what_it_judges_otherwise(
    recorded: tuple[Run, list[Rollout]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STATE", str(tmp_path))
    run, rollouts = recorded
    predicted = {r.rollout_id for r in rollouts if r.reward != 0 and "7" in str(r.items[-1])}
    assert 0 < len(predicted) < len(rollouts)
    judge = {"kind": "custom", "target": "tests.gym.judges:RefusesSevens"}
    diff = rh.rescore(rh.open_run(run.run_id, run.config.store), "sevens", environment=judge)
    assert {row["rollout_id"] for row in diff.flipped} == predicted
    assert diff.counts["equal"] == len(rollouts) - len(predicted)
    assert sum(own["flipped"] for own in diff.by_task.values()) == len(predicted)
    assert verify_store(run.config.store).problems == []


def test_the_same_again_is_a_no_op_and_another_judge_needs_another_name(recorded: tuple[Run, list[Rollout]]) -> None:
    run, _ = recorded
    first = rescore(run.config.store, run.run_id, "again")
    written = [reference.digest for reference in dataset_versions(run.config.store, "again")]
    assert rescore(run.config.store, run.run_id, "again") == first
    assert [reference.digest for reference in dataset_versions(run.config.store, "again")] == written
    with pytest.raises(StoreError, match=r"another judge: .*target.* another --name"):
        rescore(run.config.store, run.run_id, "again", overrides=[MUTATED % "gym.judges:RefusesSevens"])


def test_what_was_judged_before_a_kill_is_not_judged_again(recorded: tuple[Run, list[Rollout]]) -> None:
    run, rollouts = recorded
    whole = rescore(run.config.store, run.run_id, "whole")
    rescore(run.config.store, run.run_id, "killed", iterations=range(1, 2))
    seen: list[int] = []
    resumed = rescore(run.config.store, run.run_id, "killed", progress=lambda done, _: seen.append(done))
    assert resumed.counts == whole.counts
    assert seen == [len(rollouts) // 2, len(rollouts)]


@needs("lookup")
def test_a_rollout_that_cannot_be_rebuilt_is_refused_with_its_reason_and_has_no_reward(tmp_path: Path) -> None:
    run = opened(tmp_path, {"kind": "lookup", "problems": 60})
    rollouts = demonstrated(run.config.environment, tasks=4)
    acted = sum(any(item.get("type") == "function_call_output" for item in r.items) for r in rollouts)
    assert acted > 0
    collected(run, 1, rollouts)
    for judge, reason in (("OtherAnswers", "other_answer"), ("CannotBeReplayed", "not_replayable")):
        diff = rescore(run.config.store, run.run_id, judge.lower(), overrides=[MUTATED % f"{LOOKUPS}:{judge}"])
        assert diff.counts["refused"] == acted
        assert diff.reasons == {reason: acted}
        [version] = dataset_versions(run.config.store, judge.lower())
        failed = [row for row in read_table(version, "rollouts").to_pylist() if row["status"] == "failed"]
        assert len(failed) == acted == version.counts["failed"]
        assert all(row["reward"] is None and row["failure_code"] == "not_rebuilt" for row in failed)
        assert all(row["failure_detail"].startswith(reason) for row in failed)


def test_a_verifier_that_raises_judges_nothing(recorded: tuple[Run, list[Rollout]]) -> None:
    run, rollouts = recorded
    diff = rescore(run.config.store, run.run_id, "raises", overrides=[MUTATED % "gym.judges:Raises"])
    assert diff.reasons == {"verifier_failed": len(rollouts)}


def test_what_cannot_be_judged_is_refused_before_anything_is_written(recorded: tuple[Run, list[Rollout]]) -> None:
    run, _ = recorded
    with pytest.raises(StoreError, match=r"no complete collection of iteration 3; it has those of 1, 2"):
        rescore(run.config.store, run.run_id, "x", iterations=range(1, 4))
    with pytest.raises(ConfigError, match=r"nothing but the environment judges"):
        rescore(run.config.store, run.run_id, "x", overrides=["train.optimizer.learning_rate=1"])
    with pytest.raises(ConfigError, match="its own loop plays the rollouts"):
        rescore(
            run.config.store,
            run.run_id,
            "x",
            overrides=['environment={"kind": "agent", "url": "http://a", "train_tasks": "t"}'],
        )
    assert "x" not in dataset_names(run.config.store)


def test_a_run_trains_from_the_rescored_versions(recorded: tuple[Run, list[Rollout]]) -> None:
    run, rollouts = recorded
    rescore(run.config.store, run.run_id, "train")
    versions = find_datasets(run.config.store, ["train@all"])
    assert [reference.iteration for reference in versions] == [1, 2]
    read = [rollout for reference in versions for rollout in read_rollouts(reference)]
    assert {(r.rollout_id, r.reward) for r in read} == {(r.rollout_id, r.reward) for r in rollouts}


def test_verdicts_on_another_collection_of_the_same_name_are_not_taken_for_these(tmp_path: Path) -> None:
    def made(rollouts: list[Rollout]) -> Run:
        run = opened(tmp_path, {"kind": "calculator"})
        collected(run, 1, rollouts)
        return run

    rollouts = demonstrated(CONFIG.validate_python({"kind": "calculator"}), tasks=4)
    run = made(rollouts[:8])
    store = run.config.store
    for name in ("former", "latter"):
        rescore(store, run.run_id, name)
    rescore(store, ["former"], "both")
    assert dict(rescored_inputs(run, "both", [1])).keys() == {1}, "verdicts on verdicts are of the run's collection"
    with pytest.raises(
        StoreError, match=r"was made of .*former.*, not of .*latter.*\. Give these verdicts another --name"
    ):
        rescore(store, ["former", "latter"], "both")
    delete_run(run)
    again = made(rollouts[8:])
    for act in (lambda: rescore(store, run.run_id, "former"), lambda: list(rescored_inputs(again, "former", [1]))):
        with pytest.raises(StoreError, match=r"was made of .*recorded/iterations/000001/collect \(.*another --name"):
            act()
