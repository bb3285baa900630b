"""The terminal's view of a run: one line for each finished thing, one moving line for the present activity.

It listens to `roundhouse.activity`. Without a terminal (a pipe, CI) it writes plain lines and no moving one.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from roundhouse.activity import ACTIVITY, Work, logger

BARS = "▁▂▃▄▅▆▇█"
PLAIN_INTERVAL_SECONDS = 10.0
"""Without a terminal, activity is printed once in this time if nothing else is."""
TICK_SECONDS = 1.0


MANY_TRUNCATED = 0.3
"""Share of truncated rollouts above which an iteration's line and `roundhouse runs doctor` name it."""


def work_text(works: Sequence[Work]) -> str:
    """The newest part of the stage at work, and how long it takes; rollouts and their calls are counted.

    >>> stage = Work("t1", "train", "stage", "iteration 3", "", 40.0, 1.0)
    >>> work_text([stage, Work("t2", "train", "update 2 of 8", "", "", 9.0, 1.0)])
    'update 2 of 8 for 9 s'
    """
    rollouts = sum(work.kind == "rollout" for work in works)
    parts = [work for work in works if work.kind not in ("stage", "rollout", "model call", "call")]
    texts = [f"{rollouts} rollouts in flight"] if rollouts else []
    if parts:
        newest = min(parts, key=lambda work: work.seconds)
        texts.append(f"{' '.join(part for part in (newest.kind, newest.about) if part)} for {newest.seconds:.0f} s")
    return " · ".join(texts)


