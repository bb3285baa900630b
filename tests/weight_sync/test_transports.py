"""With any transport the same bytes arrive, or the checkpoint is read instead and the note gives the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundhouse.config.models import GenerationConfig, OptimizerConfig, TrainConfig
from roundhouse.config.training import LoraConfig
from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync import checkpoint_files
from roundhouse.weight_sync.adapter import AdapterSource
from roundhouse.weight_sync.base import checkpoint_source, fetch_weights, parse_source
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.delta import DeltaSource, write_delta
from roundhouse.weight_sync.shared_memory import SharedMemorySource
from roundhouse.weight_sync.tensor_files import digest_of, retype, weight_files
from tests.training.tiny import make_model, sequences


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", 10**9)


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    """Two successive checkpoints in float32."""
    old = make_model(tmp_path / "old")
    new = tmp_path / "new"
    new.mkdir()
    for path in weight_files(old):
        save_file({name: tensor * 1.001 for name, tensor in load_file(path).items()}, new / path.name)
    return old, new


def in_bfloat16(source: Path, target: Path) -> Path:
    target.mkdir()
    retype(source, target, "bfloat16")
    return target


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


def test_a_delta_of_the_engines_format_arrives_as_the_checkpoint_would(
    versions: tuple[Path, Path], cache: NodeCache, tmp_path: Path
) -> None:
    old, new = versions
    base, wanted = in_bfloat16(old, tmp_path / "b0"), in_bfloat16(new, tmp_path / "b1")
    write_delta(base, wanted, Location(str(tmp_path / "delta")), side_files=False)
    held = fetch_weights(str(old), checkpoint_source(dtype="bfloat16"), digest_of(base), cache)
    way = DeltaSource(dtype="bfloat16", base=digest_of(base), uri=str(tmp_path / "delta"))
    arrived = fetch_weights(str(new), way, digest_of(wanted), cache, held)
    assert (arrived.transport, arrived.note, arrived.digest) == ("delta", None, digest_of(wanted))
    for path in weight_files(wanted):
        assert (arrived.directory / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", ["holds nothing", "holds another", "deleted", "damaged"])
def test_where_the_delta_is_barred_the_checkpoint_is_read_and_the_note_says_why(
    versions: tuple[Path, Path], cache: NodeCache, tmp_path: Path, fault: str
) -> None:
    old, new = versions
    place = tmp_path / "delta"
    write_delta(old, new, Location(str(place)), side_files=False)
    held = fetch_weights(str(new if fault == "holds another" else old), None, None, cache)
    if fault == "deleted":
        (place / "delta.json").unlink()
    elif fault == "damaged":
        part = place / "delta-00000.bin"
        part.write_bytes(bytes(reversed(part.read_bytes())))
    way = DeltaSource(dtype="float32", base=digest_of(old), uri=str(place))
    arrived = fetch_weights(str(new), way, digest_of(new), cache, None if fault == "holds nothing" else held)
    assert (arrived.transport, arrived.digest) == ("store", digest_of(new))
    assert arrived.note is not None
    assert arrived.note.startswith("delta: ")


def test_shared_memory_of_another_node_is_no_way(versions: tuple[Path, Path], cache: NodeCache, tmp_path: Path) -> None:
    here = in_bfloat16(versions[0], tmp_path / "memory")
    way = SharedMemorySource(dtype="bfloat16", path=str(here))
    assert fetch_weights(str(versions[0]), way, digest_of(here), cache).transport == "shared-memory"
    elsewhere = fetch_weights(
        str(versions[0]), SharedMemorySource(dtype="bfloat16", path="/dev/shm/no"), digest_of(here), cache
    )
    assert (elsewhere.transport, elsewhere.digest) == ("store", digest_of(here))
    assert "not in this node's memory" in str(elsewhere.note)


def test_bytes_that_are_not_the_wanted_ones_are_refused_whatever_the_way(
    versions: tuple[Path, Path], cache: NodeCache
) -> None:
    with pytest.raises(DataError, match="wanted was sha256:0"):
        fetch_weights(str(versions[0]), None, "sha256:0", cache)


def test_the_merged_adapter_is_the_published_checkpoint_bit_for_bit(cache: NodeCache, tmp_path: Path) -> None:
    start = make_model(tmp_path / "start")
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
    config = TrainConfig(lora=LoraConfig(rank=4), device="cpu", threads=1, minibatches=2, optimizer=optimizer)
    trainer = Trainer.load(start, config)
    trainer.step(sequences(), 1)
    published = tmp_path / "published"
    trainer.save(published)
    way = AdapterSource(dtype="float32", base=str(start), uri=str(published / "trainer"))
    arrived = fetch_weights(str(published), way, digest_of(published), cache)
    assert (arrived.transport, arrived.note) == ("adapter", None)
    assert digest_of(published) != digest_of(start)
    other = make_model(tmp_path / "other", seed=5)
    wrong = fetch_weights(str(published), way.model_copy(update={"base": str(other)}), digest_of(published), cache)
    assert (wrong.transport, wrong.digest) == ("store", digest_of(published)), (
        "another base cannot give the wanted digest"
    )


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
