"""An environment that reports pass rates. Processes of user code import this module alone."""

from __future__ import annotations

from typing import Any

from roundhouse.environments.single_turn import Sort
from roundhouse.plugins.nemo_gym.exchange.statistics import pass_rates


class SortWithRates(Sort):
    def compute_metrics(self, tasks: list[list[Any]]) -> dict[str, Any]:
        return pass_rates(tasks)
