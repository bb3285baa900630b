"""NexRL's names of an evaluation's metrics in Weights & Biases.

tracking: {sinks: [mlflow, "roundhouse.plugins.nexrl.val_names:ValNames"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundhouse.plugins import factory


class ValNames:
    """The sink `wandb`, with `val/reward/mean` for `evaluation/reward/mean`."""

    package = "wandb"

    def __init__(self, run: Any) -> None:
        self._sink = factory("sink", "wandb")(run)

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log an iteration under NexRL's names."""
        self._sink.log_iteration(iteration, {_nexrl_name(name): value for name, value in metrics.items()})

    def close(self) -> None:
        self._sink.close()


def _nexrl_name(metric: str) -> str:
    return f"val/{metric.removeprefix('evaluation/')}" if metric.startswith("evaluation/") else metric
