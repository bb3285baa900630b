"""ATIF: trajectories of agents in Harbor's interchange format, read and written."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "reader.atif": Plugin(f"{__name__}.reader:read", traits=f"{__name__}.reader:READER"),
    "writer.atif": Plugin(f"{__name__}.writer:write"),
}
