"""A refit that is begun while the run does something else, against a real engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.stages import refit
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import begin_refit, engine_at, engine_service, ensure_version, refit_iteration
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.test_standalone import engine_process
from tests.stages.test_checkpoint import trained


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with engine_process() as url:
        yield url


@pytest.fixture
def run(tmp_path: Path, engine_url: str) -> Run:
    keys: dict[str, Any] = {"generation": {"backend": "transformers", "engine_url": engine_url}}
    config = {"run_id": "r", "store": str(tmp_path / "store"), "infra": {"state": str(tmp_path / "state")}}
    return open_run(parse_config({**config, **keys}))


@pytest.fixture
def versions(run: Run, tmp_path: Path) -> list[Reference]:
    start = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    return [start, publish(run, trained(run, 1, tiny.make_model(tmp_path / "v1", seed=2)))]


def replica(run: Run) -> ReplicaReport:
    (found,) = engine_service(run).replicas()
    return found


def test_the_stage_records_the_refit_that_was_begun_and_does_not_repeat_it(
    run: Run, versions: list[Reference], tmp_path: Path
) -> None:
    ensure_version(run, versions[0])
    refits = replica(run).refits
    begin_refit(run, versions[1])
    details = read_manifest(refit_iteration(run, 2, versions[1])).details
    assert details["proof"]["digest"] == digest_of(tmp_path / "v1")
    assert replica(run).refits == refits + 1
    assert engine_at(run, 1) == engine_service(run).url
    assert replica(run).refits == refits + 1


def test_an_engine_that_was_brought_elsewhere_since_is_refitted_by_the_stage(
    run: Run, versions: list[Reference], tmp_path: Path
) -> None:
    begin_refit(run, versions[1])
    assert engine_at(run, 1), "waits for it"
    ensure_version(run, versions[0])
    details = read_manifest(refit_iteration(run, 2, versions[1])).details
    assert details["proof"]["digest"] == digest_of(tmp_path / "v1")
    assert replica(run).policy_version == 1


def test_a_refit_of_another_version_does_not_count(run: Run, versions: list[Reference]) -> None:
    begin_refit(run, versions[1])
    refit_iteration(run, 1, versions[0])
    assert replica(run).policy_version == 0


def test_a_refit_that_fails_ahead_of_its_stage_is_repeated_by_it(
    run: Run, versions: list[Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (weights,) = Path(versions[1].uri.removeprefix("file://")).glob("*/model.safetensors")
    weights.rename(tmp_path / "away")
    begin_refit(run, versions[1])
    with pytest.raises(Exception, match="safetensors"):
        engine_at(run, 1)
    assert "is repeated" in caplog.text
    (tmp_path / "away").rename(weights)
    refit_iteration(run, 2, versions[1])
    assert replica(run).policy_version == 1


def test_an_engine_that_sleeps_while_the_trainer_works_is_left_to_the_stage(
    run: Run, versions: list[Reference]
) -> None:
    placement = run.config.placement.model_copy(update={"engine_sleeps": True})
    begin_refit(replace(run, config=run.config.model_copy(update={"placement": placement})), versions[1])
    assert refit._begun_refit(run) is None