class Pace:
    """Pace of a run: rollouts of the present stage, and the time of its iterations. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: float | None = None
        self.begin()

    def begin(self) -> None:
        """A stage begins to make rollouts."""
        self._began = self._clock()
        self._tokens = 0
        self._rewards: list[float] = []

    def add(self, tokens: int, reward: float | None) -> None:
        """A rollout was made."""
        self._tokens += tokens
        if reward is not None:
            self._rewards.append(reward)

    def iteration(self, seconds: float, remaining: int) -> None:
        """An iteration took so long, and so many are left."""
        before = self._left
        now = seconds * remaining
        self._left = now if before is None else 0.7 * before * remaining / (remaining + 1) + 0.3 * now
        self._left_at = self._clock()

    def note(self) -> str:
        """Tokens a second and the mean reward so far."""
        seconds = self._clock() - self._began
        parts: list[str] = []
        if self._tokens and seconds > 0:
            rate = self._tokens / seconds
            parts.append(f"{rate:.0f} tok/s" if rate < 1000 else f"{rate / 1000:.1f}k tok/s")
        if self._rewards:
            parts.append(f"reward {sum(self._rewards) / len(self._rewards):.2f}")
        return " · ".join(parts)

    def left(self) -> str:
        """Time left of the run; nothing before its first iteration has ended."""
        if self._left is None:
            return ""
        seconds = max(0.0, self._left - (self._clock() - self._left_at))
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"~{hours} h {minutes:02d} left" if hours else f"~{minutes} min left" if minutes else "<1 min left"


class RunView(logging.Handler):
    """Shows the events of a run; without `iterations`, of a single collection or evaluation.

    Args:
        first: version that the run starts from. Its report is that of an evaluation and of the collected data.
        run_id: for the commands that the view names.
    """

    def __init__(self, console: Console, iterations: int | None = None, first: int = 0, run_id: str = "") -> None:
        super().__init__()
        self._console = console
        self.iterations = iterations
        self._first = first
        self._run_id = f" {run_id}" if run_id else ""
        self._told_at = 0.0
        self._newest = ("", "")
        """The newest activity, and its counts."""
        self._began_at = 0.0
        """When it began."""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._pace = Pace()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(12),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._activity = self._progress.add_task("", total=None, note="", visible=False)
        self._ticker = threading.Thread(target=self._tick_until_end, name="run view", daemon=True)

    def __enter__(self) -> RunView:
        logger.addHandler(self)
        logger.propagate = False
        self._ticker.start()
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ticker.join()
        self._progress.stop()
        logger.removeHandler(self)
        logger.propagate = True

    def _tick_until_end(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.tick()

    def tick(self) -> None:
        """Show the newest activity with the work in flight; without a terminal, if nothing was written for a while."""
        with self._lock:
            what, count = self._newest
            if not what:
                return
            parts = [part for part in (count, work_text(ACTIVITY.in_flight())) if part]
            if self._console.is_terminal:
                note = " · ".join([*parts, *filter(None, [self._pace.left()])])
                self._progress.update(self._activity, description=what, note=note, visible=True)
            elif time.monotonic() - self._told_at > PLAIN_INTERVAL_SECONDS:
                self.say(escape(f"  … {' · '.join([what, *parts, f'{time.monotonic() - self._began_at:.0f} s'])}"))

    def emit(self, record: logging.LogRecord) -> None:
        show = getattr(self, f"_on_{getattr(record, 'event', '')}", None)
        if show is not None:
            show(**record.facts)  # type: ignore[attr-defined]

    def say(self, text: str) -> None:
        """Write one lasting line."""
        self._told_at = time.monotonic()
        self._write(text)

    def _write(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def expect(self, what: str) -> None:
        """Name the work that begins, for the case that it takes long."""
        with self._lock:
            self._newest, self._began_at, self._told_at = (what, ""), time.monotonic(), time.monotonic()

    def activity(self, what: str, done: float | None = None, total: float | None = None, note: str = "") -> None:
        """Show the present activity."""
        count = f"{done:.0f}/{total:.0f}" if done is not None and total is not None else ""
        with self._lock:
            if what != self._newest[0]:
                self._began_at = time.monotonic()
            self._newest = what, " · ".join(part for part in (count, note) if part)
            if self._console.is_terminal:
                text = " · ".join(part for part in (count, note, self._pace.left()) if part)
                self._progress.update(
                    self._activity, description=what, completed=done or 0, total=total, note=text, visible=True
                )
            elif time.monotonic() - self._told_at > PLAIN_INTERVAL_SECONDS:
                self.say(escape(f"  … {what}{f' {count}' if count else ''} {note}".rstrip()))

    def _on_services(self, text: str) -> None:
        self.activity(f"services: {text}")

    def _on_pages(self, prefect: str = "", prefect_sign_in: str = "", mlflow: str = "") -> None:
        if prefect:
            self.say(f"  Prefect     {prefect}\n              to sign in, open {escape(prefect_sign_in)}")
        if mlflow:
            self.say(f"  MLflow      {mlflow}")

    def _on_warm_start(self, step: int, steps: int, loss: float) -> None:
        self.activity("making the starting policy", step, steps, f"loss {loss:.3f}")

    def _on_conversion(self, text: str) -> None:
        self.activity(f"starting policy: {text}")

    def _on_engine(self, text: str) -> None:
        self.activity(f"engine: {text}")

    def _on_tracking(self, url: str) -> None:
        self.say(f"  MLflow run  {url}")

    def _on_stage(self, name: str, about: str) -> None:
        if name.startswith(("collect", "evaluate")):
            self._pace.begin()
        self.activity(f"{about}: {name}")

    def _on_rollout(self, tokens: int, reward: float | None) -> None:
        self._pace.add(tokens, reward)

    def _on_collect(self, iteration: int, finished: int, planned: int) -> None:
        self.activity(f"iteration {iteration}: rollouts", finished, planned, self._pace.note())

    def _on_alert(self, name: str, text: str) -> None:
        self.say(f"  [yellow]{name.replace('_', ' ')}[/]: {escape(text)}")

    def _on_waiting(self, text: str) -> None:
        self.say(f"  [yellow]waiting[/]: {escape(text)}")

    def _on_recovery(self, iteration: int, step: str, code: str, seconds: float) -> None:
        then = (
            f"again in {seconds:.0f} s"
            if step == "wait"
            else "skipped, on record"
            if step == "skip"
            else "the run ends"
        )
        self.say(
            f"  [yellow]iteration {iteration} failed[/] ({code}): {then}; see `roundhouse runs status{self._run_id}`"
        )

    def _on_retry(self, name: str, about: str, text: str) -> None:
        first, _, _ = text.partition("\n")
        self.say(f"  [yellow]{about}: {name} failed[/], again: {escape(first)}")

    def _on_retraining(self, iterations: int, version: int) -> None:
        self.say(f"  training {iterations} iterations again for the optimizer state of version {version}")

    def _on_evaluate(self, version: int, finished: int, planned: int) -> None:
        self.activity(f"evaluating version {version}", finished, planned, self._pace.note())

    def _on_evaluation(self, version: int, metrics: dict[str, float]) -> None:
        for metric, reward in metrics.items():
            if metric.startswith("evaluation/") and metric.endswith("/mean") and metric.split("/")[-2] == "reward":
                error = metrics.get(metric.removesuffix("mean") + "stderr", 0.0)
                of_set = "/".join(metric.split("/")[1:-2])
                name = f"  {of_set}" if of_set else ""
                self.say(
                    f"  [bold]held-out[/]   version {version:<3d}  reward [bold]{reward:.3f}[/] ± {error:.3f}{name}"
                )

    def _on_offline(self, text: str) -> None:
        self.say("\n".join(f"  {escape(line)}" for line in text.splitlines()))

    def _on_iteration(self, iteration: int, metrics: dict[str, float]) -> None:
        if iteration > self._first and self.iterations is not None:
            self._pace.iteration(metrics.get("time/iteration", 0.0), self.iterations - iteration)
            self.say(f"  {iteration_line(iteration, self.iterations, metrics)}")


def iteration_line(iteration: int, iterations: int, metrics: dict[str, float]) -> str:
    """Return an iteration in one line; for an offline one, its data's figures."""
    if "reward/mean" not in metrics and "offline/effective_rollouts" not in metrics and "train/nll" in metrics:
        seconds = metrics.get("time/iteration", 0)
        return f"iteration {iteration:>3d}/{iterations}  loss {metrics['train/nll']:.3f} nats a token  {seconds:.1f} s"
    if "reward/mean" not in metrics and "offline/effective_rollouts" in metrics:
        parts = [
            f"iteration {iteration:>3d}/{iterations}",
            f"data: reward {metrics.get('train/reward', 0):.3f}",
            f"effective sample {metrics['offline/effective_tokens']:.3f} of tokens",
            f"{metrics['offline/effective_rollouts']:.3f} of rollouts",
            f"{metrics.get('time/iteration', 0):.1f} s",
        ]
        return "  ".join(parts)
    reward = metrics.get("reward/mean")
    bar = "" if reward is None else f" {BARS[min(len(BARS) - 1, max(0, int(reward * len(BARS))))]}"
    parts = [
        f"iteration {iteration:>3d}/{iterations}",
        f"reward {reward_text(reward)}{bar}",
        f"turns {metrics.get('rollout/turns_mean', 0):.2f}",
        f"mismatch {metrics.get('train/logprob_abs_diff_max', 0):.0e}",
        f"{metrics.get('time/iteration', 0):.1f} s",
    ]
    return "  ".join([*parts, *failed_parts(metrics), *_remarks(metrics)])


