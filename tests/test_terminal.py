"""Control characters of data are shown on a terminal, and stay as they are in files and pipes."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.markup import escape
from rich.text import Text
from typer.testing import CliRunner

from roundhouse import cli
from roundhouse.cli import app
from roundhouse.cli.options import console, error_console, out, print_table
from roundhouse.cli.terminal import show_controls_in_logs, visible_controls
from roundhouse.errors import StoreError
from tests.gym.recorded import opened

CLIPBOARD = "\x1b]52;c;QQ\x07"
C1 = "\x9d0;title\x9c"
RAW = ("\x1b]", "\x07", "\x9d", "\x9c", "\x08", "\r")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def opened_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both streams of the process; pytest replaces streams that a fixture sets."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    return stream


def shown(terminal: Terminal) -> str:
    text = terminal.getvalue()
    assert not [raw for raw in RAW if raw in text]
    return text


def test_cells_and_columns_show_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened_terminal(monkeypatch)
    print_table([f"a{CLIPBOARD}"], [[f"b{C1}"], [Text(f"c{CLIPBOARD}", style="red")]])
    text = shown(terminal)
    assert r"a\x1b]52;c;QQ\x07" in text
    assert r"b\x9d0;title\x9c" in text
    assert "\x1b[31m" in text, "a style of ours is carried out"


LISTED = ("quickstart", "not started", "3 min", "single-turn", "26/26", "0.226 ± 0.033", "0.902 ± 0.023")
REASON = "no HTTP server listens there, or the engine is refitting or overloaded"


@pytest.mark.parametrize("width", [None, 200, 80, 40])
def test_no_table_breaks_a_name_or_a_number_at_any_width(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened_terminal(monkeypatch) if width else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(width or 80))
    print_table(("run", "state", "age", "environment", "iter.", "held-out", "→ newest"), [LISTED, LISTED])
    print_table(("dataset", "version", "what"), [("nightly", "20261128T130600Z-v000006", REASON)])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    for cell in (*LISTED, "20261128T130600Z-v000006"):
        assert any(cell in line for line in lines), (cell, lines)
    if width is None:
        assert any(REASON in line for line in lines), "a pipe has whole lines"
    if width == 80:
        assert all(len(line) <= 80 for line in lines)


WRITERS = {
    "markup": lambda text: console().print(escape(text), highlight=False),
    "text": lambda text: error_console().print(Text(text)),
    "line": out,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_texts_show_control_characters(monkeypatch: pytest.MonkeyPatch, write: Callable[[str], None]) -> None:
    terminal = opened_terminal(monkeypatch)
    write(f"a{CLIPBOARD}{C1}\x7f\x00")
    assert r"a\x1b]52;c;QQ" in shown(terminal)
    assert r"\x9d0;title\x9c" in shown(terminal)


def test_errors_show_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> None:
        raise StoreError(f"No run {CLIPBOARD}")

    terminal = opened_terminal(monkeypatch)
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert r"No run \x1b]52;c;QQ" in shown(terminal)


def test_log_lines_show_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened_terminal(monkeypatch)
    factory = logging.getLogRecordFactory()
    handler = logging.StreamHandler(terminal)
    log = logging.getLogger("test_terminal")
    log.addHandler(handler)
    try:
        show_controls_in_logs()
        log.warning("a policy wrote %s", CLIPBOARD)
    finally:
        logging.setLogRecordFactory(factory)
        log.removeHandler(handler)
    assert r"a policy wrote \x1b]52;c;QQ\x07" in shown(terminal)


def test_csv_has_the_characters_themselves_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, {"kind": "calculator"}).config.store
    select = ["query", "SELECT run_id || chr(27) || chr(155) AS a FROM runs", "--csv", "--store", store]
    piped = CliRunner().invoke(app, select)
    assert piped.stdout == "a\nrecorded\x1b\x9b\n"
    terminal = opened_terminal(monkeypatch)
    app(select, standalone_mode=False)
    assert terminal.getvalue() == "a\nrecorded\\x1b\\x9b\n"


def test_lines_and_tabs_stay() -> None:
    assert visible_controls("a\n\tb") == "a\n\tb"
    assert visible_controls("good\u202edab\u2066") == "good\\u202edab\\u2066"
