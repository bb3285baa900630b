"""`roundhouse runs status`, as a person and as a program calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundhouse.activity import Activity
from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.health.errors import ErrorReporter, Severity
from roundhouse.health.heartbeat import Heartbeat
from roundhouse.store.run import open_run


def test_it_shows_what_is_in_flight_and_the_newest_errors(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = open_run(parse_config({"run_id": "r", "store": store}))
    asked = ["runs", "status", "r", "--store", store]
    with pytest.raises(StoreError, match="no heartbeat"):
        CliRunner().invoke(app, asked, catch_exceptions=False)
    activity, reporter = Activity(), ErrorReporter()
    activity.start("engine", "model call", "g0/1", "http://engine")
    reporter.report_error("collect", "iteration 3", "[engine] away", Severity.WARNING)
    with Heartbeat(run.location, reporter, 60, activity):
        pass
    shown = CliRunner().invoke(app, asked, catch_exceptions=False)
    for words in (
        "ended",
        "health at the last heartbeat: warning",
        "1 engine: model call",
        "oldest g0/1",
        "collect (iteration 3): [engine] away",
    ):
        assert words in shown.output.replace("\n", " "), shown.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False).output)
    assert (told["state"], told["counts"], told["errors"][0]["severity"]) == (
        "ended",
        {"engine: model call": 1},
        "warning",
    )
