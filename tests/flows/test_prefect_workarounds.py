"""The workarounds in flows/_prefect are still needed. Where a test fails, its module can go, or must be looked at."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module, reload
from importlib.metadata import version
from pathlib import Path

import pytest
from prefect import flow
from prefect.context import FlowRunContext

import flows._prefect
from flows._prefect.reruns import pin_subflow_index
from tests.flows.served import Served

ROOT = Path(__file__).parents[2]


def printed(program: str) -> list[str]:
    """The words that a Python program prints."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    return ended.stdout.split()


def test_the_installed_prefect_is_the_one_that_the_workarounds_were_checked_with() -> None:
    assert version("prefect") == flows._prefect.CHECKED_WITH


def test_another_prefect_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
    with pytest.warns(RuntimeWarning, match=r"Prefect 99\.0 is installed"):
        reload(flows._prefect)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reload(flows._prefect)


def test_each_module_is_in_the_table_of_workarounds() -> None:
    modules = {path.stem for path in Path(flows._prefect.__file__).parent.glob("*.py")} - {"__init__"}
    rows = [line.split("`")[1] for line in (flows._prefect.__doc__ or "").splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(modules)
    assert all(import_module(f"flows._prefect.{name}").__doc__ for name in modules)


def test_reruns_a_parent_that_runs_again_is_handed_the_result_of_another_sub_flow(prefect_client: Served) -> None:
    @flow(name="child", persist_result=True, result_serializer="json")
    def child(number: int) -> int:
        return number

    @flow(name="parent")
    def parent() -> tuple[int, int, int]:
        context = FlowRunContext.get()
        assert context is not None
        first = child(1)
        context.task_run_dynamic_keys.clear()  # as in the second run of the parent, which begins at iteration 2
        mistaken = child(2)
        pin_subflow_index(child, 2)
        return first, mistaken, child(2)

    assert parent() == (1, 1, 2)


def test_signals_a_termination_that_is_raised_in_a_finalizer_is_dropped() -> None:
    program = """
import signal

def raised(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, raised)

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        sum(range(10))

Finalized()
print("dropped")
"""
    assert printed(program) == ["dropped"]


def test_tuning_prefect_imports_pandas_where_it_is_installed() -> None:
    pytest.importorskip("pandas")
    assert printed("import prefect.main, prefect.cache_policies, sys; print('pandas' in sys.modules)") == ["True"]
