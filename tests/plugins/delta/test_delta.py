"""Deltas between checkpoints as the trainer writes them."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.errors import DataError, StoreError
from roundhouse.plugins.delta import transport as deltas
from roundhouse.plugins.delta.format import DELTA, read_delta
from roundhouse.plugins.delta.transport import apply_delta, write_delta
from roundhouse.store.location import Location
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.tensor_files import TensorFile
from tests.training.tiny import make_model, sequences


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> tuple[Path, Path]:
    """Two successive checkpoints of a real trainer."""
    place = tmp_path_factory.mktemp("versions")
    config = TrainConfig(optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=0), minibatches=1, threads=1)
    trainer = Trainer.load(make_model(place / "0"), config)
    for version in (1, 2):
        trainer.step(sequences(seed=version), version)
        trainer.save(place / f"{version}")
    return place / "1", place / "2"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_delta_gives_the_next_checkpoint_bit_for_bit(versions, store_uri, tmp_path, threads):
    old, new = versions
    place = Location(store_uri) / "delta"
    written = write_delta(old, new, place, threads=threads)
    assert 0 < written.delta_bytes < written.full_bytes
    assert apply_delta(old, place, tmp_path / "made", threads=threads) == written
    assert contents(tmp_path / "made") == contents(new)


def test_it_is_the_same_delta_with_tiny_pieces_and_parts(versions, tmp_path, monkeypatch):
    monkeypatch.setattr(deltas, "PIECE_BYTES", 1000 // 8 * 8)
    monkeypatch.setattr(deltas, "PART_BYTES", 3000)
    old, new = versions
    written = write_delta(old, new, Location(str(tmp_path / "delta")))
    assert len(written.parts) > 3
    apply_delta(old, Location(str(tmp_path / "delta")), tmp_path / "made")
    assert contents(tmp_path / "made") == contents(new)


def test_between_equal_checkpoints_nothing_travels(versions, tmp_path):
    written = write_delta(versions[0], versions[0], Location(str(tmp_path / "delta")))
    assert {piece.codec for tensor in written.weights[0].tensors for piece in tensor.pieces} == {"same"}
    apply_delta(versions[0], Location(str(tmp_path / "delta")), tmp_path / "made")
    assert contents(tmp_path / "made") == contents(versions[0])


def test_another_base_is_refused_and_nothing_appears(versions, tmp_path):
    old, new = versions
    place = Location(str(tmp_path / "delta"))
    write_delta(old, new, place)
    with pytest.raises(DataError, match=r"does not start from these weights.*not"):
        apply_delta(new, place, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


def test_one_changed_bit_of_the_base_is_seen(versions, tmp_path):
    old, new = versions
    place = Location(str(tmp_path / "delta"))
    write_delta(old, new, place)
    other = tmp_path / "other"
    other.mkdir()
    for name, data in contents(old).items():
        (other / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if name.endswith(".safetensors") else data)
    with pytest.raises(DataError, match="does not start from these weights"):
        apply_delta(other, place, tmp_path / "made")


@pytest.mark.parametrize("where", ["part", "index"])
def test_damage_on_the_way_is_seen(versions, tmp_path, where):
    old, new = versions
    place = Location(str(tmp_path / "delta"))
    written = write_delta(old, new, place)
    if where == "part":
        path = tmp_path / "delta/delta-00000.bin"
        data = bytearray(path.read_bytes())
        data[written.weights[0].tensors[0].pieces[0].offset + 9] ^= 4
        path.write_bytes(data)
    else:
        index = json.loads(place.read(DELTA))
        index["weights"][0]["tensors"][0]["after"] = "0" * 64
        place.write(DELTA, json.dumps(index).encode())
    with pytest.raises(DataError, match="Fetch the whole checkpoint"):
        apply_delta(old, place, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_delta_that_was_cut_off_is_none(versions, tmp_path, monkeypatch):
    place = Location(str(tmp_path / "delta"))
    monkeypatch.setattr(Location, "create", lambda *_: (_ for _ in ()).throw(StoreError("the process died here")))
    with pytest.raises(StoreError, match="died here"):
        write_delta(*versions, place)
    with pytest.raises(StoreError):
        read_delta(place)


def test_a_delta_is_never_replaced(versions, tmp_path):
    place = Location(str(tmp_path / "delta"))
    write_delta(*versions, place)
    with pytest.raises(StoreError, match="holds a delta already"):
        write_delta(*versions, place)


def test_tensors_of_every_kind_that_come_go_and_move_between_files(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for directory in (old, new):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "manifest.json").write_text(directory.name)
    torch.manual_seed(0)
    base = {
        "half": torch.randn(300, dtype=torch.bfloat16),
        "byte": torch.randint(0, 255, (17,), dtype=torch.uint8),
        "eight": torch.randn(33).to(torch.float8_e4m3fn),
        "long": torch.arange(9),
        "empty": torch.empty(0, 4),
        "gone": torch.ones(3),
        "reshaped": torch.ones(4),
    }
    save_file(base, old / "model.safetensors")
    after = {name: tensor.clone() for name, tensor in base.items() if name != "gone"}
    after["half"][5] += 1
    after["byte"] += 3
    after["reshaped"] = torch.ones(5)
    after["fresh"] = torch.randn(7)
    save_file({name: after[name] for name in ("half", "fresh", "empty")}, new / "model-1.safetensors")
    save_file({name: after[name] for name in ("byte", "eight", "long", "reshaped")}, new / "model-2.safetensors")
    (new / "tokenizer.json").write_text("new beside the weights")
    place = Location(str(tmp_path / "delta"))
    write_delta(old, new, place)
    apply_delta(old, place, tmp_path / "made")
    wanted = contents(new)
    wanted.pop("manifest.json")  # of the store, not of the model
    assert contents(tmp_path / "made") == wanted
    made = load_file(tmp_path / "made/model-1.safetensors")
    assert torch.equal(made["half"], after["half"])


def test_a_file_that_is_cut_short_is_no_checkpoint(versions, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes((versions[0] / "model.safetensors").read_bytes()[:-7])
    with pytest.raises(DataError, match="is truncated"):
        write_delta(versions[0], broken, Location(str(tmp_path / "delta")))


@pytest.mark.parametrize(
    "content", [b"", b"weights", b"weights 0", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 7) + b'{"a":1}']
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"not a safetensors file.*complete checkpoint"):
        TensorFile(path)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_is_bounded_by_pieces_and_not_by_tensors(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(deltas, "PIECE_BYTES", 2**18)
    monkeypatch.setattr(deltas, "PART_BYTES", 2**20)
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        tensor = torch.arange(12 * 2**20, dtype=torch.int16) * (3 if version == "new" else 2)
        save_file({"one": tensor}, tmp_path / version / "model.safetensors")
    place = Location(str(tmp_path / "delta"))
    tracemalloc.start()
    try:
        write_delta(tmp_path / "old", tmp_path / "new", place, threads=threads)
        apply_delta(tmp_path / "old", place, tmp_path / "made", threads=threads)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20, "of a tensor of 24 MiB"
    assert contents(tmp_path / "made") == contents(tmp_path / "new")
