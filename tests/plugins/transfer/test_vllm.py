"""Weights by vLLM's weight-transfer interface, into real vLLM engines: proved as any others, and whole or not served."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.errors import DeploymentFailed
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.deployment import ProcessEngine
from roundhouse.generation.protocol import Completion
from roundhouse.generation.vllm_engine import environment
from roundhouse.plugins.transfer.transport import Sender, TransferSource
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import ensure_version, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync.base import RunCheckpoint
from roundhouse.weight_sync.replica_state import RefitOptions, require_agreement
from roundhouse.weight_sync.tensor_files import digest_of
from tests import fork_server
from tests.generation import tiny
from tests.generation.test_standalone import engine_process
from tests.plugins.transfer.ends import file_sender
from tests.stages.test_checkpoint import trained
from tests.stages.test_train import sequences

CONFIG = GenerationConfig(
    kv_cache_gib=0.125, max_model_len=512, request_timeout_seconds=60, engine_args={"max_num_seqs": 8}
)
SECONDS = 30.0
BATCH_BYTES = 100_000
"""The tiny models have half a megabyte: several batches."""


pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
"""The first test of the module waits for vLLM to start."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    with engine_process(fresh=True, **environment(CONFIG)) as url:
        yield ProcessEngine(url)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[ProcessEngine]:
    """An engine with two workers that share each matrix."""
    shared = CONFIG.model_copy(update={"engine_args": CONFIG.engine_args | {"tensor_parallel_size": 2}})
    with engine_process(fresh=True, **environment(shared)) as url:
        yield ProcessEngine(url)


def sender(directory: Path, engine: ProcessEngine) -> Sender:
    ids = [replica.replica_id for replica in engine.replicas()]
    return file_sender(directory, ids, SECONDS, BATCH_BYTES)


def by(way: TransferSource, directory: Path, **more: Any) -> RefitOptions:
    return RefitOptions(digest_of(directory), way.model_dump(), **more)


def test_a_run_sends_each_version_to_the_replicas_that_are_there_and_records_the_proof(
    engine: ProcessEngine, tmp_path: Path
) -> None:
    def run_by(way: str) -> Run:
        generation = CONFIG.model_dump(mode="json") | {"engine_url": engine.url, "weight_sync": way}
        config = {"run_id": "r", "store": str(tmp_path / "store"), "generation": generation}
        return open_run(parse_config({**config, "infra": {"state": str(tmp_path / "state")}}))

    run = run_by("transfer")
    checkpoints = [publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})]
    for version in (1, 2):
        directory = tmp_path / f"v{version}"
        shutil.copytree(tmp_path / "v0", directory)
        tensors = load_file(directory / "model.safetensors")
        moved = {name: tensor * (1 + 0.05 * version) for name, tensor in tensors.items()}
        save_file(moved, directory / "model.safetensors")
        checkpoints.append(publish(run, trained(run, version, directory)))
    probes = []
    for way, checkpoint in zip(("store", "transfer", "transfer"), checkpoints, strict=True):
        details = read_manifest(refit_iteration(run, checkpoint.policy_version + 1, checkpoint)).details
        assert [(one["way"], one["note"]) for one in details["replicas"]] == [(way, None)]
        assert details["proof"]["digest"] == digest_of(tmp_path / f"v{checkpoint.policy_version}")
        probes.append(details["proof"]["probe"])
    (read,) = ensure_version(run_by("store"), checkpoints[1])
    assert (read.transport, read.probe) == ("store", probes[1]), "what was sent computes as what was read"
    assert probes[0] != probes[1] != probes[2]


class Callers:
    """Threads that request long answers without a pause."""

    def __init__(self, url: str, count: int = 3) -> None:
        self._url, self.count = url, count
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))
        self.answers: list[Completion] = []
        self.failures: list[Exception] = []

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _ask(self) -> None:
        async with HttpPolicyClient(self._url, CONFIG) as policy:
            await asyncio.gather(*(self._caller(policy, number) for number in range(self.count)))

    async def _caller(self, policy: HttpPolicyClient, seed: int) -> None:
        while not self._stop.is_set():
            seed += 100
            try:
                messages = [{"role": "user", "content": f"hello {seed}"}]
                self.answers.append(await policy.complete(messages, [], Sampling(max_new_tokens=200), seed))
            except Exception as error:  # noqa: BLE001 (the test asserts that there is none)
                self.failures.append(error)

    def mixed(self) -> list[Completion]:
        return [answer for answer in self.answers if answer.version_spans is not None]


def test_kept_generations_go_on_with_the_weights_that_were_sent(
    engine: ProcessEngine, policies: dict[str, Path]
) -> None:
    directories = (policies["first"], policies["second"])
    engine.ensure(CONFIG, str(directories[0]), str(directories[0]), 10)
    deadline, version = time.monotonic() + 300, 10
    with Callers(engine.url) as callers:
        while not callers.mixed() and not callers.failures:
            version += 1
            asked = len(callers.answers) + callers.count
            directory = directories[version % 2]
            with sender(directory, engine) as sending:
                options = by(sending.source(), directory, running="continue")
                (replica,) = engine.ensure(CONFIG, str(directories[0]), str(directory), version, options)
            assert (replica.transport, replica.transport_note, sending.sent) == ("transfer", None, 1)
            # Every caller was in the middle of an answer; those are to come to their end.
            while len(callers.answers) < asked and not callers.failures:
                assert time.monotonic() < deadline, "no refit met a running generation"
                time.sleep(0.01)
    assert callers.failures == []
    answer = callers.mixed()[0]
    assert answer.version_spans is not None
    begin = 0
    for span in answer.version_spans:
        end = begin + span["tokens"]
        directory = directories[span["version"] % 2]
        expected = tiny.reference_logprobs(directory, answer.prompt_token_ids, answer.generation_token_ids)
        assert answer.generation_log_probs[begin:end] == pytest.approx(expected[begin:end], abs=1e-3)
        begin = end
    assert begin == len(answer.generation_token_ids)


