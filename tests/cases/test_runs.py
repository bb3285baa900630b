"""Runs that failed once, an iteration each: the trainer generates, so neither Ray nor vLLM starts."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from roundhouse.config.loading import load_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.pretrained import load_pretrained
from roundhouse.rollout import environment_process
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_at, engine_files, refit_iteration
from roundhouse.stages.report import summarize
from roundhouse.stages.task_survey import input_digests, task_warnings
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import StageKind, read_manifest, read_table
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.kinds import needs

CASES = Path(__file__).parent


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_trainers()


def config(case: str, directory: Path, *overrides: str) -> RunConfig:
    places = (f"store={directory}/store", f"infra.state={directory}/state")
    return load_config(CASES / f"{case}.yaml", [*places, "iterations=1", *overrides])


def trained(config: RunConfig) -> tuple[Run, list[Rollout]]:
    """Run one iteration; return its rollouts."""
    run = open_run(config)
    start = starting_policy(run)
    collected = collect_iteration(run, 1, refit_iteration(run, 1, start), engine_at(run, 0))
    sequences = validate_iteration(run, 1, collected, vocabulary_size(run))
    publish(run, train_iteration(run, 1, sequences, start, checkpoint_cache(config)))
    return run, read_rollouts(collected)


@pytest.mark.long
@pytest.mark.parametrize("how", ["plain", "thought", "mention", "broken", "bare"])
def test_b014_only_the_call_after_the_thought_runs(how: str, tmp_path: Path) -> None:
    """The policy is taught to draft a call, to mention its tag, to add a broken call, or to leave the arguments out."""
    _, rollouts = trained(config("B014", tmp_path, f"environment.parameters.how={how}", "policy.steps=100"))
    assert {rollout.status for rollout in rollouts} == {Status.COMPLETED}
    assert all(rollout.metrics["deleted"] == 0 for rollout in rollouts)
    asked = sum(rollout.metrics["asked"] for rollout in rollouts)
    assert asked >= 0.9 * len(rollouts)
    assert sum(rollout.reward for rollout in rollouts) >= 0.9 * len(rollouts)


@pytest.mark.real
@pytest.mark.parametrize("where", ["user", "tool"])
def test_b010_text_that_spells_a_turn_adds_no_turn_to_a_prompt(where: str, tmp_path: Path) -> None:
    run, rollouts = trained(config("B010", tmp_path, f"environment.parameters.where={where}"))
    assert any("The answer is 7.<|im_end|>" in json.dumps(rollout.items) for rollout in rollouts)
    tokenizer = load_pretrained(AutoTokenizer, engine_files(run))
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    reference = run.stage(1, StageKind.COLLECT).reference()
    turns = read_table(reference, "turns").select(["turn", "prompt_token_ids"]).to_pylist()
    assert {turn["prompt_token_ids"].count(begin) for turn in turns if turn["turn"] == 0} == {3}
    assert {turn["prompt_token_ids"].count(begin) for turn in turns if turn["turn"] > 0} <= {2}


@pytest.mark.real
def test_b045_held_out_tasks_that_were_trained_on_are_not_called_unseen(tmp_path: Path) -> None:
    own = config("B045", tmp_path)
    assert "4 of 4 held-out tasks are training tasks" in task_warnings(own)[0]
    run, _ = trained(own)
    evaluate_version(run, 1, engine_at(run, 1))
    metrics = read_manifest(run.stage(1, StageKind.EVALUATE).reference()).metrics
    assert metrics["evaluation/tasks_in_training"] == 4
    assert not summarize(run)["evaluation"]["never_trained_on"]


def test_b023_a_row_put_in_front_between_two_starts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tmp_path / "tasks.jsonl"
    shutil.copy(CASES / "B023_tasks.jsonl", tasks)
    monkeypatch.setenv("BUGS_TASKS", str(tasks))
    own = config("B023", tmp_path)
    run = open_run(own, inputs=input_digests(own))
    run.begin(run.stage(1, StageKind.COLLECT), policy_version=0)
    lines = tasks.read_text().splitlines(keepends=True)
    tasks.write_text("".join([lines[4], *lines]))
    with pytest.raises(ConfigError, match=rf"training tasks: {len(lines)} rows, .* -> {len(lines) + 1} rows"):
        open_run(own, inputs=input_digests(own))


@pytest.mark.real
@needs("frozen_lake")
@pytest.mark.parametrize("where", ["observation", "task"])
def test_b008_half_an_emoji_costs_no_rollout(where: str, tmp_path: Path) -> None:
    _, rollouts = trained(config("B008", tmp_path, f"environment.parameters.where={where}", "policy.steps=5"))
    assert len(rollouts) == 16
    assert all(rollout.counted_reward is not None for rollout in rollouts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "most"),
    [("sleep", "rollout_timeout", 4), ("regex", "environment_blocked", 4), ("tool", "tool_timeout", 11)],
)
def test_b019_a_verifier_or_tool_that_hangs_costs_its_rollouts_alone(
    how: str, code: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_process, "HELD_SECONDS", 2.0)
    limits = (
        "rollout.timeout_seconds=8",
        "rollout.tool_timeout_seconds=4",
        "rollout.retry.attempts=1",
        "rollout.max_failed_fraction=0.5",
    )
    _, rollouts = trained(config("B019", tmp_path, f"environment.parameters.how={how}", *limits))
    failed = Counter(rollout.failure_code for rollout in rollouts if rollout.status is Status.FAILED)
    assert set(failed) == {code}
    assert 0 < failed.total() <= most
    assert len(rollouts) == 24
