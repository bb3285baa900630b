"""With any transport the same bytes arrive, or the checkpoint is read instead and the note gives the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.weight_sync import checkpoint_files
from roundhouse.weight_sync.base import fetch_weights, parse_source
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.tensor_files import digest_of
from tests.weight_sync.publishing import in_bfloat16


def test_the_digest_is_of_the_tensors_not_of_how_they_lie_in_files(versions: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = versions
    tensors = load_file(old / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, split / "a.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, split / "b.safetensors", metadata={"k": "v"})
    assert digest_of(split) == digest_of(old) != digest_of(new)
    tensors[names[0]].view(-1)[0] += 1e-7
    save_file(tensors, split / "a.safetensors")
    (split / "b.safetensors").unlink()
    assert digest_of(split) != digest_of(old)


def test_bytes_that_are_not_the_wanted_ones_are_refused_whatever_the_way(
    versions: tuple[Path, Path], cache: NodeCache
) -> None:
    with pytest.raises(DataError, match="wanted was sha256:0"):
        fetch_weights(str(versions[0]), None, "sha256:0", cache)


def test_a_bucket_is_read_in_ranges_once_a_node(
    versions: tuple[Path, Path], cache: NodeCache, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    filesystem = s3fs.S3FileSystem(client_kwargs={"endpoint_url": s3_server})
    filesystem.call_s3("create_bucket", Bucket="ways")
    for path in versions[0].iterdir():
        filesystem.put_file(str(path), f"ways/one/{path.name}")
    monkeypatch.setattr(checkpoint_files, "RANGE_BYTES", 10_000)
    asked: list[tuple[int, int]] = []
    read_range = Location.read_range

    def counted(self: Location, name: str, begin: int, end: int) -> bytes:
        asked.append((begin, end))
        return read_range(self, name, begin, end)

    monkeypatch.setattr(Location, "read_range", counted)
    arrived = fetch_weights("s3://ways/one", None, digest_of(versions[0]), cache)
    size = (versions[0] / "model.safetensors").stat().st_size
    assert len(asked) > size // 10_000
    count = len(asked)
    again = fetch_weights("s3://ways/one", None, None, cache)
    assert (again.directory, len(asked)) == (arrived.directory, count)
    with pytest.raises(DataError, match="it ends at byte"):
        checkpoint_files.download(Location("s3://ways/one"), {"model.safetensors": size + 5}, cache.directory)


def test_transports_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="pigeon"):
        parse_source({"kind": "pigeon"})
    with pytest.raises(ValueError, match="weight-transfer engine of vLLM"):
        GenerationConfig.model_validate({"weight_sync": "nccl"})


def test_rounding_is_to_the_nearest_even(tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -3.3e38], dtype=torch.float32)
    save_file({"a": values, "n": torch.tensor([7])}, source / "model.safetensors")
    made = load_file(in_bfloat16(source, tmp_path / "t") / "model.safetensors")
    assert made["a"].tolist() == [1.0, 1.0, 1.015625, values.to(torch.bfloat16)[3].item()]
    assert made["n"].dtype == torch.int64
