"""Gymnasium: environments with text or with actions that have names or numbers."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.gymnasium": Plugin(
        f"{__name__}.environment:Gymnasium", f"{__name__}.section:GymnasiumSection", extra="gymnasium"
    )
}
