"""The data frame of a run's metrics."""

from __future__ import annotations

import difflib
from typing import Any

import pandas as pd
from pandas.plotting import PlotAccessor

from roundhouse.errors import ConfigError


class MetricsFrame(pd.DataFrame):
    """A row an iteration, a column a metric.

    `plot` skips iterations without a value, because an evaluation is not made in each. A plain data frame leaves gaps, between
    which single values are invisible.
    """

    @property
    def _constructor(self) -> type[MetricsFrame]:
        return MetricsFrame

    @property
    def plot(self) -> Any:
        return _Plot(self)


class _Plot:
    """The plots of pandas, with lines through the values that a metric has."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self._pandas: Any = PlotAccessor(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pandas, name)

    def __call__(self, *args: Any, y: Any = None, **options: Any) -> Any:
        """Plot as pandas does; with `y`, each metric through its own values.

        Raises:
            ConfigError: a metric is unknown.
        """
        if y is None or args or options.get("kind", "line") != "line" or "x" in options:
            return self._pandas(*args, **({} if y is None else {"y": y}), **options)
        axes = options.pop("ax", None)
        for metric in [y] if isinstance(y, str) else y:
            if metric not in self._frame.columns:
                near = difflib.get_close_matches(metric, self._frame.columns, 3) or sorted(self._frame.columns)
                raise ConfigError(f"Metric {metric!r} is unknown. The run has: {', '.join(near)}.")
            values = self._frame[metric].dropna()
            axes = values.plot(ax=axes, label=metric, **{"legend": True, "marker": ".", **options})
        return axes
