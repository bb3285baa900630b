"""What an iteration takes beyond rollouts and training: a real run, and its overhead part by part.

    python -m benchmarks.overhead [--config configs/quickstart.yaml] [--iterations 12] [--directory DIR] [--set KEY=VALUE …]

Real: `roundhouse train` as a person types it, with its services, engine and trainer; nothing is evaluated. Every figure is
from the manifests of the iterations between the first and the last, so a recorded run shows the same. Reported are medians and
quartiles over the iterations, and on a busy machine the better measure: CPU seconds of the flow's process, where a stage is
overhead as a whole. Overhead is defined in `roundhouse.stages.report`; here it is split further:

    report k-1 ┆ between iterations ┆ refit ┆ ∙ ┆ collect ┆ ∙ ┆ validate ┆ ∙ ┆ train ┆ ∙ ┆ checkpoint ┆ report k
                                             ∙ between stages; the last one is the report's

Of the trainer's state that is written beside the next iteration (`checkpoint.optimizer_beside_mib`), what the next step waited
for it is in its `train`.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import Manifest, StageKind

ROOT = Path(__file__).parents[1]
RUN_ID = "overhead"
WITHIN = {
    "refit: in the replica": (StageKind.REFIT, "refit/replica_seconds_max"),
    "train: saving the version": (StageKind.TRAIN, "train/save_seconds"),
    "train: waiting for the state": (StageKind.TRAIN, "train/state_wait_seconds"),
}
"""Parts of a stage's overhead that a metric of it names."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--iterations", type=int, default=12, help="the first and the last are not counted")
    parser.add_argument("--directory", type=Path, help="keep store, services and caches here")
    parser.add_argument("--set", nargs="*", default=[], help="more keys of the configuration")
    options = parser.parse_args()
    if options.iterations < 3:
        parser.error(
            "--iterations must be at least 3: the first has no report before it, the last writes its state first"
        )
    with tempfile.TemporaryDirectory(prefix="rh-") as scratch:
        run = train(options.config, options.iterations, options.directory or Path(scratch), options.set)
        by_iteration = [(iteration_manifests(run, k - 1), iteration_manifests(run, k)) for k in counted(run)]
    tell([parts_of(before, own) for before, own in by_iteration], [cpu_of(own) for _, own in by_iteration])


def train(config: Path, iterations: int, directory: Path, settings: list[str]) -> Run:
    """The run, made to its end; its services are ended."""
    store, state = directory / "store", directory / "state"
    keys = [
        f"run_id={RUN_ID}",
        f"store={store}",
        f"infra.state={state}",
        f"iterations={iterations}",
        "evaluation.every=null",
        "evaluation.before_training=false",
        *settings,
    ]
    roundhouse = Path(sys.executable).with_name("roundhouse")
    try:
        arguments = [argument for key in keys for argument in ("--set", key)]
        subprocess.run([roundhouse, "train", config, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
    finally:
        subprocess.run([roundhouse, "down", "--state", state], cwd=ROOT, check=False, stdout=sys.stderr)
    return load_run(str(store), RUN_ID)


def counted(run: Run) -> range:
    """The iterations that follow another's report of the same process, and are followed by another, beside which the state of
    a larger model's trainer is written."""
    return range(run.first_version + 2, run.config.iterations)


def parts_of(before: dict[str, Manifest], own: dict[str, Manifest]) -> dict[str, float]:
    """Seconds of overhead of a synchronous iteration, by part; `total` is the sum of all but those within a stage.

    Args:
        before: manifests of the iteration before, by stage.
    """
    # The checkpoint's manifest may be gone (`checkpoint.keep_last`); the report knows its seconds
    stages = [kind for kind in own if kind not in (StageKind.CHECKPOINT, StageKind.REPORT)]
    report = own[StageKind.REPORT]
    parts = {"between iterations": own[stages[0]].started_at - before[StageKind.REPORT].finished_at}
    for kind in (*stages, StageKind.CHECKPOINT):
        parts[str(kind)] = report.metrics[f"overhead/{kind}"]
        parts |= {part: own[kind].metrics[metric] for part, (stage, metric) in WITHIN.items() if stage == kind}
    neighbours = itertools.pairwise(stages)
    parts["between stages"] = sum(own[after].started_at - own[first].finished_at for first, after in neighbours)
    parts["report"] = report.finished_at - own[stages[-1]].finished_at - parts[str(StageKind.CHECKPOINT)]
    parts["total"] = sum(seconds for part, seconds in parts.items() if part not in WITHIN)
    return parts


def cpu_of(own: dict[str, Manifest]) -> dict[str, float]:
    """CPU seconds of the stages that neither roll out nor compute, by part, as the flow's process recorded them."""
    productive = (StageKind.COLLECT, StageKind.TRAIN)
    return {kind: each.resources["cpu_seconds"] for kind, each in own.items() if kind not in productive}


def tell(measured: list[dict[str, float]], used: list[dict[str, float]]) -> None:
    """Print the table and the line of JSON."""
    print(f"{'part':<28}{'median s':>10}{'quartiles':>16}{'CPU s':>8}")
    results = []
    for part in measured[0]:
        values = [parts[part] for parts in measured]
        low, median, high = quartiles(values)
        seconds = [cpu[part] for cpu in used if part in cpu]
        cpu = round(statistics.median(seconds), 3) if seconds else None
        print(f"{part:<28}{median:>10.3f}{f'{low:.3f} - {high:.3f}':>16}{'' if cpu is None else f'{cpu:.3f}':>8}")
        span = [round(low, 3), round(high, 3)]
        results.append({"case": part, "value": round(median, 3), "unit": "s", "quartiles": span, "cpu": cpu})
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"bench": "overhead", "iterations": len(measured), "results": results, "machine": machine}))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


if __name__ == "__main__":
    main()
