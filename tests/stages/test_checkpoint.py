import json
from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.generation.serve_app import local_model
from roundhouse.stages.checkpoint import publish, publish_starting_policy, retain
from roundhouse.stages.fork import fork_config, fork_run
from roundhouse.store.directories import KEPT_DOWNLOADS, directory_checked_meanwhile, local_directory, upload_model
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import FileEntry, Reference, model_location, read_manifest, sha256
from roundhouse.store.verification import find_garbage, verify
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint


def model_directory(path: Path, weights: bytes = b"weights") -> Path:
    (path / "trainer").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    (path / "trainer" / "state.json").write_text("{}")
    return path


def trained(run: Run, version: int, directory: Path) -> Reference:
    """A train stage that wrote the files of `version`."""
    attempt = run.begin(run.stage(version, "train"), policy_version=version - 1)
    written = upload_model(run.checkpoint(version).location, attempt.name, directory)
    return attempt.commit(details=written.details())


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
    place = run.checkpoint(1).location / read_manifest(update).details["checkpoint_directory"]
    place.write("model.safetensors", b"something else")
    with pytest.raises(StoreError, match="is not what the train stage"):
        publish(run, update)
    assert run.checkpoint(1).reference() is None


def test_a_damaged_checkpoint_is_not_loaded(run: Run, tmp_path: Path) -> None:
    published = publish_starting_policy(run, model_directory(tmp_path / "start"), {})
    model_location(Location(published.uri)).write("model.safetensors", b"weight")
    with pytest.raises(StoreError, match="damaged"):
        local_directory(published, tmp_path / "cache")


@pytest.mark.parametrize("store_uri", ["s3"], indirect=True)
def test_of_downloaded_checkpoints_those_last_used_and_those_being_read_stay(run: Run, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "warm-starts").mkdir(parents=True)
    (cache / "deleted-by-one-that-was-killed").mkdir()
    start = publish_starting_policy(run, model_directory(tmp_path / "start"), {})
    versions = [publish(run, trained(run, k, model_directory(tmp_path / str(k)))) for k in range(1, 4 + KEPT_DOWNLOADS)]

    def there() -> set[str]:
        return {path.name for path in cache.iterdir()} - {"warm-starts"}

    with directory_checked_meanwhile(versions[0], cache) as read:
        for version in versions[1:]:
            for each in (start, version):  # as a step does, whose reference is the start
                with directory_checked_meanwhile(each, cache) as directory:
                    assert (directory / "model.safetensors").is_file()
        newest = {each.digest[:24] for each in (start, *versions[1 - KEPT_DOWNLOADS :])}
        assert there() == newest | {read.name}
        assert (read / "trainer" / "state.json").read_text() == "{}"
    kept = local_directory(start, cache)
    assert there() == newest
    for version in versions:
        with directory_checked_meanwhile(version, cache):
            assert kept.is_dir(), "what a process was given stays until it ends"
    assert (cache / "warm-starts").is_dir()


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
    assert manifest.model_files.by_name().keys() == {"config.json", "model.safetensors", "trainer/state.json"}


def test_a_second_driver_that_trains_the_same_version_leaves_what_is_published_as_it_is(
    run: Run, tmp_path: Path
) -> None:
    """The reproduction: B trains version 1 to other bytes and uploads them after A has published."""
    other = open_run(run.config)
    began = other.begin(other.stage(1, "train"), policy_version=0)
    published = publish(run, trained(run, 1, model_directory(tmp_path / "a", b"the weights of A")))
    late = upload_model(other.checkpoint(1).location, began.name, model_directory(tmp_path / "b", b"B's own weights"))
    assert publish(other, began.commit(details=late.details())) == published
    local = local_directory(published, tmp_path / "cache")
    assert (local / "model.safetensors").read_bytes() == b"the weights of A"
    assert verify(run.config.store).problems == []
    garbage = [item.name.rsplit(late.directory, 1)[-1] for item in find_garbage(run.config.store)]
    assert garbage == ["/config.json", "/model.safetensors", "/trainer/state.json"], "what B wrote, and nothing else"


def test_two_uploads_of_one_attempt_have_places_of_their_own(run: Run, tmp_path: Path) -> None:
    """A pod of a Job that was replaced, and comes back."""
    directory, place = model_directory(tmp_path / "one"), run.checkpoint(1).location
    assert upload_model(place, "0001", directory).directory != upload_model(place, "0001", directory).directory


def test_a_checkpoint_of_before_whose_files_lie_beside_the_manifest_is_read_everywhere(
    run: Run, tmp_path: Path
) -> None:
    """Stores from before attempts had separate directories."""
    place = run.checkpoint(0).location
    attempt = run.begin(run.checkpoint(0), policy_version=0)
    for file in model_directory(tmp_path / "old", b"old weights").rglob("*"):
        if file.is_file():
            attempt.write_bytes(file.relative_to(tmp_path / "old").as_posix(), file.read_bytes())
    attempt.commit()
    old = json.loads(place.read("manifest.json"))
    old.pop("directory")
    place.write("manifest.json", json.dumps(old).encode())
    reference = run.checkpoint(0).reference()
    assert reference is not None
    local = local_directory(reference, tmp_path / "cache")
    assert (local / "trainer/state.json").read_text() == "{}"
    assert model_location(place).uri == place.uri
    assert (local_model(reference.uri, tmp_path / "engine") / "config.json").read_text() == "{}"
    fetched, held = fetch_checkpoint(reference.uri, NodeCache(tmp_path / "node", 10**9))
    assert (fetched / "model.safetensors").read_bytes() == b"old weights"
    if held is not None:
        held.release()
    train = run.begin(run.stage(1, "train"), policy_version=0)
    run.checkpoint(1).location.write("model.safetensors", b"w")
    entry = FileEntry(path="model.safetensors", size=1, sha256=sha256(b"w"))
    published = publish(run, train.commit(details={"checkpoint_files": [entry.model_dump()]}))
    assert (local_directory(published, tmp_path / "cache") / "model.safetensors").read_bytes() == b"w"
    fork = fork_run(fork_config(run.config.store, "r", "fork", 1))
    assert model_location(fork.checkpoint(1).location).read("model.safetensors") == b"w"
    assert verify(run.config.store).problems == []
