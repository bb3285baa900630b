"""A running engine and an environment in this process as a source of rollouts: no agent server between them.

Invariant: a row's result holds the whole rollout record under `_roundhouse`, so that an import loses nothing; the seed of a
rollout depends on the collection's seed and the row's indexes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.compat.nemo_gym.exchange.outgoing import ATTEMPT, Address, result_row
from roundhouse.compat.nemo_gym.exchange.stream import NotReached
from roundhouse.compat.nemo_gym.servers.aggregate import ROLLOUT, TASK, aggregate_metrics
from roundhouse.config.models import EnvironmentConfig, GenerationConfig, RolloutConfig
from roundhouse.environments.base import Split
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import EngineUnreachable
from roundhouse.rollout.attempt import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.failures import classify
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.trajectories.tokens import derive_seed

ENGINE_GONE = classify(EngineUnreachable())[1]


class OwnPolicy:
    """Plays rows with the engine at `engine_url`."""

    def __init__(
        self,
        engine_url: str,
        environment: EnvironmentConfig,
        generation: GenerationConfig,
        rollout: RolloutConfig,
        seed: int = 0,
    ) -> None:
        self._rollout = rollout
        self._sampling = generation.sampling
        self._seed = seed
        self._policy = HttpPolicyClient(engine_url, generation)
        self._environment = open_environment(environment)
        self._open = AsyncExitStack()

    @property
    def agent(self) -> str:
        """The name under which its rows and metrics stand."""
        return self._environment.name

    def tasks(self, split: Split) -> Sequence[Row]:
        """The environment's own task rows."""
        return self._environment.tasks(split)

    async def run(self, row: Row) -> Row:
        task, rollout = row[TASK], row[ROLLOUT]
        seed = derive_seed(self._seed, task, rollout)
        group = str(row.get("task_id") or f"task-{task}")
        played = await run_rollout(
            RolloutSpec(group, rollout, row, seed),
            self._policy,
            self._environment,
            self._rollout,
            self._sampling,
            attempt=row.get(ATTEMPT, 0) + 1,
            judges_overflow=True,
            on_policy=False,  # a row may ask for its own temperature; the log-probabilities are of what was drawn from
        )
        if played.failure_code == ENGINE_GONE and not played.turns:
            raise NotReached(played.failure_detail)
        return result_row(played, Address(task, rollout, self.agent))

    async def aggregate(self, agent: str, rows: Sequence[Row]) -> Row:
        return aggregate_metrics(rows, getattr(self._environment, "compute_metrics", None))

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._policy)
        await self._open.enter_async_context(self._environment)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
