"""Refits: how fast beside a plain copy, and how many requests fail when there are a thousand of them under load.

    python -m benchmarks.refit [--parts speed,load,transfer] [--refits 1000] [--callers 8] [--hidden 640] [--layers 12]
        [--repeats 5]

speed: a Qwen3 model (of about 100 million parameters by default, float32, random weights) in vLLM's engine. A refit as a
replica does it (digest of every tensor, check, load, probe of the layers, probe of the log-probabilities) alternates with its
peer, which proves nothing: a copy of the file, vLLM's own `reload_weights`, and a tied head packed anew, which that leaves out.

transfer: the same model; a refit by transfer (gloo, from this process, with the sender's digest) alternates with one by store.

load: a tiny model in a standalone engine, in a process of its own. Callers ask without a pause while the engine is brought back
and forth between two versions of the weights, with running generations waited for, kept and broken off in turn. Each answer's
tokens must be labelled with versions that were wanted while it was drawn, and of every 25th answer each token's log-probability
is computed again by transformers, under the version that it is labelled with.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.weight_delta import make_model
from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.engine_services import ProcessEngine
from roundhouse.generation.protocol import Completion
from roundhouse.generation.served_policy import ServedPolicy, Wanted
from roundhouse.generation.terms import Terms
from roundhouse.generation.vllm_worker import RefitExtension, retie_head
from roundhouse.generation.weights import digest_of
from roundhouse.weights.cache import NodeCache
from roundhouse.weights.transfer import Sender
from tests.generation import tiny

MODES = ("keep", "finish", "abort")
CHECKED_EVERY = 25


class WithPeer(RefitExtension):
    """The worker's extension, with the peer's way of loading beside ours."""

    def bench_reload(self, directory: str) -> None:
        self.reload_weights(weights_path=directory)  # type: ignore[attr-defined]
        retie_head(self.model_runner.get_model())  # type: ignore[attr-defined]


async def speed(work: Path, hidden: int, layers: int, repeats: int) -> list[dict[str, Any]]:
    from roundhouse.generation.vllm_engine import VllmEngine

    parameters = make_model(work / "a", hidden, layers)
    shutil.copytree(work / "a", work / "b")
    _disturb(work / "b" / "model.safetensors")
    size = (work / "a" / "model.safetensors").stat().st_size
    arguments = {"load_format": "safetensors", "worker_extension_cls": "benchmarks.refit.WithPeer"}
    config = GenerationConfig(kv_cache_gib=0.25, engine_args=arguments)
    engine = VllmEngine(config, str(work / "a"), "policy", [])
    await engine.start(serve=False)
    policy = ServedPolicy(engine, str(work / "a"), "bench", cache=NodeCache(work / "cache", 2**34))
    ours, peer = [], []
    try:
        for turn in range(-1, repeats):  # the first is not counted: it reads the files and fills caches
            for name in ("a", "b"):
                started = time.perf_counter()
                await policy.want(Wanted(1, str(work / name), request=time.time_ns()))
                mine = time.perf_counter() - started
                assert policy.status()["ready"], policy.status()["error"]
                started = time.perf_counter()
                shutil.copyfile(work / name / "model.safetensors", work / "copy.safetensors")
                shutil.rmtree(work / "copied", ignore_errors=True)
                shutil.copytree(work / name, work / "copied", ignore=shutil.ignore_patterns("*.safetensors"))
                (work / "copy.safetensors").rename(work / "copied" / "model.safetensors")
                await engine.engine.collective_rpc("bench_reload", args=(str(work / "copied"),))
                theirs = time.perf_counter() - started
                if turn >= 0:
                    ours.append(mine)
                    peer.append(theirs)
                    parts = ", ".join(f"{key} {value:.2f}" for key, value in policy.status()["seconds"].items())
                    print(f"  refit {mine:5.2f} s ({parts})   copy and reload {theirs:5.2f} s", flush=True)
    finally:
        engine.shutdown()
    ratios = sorted(b / a for a, b in zip(ours, peer, strict=True))
    share = statistics.median(ratios)
    print(
        f"refit by store, {parameters / 1e6:.0f} M parameters, {size / 1e6:.0f} MB: median {statistics.median(ours):.2f} s, "
        f"copy and reload {statistics.median(peer):.2f} s: {share:.0%} of its speed ({ratios[0]:.0%} to {ratios[-1]:.0%})"
    )
    return [
        {
            "case": "refit by store",
            "value": round(statistics.median(ours), 3),
            "unit": "s",
            "peer": round(statistics.median(peer), 3),
            "ratio": round(share, 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            "bytes": size,
        }
    ]


async def transfer(work: Path, hidden: int, layers: int, repeats: int) -> list[dict[str, Any]]:
    from roundhouse.generation.vllm_engine import VllmEngine

    parameters = make_model(work / "a", hidden, layers)
    shutil.copytree(work / "a", work / "b")
    _disturb(work / "b" / "model.safetensors")
    engine = VllmEngine(GenerationConfig(kv_cache_gib=0.25), str(work / "a"), "policy", [])
    await engine.start(serve=False)
    policy = ServedPolicy(engine, str(work / "a"), "bench", cache=NodeCache(work / "cache", 2**34))
    took: dict[str, list[float]] = {"store": [], "transfer": []}
    try:
        for turn in range(-1, repeats):  # the first is not counted: it reads the files and fills caches
            for name in ("a", "b"):
                for way, seconds in took.items():
                    started = time.perf_counter()
                    await _refit_by(way, policy, work / name)
                    if turn >= 0:
                        seconds.append(time.perf_counter() - started)
                    status = policy.status()
                    assert (status["ready"], status["way"]) == (True, way), (status["error"], status["way_note"])
    finally:
        engine.shutdown()
    store, sent = took["store"], took["transfer"]
    ratios = sorted(b / a for a, b in zip(store, sent, strict=True))
    size = (work / "a" / "model.safetensors").stat().st_size
    print(
        f"refit by transfer, {parameters / 1e6:.0f} M parameters, {size / 1e6:.0f} MB, one engine beside its sender: median "
        f"{statistics.median(sent):.2f} s, by store {statistics.median(store):.2f} s: {statistics.median(ratios):.2f} times as "
        f"long ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    return [
        {
            "case": "refit by transfer",
            "value": round(statistics.median(sent), 3),
            "unit": "s",
            "peer": round(statistics.median(store), 3),
            "ratio": round(statistics.median(ratios), 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            "bytes": size,
        }
    ]


async def _refit_by(way: str, policy: ServedPolicy, directory: Path) -> None:
    # Another version each time: a wish for what is held already is fulfilled without a refit.
    version = (policy.status()["policy_version"] or 0) + 1
    if way == "store":
        await policy.want(Wanted(version, str(directory), request=time.time_ns()))
        return
    digest = digest_of(directory)
    with Sender(directory, "gloo", [policy.replica_id], "127.0.0.1", 60) as sender:
        offered = sender.way("float32").model_dump()
        await policy.want(Wanted(version, str(directory), digest, time.time_ns(), way=offered))


def _disturb(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor + 1e-3 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


class Callers:
    """Ask the engine without a pause, from a thread of their own."""

    def __init__(self, url: str, config: GenerationConfig, count: int) -> None:
        self._url, self._config, self._count = url, config, count
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))
        self.answers = 0
        self.mixed = 0
        self.kept: list[Completion] = []
        self.failures: list[str] = []

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _ask(self) -> None:
        async with HttpPolicyClient(self._url, self._config) as policy:
            await asyncio.gather(*(self._caller(policy, number) for number in range(self._count)))

    async def _caller(self, policy: HttpPolicyClient, number: int) -> None:
        seed = number
        while not self._stop.is_set():
            seed += 1000
            messages = [{"role": "user", "content": f"Count: {seed} hello world 12345"}]
            try:
                answer = await policy.complete(messages, [], Sampling(max_new_tokens=48), seed)
            except Exception as error:  # noqa: BLE001 (counted: that is the figure)
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.answers += 1
            self.mixed += answer.version_spans is not None
            if self.answers % CHECKED_EVERY == 0 or (answer.version_spans is not None and len(self.kept) < 2000):
                self.kept.append(answer)


def load(work: Path, refits: int, callers: int, backend: str) -> list[dict[str, Any]]:
    policies = [tiny.make_model(work / name, seed=seed) for name, seed in (("even", 1), ("odd", 2))]
    config = GenerationConfig(
        backend=backend, kv_cache_gib=0.125, max_model_len=512, request_timeout_seconds=120, refit_timeout_seconds=300
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    from roundhouse.generation.backends import environment

    command = [sys.executable, "-m", "roundhouse.generation.standalone", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | environment(config), start_new_session=True)
    engine = ProcessEngine(f"http://127.0.0.1:{port}")
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        deadline = time.monotonic() + 120
        while not engine.replicas():
            try:
                engine.ensure(config, str(policies[0]), str(policies[0]), 0)
            except Exception:  # noqa: BLE001 (it is starting)
                assert time.monotonic() < deadline, "the engine does not start"
                time.sleep(0.5)
        with Callers(engine.url, config, callers) as load:
            for version in range(1, refits + 1):
                mode = MODES[version % len(MODES)]
                started = time.perf_counter()
                engine.ensure(config, str(policies[0]), str(policies[version % 2]), version, Terms(running=mode))
                seconds[mode].append(time.perf_counter() - started)
                if version % 50 == 0:
                    print(f"  {version} refits, {load.answers} answers, {load.mixed} of several versions, "
                          f"{len(load.failures)} failed", flush=True)  # fmt: skip
    finally:
        process.kill()
        process.wait()
    off = _largest_difference(policies, load.kept)
    for text in sorted(set(load.failures))[:5]:
        print("  failed:", text[:300])
    asked = load.answers + len(load.failures)
    print(
        f"{refits} refits under {callers} callers ({backend}): {len(load.failures)} of {asked} requests failed, {load.mixed} "
        f"answers of several versions; {len(load.kept)} held against transformers, token by token under the version of each: "
        f"{off:.2g} nats off at most"
    )
    found = [
        ("failed requests", len(load.failures), f"of {asked}"),
        ("answers of several versions", load.mixed, f"of {asked}"),
        ("log-probabilities", off, "nats off"),
        *(
            (f"seconds a refit, {mode}", round(statistics.median(took), 3), "s")
            for mode, took in seconds.items()
            if took
        ),
    ]
    rows: list[dict[str, Any]] = []
    for case, value, unit in found:
        print(f"  {case}: {value} {unit}")
        rows.append({"case": f"under load: {case}", "value": value, "unit": unit, "peer": None, "ratio": None})
    assert not load.failures, "requests failed"
    assert off < 1e-3, "log-probabilities are not those of the versions on record"
    return rows


def _largest_difference(policies: list[Path], answers: list[Completion]) -> float:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in policies]
    largest = 0.0
    for answer in answers:
        prompt, drawn = answer.prompt_token_ids, answer.generation_token_ids
        spans = answer.version_spans or [{"version": answer.policy_version, "tokens": len(drawn)}]
        begin = 0
        for span in spans:
            with torch.no_grad():
                logits = models[span["version"] % 2](torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
            every = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist()
            end = begin + span["tokens"]
            for ours, theirs in zip(every[begin:end], answer.generation_log_probs[begin:end], strict=True):
                largest = max(largest, abs(ours - theirs))
            begin = end
        assert begin == len(drawn), f"spans {spans} of {len(drawn)} tokens"
    return largest


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
            rows += asyncio.run(transfer(work / "transfer", arguments.hidden, arguments.layers, arguments.repeats))
        if "speed" in parts:
            rows += asyncio.run(speed(work, arguments.hidden, arguments.layers, arguments.repeats))
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
    print("\n" + json.dumps({"bench": "refit", "results": rows, "machine": machine}))


if __name__ == "__main__":
    main()
