"""Start a training step as a process of its own, and bring back what it leaves.

Invariant: what the process says by its error file or its exit code is raised here as the error that it was there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa

from roundhouse.config.train_service import ProcessService
from roundhouse.stages.child_process import ChildProcess
from roundhouse.store.location import Location
from roundhouse.training.service.border import read_error
from roundhouse.training.service.one_shot import StepResult, StepSpec, read_result

MODULE = "roundhouse.training.service.one_shot"


def run_in_process(spec: StepSpec, service: ProcessService) -> tuple[StepResult, pa.Table]:
    """Run the step, over torchrun when it has several processes; `spec.report` is set to a directory of its own.

    Raises:
        DataError, ConfigError, StoreError: as the step raised them.
        InfraError: the process was killed, ran out of time, or failed by the machine.
    """
    with tempfile.TemporaryDirectory(prefix="roundhouse-step-") as directory:
        scratch = Path(directory)
        report = Location((scratch / "report").as_uri())
        (scratch / "spec.json").write_text(spec.model_copy(update={"report": report.uri}).model_dump_json())
        process = ChildProcess(
            "The training step",
            _arguments(scratch / "spec.json", service.processes),
            scratch / "log",
            service.timeout_seconds,
            "train.service.timeout_seconds",
        )
        if (code := process.run("train")) != 0:
            raise read_error(report) or process.error_of(code)
        return read_result(report)


def _arguments(spec: Path, processes: int) -> list[str]:
    step = ["-m", MODULE, "--spec", str(spec)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*(torchrun if processes > 1 else []), *step]