def test_what_bars_a_transfer_is_told_and_the_checkpoint_is_read(
    engine: ProcessEngine, policies: dict[str, Path]
) -> None:
    model, second = str(policies["first"]), policies["second"]
    engine.ensure(CONFIG, model, model, 100)
    with sender(second, engine) as sending:
        late = sending.source().model_copy(update={"replicas": ["another"]})
        (replica,) = engine.ensure(CONFIG, model, str(second), 101, by(late, second))
        assert (replica.transport, replica.transport_note) == (
            "store",
            "transfer: this replica was not there when the weights were published",
        )
        assert sending.sent == 0
        # The sender's are not the weights that are wanted.
        options = by(sending.source(), policies["first"])
        (replica,) = engine.ensure(CONFIG, model, model, 102, options)
        assert (replica.transport, replica.digest) == ("store", digest_of(policies["first"]))
        assert f"{digest_of(second)} came" in str(replica.transport_note)
        gone = sending.source().model_copy(update={"port": 9})
    (replica,) = engine.ensure(CONFIG, model, str(second), 103, by(gone, second))
    assert replica.transport == "store"
    assert "cannot be reached" in str(replica.transport_note)
    assert replica.ready


SENDER_THAT_DIES = """
import os, signal, sys
from pathlib import Path
from roundhouse.plugins.transfer import gloo
from tests.plugins.transfer.ends import file_sender

cut = gloo.batches

def cut_short(*given):
    for number, batch in enumerate(cut(*given)):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch

gloo.batches = cut_short
directory, replica, seconds, batch_bytes = sys.argv[1:]
with file_sender(Path(directory), [replica], float(seconds), int(batch_bytes)) as sender:
    print(sender.source().model_dump_json(), flush=True)
    sys.stdin.read()
"""


def test_a_sender_that_dies_in_the_middle_leaves_nobody_served_until_the_checkpoint_is_in(
    engine: ProcessEngine, policies: dict[str, Path], tmp_path: Path
) -> None:
    model, second = str(policies["first"]), policies["second"]
    (before,) = engine.ensure(CONFIG, model, model, 200)
    command = [sys.executable, "-c", SENDER_THAT_DIES, str(second), before.replica_id, str(SECONDS), str(BATCH_BYTES)]
    process = fork_server.start(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        way = TransferSource.model_validate_json(process.stdout.readline())
        missing = tmp_path / "checkpoint"
        with pytest.raises(DeploymentFailed, match="does not exist"):
            engine.ensure(CONFIG, model, str(missing), 201, by(way, second))
        assert process.wait(timeout=60) == -9, "it was killed in the middle"
    finally:
        process.kill()
        process.communicate()
    body = {"model": "policy", "messages": tiny.TOOL_MESSAGES, "max_tokens": 4}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "policy_unavailable")
    shutil.copytree(second, missing)
    (whole,) = engine.ensure(CONFIG, model, str(missing), 201, by(way, second))
    assert (whole.ready, whole.transport, whole.pid) == (True, "store", before.pid)
    assert httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    (reread,) = engine.ensure(CONFIG, model, str(second), 202)
    require_agreement([whole, reread], "float32")
    assert whole.probe == reread.probe != before.probe


@pytest.mark.parametrize("make", [tiny.make_model, tiny.make_moe_model])
def test_what_ranks_have_trained_goes_from_their_shards_to_the_workers_that_share_each_matrix(
    make: Callable[..., Path], two_workers: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = CONFIG.model_dump(mode="json") | {"engine_url": two_workers.url, "weight_sync": "transfer"}
    generation["engine_args"] |= {"tensor_parallel_size": 2}
    train = {"device": "cpu", "threads": 1, "service": {"kind": "resident", "processes": 2}}
    tree = {"run_id": "r", "store": str(tmp_path / "store"), "generation": generation, "train": train}
    more = {"infra": {"state": str(tmp_path / "state")}, "validation": {"recompute_tolerance": None}}
    run = open_run(parse_config(tree | more))
    versions = [publish_starting_policy(run, make(tmp_path / "v0", seed=1), {})]
    refit_iteration(run, 1, versions[0])
    monkeypatch.setattr(RunCheckpoint, "in_engine_format", None)  # by which the flow's process would read it
    try:
        probes = []
        for iteration in (1, 2):
            batch = sequences(run, iteration)
            versions.append(publish(run, train_iteration(run, iteration, batch, versions[-1], tmp_path / "cache")))
            details = read_manifest(refit_iteration(run, iteration + 1, versions[-1])).details
            assert [(one["way"], one["note"]) for one in details["replicas"]] == [("transfer", None)]
            assert details["proof"]["digest"] == read_manifest(versions[-1]).details["weights_digest"]
            probes.append(details["proof"]["probe"])
        changes = {"generation": generation | {"weight_sync": "store"}}
        (read,) = ensure_version(open_run(parse_config(tree | more | changes)), versions[1])
        assert (read.transport, read.probe) == ("store", probes[0]), "what was sent computes as what was read"
        assert probes[0] != probes[1]
    finally:
        release_trainers()
