"""A trainer sends the weights of the checkpoint that it wrote, from one process or from ranks that give their rows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from roundhouse.errors import ConfigError, DataError
from roundhouse.launch.resident_ranks import ResidentRanks
from roundhouse.plugins.transfer.transport import NoSeat, TransferOffer, take_seat
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service.client import RemoteTrainService
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.verbs import TrainService
from roundhouse.weight_sync.base import Dtype
from roundhouse.weight_sync.sending import TransferBegun, WeightHolder
from roundhouse.weight_sync.tensor_files import digest_of, digest_of_tensors, retype, tensor_digests, weight_files
from tests import fork_server
from tests.plugins.transfer.ends import offer_to
from tests.plugins.transfer.test_meeting import MEMBER_THAT_DIES, received
from tests.training.service.serving import train_server
from tests.training.service.test_engine import loss_batch
from tests.training.test_resident_ranks import ALONE, ranks_of, step

pytestmark = pytest.mark.real

SECONDS = 60.0
BATCH = loss_batch([0, 1, 2, 3, 4, 5])


@pytest.fixture(scope="module")
def together() -> Iterator[ResidentRanks]:
    service = ranks_of()
    yield service
    service.close()


@pytest.fixture(params=["alone", "together", "remote"])
def trainer(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[TrainService]:
    torch.set_num_threads(1)
    if request.param == "together":
        yield request.getfixturevalue("together")
    elif request.param == "alone":
        yield TrainEngine(ALONE, temperature=0.9)
    else:
        with train_server(model_dir, tmp_path / "scratch") as url:
            yield RemoteTrainService(url, ALONE, owner="run", temperature=0.9, retry_seconds=60)


def begin(trainer: TrainService, offer: TransferOffer, digest: str) -> TransferBegun:
    assert isinstance(trainer, WeightHolder)
    return trainer.begin_transfer(offer, digest)


def written(trainer: TrainService, model_dir: Path, directory: Path) -> Path:
    """A checkpoint of a step that the trainer has just done."""
    trainer.load_checkpoint(model_dir)
    step(trainer, BATCH)
    trainer.save_checkpoint(directory, Cursor(optimizer_steps=1))
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_replica_gets_the_checkpoint_in_the_engines_format_and_training_goes_on(
    dtype: Dtype, trainer: TrainService, model_dir: Path, tmp_path: Path
) -> None:
    checkpoint = written(trainer, model_dir, tmp_path / "checkpoint")
    before = trainer.forward(BATCH.tokens)
    (tmp_path / "retyped").mkdir()
    retype(checkpoint, tmp_path / "retyped", dtype)
    begun = begin(trainer, offer_to(["a", "b"], SECONDS, dtype=dtype), digest_of(checkpoint))
    assert begun.digest == digest_of_tensors(tensor_digests(weight_files(tmp_path / "retyped")))
    with ThreadPoolExecutor(2) as replicas:
        found = replicas.map(lambda name: received(take_seat(begun.source, name, 1)), ("a", "b"))
        assert set(found) == {begun.digest}
    assert received(take_seat(begun.source, "a that comes late", 1)) == begun.digest
    assert isinstance(trainer, WeightHolder)
    trainer.end_transfer()
    trainer.end_transfer()
    with pytest.raises(NoSeat):
        take_seat(begun.source.model_copy(update={"seconds": 1.0}), "a", 1)
    assert (trainer.forward(BATCH.tokens) == before).all()
    step(trainer, BATCH)


def test_what_is_not_the_checkpoint_is_not_sent(together: ResidentRanks, model_dir: Path, tmp_path: Path) -> None:
    digest = digest_of(written(together, model_dir, tmp_path / "checkpoint"))
    step(together, BATCH)
    with pytest.raises(DataError, match=f"the checkpoint's is {digest}"):
        together.begin_transfer(offer_to(["a"], SECONDS), digest)
    by_nccl = offer_to(["a"], SECONDS).model_copy(update={"backend": "nccl"})
    digest = digest_of(written(together, model_dir, tmp_path / "another"))
    with pytest.raises(ConfigError, match="transfer_backend is nccl"):
        together.begin_transfer(by_nccl, digest)
    step(together, BATCH)


def test_a_replica_that_is_killed_in_the_middle_keeps_no_rank(
    together: ResidentRanks, model_dir: Path, tmp_path: Path
) -> None:
    checkpoint = written(together, model_dir, tmp_path / "checkpoint")
    begun = together.begin_transfer(offer_to(["dying"], SECONDS, batch_bytes=10_000), digest_of(checkpoint))
    command = [sys.executable, "-c", MEMBER_THAT_DIES, begun.source.model_dump_json()]
    assert fork_server.run(command, check=False, timeout=SECONDS).returncode == -signal.SIGKILL
    assert received(take_seat(begun.source, "a", 1)) == begun.digest
    together.end_transfer()
    step(together, BATCH)
