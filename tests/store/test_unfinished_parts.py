"""Parts of an interrupted collection without a manifest: a damaged one is omitted and made again."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator

import pyarrow.parquet as pq
import pytest

from roundhouse.collection import collector
from roundhouse.collection.collector import Parts, written_rollouts
from roundhouse.config.loading import parse_config
from roundhouse.errors import DiskFull, InfraError
from roundhouse.rollout.replay import Resumption
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_part
from roundhouse.trajectories.records import Status
from roundhouse.trajectories.schemas import ROLLOUTS, TURNS, rollouts_table, turns_table
from tests.stages.scripted_engine import ScriptedEngine
from tests.trajectories.rollouts import rollout

PLANNED, FINISHED = 12, 5


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine().serving() as server:
        yield server


@pytest.fixture
def run(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(collector, "FLUSH_SECONDS", 0.0)
    plan = {
        "prompts_per_iteration": 3,
        "group_size": 4,
        "concurrency": 1,
        "retry": {"attempts": 1, "first_delay_seconds": 0.01},
    }
    return open_run(parse_config({"run_id": "r", "store": store_uri, "rollout": plan}))


@pytest.fixture
def interrupted(run: Run, engine: ScriptedEngine) -> Reference:
    """The refit of a collection that stopped after five rollouts."""
    weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
    engine.healthy = FINISHED
    with pytest.raises(InfraError):
        collect_iteration(run, 1, weights, engine.url)
    engine.healthy = 10**6
    return weights


def burst(data: bytes) -> bytes:
    begin = len(data) // 3
    return data[:begin] + bytes(byte ^ 16 for byte in data[begin : begin + 64]) + data[begin + 64 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-20],
    "empty": lambda data: b"",
    "a burst": burst,
    "another file": lambda data: b"PAR1" * 100,
}


ON_DISK = [("file", damage, dataset) for damage in DAMAGES for dataset in ("rollouts", "turns")]


@pytest.mark.parametrize(
    ("store_uri", "damage", "dataset"), [*ON_DISK, ("s3", "truncated", "turns")], indirect=["store_uri"]
)
def test_a_damaged_part_is_made_anew_under_the_same_seeds_and_the_rest_is_kept(
    run: Run,
    interrupted: Reference,
    engine: ScriptedEngine,
    damage: str,
    dataset: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = run.stage(1, "collect").location
    part = f"{dataset}-a0001-00001.parquet"
    place.write(part, DAMAGES[damage](place.read(part)))
    reference = collect_iteration(run, 1, interrupted, engine.url)
    assert len(engine.seeds) == PLANNED + 1, "the damaged part held one rollout"
    assert len(set(engine.seeds)) == PLANNED, "it was made anew under its own seed"
    rollouts = read_rollouts(reference)
    assert len({each.rollout_id for each in rollouts}) == len(rollouts) == PLANNED
    assert all(each.status is Status.COMPLETED and each.turns for each in rollouts)
    assert f"{part} is left out" in caplog.text


def test_a_part_that_vanished_between_listing_and_reading_is_made_anew(
    run: Run, interrupted: Reference, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = run.stage(1, "collect").location
    listed = place.names()
    place.delete("rollouts-a0001-00000.parquet")
    place.delete("turns-a0001-00001.parquet")
    monkeypatch.setattr(Location, "names", lambda self: listed if self.uri == place.uri else [])
    assert len(read_rollouts(collect_iteration(run, 1, interrupted, engine.url))) == PLANNED
    assert len(engine.seeds) == PLANNED + 2


@pytest.mark.parametrize("store_uri", ["file"], indirect=True)
@pytest.mark.parametrize("dataset", ["turns", "rollouts", "journal"])
@pytest.mark.parametrize("count", [1, 3], ids=["committed next", "more comes"])
def test_what_could_not_be_written_is_written_the_next_time_and_no_rollout_is_missing_in_the_committed_stage(
    run: Run, monkeypatch: pytest.MonkeyPatch, dataset: str, count: int
) -> None:
    made, failed, write = [rollout("g", sample) for sample in range(count)], [], Location.write

    def fails_once(self: Location, name: str, data: bytes) -> None:
        if name.startswith(dataset) and not failed:
            failed.append(name)
            raise DiskFull(name)
        write(self, name, data)

    monkeypatch.setattr(Location, "write", fails_once)
    parts = Parts(run.begin(run.stage(1, "collect"), policy_version=0), 0)
    parts.journal.went_on(Resumption("g-9", 2))
    with pytest.raises(DiskFull):
        parts.add(made[0])
    for each in made[1:]:
        parts.add(each)
    if count > 1:
        again = Parts(run.begin(run.stage(1, "collect"), policy_version=0), 0)
        assert again.journal.resumptions.turns_resumed == 2
        assert written_rollouts(run.stage(1, "collect").location) == made, "each with its turns"
    reference = parts.commit(inputs={}, counts={}, metrics={}, details={})
    assert read_rollouts(reference) == made


def test_no_single_bit_can_change_in_a_part_unnoticed(run: Run) -> None:
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    some = [rollout(f"g{group}", sample) for group in range(2) for sample in range(2)]
    rng = random.Random(0)
    caught = 0
    for table, schema in ((rollouts_table(some), ROLLOUTS), (turns_table(some), TURNS)):
        data = _Held(attempt.stage.location.read(attempt.write_table("x", table).path))
        assert read_part(data, "whole", schema) == table
        for _ in range(150):
            place = rng.randrange(len(data.data))
            changed = bytearray(data.data)
            changed[place] ^= 1 << rng.randrange(8)
            found = read_part(_Held(bytes(changed)), "changed", schema)
            caught += found is None
            assert found is None or found.equals(table)
    assert caught > 100


def test_without_checksums_a_changed_number_would_go_through() -> None:
    """Purpose of the checksums: without them, such a bit is a wrong log-probability that nothing detects."""
    table = turns_table([rollout()])
    plain = io.BytesIO()
    pq.write_table(table, plain, compression="none", use_dictionary=False)
    changed = plain.getvalue().replace(b"\x00\x00\x00\xbf", b"\x00\x00\x40\xbf")  # -0.5 and -0.75 are one bit apart
    found = pq.read_table(io.BytesIO(changed)).column("generation_log_probs").to_pylist()
    assert found == [[-0.75, -0.75], [-0.75]]


class _Held(Location):
    """A location that holds one object, whatever its name."""

    def __init__(self, data: bytes) -> None:
        super().__init__("/nowhere")
        self.data = data

    def read(self, name: str) -> bytes:
        return self.data
