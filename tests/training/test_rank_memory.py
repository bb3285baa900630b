"""In saving, a tensor is whole on the rank that writes it alone, and of a mapped file a rank reads its own rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.training.checkpoint import save_model
from roundhouse.training.layers import save_adapter
from roundhouse.training.optimizer import OPTIMIZER, save_optimizer
from roundhouse.training.parallel import Ranks
from roundhouse.training.saved_tensors import SavedTensor, save_tensors
from roundhouse.training.trainer import Trainer
from tests.training.tiny import sequences


@pytest.mark.parametrize("adapter", [None, {"rank": 2}], ids=["whole", "adapter"])
def test_a_rank_of_another_machine_writes_nothing(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: dict[str, int] | None
) -> None:
    config = TrainConfig.model_validate({"minibatches": 1, "threads": 1, "device": "cpu", "lora": adapter})
    trainer = Trainer.load(model_dir, config)
    trainer.step(sequences(), 1)
    monkeypatch.setattr(Ranks, "gather", lambda ranks, found: [found] * ranks.size)
    monkeypatch.setattr(Ranks, "wait", lambda ranks: None)
    second = Ranks(rank=1, size=2)
    save_model(trainer.model, {}, tmp_path, second)
    save_optimizer(trainer.model, trainer.engine.optimizer, tmp_path, second)
    save_adapter(trainer.model, tmp_path, second)
    assert not list(tmp_path.iterdir())
    save_optimizer(trainer.model, trainer.engine.optimizer, tmp_path, Ranks(rank=0, size=2))
    assert (tmp_path / f"{OPTIMIZER}.safetensors").is_file()


def test_a_rank_holds_the_tensors_of_its_own_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda ranks, found: [found] * ranks.size)
    asked: list[tuple[str, int]] = []

    def announced(name: str) -> SavedTensor:
        def whole(ranks: Ranks, owner: int) -> torch.Tensor | None:
            asked.append((name, owner))
            return torch.zeros(1024, 1024) if ranks.rank == owner else None

        return SavedTensor(torch.Size((1024, 1024)), torch.float32, whole)

    tensors = {name: announced(name) for name in "abcd"}
    for rank in (0, 1):
        save_tensors(tensors, tmp_path, "model", Ranks(rank=rank, size=2, here=2))
    assert asked == [("a", 0), ("c", 1), ("b", 0), ("d", 1)] * 2, "in one order, and by turns"
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }


def test_what_a_rank_cannot_write_is_raised_when_all_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").mkdir()
    known: list[object] = []
    monkeypatch.setattr(Ranks, "gather", lambda ranks, found: [known.append(found) or found])
    tensors = {"a": SavedTensor.of(torch.zeros(4, 4)), "b": SavedTensor.of(torch.zeros(4, 4))}
    with pytest.raises(IsADirectoryError):
        save_tensors(tensors, tmp_path, "model", Ranks())
    assert "IsADirectoryError" in str(known)
