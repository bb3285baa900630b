"""Logs for programs: one JSON object per line, with its context.

Invariant: a line is one object with `time`, `level`, `logger`, `message`, and those of `run`, `iteration`, `stage`,
`rollout` that apply: the run is set at the start of the work (`about`), the rest comes from the work in flight
(`roundhouse.activity`), so no IDs are passed around for logging.

    {"time": "2026-11-21T20:15:03.120Z", "level": "warning", "logger": "roundhouse.collection.in_process_runner",
     "message": "…", "run": "mine", "iteration": 12, "stage": "collect", "rollout": "g000003/1"}

`ROUNDHOUSE_LOG=json` enables it in every process of a run (flow, engine, trainer, gym). `ROUNDHOUSE_LOG_LEVEL` (debug,
info, warning, error) is the lowest level; at debug, the engine writes the stages of each model call
(`roundhouse.trajectories.records.CallStage`), including the token IDs.

`ROUNDHOUSE_METRICS_PORT` opens the page of metrics; `set_up_observability` reads both variables.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from roundhouse.activity import ACTIVITY
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

VARIABLE = "ROUNDHOUSE_LOG"
LEVEL_VARIABLE = "ROUNDHOUSE_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
LABELS_VARIABLE = "ROUNDHOUSE_LOG_LABELS"
"""JSON object of labels that hold for a whole process, such as a trainer's pod."""

_labels: ContextVar[dict[str, Any] | None] = ContextVar("roundhouse_log_labels", default=None)


@contextmanager
def about(**labels: Any) -> Iterator[None]:
    """Lines written in the block, and in coroutines and threads that take over its context, carry these labels."""
    outer = _labels.set((_labels.get() or {}) | labels)
    try:
        yield
    finally:
        _labels.reset(outer)


def labels() -> dict[str, Any]:
    """Return the context of the calling code."""
    result = _of_process() | (_labels.get() or {})
    for work in ACTIVITY.around():
        if work.kind == "rollout":
            result["rollout"] = work.about
        elif work.kind == "stage":
            result["stage"] = work.module
            if (iteration := re.fullmatch(r"iteration (\d+)", work.about)) is not None:
                result["iteration"] = int(iteration[1])
    return result


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in labels().items() if name not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs() -> None:
    """Apply `ROUNDHOUSE_LOG` and `ROUNDHOUSE_LOG_LEVEL`; called at a process's start. A second call changes nothing.

    Raises:
        ConfigError: a value other than json, or an unknown level.
    """
    form, level = os.environ.get(VARIABLE, ""), os.environ.get(LEVEL_VARIABLE, "").lower()
    if form not in ("", "json"):
        raise ConfigError(f"{VARIABLE} is {form!r}. Set it to json, or leave it unset.")
    if level and level not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {level!r}. Set it to one of {', '.join(LEVELS)}, or leave it unset.")
    if form or level:
        logging.getLogger("roundhouse").setLevel(level.upper() or logging.INFO)
    root = logging.getLogger()
    if any(isinstance(handler.formatter, JsonLines) for handler in root.handlers):
        return
    if form:
        _of_process()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        root.addHandler(handler)
    elif level and not root.handlers:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _of_process() -> dict[str, Any]:
    text = os.environ.get(LABELS_VARIABLE, "")
    try:
        result = json.loads(text) if text else {}
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise ConfigError(f"{LABELS_VARIABLE} is {text!r}. It must be a JSON object.")
    return result


METRICS_VARIABLE = "ROUNDHOUSE_METRICS_PORT"


def set_up_observability() -> CollectorRegistry | None:
    """Apply the environment's settings; unset ones cost nothing. Return the address of the metrics, if served.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    set_up_logs()
    # of several ranks in a pod, the first has the page
    if not os.environ.get(METRICS_VARIABLE) or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    from roundhouse.health.metrics_page import open_metrics_page

    return open_metrics_page(os.environ[METRICS_VARIABLE]).registry
