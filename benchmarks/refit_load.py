"""A thousand refits under load: how many requests fail, and whether each token is of the version that it is labelled with.

A tiny model in a standalone engine, in a process of its own. Callers ask without a pause while the engine is brought back
and forth between two versions of the weights, with running generations waited for, kept and broken off in turn. Each answer's
tokens must be labelled with versions that were wanted while it was drawn, and of every 25th answer each token's log-probability
is computed again by transformers, under the version that it is labelled with.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.deployment import ProcessEngine
from roundhouse.generation.protocol import Completion
from roundhouse.weight_sync.replica_state import RefitOptions
from tests.generation import tiny

MODES: tuple[InflightRequests, ...] = ("continue", "drain", "restart")
CHECKED_EVERY = 25


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


def load(work: Path, refits: int, callers: int, backend: Literal["vllm", "transformers"]) -> list[dict[str, Any]]:
    policies = [tiny.make_model(work / name, seed=seed) for name, seed in (("even", 1), ("odd", 2))]
    config = GenerationConfig(
        backend=backend, kv_cache_gib=0.125, max_model_len=512, request_timeout_seconds=120, refit_timeout_seconds=300
    )
    with _engine(config, policies[0]) as engine, Callers(engine.url, config, callers) as load:
        seconds = _refit(engine, config, policies, refits, load)
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
    for case, value, unit in found:
        print(f"  {case}: {value} {unit}")
    assert not load.failures, "requests failed"
    assert off < 1e-3, "log-probabilities are not those of the versions on record"
    return [
        {"case": f"under load: {case}", "value": value, "unit": unit, "peer": None, "ratio": None}
        for case, value, unit in found
    ]


@contextmanager
def _engine(config: GenerationConfig, model: Path) -> Iterator[ProcessEngine]:
    """A standalone engine at version 0."""
    from roundhouse.generation.vllm_engine import environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "roundhouse.generation.standalone", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | environment(config), start_new_session=True)
    engine = ProcessEngine(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 120
        while not engine.replicas():
            try:
                engine.ensure(config, str(model), str(model), 0)
            except Exception:  # noqa: BLE001 (it is starting)
                assert time.monotonic() < deadline, "the engine does not start"
                time.sleep(0.5)
        yield engine
    finally:
        process.kill()
        process.wait()


def _refit(
    engine: ProcessEngine, config: GenerationConfig, policies: list[Path], refits: int, load: Callers
) -> dict[str, list[float]]:
    """Seconds of each refit, by what became of running generations."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for version in range(1, refits + 1):
        mode = MODES[version % len(MODES)]
        started = time.perf_counter()
        engine.ensure(config, str(policies[0]), str(policies[version % 2]), version, RefitOptions(running=mode))
        seconds[mode].append(time.perf_counter() - started)
        if version % 50 == 0:
            print(
                f"  {version} refits, {load.answers} answers, {load.mixed} of several versions, {len(load.failures)} failed",
                flush=True,
            )
    return seconds


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
