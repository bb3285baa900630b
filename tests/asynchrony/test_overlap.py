"""Messages between the lanes of an overlapped run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.overlap import Overlap
from roundhouse.collection.runner import ENGINE
from roundhouse.errors import TooFewRollouts
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.bucket import StoreUnavailable
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.trajectories.records import Rollout, Status
from tests.asynchrony.test_resumption import OWN_GROUPS, WINDOW, new_run, publish

PATIENCE = 60.0
ENGINE_URL = "http://127.0.0.1:9"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return new_run(str(tmp_path), engine_url=ENGINE_URL)


def test_an_iteration_is_not_blamed_for_a_later_ones_rollouts(run: Run) -> None:
    """The later rollouts fail before the earlier iteration is complete. Only the iteration that trains on them decides about
    them."""
    overlap, found = Overlap(run, ENGINE_URL), []
    waiting = threading.Thread(target=lambda: found.append(overlap.collected(1)))
    waiting.start()
    failure = TooFewRollouts("4 of 4 rollouts failed")
    overlap.failed(2, failure)
    committed = run.begin(run.stage(1, "collect"), policy_version=0).commit()
    waiting.join(PATIENCE)
    assert found == [committed]
    assert not overlap.given_up
    with pytest.raises(TooFewRollouts) as raised:
        overlap.collected(2)
    assert raised.value is failure
    assert overlap.given_up, "both loops are begun again"


def test_a_step_is_not_begun_on_chosen_groups_of_which_too_many_rollouts_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decided on then, so that they can be rolled out again."""
    overlap = Overlap(new_run(str(tmp_path), WINDOW, engine_url=ENGINE_URL), ENGINE_URL)
    overlap.dispatch.tell(happened.TransferStarted(ENGINE, 0), happened.TransferFinished(ENGINE, 0))
    failed = {}
    for position in overlap.plan.groups(1):
        for key in overlap.plan.samples(position):
            overlap.dispatch.tell(happened.RolloutStarted(*key, 1, ENGINE))
            overlap.dispatch.tell(happened.RolloutFailed(*key, 1, "timeout", final=True))
        failed[position] = [failed_rollout(overlap.plan.spec(key)) for key in overlap.plan.samples(position)]
    made = [rollout for rollouts in failed.values() for rollout in rollouts]
    monkeypatch.setattr(overlap.runner, "outlines", lambda groups: made)
    assert overlap.collected(1) is None
    with pytest.raises(TooFewRollouts, match="4 of 4 rollouts failed"), overlap.training(1):
        pytest.fail("it has begun")
    assert overlap.given_up
    assert overlap.dispatch.controller.batch is None


@pytest.mark.parametrize("asynchrony", [OWN_GROUPS, WINDOW], ids=["own groups", "window"])
def test_a_step_that_could_not_be_written_down_is_begun_again_on_the_same_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchrony: dict[str, object]
) -> None:
    run = new_run(str(tmp_path), asynchrony, engine_url=ENGINE_URL)
    overlap = Overlap(run, ENGINE_URL)
    overlap.dispatch.tell(happened.TransferStarted(ENGINE, 0), happened.TransferFinished(ENGINE, 0))
    for key in [key for position in overlap.plan.groups(1) for key in overlap.plan.samples(position)]:
        overlap.dispatch.tell(happened.RolloutStarted(*key, 1, ENGINE), happened.RolloutFinished(*key, 1))

    def fails(self: Location, name: str, data: bytes) -> None:
        raise StoreUnavailable("no answer after 9 attempts in 60 s")

    with monkeypatch.context() as away:
        away.setattr(Location, "create", fails)
        with pytest.raises(StoreUnavailable), overlap.training(1):
            pytest.fail("it has begun")
    chosen = overlap.dispatch.controller.batch
    with overlap.training(1) as batch:
        assert batch.groups == chosen
        publish(run, 1)
    assert Overlap(run, ENGINE_URL).first == 2, "the journal is whole"


def failed_rollout(spec: RolloutSpec) -> Rollout:
    return Rollout(spec.group_id, spec.sample, spec.row, "e", Status.FAILED, failure_code="timeout")
