"""What a replica tells Prometheus: its policy, in front of what its engine tells about itself.

Invariant: `roundhouse_engine_ready` is 1 exactly when the replica answers with the version that is wanted of it.
"""

from __future__ import annotations

from typing import Any

from roundhouse.generation.engine import AsgiApp

METRICS = {
    "roundhouse_engine_ready": "Whether the replica answers with the wanted version.",
    "roundhouse_engine_policy_version": "Version that it answers with; -1 before the first.",
    "roundhouse_engine_wanted_version": "Version that is wanted of it; -1 before the first.",
    "roundhouse_engine_refits_total": "Refits since it started.",
    "roundhouse_engine_refit_seconds": "Duration of the newest refit.",
}


def holds_desired_version(status: dict[str, Any]) -> bool:
    """Whether a replica (`ServedPolicy.status`) answers, and with the newest version that it was asked for."""
    wanted = status["desired"] or {}
    return bool(
        status["ready"]
        and wanted.get("weights") is not None
        and (status["policy_version"], status["weights"]) == (wanted.get("policy_version"), wanted.get("weights"))
    )


def page(status: dict[str, Any]) -> str:
    """The replica's own metrics, in Prometheus' text format."""
    wanted = (status["desired"] or {}).get("policy_version")
    values = {
        "roundhouse_engine_ready": int(holds_desired_version(status)),
        "roundhouse_engine_policy_version": -1 if status["policy_version"] is None else status["policy_version"],
        "roundhouse_engine_wanted_version": -1 if wanted is None else wanted,
        "roundhouse_engine_refits_total": status["refits"],
        "roundhouse_engine_refit_seconds": status["refit_seconds"],
    }
    lines = []
    for name, meaning in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {float(values[name])}"]
    return "\n".join(lines) + "\n"


async def told_by(app: AsgiApp | None) -> bytes:
    """The engine's own page; empty where it has none."""
    if app is None:
        return b""
    found: list[dict[str, Any]] = []

    async def keep(message: dict[str, Any]) -> None:
        found.append(message)

    async def nothing() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/metrics",
        "raw_path": b"/metrics",
        "query_string": b"",
        "headers": [],
    }
    await app(
        scope | {"http_version": "1.1", "scheme": "http", "root_path": "", "client": None, "server": None},
        nothing,
        keep,
    )
    if not found or found[0].get("status") != 200:
        return b""
    return b"".join(message.get("body", b"") for message in found[1:])
