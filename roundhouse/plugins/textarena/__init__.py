"""TextArena: text games for one player, or against a fixed opponent, as environments."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.textarena": Plugin(
        f"{__name__}.environment:TextArena", f"{__name__}.section:TextArenaSection", extra="textarena"
    )
}
