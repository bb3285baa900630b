"""Recorded runs with one planted cause of a regression, and the environment that judges them.

The policy is the tiny transformer of `tests.stages.offline_world`. It writes token IDs as numbers and is right if the first
is in the range of its task. Each iteration is collected, validated, trained and evaluated without an engine; a `Plant` sets
the fault and its first and last iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from roundhouse.environments.base import Split, TaskRow
from roundhouse.rollout.conversation import Conversation
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.evaluate import evaluation_metrics
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, Stage, StageKind, read_manifest, read_table
from roundhouse.trajectories.records import Ledger, Rollout, derive_seed
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.plugins.lab.replays.in_range import RANGE, TRAINED, InRange, right
from tests.stages import offline_world

GROUP, SAMPLES = 40, 128


Judge = Callable[[TaskRow, list[int]], float]


@dataclass(frozen=True)
class Plant:
    """Fault in iterations `since` to `until`; the defaults are correct."""

    name: str = "healthy"
    cause: str = ""
    """Kind that is to be named."""
    since: int = 10**6
    until: int = 10**6
    where: tuple[str, ...] = ("training",)
    """In the iterations' own stages, in their evaluations, or in both."""
    judge: Judge = right
    row: Callable[[TaskRow, int], TaskRow] = lambda row, group: row
    rollouts: Callable[[list[Rollout]], list[Rollout]] = lambda rollouts: rollouts
    version: Callable[[int], int] = lambda version: version
    """Whose weights the engine holds, of the version that it should hold."""
    base: Callable[[int], int] = lambda version: version
    """Whose weights the step begins from."""
    sequences: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda rows: rows
    groups: int = TRAINED
    """Of every iteration."""
    prompt_shift: int = 0
    """Of the template: the prompt is that of the task so many places on."""
    temperature: float = 1.0
    """That the engine samples at, whatever it says."""
    step: dict[str, Any] = field(default_factory=dict)
    """Keys of `train` that the step runs with, and nothing records."""
    forked: dict[str, Any] = field(default_factory=dict)
    """Keys of `train` of a fork that begins at `since`."""

    def at(self, k: int, where: str) -> Plant:
        """Return the values for iteration k, in training or evaluation."""
        return self if self.since <= k <= self.until and where in self.where else HEALTHY


HEALTHY = Plant()
TRAIN: dict[str, Any] = {
    "minibatches": 4,
    "threads": 1,
    "device": "cpu",
    "algorithm": {"kind": "grpo", "normalize_by_std": False},
    "optimizer": {"learning_rate": 0.03, "warmup_steps": 0, "betas": [0.5, 0.95]},
}


def planted_run(directory: Path, plant: Plant, iterations: int = 8, seed: int = 0) -> Run:
    """A run with so many iterations on record, each evaluated; with `forked`, a fork of one."""
    target = {
        "kind": "custom",
        "target": "tests.plugins.lab.replays.in_range:InRange",
        "parameters": {"trained": plant.groups},
    }
    keys: dict[str, Any] = {
        "environment": target,
        "rollout": {"prompts_per_iteration": plant.groups, "group_size": GROUP},
        "validation": {"check_text": False, "recompute_tolerance": None},
        "evaluation": {"every": 1},
        "train": TRAIN,
        "seed": seed,
    }
    last = plant.since - 1 if plant.forked else iterations
    run = open_run(offline_world.make_config(directory, "planted", iterations=last, **keys))
    recorded(run, plant, last)
    if plant.forked:
        keys |= {
            "train": TRAIN | plant.forked,
            "tracking": {"enabled": False, "labels": {"team": "search"}},
            "resume": {"mode": "from_path", "path": run.checkpoint(last).location.uri},
        }
        run = open_run(offline_world.make_config(directory, "forked", iterations=iterations, **keys))
        recorded(run, plant, iterations)
    return run


