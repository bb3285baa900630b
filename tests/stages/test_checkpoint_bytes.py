"""A checkpoint's bytes are written once and hashed once; later readers check that they are unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError, StoreError
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.fork import fork_config, fork_run
from roundhouse.store.directories import (
    DIGESTS,
    directory_checked_meanwhile,
    local_directory,
    scratch_beside,
    upload_model,
)
from roundhouse.store.location import Location, file_digest
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import WEIGHTS_DIGEST, Reference, read_manifest
from roundhouse.store.verification import find_garbage, verify
from roundhouse.weight_sync import checkpoint_files
from roundhouse.weight_sync.base import fetch_weights
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.tensor_files import TensorWriter, digest_of_tensors, header_of, tensor_digests, weight_files
from tests.weight_sync.test_tensor_writer import change_one_byte

WEIGHTS = {"w": torch.randn(4, 6), "v": torch.randn(3)}


@pytest.fixture
def run(store_uri: str) -> Run:
    return open_run(parse_config({"run_id": "r", "store": store_uri}))


def save(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "trainer").mkdir()
    for folder in (directory, directory / "trainer"):
        names = sorted(WEIGHTS)
        writer = TensorWriter(folder)
        headers = [header_of(name, WEIGHTS[name]) for name in names]
        writer.write("model.safetensors", headers, ((name, WEIGHTS[name]) for name in names))
        writer.close()


def trained(run: Run) -> Reference:
    attempt, place = run.begin(run.stage(1, "train"), policy_version=0), run.checkpoint(1).location
    with scratch_beside(place) as directory:
        save(directory)
        written = upload_model(place, attempt.name, directory, move=True)
    return attempt.commit(details=written.details())


def weights_of(reference: Reference) -> Path:
    return Location(reference.uri).local_path / read_manifest(reference).directory / "model.safetensors"


def fetched(reference: Reference, tmp_path: Path) -> str:
    wanted = read_manifest(reference).details[WEIGHTS_DIGEST]
    found = fetch_weights(reference.uri, None, wanted, NodeCache(tmp_path / "node", 10**9))
    found.release()
    return found.digest


def test_what_a_trainer_wrote_is_stored_under_the_digests_of_its_bytes(run: Run, tmp_path: Path) -> None:
    published = publish(run, trained(run))
    manifest = read_manifest(published)
    assert manifest.model_files.by_name().keys() == {"config.json", "model.safetensors", "trainer/model.safetensors"}
    local = local_directory(published, tmp_path / "cache")
    for name, entry in manifest.model_files.by_name().items():
        assert (entry.size, entry.sha256) == ((local / name).stat().st_size, file_digest(local / name))
    assert manifest.details[WEIGHTS_DIGEST] == digest_of_tensors(tensor_digests([local / "model.safetensors"]))
    assert not any(name.endswith(DIGESTS) or "/." in name for name in run.location.tree())
    assert verify(run.config.store).problems == []


def test_publishing_and_refitting_read_nothing_that_is_as_it_was_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = trained(run)
    monkeypatch.setattr(Location, "digest", None)
    monkeypatch.setattr(checkpoint_files, "tensor_digests", None)
    published = publish(run, update)
    assert fetched(published, tmp_path) == read_manifest(published).details[WEIGHTS_DIGEST]


@pytest.mark.parametrize("store_uri", ["file"], indirect=True)
def test_a_byte_that_changed_in_place_is_not_published(run: Run) -> None:
    update = trained(run)
    (path,) = run.checkpoint(1).location.local_path.rglob("a*/model.safetensors")
    change_one_byte(path)
    with pytest.raises(StoreError, match="is not what the train stage"):
        publish(run, update)


@pytest.mark.parametrize("store_uri", ["file"], indirect=True)
def test_a_byte_that_changed_in_place_reaches_no_engine_and_no_trainer(run: Run, tmp_path: Path) -> None:
    published = publish(run, trained(run))
    change_one_byte(weights_of(published))
    with pytest.raises(DataError, match="wanted was"):
        fetched(published, tmp_path)
    with pytest.raises(StoreError, match="damaged"):
        local_directory(published, tmp_path / "cache")
    with (
        pytest.raises(StoreError, match="damaged"),
        directory_checked_meanwhile(published, tmp_path / "cache") as place,
    ):
        raise DataError(f"what a reader would say of the weights in {place}")
    assert len(verify(run.config.store).problems) == 1


@pytest.mark.parametrize("store_uri", ["file"], indirect=True)
def test_a_copy_of_the_store_is_read_where_the_file_system_gave_new_times(run: Run, tmp_path: Path) -> None:
    """As a restored backup: the stamps differ, the bytes are the same."""
    published = publish(run, trained(run))
    path = weights_of(published)
    path.write_bytes(path.read_bytes())
    assert fetched(published, tmp_path) == digest_of_tensors(tensor_digests(weight_files(path.parent)))
    assert verify(run.config.store).problems == []


@pytest.mark.parametrize("store_uri", ["file"], indirect=True)
def test_a_forks_links_are_as_they_were_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = run.begin(run.checkpoint(0), policy_version=0)
    zero.write_bytes("config.json", b"{}")
    zero.commit()
    published = publish(run, trained(run))
    fork = fork_run(fork_config(run.config.store, "r", "fork", 1))
    monkeypatch.setattr(checkpoint_files, "tensor_digests", None)
    reference = fork.checkpoint(1).reference()
    assert reference is not None
    assert fetched(reference, tmp_path) == read_manifest(published).details[WEIGHTS_DIGEST]


@pytest.mark.parametrize("store_uri", ["file"], indirect=True)
def test_what_a_killed_save_left_is_garbage_once_the_version_is_published(run: Run) -> None:
    place = run.checkpoint(1).location
    left = place.local_path / ".saving-killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    publish(run, trained(run))
    assert [item.name.rsplit("/", 2)[1:] for item in find_garbage(run.config.store)] == [
        [".saving-killed", "model.safetensors"]
    ]
