"""Learning curves of SmolLM2-135M: `configs/pretrained.yaml` with several seeds, one after another.

    python -m benchmarks.pretrained [--config FILE] [--seeds 0 1 2] [--output docs/images/pretrained] [--work DIR]
                                    [--set KEY=VALUE …]

Each run is `roundhouse train` as a person types it, services and engine included. Of its CPU seconds, `cpu_seconds` are those
of the command and all that it started, `machine_cpu_seconds` those of the whole machine meanwhile. `--output` gets .json
(written after every run, and read to skip those already there) and .png: reward of the rollouts and each evaluation over
iterations, with standard errors. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.process_tree import ProcessTree

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/pretrained.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="default: docs/images/<name of the configuration>")
    parser.add_argument("--work", type=Path, help="keep stores and services here")
    parser.add_argument("--set", nargs="*", default=[], help="more keys of the configuration")
    options = parser.parse_args()
    output = options.output or ROOT / "docs/images" / options.config.stem
    results, tree = output.with_suffix(".json"), ProcessTree()
    runs: list[dict[str, Any]] = json.loads(results.read_text())["runs"] if results.exists() else []
    with tempfile.TemporaryDirectory(prefix="rh-") as scratch:
        work = options.work or Path(scratch)
        for seed in options.seeds:
            if any(run["seed"] == seed and run["set"] == options.set for run in runs):
                continue
            runs.append(measured(options.config, seed, work, options.set, tree))
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    plot(runs, output.with_suffix(".png"))
    print(json.dumps({"bench": options.config.stem, "machine": machine(), "runs": [shown(run) for run in runs]}))


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def measured(config: Path, seed: int, work: Path, settings: list[str], tree: ProcessTree) -> dict[str, Any]:
    """One run: its evaluations by version, and what it cost."""
    run_id, state = f"{config.stem}-{seed}", work / "state"
    keys = [f"run_id={run_id}", f"seed={seed}", f"store={work / 'store'}", f"infra.state={state}", *settings]
    roundhouse = Path(sys.executable).with_name("roundhouse")
    before, own, began = _busy_seconds(), tree.seconds(), time.monotonic()
    try:
        arguments = [argument for key in keys for argument in ("--set", key)]
        subprocess.run([roundhouse, "train", config.resolve(), *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
        wall, cpu, own = time.monotonic() - began, _busy_seconds() - before, tree.seconds() - own
    finally:
        subprocess.run([roundhouse, "down", "--state", state], cwd=ROOT, check=False, stdout=sys.stderr)
    summary = json.loads((work / f"store/runs/{run_id}/summary.json").read_text())
    return {
        "seed": seed,
        "set": settings,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(own, 1),
        "machine_cpu_seconds": round(cpu, 1),
        "stage_seconds": summary["stage_seconds"],
        "iterations": summary["iterations"],
        "reward_by_iteration": summary["reward_by_iteration"],
        "evaluations": [_evaluation(evaluation) for evaluation in summary["evaluation"]["all"]],
    }


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _evaluation(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Reward with its standard error, and the share of right answers, of each set."""
    named = {"sampled": evaluation, **evaluation.get("sets", {})}
    return {
        "version": evaluation["version"],
        **{
            name: {
                "reward": found["reward_mean"],
                "stderr": found["reward_stderr"],
                "tasks": found["tasks"],
                "right": found.get("environment/right"),
                "families": {
                    key.removeprefix("environment/right_"): value
                    for key, value in found.items()
                    if key.startswith("environment/right_")
                },
            }
            for name, found in named.items()
        },
    }


def shown(run: dict[str, Any]) -> dict[str, Any]:
    """Before and after, for the last line."""
    first, last = run["evaluations"][0], run["evaluations"][-1]
    ends = {name: [first[name]["reward"], last[name]["reward"]] for name in evaluations(first)}
    return {key: run[key] for key in ("seed", "iterations", "wall_seconds", "machine_cpu_seconds")} | ends


def evaluations(evaluation: dict[str, Any]) -> list[str]:
    """The names of an evaluation's sets."""
    return [name for name in evaluation if name != "version"]


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """One panel an evaluation, one line a seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = evaluations(runs[0]["evaluations"][0])
    figure, panels = plt.subplots(1, len(names) + 1, figsize=(4.7 * (len(names) + 1), 4.5), dpi=100, sharey=True)
    for run in runs:
        rewards, label = run["reward_by_iteration"], f"seed {run['seed']}"
        panels[0].plot(range(1, len(rewards) + 1), rewards, label=label)
        for panel, name in zip(panels[1:], names, strict=True):
            found = [(each["version"], each[name]) for each in run["evaluations"] if name in each]
            panel.errorbar(
                [version for version, _ in found],
                [each["reward"] for _, each in found],
                yerr=[each["stderr"] for _, each in found],
                capsize=3,
                label=label,
            )
    for panel, title in zip(panels, ("rollouts", *(f"held out, {name}" for name in names)), strict=True):
        panel.set_title(title)
        panel.set_xlabel("iteration")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("reward (standard error)")
    panels[0].legend()
    figure.suptitle("SmolLM2-135M-Instruct, dequantised Q4_1")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    main()