def recorded(run: Run, plant: Plant, iterations: int) -> None:
    """All iterations on record."""
    versions = {run.first_version: starting_policy(run)}
    cache = checkpoint_cache(run.config)
    evaluate(run, run.first_version, versions, HEALTHY)
    for k in range(run.first_version + 1, iterations + 1):
        own = plant.at(k, "training")
        sequences = validate_iteration(run, k, collect(run, k, versions, own), vocabulary_size(run))
        if own.sequences is not HEALTHY.sequences:
            sequences = rewritten(sequences, own.sequences)
        base = versions[max(run.first_version, own.base(k - 1))]
        train = run.config.train.model_validate(run.config.train.model_dump() | own.step)
        stepping = replace(run, config=run.config.model_copy(update={"train": train}))
        if own.step:  # the resident trainer has the keys of before
            release_trainers()
        versions[k] = publish(run, train_iteration(stepping, k, sequences, base, cache))
        if own.step:
            release_trainers()
        evaluate(run, k, versions, plant.at(k, "evaluation"))
    release_trainers()


def drawn(run: Run, weights: Reference, split: Split, version: int, draw: int, plant: Plant) -> list[Rollout]:
    """Sample rollouts of a split's tasks with these weights, labelled as `version`."""
    model = offline_world.model_of(weights)
    model = model if plant.temperature == 1.0 else Hot(model, plant.temperature)
    generator = torch.Generator().manual_seed(
        derive_seed(run.config.seed, split, draw, version if split == "heldout" else 0)
    )
    found = []
    size = GROUP if split == "train" else SAMPLES
    for group, row in enumerate(InRange(run.config.rollout.prompts_per_iteration).tasks(split)):
        task = plant.row(row, group)
        place = group + plant.prompt_shift
        for rollout in offline_world.sampled_group(model, place, size, version, draw, generator):
            text = " ".join(map(str, rollout.turns[0].generation_token_ids))
            part = {"type": "output_text", "text": text, "annotations": []}
            said = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
            items = [*Conversation(task, f"msg_{rollout.seed:08x}").items, {"id": "0", **said}]
            reward = plant.judge(task, rollout.turns[0].generation_token_ids)
            own = {"group_id": row["task_id"], "environment": "in_range", "seed": derive_seed(rollout.seed, split)}
            found.append(replace(rollout, task=task, items=items, reward=reward, **own))
    return plant.rollouts(found)


class Hot:
    """A model with an engine that divides logits by a temperature that its log-probabilities do not show."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model, self.config, self.temperature = model, model.config, temperature

    def __call__(self, tokens: torch.Tensor) -> Any:
        output = self.model(tokens)
        output.logits = output.logits / self.temperature
        return output


def collect(run: Run, k: int, versions: dict[int, Reference], plant: Plant) -> Reference:
    """The rollouts of an iteration."""
    base = versions[k - 1]
    weights = versions[max(run.first_version, plant.version(k - 1))]
    attempt = run.begin(run.stage(k, StageKind.COLLECT), policy_version=base.policy_version)
    return committed(attempt, drawn(run, weights, "train", base.policy_version, k, plant), {"weights": base})


def evaluate(run: Run, version: int, versions: dict[int, Reference], plant: Plant) -> Reference:
    """The evaluation of a version."""
    weights = versions[max(run.first_version, plant.version(version))]
    attempt = run.begin(run.stage(version, StageKind.EVALUATE), policy_version=version)
    return committed(attempt, drawn(run, weights, "heldout", version, 0, plant), {"checkpoint": versions[version]})


def committed(attempt: Any, made: list[Rollout], inputs: dict[str, Reference]) -> Reference:
    attempt.write_table("turns", turns_table(made))
    attempt.write_table("rollouts", rollouts_table(made))
    return attempt.commit(
        inputs=inputs,
        counts=Ledger.from_rollouts(made, requested=len(made)).counts(),
        metrics=evaluation_metrics(made) if "checkpoint" in inputs else {},
        details={"sampling": {"temperature": 1.0}},
    )


def rewritten(sequences: Reference, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Reference:
    """The validated sequences as a defect of the validate stage leaves them, committed in their place."""
    manifest, quarantine = read_manifest(sequences), read_table(sequences, "quarantine")
    table = read_table(sequences, "sequences")
    place = Location(sequences.uri)
    place.delete("manifest.json")
    attempt = Stage(place, kind=StageKind.VALIDATE, run_id=manifest.run_id, iteration=manifest.iteration).begin(
        manifest.provenance
    )
    attempt.write_table("sequences", pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema))
    attempt.write_table("quarantine", quarantine)
    return attempt.commit(
        inputs=manifest.inputs, counts=manifest.counts, metrics=manifest.metrics, details=manifest.details
    )


def mislabelled(groups: Sequence[int], worth: float = 1.0) -> Callable[[TaskRow, int], TaskRow]:
    """Rows of these groups ask for the wrong range, and pay so much for it."""
    return lambda row, group: row | {"range": [RANGE[1], 10**6], "worth": worth} if group in groups else row


def turned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewards with the wrong sign."""
    return [row | {"reward": 1 - row["reward"]} for row in rows]


