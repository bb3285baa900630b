"""A worker without a policy: rewards by a hash, or rollouts played back from a recording.

Invariants: no model is called; the same group and run give the same reward and the same record, in every process; what comes
out is masked, since its tokens are no draw of the policy in training, unless a recording is played back with `trainable`.

    parameters: {}                                      reward 0 or 1 by the hash of (group_id, run_id); no turns
    parameters: {recorded: store/…/collect}             the rollout of that group and run, from a collect stage's Parquet files
"""

from __future__ import annotations

import functools
import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.compat.nexrl.evaluation import EvaluationRunResult, Evaluator
from roundhouse.compat.nexrl.llm import LlmClient
from roundhouse.compat.nexrl.worker import BaseRolloutWorker
from roundhouse.errors import ConfigError
from roundhouse.store.location import Location
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables


class MockRolloutWorker(BaseRolloutWorker):
    """For tests of everything around the policy."""

    def __init__(
        self, llm: LlmClient, evaluator: Evaluator | None = None, recorded: str | None = None, trainable: bool = False
    ) -> None:
        super().__init__(llm, evaluator)
        self._recorded = recorded
        self.trained_on = trainable and recorded is not None

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        if self._recorded is None:
            reward = hash_reward(str(task["group_id"]), int(task["run_id"]))
            return await self.put_trajectory(task, "", result=EvaluationRunResult(reward))
        played = recording(self._recorded).get((str(task["group_id"]), int(task["run_id"])))
        if played is None or played.reward is None:
            return None
        self.llm.play_back(played)
        return await self.put_trajectory(task, "", result=EvaluationRunResult(played.reward, metrics=played.metrics))


def hash_reward(group_id: str, run_id: int) -> float:
    """0 or 1, about as often."""
    return float(hashlib.sha256(f"{group_id}/{run_id}".encode()).digest()[0] & 1)


@functools.lru_cache(maxsize=4)
def recording(uri: str) -> dict[tuple[str, int], Rollout]:
    """The rollouts under `uri`, by group and sample; of several attempts at one, the last file's.

    Raises:
        ConfigError: there are none.
    """
    location = Location(uri)
    names = sorted(name for name in location.names() if name.startswith("rollouts-") and name.endswith(".parquet"))
    if not names:
        raise ConfigError(f"environment.parameters.recorded is {uri!r}, which has no rollouts-*.parquet.")
    found: dict[tuple[str, int], Rollout] = {}
    for name in names:
        tables = [_table(location, part) for part in (name, f"turns-{name.removeprefix('rollouts-')}")]
        found |= {(rollout.group_id, rollout.sample): rollout for rollout in rollouts_from_tables(*tables)}
    return found


def _table(location: Location, name: str) -> pa.Table:
    return pq.read_table(io.BytesIO(location.read(name)))
