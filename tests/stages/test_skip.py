"""A skipped iteration is a version on record that is the one before, and nothing else in the run has to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import TooFewSequences
from roundhouse.stages.checkpoint import publish, publish_starting_policy, skip_after, skip_iteration, skipped_in_a_row
from roundhouse.stages.report import report_iteration, summarize
from roundhouse.store.run import Run, open_run, skip_of
from roundhouse.store.stage import read_manifest
from roundhouse.store.verification import verify
from tests.stages.test_checkpoint import model_directory, trained

WHY = skip_after(TooFewSequences("0 sequences are left"), "failures.on_too_few is skip")


@pytest.fixture
def run(store_uri: str, tmp_path: Path) -> Run:
    run = open_run(parse_config({"run_id": "r", "store": store_uri, "checkpoint": {"keep_last": 9}}))
    publish_starting_policy(run, model_directory(tmp_path / "0", b"weights 0"), {})
    publish(run, trained(run, 1, model_directory(tmp_path / "1", b"weights 1")))
    return run


def test_a_skipped_version_is_the_one_before_and_says_why(run: Run) -> None:
    published = skip_iteration(run, 2, WHY)
    assert published.policy_version == 2
    assert run.latest_checkpoint() == published
    before = run.checkpoint(1).reference()
    assert before is not None
    theirs, own = (read_manifest(one).model_files for one in (before, published))
    assert own.named() == theirs.named()
    assert own.directory != theirs.directory
    assert skip_of(run, 2) == WHY
    assert (WHY.code, WHY.kind) == ("too_few_sequences", "data")
    assert skip_of(run, 1) is None
    assert skip_iteration(run, 2, WHY) == published, "skipping again is a no-op"
    report_iteration(run, 2)
    summary = summarize(run)
    assert (summary["skipped"], summary["reward_by_iteration"]) == ([2], [None, None])
    assert verify(run.config.store).problems == []


def test_an_iteration_that_was_trained_is_published_as_it_was_trained(run: Run, tmp_path: Path) -> None:
    update = trained(run, 2, model_directory(tmp_path / "2", b"weights 2"))
    published = skip_iteration(run, 2, WHY)
    assert read_manifest(published).inputs["train"] == update
    assert skip_of(run, 2) is None


def test_only_the_iterations_right_before_count_as_in_a_row(run: Run, tmp_path: Path) -> None:
    assert skipped_in_a_row(run, 2) == 0
    skip_iteration(run, 2, WHY)
    skip_iteration(run, 3, WHY)
    assert skipped_in_a_row(run, 4) == 2
    publish(run, trained(run, 4, model_directory(tmp_path / "4", b"weights 4")))
    assert skipped_in_a_row(run, 5) == 0
