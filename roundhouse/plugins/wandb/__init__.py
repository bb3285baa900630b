"""Weights & Biases: the metrics of a run in a project."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"sink.wandb": Plugin(f"{__name__}.sink:WandbSink", extra="wandb")}
