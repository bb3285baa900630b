from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.stages.checkpoint import publish, publish_starting_policy, retain
from roundhouse.store.directories import local_directory, upload_directory
from roundhouse.store.location import Location
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest


def model_directory(path: Path, weights: bytes = b"weights") -> Path:
    (path / "trainer").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    (path / "trainer" / "state.json").write_text("{}")
    return path


def trained(run: Run, version: int, directory: Path) -> Reference:
    """A train stage that wrote the files of `version`."""
    files = upload_directory(run.checkpoint(version).location, directory)
    attempt = run.begin(run.stage(version, "train"), policy_version=version - 1)
    return attempt.commit(details={"checkpoint_files": [entry.model_dump() for entry in files]})


@pytest.fixture
def run(store_uri: str) -> Run:
    return open_run(parse_config({"run_id": "r", "store": store_uri, "checkpoint": {"keep_last": 2, "keep_every": 4}}))


def test_a_published_version_holds_the_model_and_the_trainer_and_is_the_latest(run: Run, tmp_path: Path) -> None:
    publish_starting_policy(run, model_directory(tmp_path / "start"), {})
    update = trained(run, 1, model_directory(tmp_path / "one", b"new weights"))
    assert run.latest_checkpoint().policy_version == 0, "files without a manifest are not a checkpoint"
    published = publish(run, update)
    assert run.latest_checkpoint() == published
    assert publish(run, update) == published
    local = local_directory(published, tmp_path / "cache")
    assert (local / "model.safetensors").read_bytes() == b"new weights"
    assert (local / "trainer" / "state.json").read_text() == "{}"


def test_files_that_changed_since_training_are_not_published(run: Run, tmp_path: Path) -> None:
    update = trained(run, 1, model_directory(tmp_path / "one"))
    run.checkpoint(1).location.write("model.safetensors", b"something else")
    with pytest.raises(StoreError, match="is not what the train stage"):
        publish(run, update)
    assert run.checkpoint(1).reference() is None


def test_a_damaged_checkpoint_is_not_loaded(run: Run, tmp_path: Path) -> None:
    published = publish_starting_policy(run, model_directory(tmp_path / "start"), {})
    Location(published.uri).write("model.safetensors", b"weight")
    with pytest.raises(StoreError, match="damaged"):
        local_directory(published, tmp_path / "cache")


def test_retention_keeps_the_newest_the_start_and_each_nth(run: Run, tmp_path: Path) -> None:
    publish_starting_policy(run, model_directory(tmp_path / "0"), {})
    for version in range(1, 8):
        publish(run, trained(run, version, model_directory(tmp_path / str(version))))
    assert retain(run, 7) == [1, 2, 3, 5]
    assert run.checkpoint_versions() == [0, 4, 6, 7]
    assert run.latest_checkpoint().policy_version == 7
    assert run.checkpoint(1).location.tree() == []
    assert retain(run, 7) == []


def test_the_starting_policys_manifest_records_how_it_was_made(run: Run, tmp_path: Path) -> None:
    reference = publish_starting_policy(run, model_directory(tmp_path / "start"), {"source": "s3://models/x"})
    manifest = read_manifest(reference)
    assert manifest.details == {"source": "s3://models/x"}
    assert {entry.path for entry in manifest.files} == {"config.json", "model.safetensors", "trainer/state.json"}
