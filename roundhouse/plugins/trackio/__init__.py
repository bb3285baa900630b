"""trackio: the metrics of a run in its database."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"sink.trackio": Plugin(f"{__name__}.sink:TrackioSink", extra="trackio")}
