"""A store that was written before configuration keys and metrics were renamed opens, verifies and continues.

The store and how it was made: `tests/fixtures/make_earlier_store.py`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.datasets import dataset_versions
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.promotion import promote
from roundhouse.stages.refit import engine_at, refit_iteration
from roundhouse.stages.report import report_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, load_run, open_run, promoted_version
from roundhouse.store.verification import verify
from tests.fixtures.make_earlier_store import BUCKET, STORE
from tests.generation.test_standalone import engine_process

pytestmark = pytest.mark.real

ARCHIVE = Path(__file__).parents[1] / "fixtures/earlier-store.tar.xz"


@pytest.fixture(scope="module")
def store(s3_server: str) -> Iterator[str]:
    import s3fs

    fs = s3fs.S3FileSystem()
    fs.call_s3("create_bucket", Bucket=BUCKET)
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            fs.pipe_file(member.name, content.read())
    yield STORE
    s3fs.S3FileSystem.clear_instance_cache()


def shown(*command: str) -> Any:
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("run_id", ["earlier", "earlier-async"])
def test_its_runs_are_shown_with_the_configuration_that_they_had(store: str, run_id: str) -> None:
    assert shown("runs", "show", run_id, "--store", store)["iterations"]
    config = load_run(store, run_id).config
    assert (config.rollout.prompts_per_iteration, config.train.minibatches) == (4, 2)
    assert config.generation.weight_sync == "delta"
    assert config.generation.inflight_requests == ("continue" if run_id == "earlier-async" else "drain")
    assert config.placement.colocation == "node"
    approval = config.evaluation.approval
    assert (approval.while_pending, approval.timeout_hours, approval.on_timeout) == ("block", 24, "approve")


def test_it_verifies(store: str) -> None:
    assert verify(store).problems == []


def test_its_dataset_and_its_promoted_version_are_found(store: str) -> None:
    [version] = dataset_versions(store, "nightly")
    assert len(read_rollouts(version)) == 16
    assert promoted_version(load_run(store, "earlier")) is not None


def test_its_run_continues_for_one_more_iteration(store: str, tmp_path: Path) -> None:
    with engine_process(OMP_NUM_THREADS="1") as url:
        run = continued(store, url, tmp_path)
        base = run.latest_checkpoint()
        assert base is not None
        assert base.policy_version == 2
        weights = refit_iteration(run, 3, base)
        rollouts = collect_iteration(run, 3, weights, engine_at(run, 2))
        sequences = validate_iteration(run, 3, rollouts, vocabulary_size(run))
        update = train_iteration(run, 3, sequences, base, checkpoint_cache(run.config))
        assert publish(run, update).policy_version == 3
        evaluate_version(run, 3, engine_at(run, 3))
        promote(run, 3)
        report_iteration(run, 3)
    release_trainers()
    assert run.checkpoint_versions()[-1] == 3
    assert verify(store).problems == []


def continued(store: str, engine_url: str, directory: Path) -> Run:
    """The run under a configuration in today's names."""
    config = load_run(store, "earlier").config
    return open_run(
        config.model_copy(
            update={
                "iterations": 3,
                "generation": config.generation.model_copy(update={"engine_url": engine_url}),
                "infra": config.infra.model_copy(update={"state": str(directory)}),
            }
        )
    )
