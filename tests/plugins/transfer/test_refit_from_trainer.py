"""A refit by `transfer` takes the weights from the trainer that has just made them; the checkpoint is not read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.deployment import ProcessEngine
from roundhouse.plugins.transfer.transport import Sender, TransferSource, take_seat
from roundhouse.stages import train as stage
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import ensure_version
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.base import RunCheckpoint
from roundhouse.weight_sync.replica_state import RefitOptions, ReplicaReport
from tests.plugins.transfer.ends import offer_to
from tests.plugins.transfer.test_meeting import received
from tests.stages.test_state_beside import files, run_at
from tests.stages.test_train import make_run, sequences


class OneReplica(ProcessEngine):
    """Replica that keeps only the digest of the received weights."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.states = [self._report(None, {})]

    def _report(self, digest: str | None, given: dict[str, Any]) -> ReplicaReport:
        return ReplicaReport.parse({"replica_id": "a", "pid": 1, "ready": True, "digest": digest, **given})

    def replicas(self) -> list[ReplicaReport]:
        return self.states[-1:]

    def ensure(self, *given: Any) -> list[ReplicaReport]:
        options = given[-1]
        assert isinstance(options, RefitOptions)
        source = TransferSource.model_validate(options.source)
        digest = received(take_seat(source, "a", 1))
        assert digest == options.digest
        self.states.append(self._report(digest, {"transport": source.kind}))
        return self.replicas()


@pytest.fixture(autouse=True)
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("roundhouse.stages.refit._hold_exchange", lambda *_: None)
    trainer_home.release_trainers()
    yield
    trainer_home.release_trainers()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions of the checkpoints that were read to be sent."""
    found: list[int] = []
    usual = RunCheckpoint.in_engine_format

    @contextmanager
    def noted(self: RunCheckpoint, uri: str | None = None) -> Iterator[Path]:
        found.append(self.reference.policy_version)
        with usual(self, uri) as directory:
            yield directory

    monkeypatch.setattr(RunCheckpoint, "in_engine_format", noted)
    return found


def transferring(tmp_path: Path, beside: int | None = None) -> Run:
    config = run_at(str(tmp_path / "store"), tmp_path, beside).config.model_dump(mode="json")
    return open_run(
        parse_config(config | {"run_id": "t", "generation": {"weight_sync": "transfer", "dtype": "bfloat16"}})
    )


def trained(run: Run, iteration: int, base: Reference, cache: Path) -> Reference:
    return publish(run, stage.train_iteration(run, iteration, sequences(run, iteration), base, cache))


def test_versions_come_from_the_trainer_that_holds_them_and_others_from_the_store(
    tmp_path: Path, read: list[int]
) -> None:
    run, engine = transferring(tmp_path), OneReplica()
    versions = [starting_policy(run)]
    for iteration in (1, 2):
        versions.append(trained(run, iteration, versions[-1], tmp_path / "cache"))
        ensure_version(run, versions[-1], engine)
    assert read == []
    ensure_version(run, versions[1], engine)
    trainer_home.release_trainers()
    ensure_version(run, versions[2], engine)
    assert read == [1, 2]
    digests = [one.digest for one in engine.states[1:]]
    assert digests == [digests[0], digests[1], digests[0], digests[1]]
    assert digests[0] != digests[1]


def test_a_trainer_at_work_is_not_disturbed_and_a_step_waits_for_the_refit_under_way(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, engine = transferring(tmp_path), OneReplica()
    first = trained(run, 1, starting_policy(run), tmp_path / "cache")
    usual, began, steps = TrainEngine.end_transfer, threading.Event(), []

    def ends(self: TrainEngine) -> None:
        if self._sender is not None:
            began.set()
            assert not step.is_alive() or not steps
            threading.Event().wait(0.2)
            assert steps == []
        usual(self)

    def noted(self: Trainer, *given: Any) -> Any:
        steps.append(given[1])
        return plain(self, *given)

    plain = Trainer.step
    monkeypatch.setattr(TrainEngine, "end_transfer", ends)
    monkeypatch.setattr(Trainer, "step", noted)
    step = threading.Thread(target=trained, args=(run, 2, first, tmp_path / "cache"))
    refit = threading.Thread(target=ensure_version, args=(run, first, engine))
    refit.start()
    assert began.wait(60)
    step.start()
    refit.join(60)
    step.join(60)
    assert (steps, read) == ([2], [])
    with trainer_home.trainer_holding(run, run.checkpoint(2).reference() or first) as held:
        assert held is not None
        ensure_version(run, run.checkpoint(2).reference() or first, engine)
    assert read == [2]


def test_the_state_that_is_written_beside_other_work_comes_after_the_weights(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, engine = transferring(tmp_path, beside=0), OneReplica()
    version = trained(run, 1, starting_policy(run), tmp_path / "cache")
    assert run.trainer_state(1).reference() is None
    ensure_version(run, version, engine)
    assert read == []
    assert any(name.startswith("trainer/") for name in files(run, 1))
    second = trained(run, 2, version, tmp_path / "cache")  # nothing is refitted in between
    trained(run, 3, second, tmp_path / "cache")
    assert any(name.startswith("trainer/") for name in files(run, 2))


def test_a_trainer_that_cannot_send_leaves_it_to_the_process_that_refits(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, engine = transferring(tmp_path), OneReplica()
    version = trained(run, 1, starting_policy(run), tmp_path / "cache")

    def fails(*_: Any) -> None:
        raise InfraError("a rank was lost")

    monkeypatch.setattr(TrainEngine, "begin_transfer", fails)
    [found] = ensure_version(run, version, engine)
    assert (found.transport, read) == ("transfer", [1])


@pytest.mark.real
def test_a_trainer_that_cannot_end_its_transfer_is_kept_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    start = starting_policy(run)
    stage.train_iteration(run, 1, sequences(run, 1), start, tmp_path / "cache")
    trainer = trainer_home.trainer_home(run).trainer
    assert trainer is not None
    engine, end = trainer.engine, Sender.end
    engine.begin_transfer(offer_to(["a"], 1.0), engine.weights_digest()[0])
    monkeypatch.setattr(Sender, "end", lambda sender, patience: end(sender, patience) and False)
    with pytest.raises(InfraError, match="A replica did not receive"):
        trainer_home.release_trainers()
    assert trainer_home.trainer_home(run).trainer is None
    with pytest.raises(DataError, match="No policy was loaded"):
        engine.facts()
