"""Tinker: its API as the train service and the engine of a run."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "engine.tinker": Plugin(f"{__name__}.engine:TinkerEngine", traits=f"{__name__}.section:TINKER"),
    "train_service.tinker": Plugin(f"{__name__}.opening:open_tinker", f"{__name__}.section:TinkerService"),
}
