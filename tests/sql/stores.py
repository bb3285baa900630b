"""Small runs in a store, with the real schemas, manifests and validation; only the policy's words are made up."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from roundhouse.config.loading import parse_config
from roundhouse.config.models import ValidationConfig
from roundhouse.policy.tokenizer import TURN_END, train_tokenizer
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse.trajectories.records import FailureKind, Ledger, Rollout, Status, Turn, derive_seed, digest_tokens
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from roundhouse.trajectories.validation import validate

TEXTS = ["What is 3 + 4?", "The answer is 7.", "I call the calculator.", "7"]
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'


@functools.cache
def tokenizer() -> Any:
    return train_tokenizer(TEXTS)


def write_run(
    store: str,
    run_id: str = "r",
    *,
    iterations: int = 2,
    tasks: int = 3,
    group_size: int = 4,
    seed: int = 0,
    said: str = "The answer is 7.",
    first: int = 1,
    task_name: str = "sum/{}",
    **keys: Any,
) -> Run:
    """A run of iterations `first` to `iterations`, each with rollouts of the same tasks. In each, the first task's last sample
    has failed and the second task's first one is masked; the rest are trained on."""
    config = {
        "run_id": run_id,
        "store": store,
        "seed": seed,
        "rollout": {"prompts_per_iteration": tasks, "group_size": group_size},
    }
    run = open_run(parse_config(config | keys))
    base = _starting_policy(run)
    for iteration in range(first, iterations + 1):
        base = _iteration(run, iteration, base, tasks, group_size, said, task_name)
    return run


def _starting_policy(run: Run) -> Reference:
    attempt = run.begin(run.checkpoint(0), policy_version=0)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer().save_pretrained(directory)
        attempt.write_bytes("tokenizer.json", (Path(directory) / "tokenizer.json").read_bytes())
    reference = attempt.commit()
    run.point_to(reference)
    return reference


def _iteration(
    run: Run, iteration: int, base: Reference, tasks: int, group_size: int, said: str, task_name: str
) -> Reference:
    version = iteration - 1
    made = [
        make_rollout(run.config.seed, iteration, task, sample, version, said, task_name)
        for task in range(tasks)
        for sample in range(group_size)
    ]
    fail(made[group_size - 1])
    if tasks > 1:
        made[group_size].status = Status.MASKED
    collect = run.begin(run.stage(iteration, "collect"), policy_version=version)
    half = len(made) // 2
    for part in (made[:half], made[half:]):
        collect.write_table("turns", turns_table(part))
        collect.write_table("rollouts", rollouts_table(part))
    ledger = Ledger.from_rollouts(made, requested=len(made))
    rewards = [reward for rollout in made if (reward := rollout.counted_reward) is not None]
    rollouts = collect.commit(
        inputs={"weights": base}, counts=ledger.counts(), metrics={"reward/mean": float(np.mean(rewards))}
    )
    result = validate(made, ValidationConfig(), vocabulary_size=len(tokenizer()), policy_version=version)
    attempt = run.begin(run.stage(iteration, "validate"), policy_version=version)
    attempt.write_table("sequences", result.sequences)
    attempt.write_table("quarantine", result.quarantine)
    sequences = attempt.commit(inputs={"rollouts": rollouts}, counts=result.ledger.counts())
    attempt = run.begin(run.stage(iteration, "train"), policy_version=version)
    attempt.write_table("columns", columns_of(result.sequences))
    trained = attempt.commit(inputs={"sequences": sequences, "base": base}, metrics={"train/loss": 0.5 / iteration})
    attempt = run.begin(run.checkpoint(iteration), policy_version=iteration)
    attempt.write_bytes("model.safetensors", b"weights")
    return attempt.commit(inputs={"train": trained})


def write_dataset(
    run: Run, name: str, draw: TaskDraw, version: int = 0, tasks: int = 2, group_size: int = 4
) -> Reference:
    """A version of a dataset, collected by a run."""
    weights = run.checkpoint(version).reference()
    assert weights is not None
    made = [
        make_rollout(run.config.seed, draw.iteration % 1000, task, sample, version, "The answer is 7.")
        for task in range(tasks)
        for sample in range(group_size)
    ]
    attempt = run.begin(dataset_stage(run, name, draw.label(version), draw), policy_version=version)
    attempt.write_table("turns", turns_table(made))
    attempt.write_table("rollouts", rollouts_table(made))
    rewards = [rollout.reward for rollout in made if rollout.reward is not None]
    return attempt.commit(
        inputs={"weights": weights},
        counts=Ledger.from_rollouts(made, requested=len(made)).counts(),
        metrics={"reward/mean": float(np.mean(rewards))},
    )


