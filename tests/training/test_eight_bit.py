"""8-bit moments: memory saved, exact continuation of a run, and refusals."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.trainer import Trainer
from tests.training.tiny import make_model, sequences

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "minibatches": 2}


def config(moments: str) -> TrainConfig:
    return TrainConfig.model_validate(SETTINGS | {"optimizer": {"moments": moments, "warmup_steps": 0}})


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with rows of whole blocks, and with others."""
    return make_model(tmp_path_factory.mktemp("start"), hidden_size=128, intermediate_size=192, vocabulary=96)


@pytest.fixture(scope="module")
def first(start: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """After an iteration, and where it was saved then."""
    pytest.importorskip("torchao")
    trainer = Trainer.load(start, config("8-bit"))
    trainer.step(sequences(), 1)
    trainer.save(saved := tmp_path_factory.mktemp("first"))
    return trainer, saved


def test_a_run_continues_bit_for_bit_and_near_one_in_float32(
    start: Path, first: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trainer, saved = first
    resumed = Trainer.load(saved, config("8-bit"), trainer_state=saved / "trainer")
    for each, name in ((trainer, "on"), (resumed, "resumed")):
        each.step(sequences(seed=1), 2)
        each.save(tmp_path / name)
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        assert (tmp_path / "on" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes(), file
    whole = Trainer.load(start, config("float32"))
    whole.step(sequences(), 1)
    whole.save(tmp_path / "float32")
    eight, four = ((where / "trainer/optimizer.safetensors").stat().st_size for where in (saved, tmp_path / "float32"))
    assert eight < 0.5 * four, "two matrices of seven have no whole blocks"
    ours, theirs, base = (load_file(where / "model.safetensors") for where in (saved, tmp_path / "float32", start))
    moved, apart = (
        sum(float((found[name] - other[name]).square().sum()) for name in base)
        for found, other in ((theirs, base), (ours, theirs))
    )
    assert 0 < apart < 0.1 * moved


def test_a_state_of_other_moments_is_refused(start: Path, first: tuple[Trainer, Path], tmp_path: Path) -> None:
    _, saved = first
    with pytest.raises(
        DataError, match=r"holds moments in 8-bit, but train\.optimizer\.moments is float32\. Set it to 8-bit"
    ):
        Trainer.load(saved, config("float32"), trainer_state=saved / "trainer")
    whole = Trainer.load(start, config("float32"))
    whole.step(sequences(), 1)
    whole.save(tmp_path)
    with pytest.raises(DataError, match=r"holds moments in float32, but train\.optimizer\.moments is 8-bit"):
        Trainer.load(tmp_path, config("8-bit"), trainer_state=tmp_path / "trainer")


def test_without_the_library_they_are_refused(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "roundhouse.training.adamw_8bit":
            raise ImportError("No module named 'torchao'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"moments is 8-bit, which needs torchao: pip install torchao==0.18.0, or set"
    ):
        Trainer.load(start, config("8-bit"))
