"""The names of a collection's files, all made of the rollouts file's.

out/run.jsonl  ->  out/run_materialized_inputs.jsonl   out/run_failures.jsonl         out/run_aggregate_metrics.json
                   out/run_reward_profiling.jsonl      out/run_agent_metrics.json
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CollectionFiles:
    """The files beside a rollouts file."""

    rollouts: Path

    @property
    def materialized_inputs(self) -> Path:
        return self._beside("materialized_inputs.jsonl")

    @property
    def failures(self) -> Path:
        return self._beside("failures.jsonl")

    @property
    def aggregate_metrics(self) -> Path:
        return self._beside("aggregate_metrics.json")

    @property
    def reward_profile(self) -> Path:
        return self._beside("reward_profiling.jsonl")

    @property
    def agent_metrics(self) -> Path:
        return self._beside("agent_metrics.json")

    def _beside(self, ending: str) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.stem}_{ending}")
