"""Several environments in one run: a client that hands each rollout to the environment that its task belongs to.

Invariant: the `task_id` of every row begins with the name of its environment (`calc/12`), and so do the group and the rollouts
of it, wherever they are stored, planned or sent; the environment itself sees the row as it wrote it. A row that names no
environment of the mixture is refused when the mixture is opened, before anything runs.

    {kind: mixture, environments: {calc: {kind: calculator}, words: {kind: custom, …}}, weights: {calc: 3}}
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from roundhouse.config.environments import MixtureEnvironment
from roundhouse.environments.base import Restoration, Split, TaskRow
from roundhouse.errors import ConfigError
from roundhouse.rollout.agents import RolloutAttempt
from roundhouse.rollout.plan import WeightedTasks
from roundhouse.rollout.protocol import Agent, ClosedOnExit, EnvironmentClient

MOST_NAMED = 5


class MixtureClient(ClosedOnExit):
    """The environments of a configuration as one."""

    name = "mixture"

    def __init__(
        self,
        config: MixtureEnvironment,
        parts: Mapping[str, EnvironmentClient],
        rows: Mapping[Split, Sequence[TaskRow]],
    ) -> None:
        """
        Args:
            rows: those of `config.train_tasks` and `config.heldout_tasks`, where these are set.

        Raises:
            ConfigError: a row names no environment of the mixture, or an environment whose tasks are drawn has none.
        """
        self._config = config
        self._parts = parts
        restorations = {part.restoration for part in parts.values()}
        self.restoration: Restoration = restorations.pop() if len(restorations) == 1 else "none"
        self.agent = MixtureAgent(parts)
        self._rows = {split: self._by_row(given, f"environment.{split}_tasks") for split, given in rows.items()}
        if "train" not in self._rows and (empty := [name for name, part in parts.items() if not part.tasks("train")]):
            raise ConfigError(
                f"environment.environments.{empty[0]} has no training task to draw. Give it some, or leave it out."
            )

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """Rows of one file in its order; else training tasks to be drawn by weight, and held-out tasks of all in turn."""
        if split in self._rows:
            return self._rows[split]
        own = {name: [_named(name, row) for row in part.tasks(split)] for name, part in self._parts.items()}
        if split == "train":
            return WeightedTasks(own, {name: self._config.weights.get(name, 1.0) for name in own})
        return [row for rows in itertools.zip_longest(*own.values()) for row in rows if row is not None]

    def _by_row(self, given: Sequence[TaskRow], key: str) -> list[TaskRow]:
        rows, strangers = [], []
        for number, row in enumerate(given, start=1):
            reference = row.get("agent_ref")
            name = reference.get("name") if isinstance(reference, dict) else None
            if isinstance(name, str) and name in self._parts:
                rows.append(_named(name, row))
            else:
                strangers.append(f"row {number} names {name!r}")
        if strangers:
            more = f" and {len(strangers) - MOST_NAMED} more" if len(strangers) > MOST_NAMED else ""
            raise ConfigError(
                f"{key}: {', '.join(strangers[:MOST_NAMED])}{more} (agent_ref.name), but environment.environments has "
                f"{', '.join(self._parts)}. Add these agents to the mixture, or remove their rows."
            )
        return rows

    async def seed_session(self, row: TaskRow) -> Any:
        name, own = split_row(row)
        part: Any = self._parts[name]
        return await part.seed_session(own)

    async def reset(self, row: TaskRow) -> Any:
        name, own = split_row(row)
        part: Any = self._parts[name]
        return await part.reset(own)

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        name, own = split_row(row)
        part: Any = self._parts[name]
        return await part.restore_session(own, snapshot)

    async def close(self) -> None:
        for part in self._parts.values():
            await part.close()


class MixtureAgent:
    """Plays each rollout as its environment's own agent does, within the limits of `rollout.environments`."""

    def __init__(self, parts: Mapping[str, EnvironmentClient]) -> None:
        self._parts = parts

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        name, _ = split_row(attempt.rollout.task)
        attempt.rollout.environment = name
        own = attempt.config.environments.get(name)
        attempt.config = attempt.config.of_environment(name)
        if own is not None and own.max_new_tokens is not None:
            attempt.sampling = attempt.sampling.model_copy(update={"max_new_tokens": own.max_new_tokens})
        await self.of(attempt.rollout.task).play(attempt, environment)

    def of(self, row: TaskRow) -> Agent:
        """The agent of the environment that a row belongs to."""
        return self._parts[split_row(row)[0]].agent


def _named(name: str, row: TaskRow) -> TaskRow:
    return {**row, "task_id": f"{name}/{row['task_id']}"}


def split_row(row: TaskRow) -> tuple[str, TaskRow]:
    """The name of the environment that a row of a mixture belongs to, and the row as that environment wrote it."""
    name, _, task_id = str(row["task_id"]).partition("/")
    return name, {**row, "task_id": task_id}
