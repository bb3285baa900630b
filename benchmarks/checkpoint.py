"""A large checkpoint from its writer to the engine, and back into a trainer: seconds, speed beside the disk's, memory.

    python -m benchmarks.checkpoint [--gigabytes 1] [--shard-mib 256] [--directory DIR]

A synthetic checkpoint in bfloat16 is made tensor by tensor (no model exists) and taken through a store on disk: written by a
train stage, published, verified, fetched and read tensor by tensor as an engine does at a refit by store, and checked and read
as a trainer does at a resume. Each is a process of its own, whose peak memory must stay below 2 x shard + 512 MiB. The disk's
own speed is that of writing the same bytes to one file with an fsync, and of reading it; before each phase the pages of all
files are dropped from the kernel's cache. Half the bytes are weights, which are all that a refit reads. The last line is JSON;
exit code 1: a process exceeded its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from roundhouse.config.loading import parse_config
from roundhouse.store.directories import directory_checked_meanwhile, scratch_beside, upload_model
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.store.verification import verify

MIB = 2**20
ROWS, COLUMNS = 4096, 4096
"""Of a tensor: 32 MiB in bfloat16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint, 10^9 bytes")
    parser.add_argument("--shard-mib", type=int, default=256, help="of a file of the checkpoint")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary directory")
    parser.add_argument("--phase", choices=sorted(PHASES), help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.phase is not None:
        if arguments.phase in ("write", "resume"):  # torch and transformers, whose import is not what is measured
            import roundhouse.stages.checkpoint
            import roundhouse.training.checkpoint
            import roundhouse.training.service.engine
        elif not arguments.phase.startswith("disk"):
            import roundhouse.training.saved_tensors  # noqa: F401
        started, cpu = time.perf_counter(), time.process_time()
        PHASES[arguments.phase](arguments.directory, arguments)
        found = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu, "peak": peak_mib()}
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="rh-ckpt-") as directory:
        sys.exit(report(Path(directory), arguments))


def report(work: Path, arguments: argparse.Namespace) -> int:
    """Run the phases, print the table; 1 where a process took more memory than it may."""
    size, bound = int(arguments.gigabytes * 1e9), 2 * arguments.shard_mib + 512
    if (free := shutil.disk_usage(work).free) < 1.1 * size + 2**30:
        sys.exit(f"--gigabytes {arguments.gigabytes:g} does not fit: {work} has {free / 1e9:.1f} GB free.")
    print(f"{size / 1e9:g} GB in files of {arguments.shard_mib} MiB; a process may take {bound} MiB")
    print(f"{'':<14}{'seconds':>9}{'CPU s':>8}{'MB/s':>8}{'of the disk':>13}{'peak MiB':>10}")
    rows, plain = [], {}
    for phase, beside in BESIDE.items():
        _drop_cache(work)
        found = _run(phase, work, arguments)
        speed = READ.get(phase, 1.0) * size / 1e6 / found["seconds"]
        plain[phase] = speed
        ratio = speed / plain[beside] if beside else None
        share = "" if ratio is None else f"{ratio:.0%}"
        print(
            f"{phase:<14}{found['seconds']:9.2f}{found['cpu']:8.2f}{speed:8.0f}{share:>13}{found['peak']:10.0f}",
            flush=True,
        )
        rows.append(
            {
                "case": phase,
                "value": round(found["seconds"], 3),
                "unit": "s",
                "cpu": round(found["cpu"], 3),
                "peak": round(found["peak"], 1),
                "peer": None if ratio is None else round(ratio * found["seconds"], 3),
                "ratio": None if ratio is None else round(ratio, 3),
            }
        )
    rows.append({"case": "flow", "value": 0, "unit": "s", "peak": round(peak_mib(), 1), "peer": None, "ratio": None})
    over = [row["case"] for row in rows if row["peak"] > bound]
    print(f"{'flow':<14}{'':>38}{peak_mib():14.0f}")
    print("every process stayed below its bound" if not over else f"above {bound} MiB: {', '.join(map(str, over))}")
    machine = {"cpu": platform.processor() or platform.machine(), "gigabytes": arguments.gigabytes, "bound": bound}
    print("\n" + json.dumps({"bench": "checkpoint", "results": rows, "machine": machine}))
    return 1 if over else 0


def _run(phase: str, work: Path, arguments: argparse.Namespace) -> dict[str, float]:
    own = ["--phase", phase, "--directory", str(work)]
    sizes = ["--gigabytes", str(arguments.gigabytes), "--shard-mib", str(arguments.shard_mib)]
    command = [sys.executable, "-m", "benchmarks.checkpoint", *own, *sizes]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _drop_cache(directory: Path) -> None:
    """Let the kernel forget the pages of all files below."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_mib() -> float:
    """Of this process since it began."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _blocks(size: int) -> Iterator[bytes]:
    block = os.urandom(16 * MIB)
    for begin in range(0, size, len(block)):
        yield block[: size - begin]


