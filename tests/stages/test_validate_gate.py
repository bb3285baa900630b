"""The gate over whole stages: rollouts of real weights, as the store has them, through validate and train."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.models import Sampling
from roundhouse.errors import DataError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.client import request_body
from roundhouse.generation.protocol import Completion, read_request
from roundhouse.generation.transformers_engine import TransformersEngine
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages import trainer_home
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_files
from roundhouse.stages.train import train_iteration
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import local_directory
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, Stage, read_manifest, read_table
from roundhouse.trajectories.records import Ledger, Rollout, digest_tokens
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.gym.collecting import collect
from tests.trajectories.collected import collected

pytestmark = pytest.mark.usefixtures("no_resident_trainer")

SIZE = 4


class PolicyInProcess:
    """Real weights in an engine of this process."""

    def __init__(self, run: Run, weights: Path) -> None:
        self.codec = ChatCodec(str(engine_files(run)), run.config.generation.max_model_len)
        self.engine = TransformersEngine(run.config.generation, str(engine_files(run)), self.codec)
        self.weights = weights

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        request = read_request(request_body(messages, tools, sampling, seed, "policy"), "policy")
        prompt, begun = self.codec.prompt(request), time.perf_counter()
        drawn = await self.engine.generate(prompt.token_ids, prompt.draw)
        message, finish = self.codec.message(drawn, request.tools)
        seconds = time.perf_counter() - begun
        return Completion(message, finish, prompt.token_ids, drawn.token_ids, drawn.log_probs, 0, seconds)


def make_run(store: Path, **validation: Any) -> Run:
    tree = {
        "run_id": "r",
        "store": str(store),
        "policy": {"kind": "warm_start", "steps": 20, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "environment": {"kind": "sort"},
        "generation": {"sampling": {"max_new_tokens": 24}},
        "rollout": {"prompts_per_iteration": 2, "group_size": SIZE},
        "train": {"minibatches": 2, "threads": 1, "device": "cpu"},
        "validation": validation,
        "infra": {"kind": "local", "state": str(store / "state")},
    }
    return open_run(parse_config(tree))


def play(run: Run, weights: Path) -> list[Rollout]:
    """The rollouts of iteration 1 under the weights of a directory."""
    config = run.config

    async def work() -> list[Rollout]:
        environment, policy = open_environment(config.environment), PolicyInProcess(run, weights)
        await policy.engine.start()
        await policy.engine.load_weights(str(weights))
        specs = plan_rollouts(environment.tasks("train")[: config.rollout.prompts_per_iteration], SIZE, config.seed, 1)
        async with environment:
            made = await collect(specs, policy, environment, config.rollout, config.generation.sampling)
        policy.engine.shutdown()
        return made

    return asyncio.run(work())


def collect_stage(run: Run, rollouts: list[Rollout]) -> Reference:
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    return attempt.commit(counts=Ledger.from_rollouts(rollouts).counts())


def step(run: Run, start: Reference, rollouts: list[Rollout], cache: Path) -> Reference:
    validated = validate_iteration(run, 1, collect_stage(run, rollouts), vocabulary_size(run))
    return train_iteration(run, 1, validated, start, cache)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.fixture
def start(run: Run) -> Reference:
    return starting_policy(run)


@pytest.fixture
def rollouts(run: Run, start: Reference, tmp_path: Path) -> list[Rollout]:
    return play(run, local_directory(start, tmp_path / "cache"))


def mismatched_rows(stage: Stage) -> list[dict[str, Any]]:
    names = [name for name in stage.location.names() if name.startswith("mismatched-")]
    return pa.concat_tables([pq.read_table(io.BytesIO(stage.location.read(name))) for name in names]).to_pylist()


def test_rollouts_of_the_recorded_weights_pass_both_stages_and_every_text_is_proved(
    run: Run, start: Reference, rollouts: list[Rollout], tmp_path: Path
) -> None:
    done = step(run, start, rollouts, tmp_path / "cache")
    assert run.stage(1, "train").reference() == done
    validated = run.stage(1, "validate").reference()
    assert validated is not None
    assert read_manifest(validated).metrics["validate/text_proved"] == 2 * SIZE
    assert validated.counts["quarantined"] == 0
    assert not [name for name in run.stage(1, "train").location.names() if name.startswith("mismatched")]


def test_a_break_of_the_tokens_is_counted_by_cause_and_the_quarantine_says_where_and_why(
    run: Run, start: Reference, rollouts: list[Rollout]
) -> None:
    broken = rollouts[0]
    [first] = broken.turns
    kept = first.generation_token_ids[len(first.generation_token_ids) // 2 :]
    prompt = [*first.prompt_token_ids, *kept, *first.prompt_token_ids]
    length, digest = len(prompt), digest_tokens(prompt)
    broken.turns.append(replace(first, turn=1, prompt_token_ids=prompt, prompt_length=length, prompt_digest=digest))
    validated = validate_iteration(run, 1, collect_stage(run, rollouts), vocabulary_size(run))
    manifest = read_manifest(validated)
    assert manifest.metrics["validate/token_breaks"] == 1
    assert manifest.metrics["validate/token_breaks/stripped_reasoning"] == 1
    [row] = read_table(validated, "quarantine").to_pylist()
    assert (row["rollout_id"], row["reason"]) == (broken.rollout_id, "not_contiguous")
    assert manifest.details["token_breaks"] == {broken.rollout_id: row["evidence"]}
    assert f"at token {len(first.prompt_token_ids)}" in row["evidence"]
    assert "as text '" in row["evidence"]


def reversed_log_probs(rollout: Rollout) -> None:
    rollout.turns[0].generation_log_probs.reverse()


def shifted_log_probs(rollout: Rollout) -> None:
    log_probs = rollout.turns[0].generation_log_probs
    log_probs.append(log_probs.pop(0))


def log_probs_of_another_base(rollout: Rollout) -> None:
    turn = rollout.turns[0]
    turn.generation_log_probs = [value / 2.302585 for value in turn.generation_log_probs]


@pytest.mark.parametrize("damage", [reversed_log_probs, shifted_log_probs, log_probs_of_another_base])
def test_log_probabilities_that_the_weights_do_not_give_become_no_version(
    damage: Callable[[Rollout], None], run: Run, start: Reference, rollouts: list[Rollout], tmp_path: Path
) -> None:
    damage(rollouts[2])
    with pytest.raises(DataError, match=r"1 of 8 sequences have log-probabilities .*recompute_tolerance"):
        step(run, start, rollouts, tmp_path / "cache")
    assert run.stage(1, "train").reference() is None
    assert [row["rollout_id"] for row in mismatched_rows(run.stage(1, "train"))] == [rollouts[2].rollout_id]
    assert trainer_home.trainer_home(run).trainer is None, "the weights in memory are given up"


def test_one_outlier_among_many_is_masked_named_and_counted_and_the_run_goes_on(
    run: Run, start: Reference, rollouts: list[Rollout], tmp_path: Path
) -> None:
    """Rounding in a short sequence is not tampering, and must not end a run after the whole step was computed."""
    tolerant = run.config.validation.model_copy(update={"max_mismatched_fraction": 0.2})
    run = replace(run, config=run.config.model_copy(update={"validation": tolerant}))
    reversed_log_probs(rollouts[2])
    done = step(run, start, rollouts, tmp_path / "cache")
    assert read_manifest(done).metrics["train/num_mismatched_seqs"] == 1
    assert [row["rollout_id"] for row in mismatched_rows(run.stage(1, "train"))] == [rollouts[2].rollout_id]


def test_answers_of_other_weights_under_the_wanted_number_are_found(run: Run, start: Reference, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", check_text=True)
    other_start = local_directory(
        starting_policy(open_run(other.config.model_copy(update={"seed": 7, "run_id": "s"}))), tmp_path
    )
    rollouts = play(run, other_start)
    with pytest.raises(DataError, match=r"[5-8] of 8 sequences have log-probabilities"):
        step(run, start, rollouts, tmp_path / "cache")


def test_without_a_tolerance_nothing_is_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path, recompute_tolerance=None)
    start = starting_policy(run)
    rollouts = play(run, local_directory(start, tmp_path / "cache"))
    reversed_log_probs(rollouts[2])
    assert step(run, start, rollouts, tmp_path / "cache").counts["sequences"] == 2 * SIZE


def test_turns_of_no_rollout_stop_the_iteration(run: Run, start: Reference, rollouts: list[Rollout]) -> None:
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts[:-1]))
    with pytest.raises(DataError, match="turns of 1 rollouts that the rollouts dataset has not"):
        validate_iteration(run, 1, attempt.commit(), vocabulary_size(run))


def test_a_turn_that_the_store_lost_is_missed(run: Run, start: Reference, rollouts: list[Rollout]) -> None:
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_table("turns", turns_table(rollouts[1:]))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    validated = validate_iteration(run, 1, attempt.commit(), vocabulary_size(run))
    assert read_manifest(validated).details["reasons"] == {"no_turns": 1}


def test_a_text_that_nests_too_deep_for_a_call_is_proved_as_text() -> None:
    batch = collected("calculator").again()
    rollout = next(each for each in batch.rollouts if any(item.get("type") == "function_call" for item in each.items))
    text = "<tool_call>" + "[" * 2000
    rollout.items[-1]["content"][0]["text"] = text
    rollout.turns[-1].generation_token_ids = batch.text._tokenizer.encode(text).ids
    assert batch.text.prove(rollout)
