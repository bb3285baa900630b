"""In saving, a rank that does not write holds one whole tensor at a time, not the model and its optimizer's state."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.training import layers, parallel
from roundhouse.training.checkpoint import save_model
from roundhouse.training.layers import save_adapter
from roundhouse.training.optimizer import OPTIMIZER, save_optimizer
from roundhouse.training.parallel import Ranks
from roundhouse.training.trainer import Trainer
from tests.training.tiny import sequences


@pytest.mark.parametrize("adapter", [None, {"rank": 2}], ids=["whole", "adapter"])
def test_a_rank_that_does_not_write_keeps_no_gathered_tensor(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: dict[str, int] | None
) -> None:
    config = TrainConfig.model_validate({"minibatches": 1, "threads": 1, "device": "cpu", "lora": adapter})
    trainer = Trainer.load(model_dir, config)
    trainer.step(sequences(), 1)
    gathered: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(one() is not None for one in gathered))
        whole = tensor.detach().clone()
        gathered.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(parallel, "full", gather)
    monkeypatch.setattr(layers, "full", gather)
    second = Ranks(rank=1, size=2)
    save_model(trainer.model, {}, tmp_path, second)
    save_optimizer(trainer.model, trainer.engine.optimizer, tmp_path, second)
    save_adapter(trainer.model, tmp_path, second)
    assert len(gathered) > 20
    assert most <= 6, "a matrix with the two of its adapter, and those before while they are replaced"
    assert not list(tmp_path.iterdir())
    save_optimizer(trainer.model, trainer.engine.optimizer, tmp_path, Ranks(rank=0, size=2))
    assert (tmp_path / f"{OPTIMIZER}.safetensors").is_file()
