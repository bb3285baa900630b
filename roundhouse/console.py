"""The terminal's view of a run: one line for what is finished, one moving line for what is going on.

It listens to `roundhouse.progress`. Without a terminal (a pipe, CI) it writes plain lines and no moving one.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from roundhouse.progress import logger

BARS = "▁▂▃▄▅▆▇█"
PLAIN_INTERVAL_SECONDS = 10.0
"""Without a terminal, activity is told at most this often."""


class RunView(logging.Handler):
    """Shows the events of a run."""

    def __init__(self, console: Console, iterations: int) -> None:
        super().__init__()
        self._console = console
        self._iterations = iterations
        self._told_at = 0.0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._activity = self._progress.add_task("", total=None, note="", visible=False)

    def __enter__(self) -> RunView:
        logger.addHandler(self)
        logger.propagate = False
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        logger.removeHandler(self)
        logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        show = getattr(self, f"_on_{getattr(record, 'event', '')}", None)
        if show is not None:
            show(**record.facts)  # type: ignore[attr-defined]

    def say(self, text: str) -> None:
        """Write one lasting line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def activity(self, what: str, done: float | None = None, total: float | None = None, note: str = "") -> None:
        """Show what is going on now."""
        if self._console.is_terminal:
            self._progress.update(
                self._activity, description=what, completed=done or 0, total=total, note=note, visible=True
            )
        elif time.monotonic() - self._told_at > PLAIN_INTERVAL_SECONDS:
            self._told_at = time.monotonic()
            count = f" {done:.0f}/{total:.0f}" if done is not None and total is not None else ""
            self.say(f"  … {what}{count} {note}".rstrip())

    def _on_services(self, text: str) -> None:
        self.activity(f"services: {text}")

    def _on_pages(self, prefect: str, mlflow: str | None = None) -> None:
        self.say(f"  Prefect     {prefect}" + (f"\n  MLflow      {mlflow}" if mlflow else ""))

    def _on_warm_start(self, step: int, steps: int, loss: float) -> None:
        self.activity("making the starting policy", step, steps, f"loss {loss:.3f}")

    def _on_engine(self, text: str) -> None:
        self.activity(f"engine: {text}")

    def _on_tracking(self, url: str) -> None:
        self.say(f"  MLflow run  {url}")

    def _on_collect(self, iteration: int, finished: int, planned: int) -> None:
        self.activity(f"iteration {iteration}: rollouts", finished, planned)

    def _on_recovery(self, iteration: int, step: str, code: str, seconds: float) -> None:
        then = (
            f"again in {seconds:.0f} s"
            if step == "wait"
            else "skipped, on record"
            if step == "skip"
            else "the run ends"
        )
        self.say(f"  [yellow]iteration {iteration} failed[/] ({code}): {then}; see `roundhouse runs activity`")

    def _on_evaluate(self, version: int, finished: int, planned: int) -> None:
        self.activity(f"evaluating version {version}", finished, planned)

    def _on_evaluation(self, version: int, metrics: dict[str, float]) -> None:
        reward, error = metrics.get("evaluation/reward_mean"), metrics.get("evaluation/reward_stderr", 0.0)
        if reward is not None:
            self.say(f"  [bold]held-out[/]   version {version:<3d}  reward [bold]{reward:.3f}[/] ± {error:.3f}")

    def _on_iteration(self, iteration: int, metrics: dict[str, float]) -> None:
        if iteration > 0:
            self.say(f"  {iteration_line(iteration, self._iterations, metrics)}")


def iteration_line(iteration: int, iterations: int, metrics: dict[str, float]) -> str:
    """An iteration in one line."""
    reward = metrics.get("reward/mean", 0.0)
    bar = BARS[min(len(BARS) - 1, max(0, int(reward * len(BARS))))]
    parts = [
        f"iteration {iteration:>3d}/{iterations}",
        f"reward {reward:.3f} {bar}",
        f"turns {metrics.get('rollout/turns_mean', 0):.2f}",
        f"mismatch {metrics.get('train/logprob_abs_diff_max', 0):.0e}",
        f"{metrics.get('seconds/iteration', 0):.1f} s",
    ]
    return "  ".join(parts)


def print_summary(console: Console, summary: dict[str, Any], links: dict[str, str], hints: list[str]) -> None:
    """The end of a run on one screen."""
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    console.print()
    if before and after:
        console.print(
            f"[bold]Held-out reward {before['reward_mean']:.3f} → {after['reward_mean']:.3f}[/]  "
            f"(± {before['reward_stderr']:.3f}, ± {after['reward_stderr']:.3f}; {after['tasks']:.0f} tasks never trained on)"
        )
    ledger = ", ".join(f"{count} {name}" for name, count in summary["ledger"].items() if count)
    console.print(f"{summary['iterations']} iterations in {summary['wall_seconds']:.0f} s · rollouts: {ledger}")
    stages = " · ".join(f"{kind} {seconds:.0f} s" for kind, seconds in summary["stage_seconds"].items())
    console.print(f"by stage: {stages}")
    overhead = summary["overhead_seconds_per_iteration"].get("overhead/total")
    if overhead is not None:
        console.print(f"Roundhouse's own overhead: {overhead:.2f} s an iteration (median)")
    for name, link in links.items():
        console.print(f"{name:<14}{link}", soft_wrap=True)
    if hints:
        console.print("\n[bold]Try next[/]")
        for hint in hints:
            console.print(f"  {hint}", soft_wrap=True, highlight=False)
