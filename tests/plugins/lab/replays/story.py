"""The run of the story in docs/replay.md: its verifier had a bug; recorded without an engine.

The policy is a tiny transformer that samples token IDs; its text is those IDs as numbers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from roundhouse.plugins.lab.replays.rollouts import judge_one
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.conversation import Conversation
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference
from roundhouse.trajectories.records import Rollout
from tests.plugins.lab.replays.trained import trained_run
from tests.stages import offline_world

TARGET = "docs/examples/first_number.py:{}"
GROUP = 8


def story_run(directory: Path, run_id: str, verifier: str, iterations: int = 8) -> Run:
    """A run that was trained with one of the two verifiers."""
    return trained_run(
        directory,
        iterations,
        run_id,
        judged_group,
        environment={"kind": "custom", "target": TARGET.format(verifier)},
        rollout={"prompts_per_iteration": 4, "group_size": GROUP},
    )


def judged_group(run: Run, base: Reference, k: int, generator: torch.Generator) -> list[Rollout]:
    """The rollouts of an iteration, judged by the run's environment."""

    async def work() -> list[Rollout]:
        async with open_environment(run.config.environment) as environment:
            found = []
            model = offline_world.model_of(base)
            for group, row in enumerate(environment.tasks("train")[: run.config.rollout.prompts_per_iteration]):
                drawn = offline_world.sampled_group(model, group, GROUP, base.policy_version, k, generator)
                for rollout in drawn:
                    conversation = Conversation(row, f"msg_{rollout.seed:08x}")
                    text = " ".join(map(str, rollout.turns[0].generation_token_ids))
                    part = {"type": "output_text", "text": text, "annotations": []}
                    said = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
                    told = replace(rollout, task=row, items=[*conversation.items, {"id": "0", **said}])
                    judged = await judge_one(told, environment)
                    assert judged.after is not None, judged.detail
                    found.append(judged.after)
            return found

    return asyncio.run(work())


def chance_of_right(checkpoint: Reference, most: int = 60) -> float:
    """Expected reward of a version by the right verifier, exactly."""
    model = offline_world.model_of(checkpoint)
    prompts = torch.tensor([offline_world.prompt_of(group, model.config.vocab_size) for group in range(4)])
    with torch.no_grad():
        return float(model(prompts).logits[:, -1].softmax(-1)[:, : most + 1].sum(-1).mean())
