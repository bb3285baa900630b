"""The terminal's view of a run, from the run's events: on a terminal of 80 columns, and without one."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from roundhouse import console as view_module
from roundhouse.activity import ACTIVITY, announce
from roundhouse.console import Pace, RunView, iteration_line, print_summary

METRICS = {"reward/mean": 0.5, "rollout/turns_mean": 2.0, "time/iteration": 30.0}


def tell_an_iteration(iteration: int) -> None:
    announce("stage", name="collect", about=f"iteration {iteration}")
    for finished in range(1, 9):
        announce("rollout", tokens=1000, reward=float(finished % 2))
        announce("collect", iteration=iteration, finished=finished, planned=512)


def test_progress_fits_80_columns_and_says_stage_rollouts_speed_reward_and_time_left() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=10, legacy_windows=False, _environ={})
    with RunView(screen, 100) as view:
        announce("iteration", iteration=98, metrics=METRICS)
        tell_an_iteration(99)
        with screen.capture() as drawn:
            screen.print(view._progress.get_renderable())
    lines = Console(width=80, file=io.StringIO())
    plain = [line for line in _without_codes(drawn.get()).splitlines() if line.strip()]
    assert all(lines.measure(line).maximum <= 80 for line in plain)
    [line] = [line for line in plain if "rollouts" in line]
    for part in ("iteration 99", "8/512", "tok/s", "reward 0.50", "~1 min left"):
        assert part in line, (part, line)


def test_without_a_terminal_there_are_plain_lines_without_control_codes() -> None:
    written = io.StringIO()
    with RunView(Console(file=written, width=80, _environ={}), 2):
        tell_an_iteration(1)
        announce("iteration", iteration=1, metrics=METRICS)
        announce("alert", name="reward_collapse", text="It fell [far].")
        announce("retry", name="evaluate", about="version 0", text="The engine [1] is silent.\nTraceback")
    assert "\x1b" not in written.getvalue()
    assert "iteration   1/2  reward 0.500" in written.getvalue()
    assert "reward collapse: It fell [far]." in written.getvalue()
    assert "version 0: evaluate failed, again: The engine [1] is silent.\n" in written.getvalue()


def test_a_silent_wait_names_stage_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and the start of the engine printed nothing for minutes."""
    monkeypatch.setattr(view_module, "PLAIN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(view_module, "TICK_SECONDS", 60.0)
    written = io.StringIO()
    with RunView(Console(file=written, width=80, _environ={}), 2) as view:
        view.expect("checking the configuration")
        view.tick()
        announce("engine", text="loading weights")
        view.tick()
        announce("stage", name="train", about="iteration 1")
        with ACTIVITY.track("train", "stage", "iteration 1"), ACTIVITY.track("train", "update 2 of 8"):
            view.tick()
        announce("collect", iteration=2, finished=3, planned=8)
        with ACTIVITY.track("collect", "rollout"), ACTIVITY.track("engine", "model call", where="http://e"):
            view.tick()
    lines = written.getvalue().splitlines()
    for line in (
        "  … checking the configuration · 0 s",
        "  … engine: loading weights · 0 s",
        "  … iteration 1: train · update 2 of 8 for 0 s · 0 s",
        "  … iteration 2: rollouts · 3/8 · 1 rollouts in flight · 0 s",
    ):
        assert line in lines, lines


def test_time_left_is_known_after_an_iteration_and_runs_down() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    assert pace.left() == ""
    pace.iteration(60.0, 119)
    assert pace.left() == "~1 h 59 left"
    now = 3600.0
    assert pace.left() == "~59 min left"
    now = 10_000.0
    assert pace.left() == "<1 min left"


def test_a_stage_counts_its_own_rollouts() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    pace.add(500, 1.0)
    now = 1.0
    pace.begin()
    now = 2.0
    pace.add(2500, None)
    assert pace.note() == "2.5k tok/s"


def _without_codes(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_summary_shows_every_evaluation_set_and_that_weights_were_dequantised() -> None:
    def evaluation(reward: float, greedy: float) -> dict:
        own = {"reward_mean": reward, "reward_stderr": 0.02, "tasks": 190}
        return own | {"sets": {"greedy": {"reward_mean": greedy, "reward_stderr": 0.03}}}

    summary = {
        "evaluation": {"before": evaluation(0.2, 0.4), "after": evaluation(0.5, 0.7)},
        "converted_from": "model.gguf", "ledger": {}, "iterations": 2, "wall_seconds": 3, "stage_seconds": {},
        "overhead_seconds_per_iteration": {},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    print_summary(console, summary, {}, [])
    assert "190 held-out tasks)" in console.file.getvalue(), "an older summary does not show what was trained on"
    assert "greedy: 0.400 ± 0.030 → 0.700 ± 0.030" in console.file.getvalue()
    assert "model.gguf, dequantised to float32: not the published weights" in console.file.getvalue()


def test_an_iteration_that_teaches_nothing_names_the_reason() -> None:
    flat = {"reward/mean": 0.5, "train/baseline_reward/pct_mixed": 0.0, "train/grad_norm": 0.0}
    assert "no gradient: each group has one reward" in iteration_line(1, 2, flat)
    assert "no gradient" not in iteration_line(1, 2, flat | {"train/grad_norm": 0.1}), "of a KL term"
    assert "truncated 70 %" in iteration_line(1, 2, flat | {"rollout/truncated_rate": 0.7}).replace("70%", "70 %")
    assert "reward –  turns" in iteration_line(1, 2, {}), "no rollout has a reward"


def test_the_version_that_a_fork_starts_from_is_no_iteration_of_it() -> None:
    screen = Console(file=io.StringIO(), width=120)
    with RunView(screen, 26, first=25):
        for iteration in (25, 26):
            announce("iteration", iteration=iteration, metrics={"reward/mean": 0.5})
    assert "25/26" not in screen.file.getvalue()
    assert "26/26" in screen.file.getvalue()
    summary = {
        "evaluation": {"before": None, "after": None},
        "ledger": {}, "first_version": 25, "iterations": 26, "wall_seconds": 65, "stage_seconds": {},
        "overhead_seconds_per_iteration": {}, "seconds_before_first_stage": {"total": 90.0, "starting_policy": 0.2},
    }  # fmt: skip
    print_summary(screen, summary, {}, [])
    assert "1 iteration (26) in 65 s" in screen.file.getvalue()


@pytest.mark.parametrize(("high", "warns"), [(-0.03, True), (0.01, False)])
def test_the_summary_shows_the_change_of_a_set_and_warns_of_a_fall(high: float, warns: bool) -> None:
    own = {"reward_mean": 0.5, "reward_stderr": 0.02, "tasks": 9}
    evaluations = [own | {"sets": {"kept": {"reward_mean": mean, "reward_stderr": 0.02}}} for mean in (0.94, 0.84)]
    changes = {"kept": {"change": -0.1, "stderr": 0.034, "low": -0.17, "high": high}}
    summary = {
        "evaluation": {"before": evaluations[0], "after": evaluations[1], "changes": changes},
        "ledger": {}, "iterations": 2, "wall_seconds": 3, "stage_seconds": {}, "overhead_seconds_per_iteration": {},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, summary, {}, [])
    shown = console.file.getvalue()
    assert "kept: 0.940 ± 0.020 → 0.840 ± 0.020  (change -0.100 ± 0.034)" in shown
    assert ("kept fell significantly" in shown) == warns


@pytest.mark.parametrize(
    ("shared", "never", "words"),
    [
        (0, True, "4 tasks never trained on)"),
        (4, False, "4 tasks, 4 of them training tasks, too)"),
        (0, False, "4 held-out tasks)"),
    ],
)
def test_the_summary_claims_tasks_never_trained_on_only_if_that_is_known(shared: int, never: bool, words: str) -> None:
    after = {"reward_mean": 0.5, "reward_stderr": 0.1, "tasks": 4.0, "tasks_in_training": float(shared)}
    summary = {
        "evaluation": {"before": after, "after": after, "never_trained_on": never},
        "ledger": {}, "iterations": 2, "wall_seconds": 3, "stage_seconds": {}, "overhead_seconds_per_iteration": {},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    print_summary(console, summary, {}, [])
    assert words in console.file.getvalue()


@pytest.mark.parametrize("is_on_path", [True, False])
def test_the_next_commands_begin_with_the_activation_if_the_shell_needs_it(
    is_on_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) if is_on_path else "")
    summary = {
        "evaluation": {"before": None, "after": None},
        "ledger": {}, "iterations": 2, "wall_seconds": 3, "stage_seconds": {}, "overhead_seconds_per_iteration": {},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=300)
    print_summary(console, summary, {}, ["roundhouse runs list"])
    shown = console.file.getvalue().partition("Try next")[2].split("\n")[1:]
    activation = [] if is_on_path else [f"  source {Path(sys.executable).parent}/activate"]
    assert shown == [*activation, "  roundhouse runs list", ""]
