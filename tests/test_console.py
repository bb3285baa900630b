"""The terminal's view of a run, from the events that a run tells: on a terminal of 80 columns, and without one."""

from __future__ import annotations

import io

from rich.console import Console

from roundhouse.activity import announce
from roundhouse.console import Pace, RunView, print_summary

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
    assert "\x1b" not in written.getvalue()
    assert "iteration   1/2  reward 0.500" in written.getvalue()
    assert "reward collapse: It fell [far]." in written.getvalue()


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
    assert "greedy: 0.400 → 0.700" in console.file.getvalue()
    assert "model.gguf, dequantised to float32: not the published weights" in console.file.getvalue()
