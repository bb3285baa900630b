"""Refits: how fast beside a plain copy, and how many requests fail when there are a thousand of them under load.

    python -m benchmarks.refit [--parts speed,load,transfer] [--refits 1000] [--callers 8] [--hidden 640] [--layers 12]
        [--repeats 5]

speed: a Qwen3 model (of about 100 million parameters by default, float32, random weights) in vLLM's engine. A refit as a
replica does it (proof that the files are those of the checkpoint, load, probe of the layers, probe of the log-probabilities)
between two checkpoints of a store, hashed while they were written as a trainer does, alternates with its peer, which proves
nothing: a copy of the file, vLLM's own `reload_weights`, and a tied head packed anew, which that leaves out.

transfer: the same model; a refit by transfer (gloo, from this process, with the sender's digest) alternates with one by store.

load: `benchmarks.refit_load`.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.refit_load import load
from benchmarks.weight_delta import make_model
from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig
from roundhouse.generation.served_policy import ServedPolicy
from roundhouse.generation.vllm_worker import RefitExtension, complete_reload
from roundhouse.plugins.transfer.transport import Sender, TransferOffer
from roundhouse.stages.checkpoint import publish
from roundhouse.store.directories import scratch_beside, upload_model
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import model_location
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.checkpoint_files import proved_digest
from roundhouse.weight_sync.replica_state import DesiredPolicy
from roundhouse.weight_sync.tensor_files import SHARD_BYTES, TensorHeader, TensorWriter, iterate, shards

if TYPE_CHECKING:
    from roundhouse.generation.vllm_engine import VllmEngine


class WithPeer(RefitExtension):
    """The worker's extension, with the peer's way of loading beside ours."""

    def bench_reload(self, directory: str) -> None:
        self.reload_weights(weights_path=directory)  # type: ignore[attr-defined]
        complete_reload(self.model_runner.get_model())  # type: ignore[attr-defined]


@dataclass
class Bench:
    """A replica in this process, and two checkpoints of a store to bring it to by turns."""

    work: Path
    checkpoints: tuple[Location, Location]
    engine: VllmEngine
    policy: ServedPolicy
    about: str
    bytes: int

    def rounds(self, repeats: int) -> Iterator[tuple[bool, Location]]:
        """Whether it counts, and the checkpoint. The first round does not: it reads the files and fills caches."""
        return ((turn >= 0, one) for turn in range(-1, repeats) for one in self.checkpoints)

    def row(self, case: str, took: list[float], peer: list[float], ratios: list[float]) -> dict[str, Any]:
        return {
            "case": case,
            "value": round(statistics.median(took), 3),
            "unit": "s",
            "peer": round(statistics.median(peer), 3),
            "ratio": round(statistics.median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "bytes": self.bytes,
        }


@asynccontextmanager
async def bench(work: Path, hidden: int, layers: int, **engine_arguments: str) -> AsyncIterator[Bench]:
    from roundhouse.generation.vllm_engine import VllmEngine

    parameters = make_model(work / "a", hidden, layers)
    run = open_run(parse_config({"run_id": "bench", "store": str(work / "store")}))
    checkpoints = _stored(run, 1, work / "a", 0.0), _stored(run, 2, work / "a", 1e-3)
    size = (work / "a" / "model.safetensors").stat().st_size
    # a copy is not validated: the peer's side loads weights by itself, which a run's configuration may not
    config = GenerationConfig(kv_cache_gib=0.25).model_copy(update={"engine_args": engine_arguments})
    engine = VllmEngine(config, str(work / "a"), "policy", [])
    await engine.start()
    policy = ServedPolicy(engine, str(work / "a"), "bench", cache=NodeCache(work / "cache", 2**34))
    try:
        yield Bench(
            work, checkpoints, engine, policy, f"{parameters / 1e6:.0f} M parameters, {size / 1e6:.0f} MB", size
        )
    finally:
        engine.shutdown()


async def speed(work: Path, hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    arguments = {"load_format": "safetensors", "worker_extension_cls": "benchmarks.refit.WithPeer"}
    ours, peer = [], []
    async with bench(work, hidden, layers, **arguments) as on:
        for counts, checkpoint in on.rounds(repeats):
            mine = await _seconds(partial(_refit_by, "store", on.policy, checkpoint))
            theirs = await _seconds(partial(_copy_and_reload, on, checkpoint))
            if counts:
                ours.append(mine)
                peer.append(theirs)
                parts = ", ".join(f"{key} {value:.2f}" for key, value in on.policy.status()["seconds"].items())
                print(f"  refit {mine:5.2f} s ({parts})   copy and reload {theirs:5.2f} s", flush=True)
    row = on.row("refit by store", ours, peer, [b / a for a, b in zip(ours, peer, strict=True)])
    least, most = row["spread"]
    print(
        f"refit by store, {on.about}: median {row['value']:.2f} s, copy and reload {row['peer']:.2f} s: "
        f"{row['ratio']:.0%} of its speed ({least:.0%} to {most:.0%})"
    )
    return row


async def transfer(work: Path, hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {"store": [], "transfer": []}
    async with bench(work, hidden, layers) as on:
        for counts, checkpoint in on.rounds(repeats):
            for way, seconds in took.items():
                one = await _seconds(partial(_refit_by, way, on.policy, checkpoint))
                if counts:
                    seconds.append(one)
    store, sent = took["store"], took["transfer"]
    row = on.row("refit by transfer", sent, store, [b / a for a, b in zip(store, sent, strict=True)])
    least, most = row["spread"]
    print(
        f"refit by transfer, {on.about}, one engine beside its sender: median {row['value']:.2f} s, "
        f"by store {row['peer']:.2f} s: {row['ratio']:.2f} times as long ({least:.2f} to {most:.2f})"
    )
    return row


async def _seconds(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    await act()
    return time.perf_counter() - started


async def _refit_by(way: str, policy: ServedPolicy, checkpoint: Location) -> None:
    # Another version each time: a desired state that is held already needs no refit.
    version, uri = (policy.status()["policy_version"] or 0) + 1, checkpoint.uri
    directory = model_location(checkpoint).local_path
    digest = proved_digest(uri, directory)
    if way == "store":
        await policy.apply(DesiredPolicy(version, uri, digest, request=time.time_ns()))
    else:
        replicas, here = [policy.replica_id], "http://127.0.0.1:1"
        offer = TransferOffer(dtype="float32", backend="gloo", replicas=replicas, engine=here, seconds=60)
        with Sender.of_files(directory, offer) as sender:
            source = sender.source().model_dump()
            await policy.apply(DesiredPolicy(version, uri, digest, time.time_ns(), source=source))
    status = policy.status()
    assert (status["ready"], status["transport"]) == (True, way), (status["error"], status["transport_note"])


async def _copy_and_reload(on: Bench, checkpoint: Location) -> None:
    copied = on.work / "copied"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(model_location(checkpoint).local_path, copied)
    await on.engine.engine.collective_rpc("bench_reload", args=(str(copied),))


def _stored(run: Run, version: int, directory: Path, added: float) -> Location:
    """A checkpoint with the model of a directory, a number added to each weight, written as a train stage writes it."""
    place = run.checkpoint(version).location
    attempt = run.begin(run.stage(version, "train"), policy_version=version - 1)
    changed = {name: tensor + added for name, tensor in iterate(directory)}
    planned = shards([TensorHeader(name, one.dtype, tuple(one.shape)) for name, one in changed.items()], SHARD_BYTES)
    with scratch_beside(place) as scratch:
        shutil.copytree(directory, scratch, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        writer = TensorWriter(scratch)
        writer.write_sharded("model", planned, iter(changed.items()))
        writer.close()
        written = upload_model(place, attempt.name, scratch, move=True)
    publish(run, attempt.commit(details=written.details()))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="speed,load")
    parser.add_argument("--refits", type=int, default=1000)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--backend", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    from roundhouse.generation.vllm_engine import environment

    os.environ.update(environment(GenerationConfig()))
    parts, rows = arguments.parts.split(","), []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        if "load" in parts:
            rows += load(work, arguments.refits, arguments.callers, arguments.backend)
        if "transfer" in parts:
            rows.append(asyncio.run(transfer(work / "transfer", arguments.hidden, arguments.layers, arguments.repeats)))
        if "speed" in parts:
            rows.append(asyncio.run(speed(work / "speed", arguments.hidden, arguments.layers, arguments.repeats)))
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
    print("\n" + json.dumps({"bench": "refit", "results": rows, "machine": machine}))


if __name__ == "__main__":
    main()
