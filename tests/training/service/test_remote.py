"""The train service over real HTTP: the same bits as in process, whatever the network does."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse.config.algorithms import CrossEntropyConfig, GRPOConfig
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.store.directories import DIGESTS
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.service.client import RemoteTrainService
from roundhouse.training.service.server import require_token_beyond_loopback
from roundhouse.training.trainer import Trainer
from tests.ports import free_port
from tests.training.service.serving import train_server
from tests.training.tiny import make_model, record, sequences

CONFIG = TrainConfig(
    minibatches=3, threads=1, device="cpu", algorithm=GRPOConfig(kl_coefficient=0.05, entropy_coefficient=0.01)
)
TOKEN = "a-token-of-a-test"


@pytest.fixture
def server(model_dir: Path, tmp_path: Path) -> Iterator[str]:
    with train_server(model_dir, tmp_path / "server", token=TOKEN) as url:
        yield url


def remote(url: str, owner: str = "run-1", **options: object) -> RemoteTrainService:
    given = {"token": TOKEN, "temperature": 0.9, "timeout_seconds": 30, "retry_seconds": 3} | options
    return RemoteTrainService(url, CONFIG, owner=owner, **given)  # type: ignore[arg-type]


def files(directory: Path) -> dict[str, bytes]:
    return {
        f.relative_to(directory).as_posix(): f.read_bytes()
        for f in directory.rglob("*")
        if f.is_file() and f.name != DIGESTS
    }


def in_process(model_dir: Path, reference_dir: Path, directory: Path, iterations: int = 2) -> dict[str, bytes]:
    trainer = Trainer.load(model_dir, CONFIG, reference_dir=reference_dir, seed=5, temperature=0.9)
    for iteration in range(1, iterations + 1):
        trainer.step(sequences(seed=iteration), iteration)
    trainer.save(directory)
    return files(directory)


class FakeNetwork(httpx.HTTPTransport):
    """Sends every request, and then loses the first reply to each path that changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        answer.read()
        if "x-roundhouse-call" in request.headers and self.lost.count(request.url.path) < 2:
            self.lost.append(request.url.path)
            raise httpx.ReadError("the reply was lost", request=request)
        return answer


def test_a_remote_service_writes_the_same_checkpoint_as_this_process(
    server: str, model_dir: Path, reference_dir: Path, tmp_path: Path
) -> None:
    local = Trainer.load(model_dir, CONFIG, reference_dir=reference_dir, seed=5, temperature=0.9)
    trainer = Trainer.over(remote(server), model_dir, CONFIG, reference_dir=reference_dir, seed=5)
    for iteration in (1, 2):
        ours, theirs = (each.step(sequences(seed=iteration), iteration) for each in (local, trainer))
        speed = {"tokens_per_second"}
        assert {k: v for k, v in ours.metrics.items() if k not in speed} == {
            k: v for k, v in theirs.metrics.items() if k not in speed
        }
        assert ours.columns.equals(theirs.columns)
    for each, name in ((local, "local"), (trainer, "remote")):
        each.save(tmp_path / name)
    assert files(tmp_path / "local") == files(tmp_path / "remote")
    trainer.close()


def test_a_lost_reply_never_applies_an_update_twice(
    server: str, model_dir: Path, reference_dir: Path, tmp_path: Path
) -> None:
    network = FakeNetwork()
    service = remote(server, transport=network, retry_seconds=30)
    trainer = Trainer.over(service, model_dir, CONFIG, reference_dir=reference_dir, seed=5)
    for iteration in (1, 2):
        trainer.step(sequences(seed=iteration), iteration)
    trainer.save(tmp_path / "remote")
    assert {path: network.lost.count(path) for path in network.lost} == {
        "/v1/load_checkpoint": 2,
        "/v1/forward_backward": 2,
        "/v1/optim_step": 2,
        "/v1/store_checkpoint": 2,
    }
    assert files(tmp_path / "remote") == in_process(model_dir, reference_dir, tmp_path / "local")
    trainer.close()


def test_a_remote_run_that_is_saved_and_resumed_equals_the_uninterrupted_one(
    server: str, model_dir: Path, reference_dir: Path, tmp_path: Path
) -> None:
    first = Trainer.over(remote(server), model_dir, CONFIG, reference_dir=reference_dir, seed=5)
    first.step(sequences(seed=1), 1)
    first.save(tmp_path / "half")
    state = tmp_path / "half/trainer"
    second = Trainer.over(
        remote(server), tmp_path / "half", CONFIG, trainer_state=state, reference_dir=reference_dir, seed=5
    )
    second.step(sequences(seed=2), 2)
    second.save(tmp_path / "whole")
    assert files(tmp_path / "whole") == in_process(model_dir, reference_dir, tmp_path / "local")
    second.close()


def test_a_server_that_restarted_is_noticed_and_the_trainer_refuses_to_go_on(model_dir: Path, tmp_path: Path) -> None:
    config = TrainConfig(minibatches=2, threads=1, device="cpu")
    port = free_port()
    with train_server(model_dir, tmp_path / "before", port=port) as url:
        service = RemoteTrainService(url, config, owner="run-1", timeout_seconds=30, retry_seconds=2)
        trainer = Trainer.over(service, model_dir, config)
        trainer.step(sequences(seed=1), 1)
    with (
        train_server(model_dir, tmp_path / "after", port=port),
        pytest.raises(InfraError, match="restarted, or the session ended"),
    ):
        trainer.step(sequences(seed=2), 2)
    with pytest.raises(InfraError, match=r"did not answer.*Is it running"):
        trainer.save(tmp_path / "saved")


