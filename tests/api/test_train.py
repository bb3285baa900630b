"""`rh.train`: training by the command line in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

import roundhouse as rh
from roundhouse.api import progress, training
from roundhouse.config.models import RunConfig
from roundhouse.errors import BudgetReached, ConfigError, DataError, InfraError, RoundhouseError

ROOT = Path(__file__).parents[2]


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the child be this program: it has `events`, a stream, and `emit`."""
    start = "import json, os, sys, time; events = os.fdopen(int(sys.argv[-1]), 'w')\n"
    emit = "def emit(**line):\n    events.write(json.dumps(line) + chr(10)); events.flush()\n"
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", start + emit + code, command[-1]], **options)

    monkeypatch.setattr(training.subprocess, "Popen", started)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return rh.load_config(ROOT / "configs/quickstart.yaml", [f"store={tmp_path}/store"])


@pytest.mark.parametrize(("code", "kind"), [(78, ConfigError), (65, DataError), (75, InfraError), (77, BudgetReached)])
def test_the_error_of_the_child_is_raised_with_its_kind_and_text(
    code: int, kind: type[RoundhouseError], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, f"emit(event='error', message='lower x'); sys.exit({code})")
    with pytest.raises(kind, match=r"^lower x$"):
        rh.train(config)


def test_lines_of_the_child_are_printed_and_a_defect_of_ours_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child(
        monkeypatch,
        "print('iteration 1'); print('half', end='', flush=True); sys.stderr.write('Traceback'); sys.exit(1)",
    )
    with pytest.raises(RoundhouseError, match="ended with exit code 1"):
        rh.train(config)
    assert capsys.readouterr().out.splitlines()[0] == "iteration 1"


def test_an_interrupt_ends_the_child_as_ctrl_c_does(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = tmp_path / "ended"
    code = f"""
try:
    emit(event='stage', facts=dict())
    time.sleep(60)
except KeyboardInterrupt:
    print('x' * 200000)
    open({str(ended)!r}, 'w')
"""
    child(monkeypatch, code)

    @contextmanager
    def interrupted(config: RunConfig) -> Iterator[progress.Show]:
        yield lambda event, facts: os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training, "progress_display", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rh.train(config)
    assert ended.is_file()
    assert capsys.readouterr().out.count("x") == 200000


def test_what_cannot_be_a_configuration_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"config is 3, a int. Give the path of a YAML file, a mapping"):
        rh.train(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"learning_rat: unknown key. Did you mean 'learning_rate'"):
        rh.train({"run_id": "r"}, **{"train.optimizer.learning_rat": 1e-3})
    with pytest.raises(ConfigError, match=r"No configuration file nowhere.yaml"):
        rh.train("nowhere.yaml")


def test_a_notebooks_cell_shows_bar_and_curves_and_is_updated(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    handle = types.SimpleNamespace(update=shown.append)
    display = types.ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda html, display_id: (shown.append(html), handle)[1]  # type: ignore[attr-defined]
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with progress.progress_display(config) as show:
        for k in (1, 2):
            show("iteration", {"iteration": k, "metrics": {"reward/mean": k / 4}})
        show("evaluation", {"version": 2, "metrics": {"evaluation/reward/mean": 0.75}})
        show("engine", {"text": "<b>loading"})
    assert "iteration 0 of 25" in shown[0]
    assert '<progress value="2" max="25">' in shown[-1]
    assert "reward: 0.250 → 0.500" in shown[-1]
    assert "held-out reward: 0.750" in shown[-1]
    assert "engine: &lt;b&gt;loading" in shown[-1]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_notebook_of_the_examples_runs_as_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its code in one namespace, on a thread with a running event loop, as a kernel has."""
    plt.switch_backend("agg")
    notebook = json.loads((ROOT / "examples/first_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    async def kernel() -> None:
        for cell in cells:
            exec(compile(cell, "cell", "exec"), names)

    asyncio.run(kernel())
    run = names["run"]
    assert run.state == "finished"
    assert run.config.iterations == len(run.metrics().loc[1:]) == 2
    assert len(run.rollouts(2, split="train")) == run.summary()["ledger"]["requested"] / 2
    assert json.loads((tmp_path / "notebook-model/config.json").read_text())["dtype"] == "bfloat16"
    assert names["fork"].state == "not started"
    assert {each.run_id for each in rh.runs()} == {"notebook", "notebook-fork"}
    with pytest.raises(ConfigError, match="exists with another configuration"):
        rh.train("configs/quickstart.yaml", iterations=2, run_id="notebook", seed=5)
    assert rh.train(run).state == "finished"