def _remarks(metrics: dict[str, float]) -> list[str]:
    """Return why an iteration taught little or nothing."""
    remarks = []
    if metrics.get("train/baseline_reward/pct_mixed") == 0 and not metrics.get("train/grad_norm"):
        remarks.append("no gradient: each group has one reward throughout")
    if (cut := metrics.get("rollout/truncated_rate", 0.0)) > MANY_TRUNCATED:
        remarks.append(f"truncated {cut:.0%}: answers are cut off by a limit")
    return remarks


def failed_parts(metrics: dict[str, float]) -> list[str]:
    """Return the failures of an iteration's rollouts by code, for its line; nothing without any."""
    prefix = "failures/code/"
    codes = {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix)}
    counts = ", ".join(f"{code} {codes[code]:.0f}" for code in sorted(codes, key=lambda code: -codes[code]))
    return [f"failed {metrics.get('rollout/failed_rate', 0.0):.0%}: {counts}"] if codes else []


def reward_text(reward: float | None) -> str:
    """Return a reward with three decimals; a dash if no rollout had one."""
    return "–" if reward is None else f"{reward:.3f}"


def mean_text(evaluation: dict[str, Any]) -> str:
    """A mean reward with its standard error."""
    mean, error = evaluation.get("reward_mean"), evaluation.get("reward_stderr")
    return reward_text(mean) + ("" if mean is None or error is None else f" ± {reward_text(error)}")


