"""A real run in which the trainer generates: killed in the second iteration and resumed, without an engine."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from roundhouse.stages.collect import read_rollouts
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import Status
from tests.asynchrony.place import SECONDS, Place
from tests.chaos.strikes import Strike

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def resumed(place: Place) -> Run:
    keys: dict[str, Any] = {
        "iterations": 2,
        "generation": {"backend": "trainer", "max_model_len": 256, "max_new_tokens": 24},
        "train": {"minibatches": 1, "threads": 1, "device": "cpu"},
        "validation": {},
        "evaluation": {"every": 2, "tasks": 2, "before_training": False},
        "asynchrony": {},
    }
    strike = Strike("flow", "create iterations/000002/train/manifest.json", "before")
    assert place.train("inside", strike, **keys).wait(SECONDS) == -signal.SIGKILL, place.log("inside").read_text()
    assert place.run("inside").stage(2, StageKind.TRAIN).reference() is None
    assert place.train("inside", **keys).wait(SECONDS) == 0, place.log("inside").read_text()
    return place.run("inside")


def test_its_rollouts_are_the_trainers_own_and_it_ends_like_any_other(resumed: Run) -> None:
    for k in (1, 2):
        collected, trained = (resumed.stage(k, kind).reference() for kind in (StageKind.COLLECT, StageKind.TRAIN))
        assert collected is not None
        assert trained is not None
        rollouts = read_rollouts(collected)
        assert {rollout.status for rollout in rollouts} <= {Status.COMPLETED, Status.TRUNCATED}
        assert {turn.policy_version for rollout in rollouts for turn in rollout.turns} == {k - 1}
        metrics = read_manifest(trained).metrics
        assert metrics["train/num_mismatched_seqs"] == 0
        assert metrics["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    latest = resumed.latest_checkpoint()
    assert latest is not None
    assert latest.policy_version == 2
    assert resumed.stage(2, StageKind.EVALUATE).reference() is not None
    assert verify(str(resumed.location.uri).split("/runs/")[0]).problems == []
