"""Many concurrent rollouts without a stage, for tests and benchmarks of environments, agents and journals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from roundhouse.collection.in_process_runner import RolloutCollection
from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.generation.protocol import PolicyClient
from roundhouse.rollout.plan import RolloutSpec, reorder
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.trajectories.records import Rollout

OnRollout = Callable[[Rollout], None]


async def collect(
    specs: Sequence[RolloutSpec],
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
    on_rollout: OnRollout | None = None,
    **options: Any,
) -> list[Rollout]:
    """All rollouts of `specs`, in their order, with `config.concurrency` in flight; `options` as of `RolloutCollection.of`.

    Failures are outcomes and do not raise; what `on_rollout` raises does, and ends the collection.
    """
    collection = RolloutCollection.of(specs, policy, environment, config, sampling, **options)
    queue = iter(enumerate(specs))
    results: list[tuple[int, Rollout]] = []

    async def work() -> None:
        for index, spec in queue:
            rollout = await collection.roll_out(spec)
            results.append((index, rollout))
            if on_rollout is not None:
                on_rollout(rollout)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(config.concurrency or len(specs), len(specs))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return reorder(results, len(specs))
