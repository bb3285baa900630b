"""TRL: the completions that its GRPOTrainer logs (`log_completions`)."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "reader.trl": Plugin(f"{__name__}.reader:read", f"{__name__}.reader:TrlReader", traits=f"{__name__}.reader:READER")
}
