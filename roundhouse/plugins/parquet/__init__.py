"""Parquet: rollouts and turns as tables of typed columns that Hugging Face's `datasets` and other readers accept."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"writer.parquet": Plugin(f"{__name__}.writer:write")}
