"""Traces in the conventions of OpenTelemetry for generative AI, exported from the store."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "command.otel": Plugin(f"{__name__}.command:app", traits="Export runs and rollouts as OpenTelemetry traces.")
}
