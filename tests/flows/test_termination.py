"""A run that was told to end while Python drops exceptions ends all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import signal, sys, time
from flows._prefect.signals import redeliver_lost_signals
from prefect.exceptions import TerminationSignal

def told(number, frame):
    raise TerminationSignal(signal=number)

signal.signal(signal.SIGTERM, told)

class Finalized:
    def __del__(self):
        signal.raise_signal(getattr(signal, sys.argv[1]))
        time.sleep(0)

began = time.monotonic()
try:
    with redeliver_lost_signals():
        Finalized()
        print("dropped", flush=True)
        while time.monotonic() - began < 30:
            time.sleep(0.01)
except (TerminationSignal, KeyboardInterrupt) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(("signal", "raised"), [("SIGTERM", "TerminationSignal"), ("SIGINT", "KeyboardInterrupt")])
def test_a_termination_that_python_drops_is_raised_again(signal: str, raised: str) -> None:
    command = [sys.executable, "-c", PROGRAM, signal]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert ended.stdout.split() == ["dropped", raised], ended.stderr
    assert "ignored" not in ended.stderr


def test_what_else_is_dropped_is_told_as_ever() -> None:
    program = """
import sys
from flows._prefect.signals import redeliver_lost_signals
class Finalized:
    def __del__(self):
        raise ValueError("in a finalizer")
before = sys.unraisablehook
with redeliver_lost_signals():
    Finalized()
assert sys.unraisablehook is before
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0
    assert "ValueError: in a finalizer" in ended.stderr
