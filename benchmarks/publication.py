"""How long a version takes from the optimizer's last update until the next refit may begin, with its state before or beside.

    python -m benchmarks.publication [--layers 38] [--iterations 4] [--collection 10] [--s3] [--directory DIR]

Real train and checkpoint stages on a policy of 135 M parameters (3.5 M a layer) and made-up sequences. In place of refit and
collection the run sleeps; the state is written meanwhile, or, with `checkpoint.optimizer_beside_mib: null`, was written before.
`--s3`: into a bucket of moto, a server on this machine. The first iteration, which loads the trainer, is not counted. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow as pa

from roundhouse.config.loading import parse_config
from roundhouse.cpu import process_seconds
from roundhouse.stages import train as stage
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish, retain
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse.training.trainer import Trainer
from roundhouse.trajectories.schemas import SEQUENCES

SHAPE = {"hidden_size": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate_size": 1536}
"""Of SmolLM2-135M, whose vocabulary is in more layers here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument("--iterations", type=int, default=4, help="the first is not counted")
    parser.add_argument("--collection", type=float, default=10.0, help="seconds of refit and collection")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary directory")
    options = parser.parse_args()
    results = []
    print(f"{'state':<8}{'to the next refit: s':>21}{'CPU s':>8}{'next step waits: s':>20}")
    with (
        tempfile.TemporaryDirectory(dir=options.directory, prefix="rh-publication-") as scratch,
        bucket() if options.s3 else nullcontext(scratch) as place,
    ):
        for name, beside in (("before", None), ("beside", 0)):
            run = run_at(f"{place}/{name}", Path(scratch), options.layers, beside)
            measured = list(iterations(run, Path(scratch) / "cache", options.iterations, options.collection))[1:]
            seconds, cpu, waited = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{name:<8}{seconds:>21.2f}{cpu:>8.2f}{waited:>20.2f}", flush=True)
            results.append(
                {"case": name, "value": round(seconds, 3), "unit": "s", "cpu": round(cpu, 3), "wait": waited}
            )
            trainer_home.release_trainers()
    print("\n" + json.dumps({"bench": "publication", "s3": options.s3, "layers": options.layers, "results": results}))


def run_at(store: str, scratch: Path, layers: int, beside: int | None) -> Run:
    policy = {"kind": "warm_start", "steps": 1, "batch_size": 1, "layers": layers, **SHAPE}
    tree = {
        "run_id": "publication",
        "store": store,
        "iterations": 1000,
        "policy": policy,
        "train": {"minibatches": 1, "device": "cpu"},
        "checkpoint": {"optimizer_beside_mib": beside, "keep_last": 1},
        "infra": {"kind": "local", "state": str(scratch / "state")},
        "validation": {"recompute_tolerance": None},  # the tokens are made up
    }
    return open_run(parse_config(tree))


def iterations(run: Run, cache: Path, count: int, collection: float) -> Iterator[tuple[float, float, float]]:
    """Of each iteration: seconds and CPU seconds from the step's end to the published version, and the wait before the step."""
    step, ended = Trainer.step, list[tuple[float, float]]()

    def timed(self, *arguments):  # type: ignore[no-untyped-def]
        report = step(self, *arguments)
        ended.append((time.monotonic(), process_seconds()))
        return report

    checkpoint = starting_policy(run)
    for iteration in range(1, count + 1):
        batch = sequences(run, iteration)
        Trainer.step = timed  # type: ignore[method-assign]
        try:
            update = stage.train_iteration(run, iteration, batch, checkpoint, cache)
        finally:
            Trainer.step = step  # type: ignore[method-assign]
        checkpoint = publish(run, update)
        seconds, cpu = ended.pop()
        yield (
            time.monotonic() - seconds,
            process_seconds() - cpu,
            read_manifest(update).metrics["train/state_wait_seconds"],
        )
        retain(run, iteration)
        time.sleep(collection)


def sequences(run: Run, iteration: int) -> Reference:
    """A validate stage of four short sequences."""
    draw, rows = random.Random(iteration), []
    for sample in range(4):
        tokens = [draw.randrange(40) for _ in range(16)]
        row = {
            "sequence_id": f"g/{sample}/0",
            "rollout_id": f"g/{sample}",
            "group_id": "g",
            "token_ids": tokens,
            "loss_mask": [0] * 8 + [1] * 8,
            "gen_logprobs": [0.0] * 8 + [-4.0] * 8,
            "policy_version": iteration - 1,
            "version_spans": [{"version": iteration - 1, "start": 8, "end": 16}],
            "reward": float(sample % 2),
            "truncated": False,
        }
        rows.append(row)
    attempt = run.begin(run.stage(iteration, "validate"), policy_version=iteration - 1)
    attempt.write_table("sequences", pa.Table.from_pylist(rows, schema=SEQUENCES))
    return attempt.commit()


@contextmanager
def bucket() -> Iterator[str]:
    """URI of a bucket of moto, whose endpoint and credentials are in the environment from now on."""
    import s3fs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        s3fs.S3FileSystem().call_s3("create_bucket", Bucket="publication")
        yield "s3://publication"
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
