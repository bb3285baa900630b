"""A run that is stopped while Python drops exceptions still ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server

PROGRAM = """
import signal, sys, time
from roundhouse_flows._prefect.signals import redeliver_lost_signals
from prefect.exceptions import TerminationSignal

def told(number, frame):
    raise TerminationSignal(signal=number)

signal.signal(signal.SIGTERM, told)

class Finalized:
    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()

def raises(name):
    signal.raise_signal(getattr(signal, name))
    time.sleep(0)

def fails():
    raise ValueError("in a finalizer")

for name in ("SIGTERM", "SIGINT"):
    began = time.monotonic()
    try:
        with redeliver_lost_signals():
            Finalized(lambda: raises(name))
            print("dropped", end=" ")
            while time.monotonic() - began < 30:
                time.sleep(0.01)
    except (TerminationSignal, KeyboardInterrupt) as error:
        print(type(error).__name__)

print("ignored so far:", file=sys.stderr, flush=True)
before = sys.unraisablehook
with redeliver_lost_signals():
    Finalized(fails)
assert sys.unraisablehook is before
print("the hook is the one of before")
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """The program, which drops a signal of each kind and another error."""
    command = [sys.executable, "-c", PROGRAM]
    return fork_server.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(("line", "raised"), [(0, "TerminationSignal"), (1, "KeyboardInterrupt")])
def test_a_termination_that_python_drops_is_raised_again(
    ended: subprocess.CompletedProcess[str], line: int, raised: str
) -> None:
    assert ended.stdout.splitlines()[line].split() == ["dropped", raised], ended.stderr
    before, _, _ = ended.stderr.partition("ignored so far:")
    assert "ignored" not in before.lower(), before


def test_what_else_is_dropped_is_told_as_ever(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[2] == "the hook is the one of before"
    assert "ValueError: in a finalizer" in ended.stderr.partition("ignored so far:")[2]
