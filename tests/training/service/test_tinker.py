"""The Tinker client by the real SDK, against a server that speaks its API and knows nothing of roundhouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from roundhouse.config.algorithms import CISPOConfig, CrossEntropyConfig, GRPOConfig
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.service.tinker import TinkerPointer, TinkerTrainService
from roundhouse.training.service.verbs import ModelFacts
from roundhouse.training.trainer import Trainer
from tests.training.service.serving import listening
from tests.training.service.tinker_server import FakeTinker
from tests.training.tiny import VOCABULARY, sequences

KEY = "tml-test"
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5)


@pytest.fixture
def server(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeTinker, str]]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    fake = FakeTinker(model_dir, KEY)
    with listening(fake.app) as url:
        yield fake, url


@pytest.fixture
def start(tmp_path: Path) -> Path:
    directory = tmp_path / "start"
    directory.mkdir()
    (directory / "tinker.json").write_text(TinkerPointer(base_model="tiny").model_dump_json())
    return directory


def service(url: str, key: str = KEY) -> TinkerTrainService:
    facts = ModelFacts(vocabulary=VOCABULARY, positions=256)
    return TinkerTrainService(OPTIMIZER, facts, run="run-1", base_url=url, api_key=key, timeout_seconds=30)


def config(algorithm: Any, updates: int = 3) -> TrainConfig:
    return TrainConfig(algorithm=algorithm, optimizer=OPTIMIZER, minibatches=updates, threads=1, device="cpu")


def distance(fake: FakeTinker, local: Trainer, start: dict[str, torch.Tensor]) -> float:
    """Of the two models' ways from the start, relative to their length."""
    ours, theirs = dict(local.model.named_parameters()), dict(fake.model.named_parameters())
    apart = sum(float((ours[name] - theirs[name]).detach().double().square().sum()) for name in ours)
    return (apart / sum(float((ours[name] - start[name]).detach().double().square().sum()) for name in ours)) ** 0.5


@pytest.mark.parametrize(
    ("algorithm", "losses"),
    [
        (GRPOConfig(), ["importance_sampling", "ppo", "ppo"]),
        (CISPOConfig(kind="cispo", mismatch_correction="none"), ["cispo"] * 3),
        (CrossEntropyConfig(kind="cross_entropy"), ["cross_entropy"] * 3),
    ],
    ids=["grpo", "cispo", "cross_entropy"],
)
def test_the_driver_trains_on_tinker_as_in_process(
    server: tuple[FakeTinker, str], start: Path, model_dir: Path, algorithm: Any, losses: list[str]
) -> None:
    fake, url = server
    local = Trainer.load(model_dir, config(algorithm), seed=5)
    before = {name: p.detach().clone() for name, p in local.model.named_parameters()}
    trainer = Trainer.over(service(url), start, config(algorithm), seed=5)
    ours, theirs = (each.step(sequences(), 1) for each in (local, trainer))
    assert fake.losses == losses
    assert fake.sequence == sorted(fake.sequence)
    assert distance(fake, local, before) < 2e-3
    for name in ("loss", "grad_norm", "token_mult_prob_error", "reward"):
        expected = ours.metrics[name]
        assert theirs.metrics[name] == pytest.approx(expected, rel=2e-3, abs=2e-5), name
    trainer.close()


def test_a_checkpoint_is_a_pointer_that_continues_with_optimizer_and_cursor(
    server: tuple[FakeTinker, str], start: Path, tmp_path: Path
) -> None:
    fake, url = server
    through = Trainer.over(service(url), start, config(GRPOConfig()), seed=5)
    through.step(sequences(seed=1), 1)
    through.save(tmp_path / "half")
    through.step(sequences(seed=2), 2)
    expected = {name: p.detach().clone() for name, p in fake.model.named_parameters()}
    resumed = Trainer.over(
        service(url), tmp_path / "half", config(GRPOConfig()), trainer_state=tmp_path / "half/trainer", seed=5
    )
    resumed.step(sequences(seed=2), 2)
    assert resumed.cursor.optimizer_steps == 6
    assert all(torch.equal(p, expected[name]) for name, p in fake.model.named_parameters())


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        (GRPOConfig(entropy_coefficient=0.01), "entropy_weights.*entropy_coefficient to 0"),
        (GRPOConfig(mismatch_correction="tis"), "mismatch_correction 'tis'"),
        (GRPOConfig(kl_coefficient=0.1), "kl_coefficient to 0"),
    ],
    ids=["entropy", "correction", "reference"],
)
def test_what_tinker_cannot_compute_is_refused_by_name_before_anything_is_applied(
    server: tuple[FakeTinker, str], start: Path, model_dir: Path, algorithm: GRPOConfig, named: str
) -> None:
    fake, url = server
    with pytest.raises(ConfigError, match=named):
        Trainer.over(service(url), start, config(algorithm), reference_dir=model_dir).step(sequences(), 1)
    assert fake.losses == []


def test_wrong_credentials_an_unknown_model_and_weights_instead_of_a_pointer_are_told_apart(
    server: tuple[FakeTinker, str], start: Path, model_dir: Path
) -> None:
    _, url = server
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        service(url, key="tml-wrong").load_checkpoint(start)
    with pytest.raises(ConfigError, match=r"tinker.json cannot be read.*base_model"):
        service(url).load_checkpoint(model_dir)
    (start / "tinker.json").write_text('{"base_model": "huge"}')
    with pytest.raises(DataError, match="no base model huge"):
        service(url).load_checkpoint(start)
