"""The picture of a run: reward by iteration with held-out evaluations, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundhouse.stages.report import iteration_manifests, stage_seconds
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind

_COLORS = {
    StageKind.COLLECT: "#4c78a8",
    StageKind.TRAIN: "#f58518",
    StageKind.REFIT: "#54a24b",
    StageKind.VALIDATE: "#b279a2",
    StageKind.CHECKPOINT: "#9d755d",
    "orchestration": "#bab0ac",
}


def plot_run(run: Run, summary: dict[str, Any], file: Path) -> None:
    """Write the learning curve as a PNG of about 1400 x 560 pixels."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.6), dpi=100, width_ratios=(3, 2))
    _plot_reward(left, summary, run.first_version + 1)
    _plot_seconds(right, run, range(run.first_version + 1, summary["iterations"] + 1))
    figure.suptitle(f"{run.run_id}: {summary['environment']}, seed {run.config.seed}", fontsize=13)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _plot_reward(axes: Any, summary: dict[str, Any], first: int) -> None:
    nan = float("nan")  # a gap where an iteration was skipped
    rewards = [nan if reward is None else reward for reward in summary["reward_by_iteration"]]
    axes.plot(range(first, first + len(rewards)), rewards, color="#4c78a8", linewidth=1.6, label="training rollouts")
    evaluations = summary["evaluation"]["all"]
    axes.errorbar(
        [evaluation["version"] for evaluation in evaluations],
        [evaluation["reward_mean"] for evaluation in evaluations],
        yerr=[1.96 * evaluation["reward_stderr"] for evaluation in evaluations],
        fmt="o",
        color="#e45756",
        capsize=4,
        label="held-out tasks (95 % interval)",
    )
    axes.set_xlabel("iteration")
    axes.set_ylabel("mean reward")
    axes.set_ylim(-0.02, max([1.02, *(reward for reward in rewards if reward == reward)]))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _plot_seconds(axes: Any, run: Run, numbers: range) -> None:
    manifests = [iteration_manifests(run, k) for k in numbers]
    bottom = [0.0] * len(numbers)
    for kind, color in _COLORS.items():
        if kind == "orchestration":
            heights = [
                m[StageKind.REPORT].metrics.get("overhead/orchestration", 0.0) if StageKind.REPORT in m else 0.0
                for m in manifests
            ]
        else:
            heights = [stage_seconds(m[kind]) if kind in m else 0.0 for m in manifests]
        axes.bar(numbers, heights, bottom=bottom, width=1.0, color=color, label=kind)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("iteration")
    axes.set_ylabel("seconds")
    axes.legend(loc="upper right", fontsize=8)
