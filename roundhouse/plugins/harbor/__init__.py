"""Harbor: task directories as an environment in sandboxes."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"environment.harbor": Plugin(f"{__name__}.environment:Harbor", f"{__name__}.section:HarborSection")}