def make_rollout(
    seed: int, iteration: int, task: int, sample: int, version: int, said: str, task_name: str = "sum/{}"
) -> Rollout:
    """Two turns: a tool call, and an answer."""
    rng = random.Random(derive_seed(seed, iteration, task, sample))
    question = f"What is {task} + {iteration}?"
    call = {
        "type": "function_call",
        "name": "calculator",
        "arguments": json.dumps({"expression": f"{task}+{iteration}"}),
    }
    turns: list[Turn] = []
    tokens: list[int] = []
    for index, (new, generated) in enumerate([(question, "I call the calculator."), (str(task + iteration), said)]):
        new_ids = tokenizer().encode(new, add_special_tokens=False)
        ids = [*tokenizer().encode(generated, add_special_tokens=False), tokenizer().convert_tokens_to_ids(TURN_END)]
        tokens = [*tokens, *new_ids]
        log_probs = [-rng.expovariate(2) for _ in ids]
        parent = index - 1 if index else None
        turns.append(
            Turn(index, parent, new_ids, len(tokens), digest_tokens(tokens), ids, log_probs, version, "stop", 0.1)
        )
        tokens = [*tokens, *ids]
    return Rollout(
        group_id=task_name.format(task),
        sample=sample,
        task={"task_id": task_name.format(task), "expected_answer": task + iteration},
        environment="sums" if task % 2 else "other-sums",
        status=Status.COMPLETED,
        seed=derive_seed(seed, iteration, task, sample),
        reward=float(rng.random() < 0.5),
        reward_components={},
        metrics={"tool_calls": 1.0},
        items=[
            {"type": "message", "role": "user", "content": question},
            call | {"call_id": "c0"},
            {"type": "function_call_output", "call_id": "c0", "output": str(task + iteration)},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
        ],
        turns=turns,
        finish_reason="stop",
        started_at=1_700_000_000.0 + 100 * iteration + task + sample / 10,
        seconds=0.5,
        generation_seconds=0.2,
        environment_seconds=0.1,
    )


def begin_stage(run: Run, iteration: int, attempts: int) -> None:
    """A collect stage that was interrupted so many times; each attempt wrote one rollout more than the one before."""
    for count in range(1, attempts + 1):
        attempt = run.begin(run.stage(iteration, "collect"), policy_version=iteration - 1)
        made = [make_rollout(0, iteration, 0, sample, iteration - 1, "hm") for sample in range(count)]
        attempt.write_table("turns", turns_table(made))
        attempt.write_table("rollouts", rollouts_table(made))


def fail(rollout: Rollout) -> None:
    rollout.status, rollout.reward, rollout.turns = Status.FAILED, None, []
    rollout.failure_kind, rollout.failure_code = FailureKind.INFRA, "engine_timeout"
    rollout.failure_detail = f"no answer in 60 s {HOSTILE}"


def columns_of(sequences: pa.Table) -> pa.Table:
    """Return the columns that a train stage would write for them."""
    recorded = sequences.column("gen_logprobs").to_pylist()
    rewards = sequences.column("reward").to_numpy()
    trainer = [[value + 0.01 if value else 0.0 for value in row] for row in recorded]
    return pa.table(
        {
            "sequence_id": sequences.column("sequence_id"),
            "rollout_id": sequences.column("rollout_id"),
            "group_id": sequences.column("group_id"),
            "reward": rewards,
            "advantage": rewards - rewards.mean(),
            "baseline": np.full(len(rewards), rewards.mean()),
            "trained": np.ones(len(rewards), dtype=bool),
            "tokens": [len(row) for row in recorded],
            "trained_tokens": [sum(value != 0 for value in row) for row in recorded],
            "token_mult_prob_error": np.full(len(rewards), 1.01),
            "trainer_logprobs": pa.array(trainer, pa.list_(pa.float32())),
        }
    )