def write_plainly(work: Path, arguments: argparse.Namespace) -> None:
    with (work / "plain").open("wb", buffering=0) as stream:
        for block in _blocks(int(arguments.gigabytes * 1e9)):
            stream.write(block)
        os.fsync(stream.fileno())


def read_plainly(work: Path, arguments: argparse.Namespace) -> None:
    with (work / "plain").open("rb", buffering=0) as stream:
        while stream.read(4 * MIB):
            pass
    (work / "plain").unlink()


def run_of(work: Path) -> Run:
    return open_run(parse_config({"run_id": "bench", "store": str(work / "store")}))


def write(work: Path, arguments: argparse.Namespace) -> None:
    """As a train stage does: half the bytes are weights, half the trainer's state."""
    import torch

    from roundhouse.training.checkpoint import TRAINER_DIRECTORY
    from roundhouse.training.optimizer import OPTIMIZER
    from roundhouse.weight_sync.tensor_files import TensorHeader, TensorWriter, shards

    run, noise = run_of(work), torch.randn(ROWS, COLUMNS).to(torch.bfloat16)
    attempt = run.begin(run.stage(1, "train"), policy_version=0)
    place, limit = run.checkpoint(1).location, arguments.shard_mib * MIB
    tensors = max(2, round(arguments.gigabytes * 1e9 / (ROWS * COLUMNS * 2)))
    with scratch_beside(place) as directory:
        (directory / TRAINER_DIRECTORY).mkdir()
        (directory / "config.json").write_text('{"model_type": "synthetic"}')
        for folder, stem, first in ((directory, "model", 0), (directory / TRAINER_DIRECTORY, OPTIMIZER, tensors // 2)):
            last = tensors if first else tensors // 2
            headers = [TensorHeader(f"t{number:06d}", torch.bfloat16, (ROWS, COLUMNS)) for number in range(first, last)]
            planned, writer = shards(headers, limit), TensorWriter(folder, weights=not first)
            made = ((one.name, noise.fill_diagonal_(int(one.name[1:]))) for shard in planned for one in shard)
            writer.write_sharded(stem, planned, made)
            writer.close()
        written = upload_model(place, attempt.name, directory, move=True)
    attempt.commit(details=written.details())


def publish(work: Path, arguments: argparse.Namespace) -> None:
    from roundhouse.stages.checkpoint import publish as publish_version

    run = run_of(work)
    trained = run.stage(1, "train").reference()
    assert trained is not None
    publish_version(run, trained)


def verify_store(work: Path, arguments: argparse.Namespace) -> None:
    found = verify(str(work / "store"))
    assert found.problems == [], found.problems


def refit(work: Path, arguments: argparse.Namespace) -> None:
    """As a replica does: fetch with proof, then hand every tensor to the engine, which here copies and forgets it."""
    from roundhouse.store.stage import WEIGHTS_DIGEST
    from roundhouse.weight_sync.base import fetch_weights
    from roundhouse.weight_sync.cache import NodeCache
    from roundhouse.weight_sync.tensor_files import iterate

    checkpoint = run_of(work).latest_checkpoint()
    assert checkpoint is not None
    digest = read_manifest(checkpoint).details[WEIGHTS_DIGEST]
    fetched = fetch_weights(checkpoint.uri, None, digest, NodeCache(work / "cache", 0))
    assert fetched.directory is not None
    assert fetched.digest == digest
    for _, tensor in iterate(fetched.directory):
        tensor.clone()


def resume(work: Path, arguments: argparse.Namespace) -> None:
    """As a trainer does that begins from the store: every tensor of weights and state read, all digests checked meanwhile."""
    from roundhouse.training.checkpoint import TRAINER_DIRECTORY
    from roundhouse.training.optimizer import OPTIMIZER
    from roundhouse.training.saved_tensors import saved_tensors
    from roundhouse.weight_sync.tensor_files import iterate

    checkpoint = run_of(work).latest_checkpoint()
    assert checkpoint is not None
    with directory_checked_meanwhile(checkpoint, work / "cache") as directory:
        for _, tensor in iterate(directory):
            tensor.clone()
        for _, tensor in saved_tensors(directory / TRAINER_DIRECTORY, OPTIMIZER):
            tensor.clone()


PHASES: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "disk write": write_plainly,
    "disk read": read_plainly,
    "write": write,
    "publish": publish,
    "verify": verify_store,
    "refit": refit,
    "resume": resume,
}
BESIDE: dict[str, str | None] = {
    "disk write": None,
    "disk read": None,
    "write": "disk write",
    "publish": None,
    "verify": "disk read",
    "refit": "disk read",
    "resume": "disk read",
}
"""Each phase in its turn, and the speed of the disk that it is held against."""
READ = {"refit": 0.5}
"""Share of the checkpoint's bytes that a phase is about, where it is not all."""


if __name__ == "__main__":
    main()
