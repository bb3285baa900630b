"""The train service in a real Ray actor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.models import TrainConfig
from roundhouse.config.training import RayService
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.stages.trainers import open_service
from roundhouse.training.service.actor import ActorChannel
from roundhouse.training.service.wire import ChannelService
from roundhouse.training.trainer import Trainer
from tests.training.service.test_remote import files
from tests.training.tiny import make_model, sequences

pytestmark = pytest.mark.real

CONFIG = TrainConfig(
    minibatches=2, threads=1, device="cpu", algorithm=GRPOConfig(kl_coefficient=0.05), service=RayService(kind="ray")
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.long
def test_an_actor_writes_what_this_process_writes_and_its_loss_is_an_infrastructure_error(
    model_dir: Path, reference_dir: Path, tmp_path: Path
) -> None:
    local = Trainer.load(model_dir, CONFIG, reference_dir=reference_dir, seed=5)
    service = open_service(CONFIG, owner="run-1", temperature=1.0)
    trainer = Trainer.over(service, model_dir, CONFIG, reference_dir=reference_dir, seed=5)
    for iteration in (1, 2):
        for each in (local, trainer):
            each.step(sequences(seed=iteration), iteration)
    for each, name in ((local, "local"), (trainer, "actor")):
        each.save(tmp_path / name)
    assert files(tmp_path / "local") == files(tmp_path / "actor")
    other = make_model(tmp_path / "other", vocabulary=80)
    with pytest.raises(DataError, match="another architecture"):
        service.load_checkpoint(other)
    trainer.close()
    with pytest.raises(InfraError, match="train actor was lost"):
        trainer.step(sequences(seed=3), 3)


def test_an_actor_that_the_cluster_has_no_room_for_is_an_infrastructure_error(model_dir: Path) -> None:
    wanting = CONFIG.model_copy(update={"service": RayService(kind="ray", gpus=1, timeout_seconds=2)})
    service = open_service(wanting, owner="run-1", temperature=1.0)
    with pytest.raises(InfraError, match=r"within train.service.timeout_seconds \(2 s\).*GPUs"):
        service.load_checkpoint(model_dir)
    service.close()


def test_an_actor_that_cannot_begin_answers_with_the_reason_and_leaves_nothing_on_its_disk(model_dir: Path) -> None:
    service = open_service(CONFIG, owner="run-1", temperature=0.0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="temperature is 0"):
            service.load_checkpoint(model_dir)
    assert isinstance(service, ChannelService)
    assert isinstance(service.channel, ActorChannel)
    scratch = Path(ray.get(service.channel.actor.__ray_call__.remote(lambda actor: actor._scratch.name)))
    assert scratch.is_dir()
    service.close()
    assert not scratch.exists()
