"""reasoning-gym: procedural reasoning problems with exact verifiers, as environments."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.reasoning_gym": Plugin(
        f"{__name__}.environment:ReasoningGym", f"{__name__}.section:ReasoningGymSection", extra="reasoning-gym"
    )
}
