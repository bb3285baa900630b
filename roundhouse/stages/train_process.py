"""Start a training step as a process of its own, and bring back what it leaves.

Invariant: what the process says by its error file or its exit code is raised here as the error that it was there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa

from roundhouse.config.train_service import ProcessService
from roundhouse.http.ports import LOOPBACK
from roundhouse.launch.child_process import ChildProcess
from roundhouse.store.location import Location
from roundhouse.training.service.job_entry import read_error
from roundhouse.training.service.one_shot import StepSpec, TrainStepResult, read_result

MODULE = "roundhouse.training.service.one_shot"
RANKS_MEET_BY_FILE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun opens no port, which by itself it does on every interface; the ranks' own store is `parallel.join`'s."""


def run_in_process(spec: StepSpec, service: ProcessService) -> tuple[TrainStepResult, pa.Table]:
    """Run the step, over torchrun when it has several processes; `spec.report` is set to a directory of its own.

    Raises:
        DataError, ConfigError, StoreError: as the step raised them.
        InfraError: the process was killed, ran out of time, or failed by the machine.
    """
    with tempfile.TemporaryDirectory(prefix="roundhouse-step-") as directory:
        scratch = Path(directory)
        report = Location((scratch / "report").as_uri())
        (scratch / "spec.json").write_text(spec.model_copy(update={"report": report.uri}).model_dump_json())
        ranks = torchrun(service.processes, scratch / "meeting") if service.processes > 1 else []
        process = ChildProcess(
            "The training step",
            [*ranks, "-m", MODULE, "--spec", str(scratch / "spec.json")],
            scratch / "log",
            service.timeout_seconds,
            "train.service.timeout_seconds",
            RANKS_MEET_BY_FILE,
        )
        if (code := process.run("train")) != 0:
            raise read_error(report) or process.error_of(code)
        return read_result(report)


def torchrun(processes: int, meeting: Path) -> list[str]:
    """Arguments of this interpreter that start the ranks of one machine, with the environment of `RANKS_MEET_BY_FILE`."""
    by_file = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting), "--rdzv-conf", "store_type=file"]
    here = ["--rdzv-id", "step", "--nnodes", "1", "--nproc-per-node", str(processes), "--local-addr", LOOPBACK]
    return ["-m", "torch.distributed.run", *by_file, *here]
