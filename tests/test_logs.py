"""JSON logs: one object a line, about the run, iteration, stage and rollout that the code worked on."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

from roundhouse import logs
from roundhouse.activity import ACTIVITY
from roundhouse.errors import ConfigError
from roundhouse.logs import JsonLines, about, set_up_logs


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("roundhouse.test_logs")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_names_what_the_code_works_on_without_being_told(written: io.StringIO) -> None:
    logger = logging.getLogger("roundhouse.test_logs")
    logger.warning("before %s", "all")
    with about(run="mine"), ACTIVITY.track("collect", "stage", "iteration 12"):
        logger.warning("of the stage")
        with ACTIVITY.track("collect", "rollout", "g3/1"), ACTIVITY.track("engine", "model call"):
            thread = threading.Thread(target=copy_context().run, args=(logger.error, "in a thread\nof two lines"))
            thread.start()
            thread.join()
    first, second, third = lines(written)
    assert first["message"] == "before all"
    assert not {"run", "stage", "rollout"} & set(first)
    assert {name: second[name] for name in ("run", "iteration", "stage")} == {
        "run": "mine",
        "iteration": 12,
        "stage": "collect",
    }
    assert (third["rollout"], third["level"], third["message"]) == ("g3/1", "error", "in a thread\nof two lines")


def test_an_exception_is_in_its_line_and_what_is_no_json_is_text(written: io.StringIO) -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        with about(run="mine", extra=object()):
            logging.getLogger("roundhouse.test_logs").exception("failed")
    [line] = lines(written)
    assert "ValueError: wrong" in line["error"]
    assert line["time"].endswith("Z")


def test_a_process_has_labels_of_its_own_and_bad_settings_are_refused(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logs.LABELS_VARIABLE, '{"run": "mine", "stage": "train"}')
    logging.getLogger("roundhouse.test_logs").warning("x")
    assert lines(written)[0]["stage"] == "train"
    monkeypatch.setenv(logs.VARIABLE, "yaml")
    with pytest.raises(ConfigError, match="ROUNDHOUSE_LOG is 'yaml'"):
        set_up_logs()
    monkeypatch.setenv(logs.VARIABLE, "json")
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="ROUNDHOUSE_LOG_LEVEL is 'loud'"):
        set_up_logs()
    monkeypatch.delenv(logs.LEVEL_VARIABLE)
    monkeypatch.setenv(logs.LABELS_VARIABLE, "[1]")
    with pytest.raises(ConfigError, match="ROUNDHOUSE_LOG_LABELS"):
        set_up_logs()


def test_set_up_twice_writes_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "json")
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        set_up_logs()
        set_up_logs()
        assert len(root.handlers) == len(before) + 1
    finally:
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
