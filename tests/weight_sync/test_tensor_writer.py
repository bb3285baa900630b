"""Tensors are written as safetensors writes them, and hashed once: while they are written."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundhouse.errors import DataError
from roundhouse.store.directories import DIGESTS, FileDigests
from roundhouse.store.location import file_digest
from roundhouse.training.parallel import Ranks
from roundhouse.training.saved_tensors import SavedTensor, save_tensors, saved_tensors
from roundhouse.weight_sync import tensor_files
from roundhouse.weight_sync.tensor_files import (
    TensorFile,
    TensorWriter,
    digest_of,
    digest_of_tensors,
    header_of,
    shards,
    tensor_digests,
    weight_files,
)

TENSORS = {
    "b": torch.arange(12.0).reshape(3, 4),
    "a": torch.randn(7, 5),
    "half": torch.randn(33).to(torch.bfloat16),
    "step": torch.tensor(3.0),
    "ids": torch.arange(5),
    "large": torch.randn(600, 600),  # hashed by other threads
}


def written(directory: Path, limit: int = 2**40) -> Path:
    directory.mkdir(exist_ok=True)
    planned = shards((header_of(name, tensor) for name, tensor in TENSORS.items()), limit)
    writer = TensorWriter(directory)
    writer.write_sharded("model", planned, ((one.name, TENSORS[one.name]) for shard in planned for one in shard))
    writer.close()
    return directory


def read_anew(directory: Path) -> str:
    return digest_of_tensors(tensor_digests(weight_files(directory)))


def change_one_byte(path: Path) -> None:
    """In place: neither the size nor the file is another."""
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    one = written(tmp_path / "one") / "model.safetensors"
    save_file(TENSORS, tmp_path / "two", metadata={"format": "pt"})
    assert one.read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(("before", "after"), [(100, 2**40), (2**40, 100), (100, 600), (600, 100)])
def test_nothing_stays_of_what_was_saved_in_another_number_of_files(tmp_path: Path, before: int, after: int) -> None:
    written(tmp_path / "both", before)
    (tmp_path / "both/model-of-another.safetensors").touch()
    fresh, both = written(tmp_path / "fresh", after), written(tmp_path / "both", after)
    (both / "model-of-another.safetensors").unlink()
    assert {path.name: path.read_bytes() for path in both.glob("model*")} == {
        path.name: path.read_bytes() for path in fresh.glob("model*")
    }
    assert digest_of(both) == read_anew(both)


def test_pieces_of_rows_make_the_file_of_the_whole_tensors_and_others_are_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (headers,) = shards(header_of(name, tensor) for name, tensor in TENSORS.items())
    wholes = [(one.name, TENSORS[one.name]) for one in headers]
    pieces = [(name, piece) for name, tensor in wholes for piece in (tensor.split(3) if tensor.ndim else [tensor])]
    writer = TensorWriter(tmp_path / "two")
    writer.write("model.safetensors", headers, pieces)
    writer.close()
    assert (tmp_path / "two/model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert digest_of(tmp_path / "two") == digest_of(whole) == read_anew(tmp_path / "two")
    for wrong in (
        pieces[1:],
        pieces[:-1],
        [*wholes[1:], wholes[0]],
        [(name, tensor.double()) for name, tensor in wholes],
    ):
        with pytest.raises(ValueError, match="was announced"):
            TensorWriter(tmp_path / "two").write("model.safetensors", headers, wrong)


def test_the_digests_are_those_of_the_files_and_need_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path / "one", limit=100)
    left = FileDigests.beside(directory)
    assert len(weight_files(directory)) == len(left.files) > 1
    for path in weight_files(directory):
        entry = left.of(path)
        assert entry is not None
        assert (entry.size, entry.sha256) == (path.stat().st_size, file_digest(path))
    expected = read_anew(directory)
    monkeypatch.setattr(tensor_files, "tensor_digests", None)
    assert digest_of(directory) == expected


def test_a_byte_that_changed_right_after_the_writing_is_read_and_found(tmp_path: Path) -> None:
    directory = written(tmp_path / "one")
    before = digest_of(directory)
    change_one_byte(directory / "model.safetensors")
    assert digest_of(directory) == read_anew(directory) != before


def test_files_that_a_writer_did_not_make_are_read(tmp_path: Path) -> None:
    directory = written(tmp_path / "one")
    (directory / DIGESTS).write_text("{")
    assert digest_of(directory) == read_anew(directory)
    written_before = written(tmp_path / "two")
    save_file({"more": torch.ones(1)}, written_before / "more.safetensors")
    assert FileDigests.beside(written_before).weights(written_before) is None


def test_shards_hold_every_tensor_once_and_no_more_than_their_limit(tmp_path: Path) -> None:
    directory = written(tmp_path / "one", limit=100)
    found = [load_file(path) for path in weight_files(directory)]
    assert sorted(name for part in found for name in part) == sorted(TENSORS)
    assert all(part.keys() and torch.equal(value, TENSORS[name]) for part in found for name, value in part.items())
    assert all(sum(one.nbytes for one in part.values()) <= 100 or len(part) == 1 for part in found)


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    directory = written(tmp_path / "one", limit=100)
    (directory / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DataError, match=r"index\.json has no readable weight_map"):
        weight_files(directory)


@pytest.mark.parametrize("text", ['{"weight_map": {"a": 3}}', '{"weight_map": {"a": null, "b": "c"}}', "[" * 100_000])
def test_an_index_without_names_of_files_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json has no readable weight_map"):
        weight_files(tmp_path)


HEADERS = {
    "no dtype": '{"a": {"shape": [1], "data_offsets": [0, 4]}}',
    "no shape": '{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
    "no offsets": '{"a": {"dtype": "F32", "shape": [1]}}',
    "a number as dtype": '{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}',
    "a negative shape": '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "a text as offset": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]}}',
    "backward offsets": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    "three offsets": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
    "not an object": '{"a": [1]}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_of_another_form_is_no_safetensors_file(tmp_path: Path, header: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
    with pytest.raises(DataError, match=r"model\.safetensors is not a safetensors file"):
        list(TensorFile(tmp_path / "model.safetensors").tensors())


def test_an_optimizers_state_has_the_digests_of_its_files_and_none_of_its_tensors(tmp_path: Path) -> None:
    state = {name: SavedTensor.of(tensor) for name, tensor in TENSORS.items()}
    save_tensors(state, tmp_path, "optimizer", Ranks(), weights=False)
    left = FileDigests.beside(tmp_path)
    entry = left.of(tmp_path / "optimizer.safetensors")
    assert entry is not None
    assert entry.sha256 == file_digest(tmp_path / "optimizer.safetensors")
    assert left.weights_digest is None


def test_an_optimizers_state_above_a_files_size_is_read_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundhouse.training.saved_tensors.SHARD_BYTES", 100)
    save_tensors({name: SavedTensor.of(tensor) for name, tensor in TENSORS.items()}, tmp_path, "optimizer", Ranks())
    assert (tmp_path / "optimizer.safetensors.index.json").is_file()
    found = dict(saved_tensors(tmp_path, "optimizer"))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    sorted(tmp_path.glob("optimizer-*.safetensors"))[1].unlink()
    with pytest.raises(DataError, match="which its index names"):
        dict(saved_tensors(tmp_path, "optimizer"))
