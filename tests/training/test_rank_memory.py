"""In loading and saving, no rank holds much more than its own part: a tensor is whole on the rank that writes it alone, and of
files a rank reads its own rows and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.training.checkpoint import save_model
from roundhouse.training.layers import save_adapter
from roundhouse.training.optimizer import OPTIMIZER, save_optimizer
from roundhouse.training.parallel import Ranks
from roundhouse.training.saved_tensors import SavedTensor, save_tensors
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files
from tests.training.test_resident_ranks import ranks_of
from tests.training.tiny import make_model, sequences

pytestmark = pytest.mark.real

MIB = 2**20


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

        return SavedTensor.by_whole(torch.Size((1024, 1024)), torch.float32, whole)

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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("experts", "vocabulary"), [(0, 512), (16, 512), (0, 196_608)], ids=["dense", "experts", "one large tensor"]
)
def test_of_weights_in_bfloat16_no_rank_takes_much_more_than_its_part(
    tmp_path: Path, experts: int, vocabulary: int
) -> None:
    """Of four ranks each holds a quarter in float32; converting or fusing everything would take four times that."""
    wide: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 5 if experts else 8, "intermediate_size": 4096}
    wide |= {"moe_intermediate_size": 512} if experts else {}
    if vocabulary > 512:
        wide = {"hidden_size": 512, "num_hidden_layers": 1}
    model = make_model(tmp_path / "model", vocabulary=vocabulary, dtype=torch.bfloat16, experts=experts, **wide)
    part = sum(len(tensor.data) for file in weight_files(model) for tensor in TensorFile(file).tensors()) * 2 / 4 / MIB
    assert part > 90
    service = ranks_of(processes=4)
    try:
        pids = list(service.ranks.pids.values())
        before = [_reset_peak(pid) for pid in pids]
        service.load_checkpoint(model)
        loaded = [_peak(pid) - first for pid, first in zip(pids, before, strict=True)]
        service.save_checkpoint(tmp_path / "saved", None)
        peaks = [_peak(pid) for pid in pids]
    finally:
        service.close()
    assert max(loaded) < 2 * part + 64, loaded
    saved = [peak - first for peak, first in zip(peaks, before, strict=True)]
    assert max(saved) < 2 * part + 64, saved
    assert max(peaks) < 2 * part + 512, "with what a process takes that has only started"
    found, source = (
        {tensor.name: tensor.data for file in weight_files(where) for tensor in TensorFile(file).tensors()}
        for where in (tmp_path / "saved", model)
    )
    assert found.keys() == source.keys()
    for name, data in found.items():
        assert (data.view("<u4") >> 16 == source[name].view("<u2")).all(), "bfloat16 is the upper half of float32"


def _reset_peak(pid: int) -> float:
    """MiB that the process has now, from which its peak is counted anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _peak(pid)


def _peak(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
