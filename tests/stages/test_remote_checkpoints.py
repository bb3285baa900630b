"""A train server reads and writes checkpoints in the store itself: none of their bytes pass through the flow's process."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, InfraError, StoreError
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.directories import StoredModel
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, model_location, read_manifest
from roundhouse.training.service.client import RemoteTrainService
from roundhouse.training.service.protocol import StoreCheckpoint
from tests import fork_server
from tests.ports import free_port
from tests.stages.test_train import checkpoint_digests, make_run, sequences
from tests.training.service.serving import train_server
from tests.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_resident_trainer")]

MIB = 2**20


@pytest.fixture(scope="module")
def large_policy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy of 7 M parameters: a checkpoint of 78 MiB with its moments."""
    place = tmp_path_factory.mktemp("large")
    start = model_location(Location(starting_policy(make_run(str(place / "store"), place)).uri)).local_path
    shutil.copytree(start, place / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    shape = AutoConfig.from_pretrained(start)
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "layer_types": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(type(shape)(**{**shape.to_dict(), **size})).save_pretrained(place / "model")
    return {"kind": "pretrained", "path": str(place / "model")}


def run_of(policy: dict[str, str], store: str, tmp_path: Path, **service: Any) -> Run:
    tree = make_run(f"{store}-unused", tmp_path, **service).config.model_dump(mode="json", exclude_unset=True)
    return open_run(parse_config(tree | {"store": store, "policy": policy}))


@contextmanager
def server_process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`roundhouse train-server`, answering."""
    command = [str(Path(sys.executable).with_name("roundhouse")), "train-server", "--device", "cpu", "--threads", "1"]
    process = fork_server.start([*command, "--port", str(port)])
    try:
        until(lambda: _answers(port), "a train server that answers", process=process)
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


def train(run: Run, iteration: int, base: Reference, tmp_path: Path) -> Reference:
    return publish(run, train_iteration(run, iteration, sequences(run, iteration), base, tmp_path / "cache"))


def test_the_flow_takes_no_more_memory_for_a_checkpoint_however_large_it_is(
    large_policy: dict[str, str], store_uri: str, tmp_path: Path
) -> None:
    """Than for one of 0.3 MiB, in two iterations with a server that loads the second anew."""
    port = free_port()
    service = {"kind": "remote", "url": f"http://127.0.0.1:{port}"}
    with server_process(port):
        peaks, sizes = [], []
        for run in (
            make_run(f"{store_uri}/small", tmp_path, **service),
            run_of(large_policy, f"{store_uri}/large", tmp_path, **service),
        ):
            checkpoint = starting_policy(run)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before = _memory("VmHWM")
            for iteration in (1, 2):
                checkpoint = train(run, iteration, checkpoint, tmp_path)
                trainer_home.release_trainers()
            peaks.append(_memory("VmHWM") - before)
            sizes.append(sum(entry.size for entry in read_manifest(checkpoint).files) / MIB)
    assert sizes[1] > 70 > 70 * sizes[0]
    assert peaks[1] < peaks[0] + 16, peaks
    assert not (tmp_path / "cache").exists(), "nor is one on its disk"


def _memory(key: str) -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024


def test_a_server_that_is_killed_in_the_middle_of_a_file_publishes_nothing(
    large_policy: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    service = {"kind": "remote", "url": f"http://127.0.0.1:{port}", "retry_seconds": 1}
    run = run_of(large_policy, str(tmp_path / "store"), tmp_path, **service)
    base, batch = starting_policy(run), sequences(run, 1)
    place = run.checkpoint(1).location.local_path
    cut = threading.Event()
    with server_process(port) as process:

        def kill() -> None:
            while not any(file.stat().st_size > MIB for file in place.glob(".saving-*/**/*safetensors*")):
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
            cut.set()

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(InfraError, match="did not answer"):
            train_iteration(run, 1, batch, base, tmp_path / "cache")
    assert cut.is_set()
    written = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) / MIB
    assert 1 < written < 70, "a part of it was written"
    assert run.stage(1, "train").reference() is None
    assert run.checkpoint(1).reference() is None
    with server_process(port):
        checkpoint = publish(run, train_iteration(run, 1, batch, base, tmp_path / "cache"))
    resident = run_of(large_policy, str(tmp_path / "resident"), tmp_path)
    expected = train(resident, 1, starting_policy(resident), tmp_path)
    assert checkpoint_digests(checkpoint) == checkpoint_digests(expected)


def test_a_store_that_the_server_does_not_see_is_refused(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    base = starting_policy(run)
    with train_server(model_location(Location(base.uri)).local_path, tmp_path / "server") as url:
        service = RemoteTrainService(url, run.config.train, owner="r", timeout_seconds=30, retry_seconds=2)
        shutil.move(tmp_path / "store", tmp_path / "elsewhere")
        with pytest.raises(
            ConfigError, match=f"{base.uri} is not on the train service's machine.* Set store .* to s3://"
        ):
            service.load_checkpoint(StoredModel(uri=base.uri))
        unseen = StoreCheckpoint(place=base.uri, attempt="0001", cursor=None)
        with pytest.raises(ConfigError, match="is not on the train service's machine"):
            service.channel.change("store_checkpoint", unseen.model_dump_json().encode())
        assert not (tmp_path / "store").exists()
        service.close()


def test_a_damaged_file_is_the_stores_fault_as_it_is_in_this_process(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    base = starting_policy(run)
    [weights] = [entry for entry in read_manifest(base).files if entry.path.endswith("model.safetensors")]
    (Location(base.uri).local_path / weights.path).write_bytes(b"damaged")
    with train_server(model_location(Location(base.uri)).local_path, tmp_path / "server") as url:
        service = RemoteTrainService(url, run.config.train, owner="r", timeout_seconds=30, retry_seconds=2)
        with pytest.raises(StoreError, match=r"On the train service, .*model.safetensors is damaged"):
            service.load_checkpoint(StoredModel.of(base, tmp_path / "cache"))
        service.close()


def test_a_path_that_is_another_directory_on_the_server_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    start = model_location(Location(starting_policy(run).uri)).local_path
    with train_server(start, tmp_path / "server") as url:
        service = RemoteTrainService(url, run.config.train, owner="r", timeout_seconds=30, retry_seconds=2)
        service.load_checkpoint(start)
        change = service.channel.change

        def elsewhere(verb: str, body: bytes) -> bytes:
            return change(verb, body.replace(b"/here", b"/there"))

        (tmp_path / "there").mkdir()
        monkeypatch.setattr(service.channel, "change", elsewhere)
        with pytest.raises(ConfigError, match=r"here/a0001-\w+, which does not exist here: .* Set store to s3://"):
            service.store_checkpoint(Location(str(tmp_path / "here")), "0001", None)
        service.close()
