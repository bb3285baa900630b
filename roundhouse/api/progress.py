"""The progress of a training in a notebook: one cell output that is updated. Elsewhere the child's own lines are enough."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from roundhouse.config.models import RunConfig
from roundhouse.notebook import svg_curve

Show = Callable[[str, dict[str, Any]], None]
UPDATE_SECONDS = 0.5
"""Least time between two updates of a cell."""


@contextmanager
def progress_display(config: RunConfig) -> Iterator[Show]:
    """Yield a function that is given each event; in a notebook it updates a cell's output."""
    if not in_notebook():
        yield lambda event, facts: None
        return
    from IPython.display import HTML, display

    state = Progress(config.run_id, config.iterations)
    handle = display(HTML(state.html()), display_id=True)
    shown_at = time.monotonic()

    def show(event: str, facts: dict[str, Any]) -> None:
        nonlocal shown_at
        is_lasting = state.take(event, facts)
        if is_lasting or time.monotonic() - shown_at > UPDATE_SECONDS:
            handle.update(HTML(state.html()))
            shown_at = time.monotonic()

    yield show
    handle.update(HTML(state.html()))


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Progress:
    """What a run's events have reported so far."""

    def __init__(self, run_id: str, iterations: int) -> None:
        self.run_id, self.iterations = run_id, iterations
        self.iteration = 0
        self.activity = "starting"
        self.rewards: list[tuple[float, float]] = []
        self.heldout: list[tuple[float, float]] = []

    def take(self, event: str, facts: dict[str, Any]) -> bool:
        """Take an event, and return whether it ended an iteration or an evaluation."""
        metrics = facts.get("metrics", {})
        if event == "iteration":
            self.iteration = facts["iteration"]
            if "reward/mean" in metrics:
                self.rewards.append((self.iteration, metrics["reward/mean"]))
        elif event == "evaluation":
            if "evaluation/reward/mean" in metrics:
                self.heldout.append((facts["version"], metrics["evaluation/reward/mean"]))
        elif event == "collect":
            self.activity = f"rollouts {facts['finished']}/{facts['planned']}"
        elif event == "evaluate":
            self.activity = f"evaluating version {facts['version']}: {facts['finished']}/{facts['planned']}"
        elif event == "stage":
            self.activity = f"{facts['about']}: {facts['name']}"
        elif event in ("services", "engine", "conversion", "waiting"):
            self.activity = f"{event}: {facts['text']}"
        elif event == "warm_start":
            self.activity = f"making the starting policy: step {facts['step']}/{facts['steps']}"
        return event in ("iteration", "evaluation")

    def html(self) -> str:
        """Return bar, activity and curves."""
        text = f"{escape(self.run_id)}: iteration {self.iteration} of {self.iterations} · {escape(self.activity)}"
        bar = f'<progress value="{self.iteration}" max="{self.iterations}"></progress>'
        return f"<div>{bar} {text}</div>{svg_curve(self.rewards, 'reward')}{svg_curve(self.heldout, 'held-out reward')}"
