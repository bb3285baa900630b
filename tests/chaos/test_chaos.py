"""A run that is killed repeatedly ends with the same bytes as an undisturbed one. The long version: `make chaos`."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import yaml

from roundhouse.infra import services
from roundhouse.store.location import Location
from roundhouse.store.run import load_run
from roundhouse.store.stage import MANIFEST, model_location, read_manifest
from roundhouse.store.verification import verify
from tests.chaos.outcome import Outcome
from tests.chaos.stand import Stand, stand
from tests.chaos.strikes import Operation, Strike, by_trainer_process, draw_strikes, every_strike, recorded
from tests.chaos.trial import Kill, Trial, draw_kills, play
from tests.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[Stand]:
    with stand(tmp_path_factory.mktemp("chaos"), iterations=2, tracked=False) as built:
        yield built


@pytest.fixture(scope="module")
def undisturbed(ready: Stand) -> Trial:
    trial = play(ready, "undisturbed", [], record=True)
    assert trial.starts == 1
    return trial


def test_killed_at_seeded_moments_it_ends_in_the_same_bytes(ready: Stand, undisturbed: Trial) -> None:
    # Working seconds, and few of them: what is durable is not worked for again, so a fast machine has little beyond these.
    work = undisturbed.working_seconds
    kills = [
        Kill("flow", 0.15 * work),
        Kill("engine", 0.1 * work),
        Kill("environment", 0.05 * work),
    ]
    strikes = [
        Strike("flow", "write checkpoints/000001/a*/tokenizer.json", "torn"),
        Strike("flow", "create iterations/000002/validate/manifest.json", "unplaced"),
    ]
    trial = play(ready, "disturbed", kills, strikes)
    assert trial.outcome.differences(undisturbed.outcome) == []
    assert trial.starts > 1
    assert [str(done) for done in trial.done if "planted" not in done.target]
    assert [str(done) for done in trial.done if "torn write checkpoints/000001/a*/tokenizer.json" in done.where]
    assert [
        str(done) for done in trial.done if "unplaced create iterations/000002/validate/manifest.json" in done.where
    ]


@pytest.mark.long
def test_of_two_drivers_on_one_bucket_one_goes_on_the_other_says_who_has_the_run_and_nothing_published_changes(
    ready: Stand, s3_server: str
) -> None:
    """From two state directories: the second driver starts while the first works, then while it is stopped; then the first
    continues."""
    store = f"s3://rh-{uuid.uuid4().hex[:12]}/store"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=store.split("/")[2])
    run, elsewhere = Location(f"{store}/runs/two"), ready.directory / "elsewhere"
    settings = ready.settings | {"run_id": "two", "store": store, "checkpoint": {"keep_last": 1000}}

    def start(name: str, iterations: int, state: Path) -> Any:
        path = ready.directory / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump(settings | {"iterations": iterations, "infra": {"kind": "local", "state": str(state)}})
        )
        return ready.train(path, {"ROUNDHOUSE_STORE_LEASE_SECONDS": "12"})

    def log_of(name: str) -> str:
        return " ".join((ready.directory / f"{name}.log").read_text().split())

    def published() -> dict[str, str]:
        """By name, the digest of what is not the run's own book-keeping. `latest.json` is a hint from which readers go
        forward: a process that was stopped between its check of the lease and that write still makes it."""
        names = [name for name in run.tree() if not name.startswith(("lease/", "health", "latest.json"))]
        return {name: hashlib.sha256(run.read(name)).hexdigest() for name in names}

    first = start("first", 1000, ready.state)
    try:
        told = {"process": first, "evidence": lambda: log_of("first")}
        until(
            lambda: run.exists("run.json") and load_run(store, "two").latest_checkpoint(), "a first checkpoint", **told
        )
        assert start("refused", 3, elsewhere).wait(120) == 74
        assert f"process {first.pid} on {socket.gethostname()}" in log_of("refused")
        assert not elsewhere.exists(), "nothing was started"

        until(lambda: (load_run(store, "two").latest_checkpoint().policy_version or 0) >= 1, "a second", **told)
        os.kill(first.pid, signal.SIGSTOP)
        newest = max(load_run(store, "two").checkpoint_versions())
        follows = start("second", newest + 2, elsewhere)
        assert follows.wait(240) == 0, log_of("second")
        before = published()
        assert load_run(store, "two").latest_checkpoint().policy_version == newest + 2
    finally:
        os.kill(first.pid, signal.SIGCONT)
    try:
        assert first.wait(120) == 74, log_of("first")
    finally:
        first.kill()
        services.down(elsewhere / "services")
    assert f"now: process {follows.pid} on {socket.gethostname()}" in log_of("first")
    after = published()
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after.keys() - before.keys() if name.endswith(MANIFEST)]
    assert load_run(store, "two").latest_checkpoint().policy_version == newest + 2
    assert verify(store).problems == []
    tokens = {read_manifest(load_run(store, "two").checkpoint(k).reference()).lease for k in (0, newest + 2)}
    assert tokens == {1, 2}


def test_a_recording_names_the_operations_of_every_kind(ready: Stand, undisturbed: Trial) -> None:
    operations = recorded(ready.directory / "undisturbed.operations")
    assert {operation.family for operation in operations} == {
        "data",
        "manifest",
        "attempt",
        "checkpoint",
        "pointer",
        "refit",
        "prefect",
    }
    phases = {strike.phase for strike in every_strike(operations, [2])}
    assert phases == {"before", "torn", "unplaced", "after"}
    trained = [one.name for one in by_trainer_process(operations) if one.process == "trainer"]
    assert "write checkpoints/000002/a*/model.safetensors" in trained
    assert "write checkpoints/000000/a*/model.safetensors" not in trained


def test_the_comparison_notices_one_changed_bit_and_one_lost_rollout(ready: Stand, undisturbed: Trial) -> None:
    outcome = Outcome.of(load_run(ready.settings["store"], "undisturbed"))
    assert outcome.differences(undisturbed.outcome) == []
    other = Outcome(dict(outcome.weights), {k: list(v) for k, v in outcome.trained.items()})
    other.weights["model.safetensors"] = "0" * 64
    twice = other.trained[1][0]
    other.trained[1].append(twice)
    lost = other.trained[2].pop()
    told = other.differences(undisturbed.outcome)
    assert any("model.safetensors" in line for line in told)
    assert any(f"lost ['{lost}']" in line for line in told)
    assert any(f"too many ['{twice}']" in line for line in told)


def test_a_damaged_store_is_no_pass(ready: Stand, undisturbed: Trial, tmp_path: Path) -> None:
    run = load_run(ready.settings["store"], "undisturbed")
    place = model_location(run.checkpoint(2).location).local_path / "tokenizer.json"
    whole = place.read_bytes()
    try:
        place.write_bytes(whole[:-1])
        assert any("tokenizer.json" in line for line in Outcome.of(run).differences(undisturbed.outcome))
    finally:
        place.write_bytes(whole)


def test_the_same_seed_draws_the_same_kills() -> None:
    drawn = draw_kills(7, 5, 60.0, ("flow", "engine"))
    assert drawn == draw_kills(7, 5, 60.0, ("flow", "engine"))
    assert drawn != draw_kills(8, 5, 60.0, ("flow", "engine"))


def test_the_same_seed_draws_the_same_strikes_each_at_an_operation_of_its_own() -> None:
    names = [f"write iterations/00000{k}/collect/rollouts-a*-00000.parquet" for k in range(1, 9)]
    operations = [Operation("flow", name, ("before", "torn", "unplaced", "after")) for name in names]
    operations.append(Operation("flow", "refit version 3", ("before", "during", "after")))
    drawn = draw_strikes(7, 5, operations)
    assert drawn == draw_strikes(7, 5, operations)
    assert len({strike.name for strike in drawn}) == 5
    assert len(draw_strikes(7, 50, operations)) == len(operations)
