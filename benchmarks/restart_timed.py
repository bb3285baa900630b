"""The `roundhouse` command, timed to its first useful act in one stage and killed there; see `benchmarks.restart`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import wrapt

STAGE_VARIABLE, TIMES_VARIABLE = "ROUNDHOUSE_RESTART_STAGE", "ROUNDHOUSE_RESTART_TIMES"
ACTS = {
    "refit": ("roundhouse.stages.refit", "ensure_version"),
    "collect": ("roundhouse.generation.client", "HttpPolicyClient.complete"),
    "validate": ("roundhouse.stages.validate", "validate"),
    "train": ("roundhouse.training.service.engine", "TrainEngine.forward"),
    "checkpoint": ("roundhouse.stages.checkpoint", "read_manifest"),
    "report": ("roundhouse.stages.report", "overhead_seconds"),
}
"""Module and callable whose first call is the act. Hooked when the module is imported, which this does not hasten."""
_HEAVY = ("prefect", "mlflow", "torch", "transformers", "pandas", "sklearn", "ray")


def main() -> None:
    stage = os.environ[STAGE_VARIABLE]
    module, name = ACTS[stage]

    def hook(loaded: Any) -> None:
        wrapt.wrap_function_wrapper(loaded, name, _act)

    wrapt.register_post_import_hook(hook, module)
    from roundhouse.cli import main as command

    command()


def _act(wrapped: Any, instance: Any, arguments: Any, keywords: Any) -> None:
    process = psutil.Process()
    cpu = process.cpu_times()
    told = {
        "wall": round(_seconds_since_start(), 3),
        "cpu": round(cpu.user + cpu.system, 3),
        "load": round(os.getloadavg()[0], 2),
        "imported": [name for name in _HEAVY if name in sys.modules],
    }
    Path(os.environ[TIMES_VARIABLE]).write_text(json.dumps(told))
    os.kill(os.getpid(), signal.SIGKILL)


def _seconds_since_start() -> float:
    """By the kernel's clock; psutil's `create_time` is off by up to a second, since it adds to a boot time in whole seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
