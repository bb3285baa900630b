"""SGLang: a server that runs already as the engine of a run, by its own routes."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"endpoint.sglang": Plugin(f"{__name__}.engine:SGLangEngine")}