def test_without_the_token_no_control_call_is_answered(server: str, model_dir: Path) -> None:
    assert httpx.get(f"{server}/health").json() == {"status": "ok"}
    for token in (None, "another"):
        with pytest.raises(ConfigError, match="bearer token"):
            remote(server, token=token).load_checkpoint(model_dir)
    for method, path in (("POST", "/v1/session"), ("POST", "/v1/facts"), ("POST", "/v1/optim_step"), ("GET", "/docs")):
        assert httpx.request(method, f"{server}{path}").status_code == 401, path
    foreign = httpx.post(f"{server}/v1/session", headers={"authorization": f"Bearer {TOKEN}"}, content=b"{}")
    assert foreign.status_code == 400
    assert "x-roundhouse-protocol" in foreign.json()["message"]


def test_beyond_loopback_a_token_is_required() -> None:
    for host in ("0.0.0.0", "10.0.0.7", "::", "train.example"):
        with pytest.raises(ConfigError, match=f"--host {host}.*ROUNDHOUSE_TRAIN_TOKEN"):
            require_token_beyond_loopback(host, None)
        require_token_beyond_loopback(host, TOKEN)
    for host in ("127.0.0.1", "::1", "localhost"):
        require_token_beyond_loopback(host, None)


def test_one_run_at_a_time_but_a_run_that_restarts_takes_over_at_once(server: str, model_dir: Path) -> None:
    first = remote(server)
    first.load_checkpoint(model_dir)
    with pytest.raises(InfraError, match=r"belongs to 'run-1'"):
        remote(server, owner="run-2").load_checkpoint(model_dir)
    again = remote(server)
    again.load_checkpoint(model_dir)
    with pytest.raises(InfraError, match="session ended"):
        first.optim_step(1e-3, 1.0)
    again.close()
    remote(server, owner="run-2").load_checkpoint(model_dir)


def test_a_silent_run_loses_the_service_to_another(model_dir: Path, tmp_path: Path) -> None:
    with train_server(model_dir, tmp_path / "server", token=TOKEN, idle_seconds=0.2) as url:
        silent = remote(url)
        silent.load_checkpoint(model_dir)
        time.sleep(0.3)
        remote(url, owner="run-2").load_checkpoint(model_dir)
        with pytest.raises(InfraError, match="session ended"):
            silent.facts()


def test_a_session_that_cannot_begin_does_not_keep_the_service_from_another_run(server: str, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="temperature is 0"):
        remote(server, temperature=0.0).load_checkpoint(model_dir)
    remote(server, owner="run-2").load_checkpoint(model_dir)


def test_a_request_over_its_time_limit_names_the_key_to_raise(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        service = remote(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.2, retry_seconds=0)
        with pytest.raises(InfraError, match=r"within train\.service\.timeout_seconds \(0\.2 s\)\. Raise it"):
            service.load_checkpoint(model_dir)


def test_a_checkpoint_of_another_architecture_is_refused(server: str, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", vocabulary=80)
    with pytest.raises(DataError, match=r"another architecture.*vocab_size is 80, the service's 64"):
        remote(server).load_checkpoint(other)


def test_a_body_above_the_limit_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with train_server(model_dir, tmp_path / "server", token=TOKEN, max_body_bytes=4000) as url:
        trainer = Trainer.over(remote(url), model_dir, TrainConfig(minibatches=1))
        with pytest.raises(DataError, match="larger than 4000 bytes"):
            trainer.step(sequences(), 1)


def several_from_one_rollout() -> list[dict[str, Any]]:
    """A group with rollouts split into sequences, one of a single rollout of three sequences, and an ordinary one."""
    rows = [record(f"a{i}/{part}", "a", float(i % 2), rollout=f"a{i}") for i in range(4) for part in range(1 + i % 3)]
    rows += [record(f"b/{part}", "b", 0.7, rollout="b") for part in range(3)]
    return rows + [record(f"c{i}", "c", float(i == 0)) for i in range(4)]


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPOConfig(),
        CrossEntropyConfig(kind="cross_entropy", select="threshold", reward_threshold=0.5),
        CrossEntropyConfig(kind="cross_entropy"),
    ],
    ids=["grpo", "rejection sampling", "supervised"],
)
def test_grpo_and_cross_entropy_train_remotely_on_rollouts_of_several_sequences(
    server: str, model_dir: Path, tmp_path: Path, algorithm: Any
) -> None:
    """Two defects of a peer's remote trainers: several sequences of one rollout gave a NaN advantage, and cross-entropy asked
    for an advantage that imitation does not have."""
    config = TrainConfig(minibatches=2, threads=1, device="cpu", algorithm=algorithm)
    batch = TrainingSequences.from_records(several_from_one_rollout())
    local = Trainer.load(model_dir, config, seed=5)
    service = RemoteTrainService(server, config, owner="run-1", token=TOKEN, timeout_seconds=30, retry_seconds=3)
    trainer = Trainer.over(service, model_dir, config, seed=5)
    ours, theirs = (each.step(batch, 1) for each in (local, trainer))
    assert theirs.updates == 2
    assert all(math.isfinite(value) for value in theirs.metrics.values())
    assert ours.columns.equals(theirs.columns)
    for each, name in ((local, "local"), (trainer, "remote")):
        each.save(tmp_path / name)
    assert files(tmp_path / "local") == files(tmp_path / "remote")
    assert files(tmp_path / "remote")["model.safetensors"] != (model_dir / "model.safetensors").read_bytes()
