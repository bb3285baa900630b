"""The heartbeat file of a run shows the activity of its process, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roundhouse.activity import Activity
from roundhouse.config.loading import parse_config
from roundhouse.health.errors import ErrorReporter, Severity
from roundhouse.health.heartbeat import RECORD, Beat, Heartbeat, read_beat, state_of
from roundhouse.store import lease
from roundhouse.store.location import Location
from roundhouse.store.run import open_run


def test_the_record_follows_what_is_in_flight(store_uri: str) -> None:
    location, activity, reporter = Location(store_uri), Activity(), ErrorReporter()
    assert read_beat(location) is None
    with Heartbeat(location, reporter, 0.05, activity):
        token = activity.start("engine", "model call", "g0/0", "http://engine")
        reporter.report_error("collect", "iteration 1", "away", Severity.WARNING)
        beat = _until(location, lambda beat: bool(beat.counts) and bool(beat.errors))
        assert (beat.counts, beat.in_flight[0].where) == ({"engine: model call": 1}, "http://engine")
        assert (beat.health.status, beat.errors[0].message) == ("warning", "away")
        assert beat.state(beat.written_at) == "working"
        assert beat.state(beat.written_at + 60) == "silent"
        activity.end(token)
    last = read_beat(location)
    assert last is not None
    assert (last.state(last.written_at + 60), last.counts) == ("ended", {})


def test_a_new_process_keeps_the_errors_of_the_one_before(tmp_path: Path) -> None:
    location, before, after = Location(str(tmp_path)), ErrorReporter(), ErrorReporter()
    with Heartbeat(location, before, 10, Activity()):
        before.report_error("train", "iteration 1", "first")
    with Heartbeat(location, after, 10, Activity()):
        after.report_error("train", "iteration 2", "second")
    beat = read_beat(location)
    assert beat is not None
    assert [error.message for error in beat.errors] == ["first", "second"]


def test_a_record_that_cannot_be_written_or_read_stops_nothing(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / RECORD).write_text("half a rec")
    with Heartbeat(Location(str(place)), ErrorReporter(), 600, Activity()):
        _until(Location(str(place)), lambda beat: True)  # the first beat; the next is after the block
        (place / RECORD).unlink()
        (place / RECORD).mkdir()
    assert (place / RECORD).is_dir()


@pytest.mark.parametrize(("seconds_ago", "state"), [(0, "running"), (7200, "crashed")])
def test_a_driver_elsewhere_that_waits_before_its_first_beat_is_running_while_it_renews_its_lease(
    tmp_path: Path, seconds_ago: float, state: str
) -> None:
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    with Heartbeat(run.location, ErrorReporter(), 10, Activity()):
        pass
    beat = json.loads(run.location.read(RECORD)) | {"ended": False, "written_at": 60.0}
    run.location.write(RECORD, json.dumps(beat).encode())
    with lease.driving(run.location):
        pass
    [record] = lease.all_drivers(run.location)
    waits = {
        "since": time.time() - 36000 - seconds_ago,
        "seconds": 60.0,
        "renewals": 3540,
    }  # of 3600: each is a little late
    away = record.model_copy(update={**waits, "machine": "a pod", "released": False})
    [name] = (run.location / lease.DIRECTORY).names()
    (run.location / lease.DIRECTORY).write(name, away.model_dump_json().encode())
    assert state_of(run) == state


def _until(location: Location, holds: Callable[[Beat], bool], seconds: float = 30) -> Beat:
    deadline = time.monotonic() + seconds
    while (beat := read_beat(location)) is None or not holds(beat):
        assert time.monotonic() < deadline, beat
        time.sleep(0.02)
    return beat


def test_a_driver_that_was_killed_while_it_trained_is_reported_with_the_keys_to_lower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    location, activity, after = Location(str(tmp_path)), Activity(), ErrorReporter()
    heartbeat = Heartbeat(location, ErrorReporter(), 10, activity)
    activity.start("train", "update 2 of 4")
    heartbeat._beat(None)
    with Heartbeat(location, after, 10, Activity()):
        pass
    [error] = after.errors()
    assert error.details == {"code": "process_killed"}
    assert "train: update 2 of 4" in error.message
    assert "lower train.tokens_per_microbatch" in error.message
    shown = [vars(record)["facts"] for record in caplog.records if record.message == "alert"]
    assert shown == [{"name": "process_killed", "text": error.message}], "the command that resumes shows it"
    with Heartbeat(location, again := ErrorReporter(), 10, Activity()):
        pass
    assert [each.error_id for each in again.errors()] == [error.error_id], "it is reported once"
