"""TensorBoard: the metrics of a run as event files."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"sink.tensorboard": Plugin(f"{__name__}.sink:TensorBoardSink", extra="tensorboard")}
