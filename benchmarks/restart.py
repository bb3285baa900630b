"""From the start of a killed run's process to its next useful act, by the stage that it was killed in.

    python -m benchmarks.restart [--repeats 3] [--stages collect train]

A run on the chaos suite's stand (Prefect and MLflow servers, an engine and an environment server, all of them up throughout) is
killed in the middle of a stage of its second iteration: between the stage's first and last write. The same command is started
again and timed from the process's start to its first useful act in that stage:

    refit        the engine is told which weights are wanted
    collect      the first rollout's first request leaves
    validate     the first proof begins
    train        the first micro-batch goes through the model
    checkpoint   the new version's files are read to be published
    report       the iteration's numbers are put together

There the process is killed again, so that each repeat begins from the same store. Wall time depends on how busy the machine is,
so the CPU seconds that the process had used by then stand beside it, with the load: on a quiet machine wall time comes near
them. Which heavy libraries were imported before the act is told, since they are most of it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.restart_timed import ACTS, STAGE_VARIABLE, TIMES_VARIABLE
from tests.chaos.stand import Stand, stand
from tests.chaos.strikes import PLAN_VARIABLE, Plan, Strike

ITERATION = 2
RUN_ID = "restart"
TIME_LIMIT = 900.0
_STRUCK = {
    "refit": "create iterations/{k}/refit/manifest.json",
    "collect": "write iterations/{k}/collect/rollouts-a*-00000.parquet",
    "validate": "write iterations/{k}/validate/sequences-a*-00000.parquet",
    "train": "write checkpoints/{k}/a*/model.safetensors",
    "checkpoint": "create checkpoints/{k}/manifest.json",
    "report": "create iterations/{k}/report/manifest.json",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stages", nargs="+", choices=list(ACTS), default=list(ACTS))
    parser.add_argument(
        "--limit", type=float, default=3.0, help="seconds; beyond, the exit code is 1 (CPU seconds count)"
    )
    parser.add_argument("--directory", type=Path, help="keep everything here")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        stand(options.directory or Path(scratch), iterations=ITERATION, tracked=True) as ready,
    ):
        measured = {stage: _measure(ready, stage, options.repeats) for stage in ACTS if stage in options.stages}
    _tell(measured, options.limit)


def _measure(ready: Stand, stage: str, repeats: int) -> list[dict[str, Any]]:
    """Kill the run in the stage, and time the starts after that."""
    configuration = ready.configuration(RUN_ID)
    plan = ready.directory / f"{stage}.plan"
    name = _STRUCK[stage].format(k=f"{ITERATION:06d}")
    Plan((Strike("flow", name, "torn"),), ready.directory / f"{stage}.struck").save(plan)
    code = ready.train(configuration, {PLAN_VARIABLE: str(plan)}).wait(TIME_LIMIT)
    if code != -9:
        raise SystemExit(
            f"The run was not killed in {stage}: exit code {code}; see {ready.directory / f'{RUN_ID}.log'}"
        )
    found = []
    for number in range(repeats):
        times = ready.directory / f"{stage}-{number}.json"
        timed = {TIMES_VARIABLE: str(times), STAGE_VARIABLE: stage}
        ready.train(configuration, timed, module="benchmarks.restart_timed", fresh=True).wait(TIME_LIMIT)
        if not times.exists():
            raise SystemExit(
                f"The start after a kill in {stage} came to no act; see {ready.directory / f'{RUN_ID}.log'}"
            )
        found.append(json.loads(times.read_text()))
        print(f"{stage}: {found[-1]}", flush=True)
    return found


def _tell(measured: dict[str, list[dict[str, Any]]], limit: float) -> None:
    print(f"\n{'killed in':<12}{'wall, s':>10}{'CPU, s':>10}{'load':>8}  imported before the act")
    results: list[dict[str, Any]] = []
    for stage, times in measured.items():
        wall, cpu = (statistics.median(one[name] for one in times) for name in ("wall", "cpu"))
        load = statistics.median(one["load"] for one in times)
        print(f"{stage:<12}{wall:>10.2f}{cpu:>10.2f}{load:>8.1f}  {', '.join(times[0]['imported'])}")
        results += [
            {"case": f"killed in {stage}", "value": round(wall, 2), "unit": "s"},
            {"case": f"killed in {stage}, CPU", "value": round(cpu, 2), "unit": "s"},
            {"case": f"killed in {stage}, load", "value": round(load, 1), "unit": "processes"},
        ]
    slow = [stage for stage, times in measured.items() if statistics.median(one["cpu"] for one in times) > limit]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"bench": "restart", "limit": limit, "beyond": slow, "results": results, "machine": machine}))
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()
