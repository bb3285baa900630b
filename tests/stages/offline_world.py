"""A small policy that collects for itself: token by token from its own distribution, so that its log-probabilities are true.

A rollout is one turn of `LENGTH` tokens after a prompt of its group; its reward is 1 when the first of them is a low one.
Run as a program, it trains a run offline to its end, stage after stage, as the flow does:

    python -m tests.stages.offline_world CONFIG.json
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.pretrained import load_pretrained
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.stages.offline import prepare_offline, validate_batch, with_iterations
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import log_probs_under, train_iteration
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, model_location
from roundhouse.trajectories.records import Ledger, Rollout, Status, Turn, derive_seed, digest_tokens
from roundhouse.trajectories.schemas import rollouts_table, turns_table

LENGTH, PROMPT = 4, 3


def make_config(directory: Path, run_id: str = "base", **keys: Any) -> RunConfig:
    tree = {
        "run_id": run_id,
        "store": str(directory / "store"),
        "policy": {"kind": "warm_start", "steps": 2, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "rollout": {"prompts_per_iteration": 4, "group_size": 4},
        "train": {
            "minibatches": 2,
            "threads": 1,
            "device": "cpu",
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
        },
        "validation": {"check_text": False},  # there is no text
        "tracking": {"enabled": False},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }
    return parse_config(tree | keys)


def model_of(checkpoint: Reference) -> Any:
    directory = model_location(Location(checkpoint.uri)).local_path
    return load_pretrained(AutoModelForCausalLM, directory, dtype=torch.float32).eval()


def prompt_of(group: int, vocabulary: int) -> list[int]:
    return [derive_seed("prompt", group, place) % vocabulary for place in range(PROMPT)]


def is_low(token: int, vocabulary: int) -> bool:
    return token < vocabulary // 4


def chance_of_low(checkpoint: Reference, groups: int) -> float:
    """Expected reward of a policy, exactly."""
    model = model_of(checkpoint)
    vocabulary = model.config.vocab_size
    prompts = torch.tensor([prompt_of(group, vocabulary) for group in range(groups)])
    with torch.no_grad():
        chances = model(prompts).logits[:, -1].softmax(-1)
    return float(chances[:, : vocabulary // 4].sum(-1).mean())


def collect(
    run: Run,
    checkpoint: Reference,
    name: str = "night",
    draw: int = 1,
    groups: int = 8,
    size: int = 4,
    branched: bool = False,
) -> Reference:
    """A dataset of the checkpoint's own rollouts; `branched`, as branches of rollouts that are not in it."""
    model = model_of(checkpoint)
    version = checkpoint.policy_version
    generator = torch.Generator().manual_seed(derive_seed("collect", version, draw))
    made = [
        rollout for group in range(groups) for rollout in sampled_group(model, group, size, version, draw, generator)
    ]
    if branched:
        origins = [f"{each.group_id}/0" for each in made]
        made = [
            replace(each, group_id=f"{origin}@0", branched_from=origin)
            for each, origin in zip(made, origins, strict=True)
        ]
    stage = dataset_stage(run, name, TaskDraw(draw).label(version), TaskDraw(draw))
    attempt = run.begin(stage, policy_version=version)
    attempt.write_table("turns", turns_table(made))
    attempt.write_table("rollouts", rollouts_table(made))
    return attempt.commit(
        inputs={"weights": checkpoint},
        counts=Ledger.from_rollouts(made, requested=len(made)).counts(),
        metrics={"reward/mean": sum(rollout.reward or 0 for rollout in made) / len(made)},
        details={"sampling": {"temperature": 1.0}},
    )


def sampled_group(
    model: Any, group: int, size: int, version: int, draw: int, generator: torch.Generator
) -> list[Rollout]:
    vocabulary = model.config.vocab_size
    prompt = prompt_of(group, vocabulary)
    tokens = torch.tensor([prompt] * size)
    chosen = []
    with torch.no_grad():
        for _ in range(LENGTH):
            log_probs = model(tokens).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
            chosen.append(log_probs.gather(1, drawn)[:, 0])
            tokens = torch.cat([tokens, drawn], 1)
    rows = zip(tokens[:, PROMPT:].tolist(), torch.stack(chosen, 1).tolist(), strict=True)
    return [
        Rollout(
            group_id=f"task/{group}",
            sample=sample,
            task={"task_id": f"task/{group}", "responses_create_params": {"input": f"prompt {group}"}},
            environment="low",
            status=Status.COMPLETED,
            seed=derive_seed(version, draw, group, sample),
            reward=float(is_low(generated[0], vocabulary)),
            turns=[Turn(0, None, prompt, PROMPT, digest_tokens(prompt), generated, log_probs, version, "stop", 0.1)],
            finish_reason="stop",
            started_at=1_700_000_000.0 + 1000 * draw + 10 * group + sample,
            seconds=0.5,
            generation_seconds=0.2,
            environment_seconds=0.1,
        )
        for sample, (generated, log_probs) in enumerate(rows)
    ]


def train_to_the_end(config: RunConfig) -> Run:
    """All that is missing of an offline run, stage after stage."""
    run = with_iterations(open_run(config))
    base = starting_policy(run)
    cache = checkpoint_cache(config)
    prepare_offline(run, base, functools.partial(log_probs_under, run, base, cache=cache))
    for k in range(run.first_version + 1, run.config.iterations + 1):
        base = publish(run, train_iteration(run, k, validate_batch(run, k), base, cache))
        sys.stdout.write(f"{k}\n")
        sys.stdout.flush()
    return run


if __name__ == "__main__":
    train_to_the_end(parse_config(json.loads(Path(sys.argv[1]).read_text())))
