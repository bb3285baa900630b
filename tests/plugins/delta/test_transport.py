"""Replicas receive the changes since their version, or read the checkpoint, and the note gives the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.plugins.delta.transport import DeltaSource, write_delta
from roundhouse.store.location import Location
from roundhouse.store.stage import Reference
from roundhouse.weight_sync.base import FetchedWeights, checkpoint_source, fetch_weights
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import digest_of, weight_files
from tests.weight_sync.publishing import begun, follow, in_bfloat16, published


def says(weights: FetchedWeights, checkpoint: Reference) -> ReplicaReport:
    """Return the answer of a replica with these weights."""
    status = {
        "replica_id": "a",
        "ready": True,
        "digest": weights.digest,
        "weights": checkpoint.uri,
        "probe": [-1.0, -2.0],
    }
    return ReplicaReport.parse(status)


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


def test_by_delta_the_first_comes_whole_and_the_next_as_what_changed(
    tmp_path: Path, store: str, cache: NodeCache
) -> None:
    run, checkpoints = begun(tmp_path, store, weight_sync="delta")
    with published(run, checkpoints[0]) as found:
        held = follow(found, checkpoints[0], cache)
    assert (held.transport, held.note) == ("store", None)
    for checkpoint, before in ((checkpoints[1], checkpoints[0]), (checkpoints[2], checkpoints[1])):
        with published(run, checkpoint, [says(held, before)]) as found:
            held = follow(found, checkpoint, cache, held)
            late = follow(found, checkpoint, NodeCache(tmp_path / f"late-{checkpoint.policy_version}", 10**9))
        assert (held.transport, held.note, held.digest) == ("delta", None, found.digest)
        assert (late.transport, late.digest) == ("store", found.digest), (
            "a late joiner comes to the newest version by itself"
        )
    assert len((run.location / "deltas").names()) == 2


def test_a_delta_for_an_older_version_is_there_until_it_was_read(tmp_path: Path, cache: NodeCache) -> None:
    run, checkpoints = begun(tmp_path, str(tmp_path / "store"), weight_sync="delta")
    with published(run, checkpoints[0]) as found:
        held = follow(found, checkpoints[0], cache)
    deltas = run.location / "deltas"
    newer = [f"00001{number}-from-{'0' * 12}-{'0' * 12}" for number in range(3)]
    for name in newer:
        (deltas / name).write("delta.json", b"{}")
    with published(run, checkpoints[1], [says(held, checkpoints[0])]) as found:
        assert follow(found, checkpoints[1], cache, held).transport == "delta"
    assert deltas.names()[1:] == newer[1:]