def _tasks(evaluation: dict[str, Any]) -> str:
    """Return the number of evaluated tasks, and of training tasks among them, which older summaries lack."""
    after = evaluation["after"]
    tasks = "–" if after.get("tasks") is None else f"{after['tasks']:.0f}"
    if evaluation.get("never_trained_on"):
        return f"{tasks} tasks never trained on"
    shared = after.get("tasks_in_training")
    return (
        f"{tasks} tasks, [yellow]{shared:.0f} of them training tasks, too[/]" if shared else f"{tasks} held-out tasks"
    )


def _iterations(summary: dict[str, Any]) -> str:
    """The iterations that a run made, and their time. An older summary does not have the version that a fork begins from."""
    first = summary.get("first_version", 0)
    count = summary["iterations"] - first
    span = f"{first + 1}" if count == 1 else f"{first + 1} to {summary['iterations']}"
    last = f" ({span})" if first and count > 0 else ""
    idle = summary.get("seconds_between_starts") or 0.0
    between = f", {idle:.0f} of them between starts" if idle >= 1 else ""
    return f"{count} iteration{'' if count == 1 else 's'}{last} in {summary['wall_seconds']:.0f} s{between}"


def print_summary(console: Console, summary: dict[str, Any], links: dict[str, str], hints: list[str]) -> None:
    """The end of a run on one screen."""
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    console.print()
    if before and after:  # a summary that is stored may lack the fields of an evaluation without a reward
        means = " → ".join(mean_text(each) for each in (before, after))
        console.print(f"[bold]Held-out reward {means}[/]  ({_tasks(summary['evaluation'])})")
        for name, evaluation in after.get("sets", {}).items():
            means = " → ".join(mean_text(each) for each in (before.get("sets", {}).get(name, {}), evaluation))
            change = summary["evaluation"].get("changes", {}).get(name)
            difference = "" if change is None else f"  (change {change['change']:+.3f} ± {change['stderr']:.3f})"
            console.print(f"  {name}: {means}{difference}")
            if change is not None and change["high"] < 0:
                console.print(
                    f"  [yellow]{name} fell significantly. A KL to the starting policy "
                    "(train.algorithm.kl_coefficient) or a lower train.optimizer.learning_rate preserves more of it.[/]"
                )
    if (converted := summary.get("converted_from")) is not None:
        console.print(f"starting policy: {escape(converted)}, dequantised to float32: not the published weights")
    ledger = ", ".join(f"{count} {name}" for name, count in summary["ledger"].items() if count)
    console.print(f"{_iterations(summary)} · rollouts: {ledger or 'none'}")
    start = summary.get("seconds_before_first_stage")
    if start is not None and start["total"]:
        console.print(
            f"before the first stage: {start['total']:.0f} s (starting policy {start['starting_policy']:.0f} s; else services "
            "and engine)"
        )
    stages = " · ".join(f"{kind} {seconds:.0f} s" for kind, seconds in summary["stage_seconds"].items())
    console.print(f"by stage: {stages}")
    overhead = summary["overhead_seconds_per_iteration"].get("overhead/total")
    if overhead is not None:
        console.print(f"Roundhouse's own overhead: {overhead:.2f} s an iteration (median)")
    if summary.get("mlflow_complete") is False:
        console.print(
            f"[yellow]MLflow lacks a part of this run; write it there: roundhouse runs track {summary['run_id']}[/]"
        )
    for name, link in links.items():
        console.print(f"{name:<14}{link}", markup=False, soft_wrap=True)
    if hints:
        console.print("\n[bold]Try next[/]")
        if shutil.which("roundhouse") is None:
            console.print(f"  source {Path(sys.executable).parent / 'activate'}", soft_wrap=True, markup=False)
        for hint in hints:
            console.print(f"  {hint}", soft_wrap=True, highlight=False, markup=False)
