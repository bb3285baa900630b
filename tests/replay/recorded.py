"""Recorded rollouts of any environment, without an engine: a scripted policy plays what the environment demonstrates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from roundhouse.config.loading import parse_config
from roundhouse.config.models import EnvironmentConfig
from roundhouse.environments import load_any
from roundhouse.environments.base import TaskRow
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import StageKind
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout, derive_seed
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config

VERSION = 3


def opened(directory: Path, environment: dict[str, Any], run_id: str = "recorded") -> Run:
    """A run that collects from this environment."""
    return open_run(parse_config({"run_id": run_id, "store": str(directory / "store"), "environment": environment}))


def demonstrated(config: EnvironmentConfig, tasks: int = 6, size: int = 4, **limits: Any) -> list[Rollout]:
    """Groups of a task each, played by what the environment shows of good and bad rollouts of any task."""

    async def work() -> list[Rollout]:
        shown = load_any(config).demonstrations("train", tasks * size, 0.5, seed=1)
        by_prompt: dict[str, list[list[dict[str, Any]]]] = {}
        for messages in shown:
            by_prompt.setdefault(str(messages[0]["content"]), []).append(messages)
        rows: dict[str, list[TaskRow]] = {}
        async with open_environment(config) as client:
            for row in client.tasks("train"):
                rows.setdefault(str(row["responses_create_params"]["input"][-1]["content"]), []).append(row)
            made = []
            # several tasks may share a prompt (a hidden number, a lake shown only later)
            chosen = [(row, own) for prompt, own in by_prompt.items() for row in rows.get(prompt, [])[:tasks]]
            others = [messages for own in by_prompt.values() for messages in own]
            for place, (row, own) in enumerate(chosen[:tasks]):
                for sample in range(size):
                    messages = own[sample] if sample < len(own) else others[(place * size + sample) % len(others)]
                    said = [{"finish_reason": None, **m} for m in messages if m["role"] == "assistant"]
                    spec = RolloutSpec(str(row["task_id"]), sample, row, derive_seed(7, row["task_id"], sample))
                    config_of = rollout_config(**({"max_turns": 12} | limits))
                    made.append(await run_rollout(spec, ScriptedPolicy(by_turn(*said)), client, config_of, SAMPLING))
            return made

    return asyncio.run(work())


def collected(run: Run, iteration: int, rollouts: list[Rollout]) -> Reference:
    """These rollouts as the collection of an iteration."""
    attempt = run.begin(run.stage(iteration, StageKind.COLLECT), policy_version=VERSION)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    ledger = Ledger.from_rollouts(rollouts, requested=len(rollouts))
    return attempt.commit(
        counts=ledger.counts(), details={"failures": ledger.failures, "sampling": {"temperature": 1.0}}
    )