def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewards in the reverse order within each group: the best sequence has the worst reward."""
    found = []
    for group in sorted({row["group_id"] for row in rows}):
        own = sorted((row for row in rows if row["group_id"] == group), key=lambda row: row["reward"])
        rewards = [row["reward"] for row in reversed(own)]
        found += [row | {"reward": reward} for row, reward in zip(own, rewards, strict=True)]
    return found


def forgetful(row: TaskRow, said: list[int]) -> float:
    """A verifier that accepts a third of the right answers."""
    return right(row, said) * (said[0] % 3 == 0)


def turned_verdict(row: TaskRow, said: list[int]) -> float:
    """A verifier with the wrong sign."""
    return 1 - right(row, said)


def optimizer(**keys: Any) -> dict[str, Any]:
    return {"optimizer": TRAIN["optimizer"] | keys}


def algorithm(**keys: Any) -> dict[str, Any]:
    return {"algorithm": TRAIN["algorithm"] | keys}


BOTH, EVALUATION = ("training", "evaluation"), ("evaluation",)
PLANTS = [
    Plant("verifier turned", "reward", 5, 5, judge=turned_verdict),
    Plant("verifier turned for good", "reward", 4, 7, judge=turned_verdict),
    Plant("verifier of another range", "reward", 5, 7, judge=lambda row, said: float(said[0] >= 100)),
    Plant("forgetful verifier", "reward", 5, 7, BOTH, forgetful),
    Plant("forgetful verifier of the evaluation", "reward", 6, 7, EVALUATION, forgetful),
    Plant("one poisoned group", "rows", 4, 4, row=mislabelled([2], 40.0)),
    Plant("three mislabelled groups", "rows", 4, 4, row=mislabelled([1, 4, 5], 5.0)),
    Plant("a poisoned group later", "rows", 6, 6, row=mislabelled([5], 40.0)),
    Plant("two of sixteen groups poisoned", "rows", 4, 4, row=mislabelled([3, 12], 200.0), groups=16),
    Plant("all rows mislabelled", "rows", 5, 5, row=mislabelled(range(TRAINED))),
    Plant("other held-out tasks", "rows", 5, 7, EVALUATION, row=mislabelled(range(4))),
    Plant("learning rate", "configuration", 5, 7, forked=optimizer(learning_rate=0.5)),
    Plant("weight decay", "configuration", 5, 7, forked=optimizer(weight_decay=10.0)),
    Plant("entropy", "configuration", 5, 7, forked=algorithm(entropy_coefficient=5.0)),
    Plant(
        "one of three keys",
        "configuration",
        5,
        7,
        forked=algorithm(entropy_coefficient=5.0, clip_low=0.25) | optimizer(learning_rate=0.028),
    ),
    Plant("anchored to the start", "configuration", 5, 7, forked=algorithm(kl_coefficient=10.0)),
    Plant("trained from an older version", "weights", 5, 5, base=lambda version: version - 3),
    Plant("trained from the start", "weights", 6, 6, base=lambda version: 0),
    Plant("trained from version 1", "weights", 7, 7, base=lambda version: 1),
    Plant("stale weights in the engine", "engine", 5, 7, EVALUATION, version=lambda version: version - 4),
    Plant("another template", "engine", 6, 7, EVALUATION, prompt_shift=50),
    Plant("hot sampling", "engine", 5, 7, EVALUATION, temperature=6.0),
    Plant("rewards turned by validation", "code", 5, 5, sequences=turned),
    Plant("rewards swapped by validation", "code", 6, 6, sequences=swapped),
    Plant("a step that did not do what it says", "code", 5, 5, step=algorithm(entropy_coefficient=5.0)),
]
