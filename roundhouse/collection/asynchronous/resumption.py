"""A run's controller from the store: its journal, and what the store holds that the journal does not say.

Invariant: whatever was killed when, the controller that comes out of it agrees with the store: its version is the newest
checkpoint's, a rollout counts as finished exactly when it is on disk with its turns (in a committed collect stage also as
failed), and nothing runs.

With a window the rollouts lie in generate stages, each committed when steps were decided on for all of its groups: the journal
says so before, and nothing of it is open any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from roundhouse.collection.asynchronous import events as happened
from roundhouse.collection.asynchronous.controller import Controller
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal
from roundhouse.collection.asynchronous.dispatch import ENGINE, Dispatch
from roundhouse.collection.asynchronous.plan import Plan, bound_of, generated_in
from roundhouse.collection.asynchronous.pool import Key
from roundhouse.collection.collector import written_rollouts
from roundhouse.errors import DataError, StoreError
from roundhouse.store.run import Run, skip_of
from roundhouse.trajectories.records import Rollout, Status

PLACE = "asynchrony"
"""Of the journal, in the run."""


def resume(run: Run, plan: Plan) -> Dispatch:
    """The dispatch of a run that begins or resumes.

    Raises:
        StoreError: the journal and the checkpoints are not of one run.
        DataError: the bound is narrower than that the run began with.
    """
    journal, terms = ControllerJournal(run.location / PLACE), bound_of(run)
    controller = journal.load(terms, ())
    dispatch = Dispatch(controller, journal)
    latest = run.latest_checkpoint()
    newest = run.first_version if latest is None else latest.policy_version
    _skip_what_was_skipped(run, dispatch, newest)
    try:
        finished: list[tuple[int, int, int]] = []
        failed: list[tuple[int, int]] = []
        for iteration in _open_iterations(controller, newest):
            stage = generated_in(run, iteration)
            committed = stage.reference() is not None
            if committed and controller.terms.chooses:
                continue
            keyed = plan.keyed(iteration, written_rollouts(stage.location))
            own = finished_rollouts(keyed)
            finished += own
            if committed:
                failed += sorted(keyed.keys() - {(position, sample) for position, sample, _ in own})
        dispatch.tell(happened.Restarted(newest, tuple(finished), ((ENGINE, None),), tuple(failed)))
    except DataError as error:
        raise StoreError(
            f"{run.location.uri}/{PLACE} does not go with the checkpoints: {error} Where the journal is lost, fork the run: "
            f"--set resume.path={run.checkpoint(newest).location.uri} --set run_id=<name>."
        ) from error
    # What the controller has on record and the store lacks is rolled out again; in an open stage also what had failed
    for iteration in _open_iterations(controller, controller.version):
        stage = generated_in(run, iteration)
        if stage.reference() is not None:
            continue
        own = finished_rollouts(plan.keyed(iteration, written_rollouts(stage.location)))
        rounds = range(1, controller.pool.rounds_of(iteration) + 1)
        keys = chain.from_iterable(plan.keys(iteration, number) for number in rounds)
        forget(dispatch, keys, {(position, sample) for position, sample, _ in own})
    dispatch.record(keep_state=True)
    return dispatch


def catch_up(run: Run, dispatch: Dispatch, version: int) -> None:
    """Tell of iterations up to `version` that were skipped, which the controller did not hear of."""
    with dispatch:
        _skip_what_was_skipped(run, dispatch, version)


def oldest_version(rollout: Rollout) -> int:
    """Of its tokens."""
    return min(turn.policy_version for turn in rollout.turns)


def finished_rollouts(keyed: Mapping[Key, Rollout], tokenless: int | None = None) -> list[tuple[int, int, int]]:
    """Those that need not be made again, as events have them: (position, sample, oldest version). `tokenless` is the version of
    those without turns; unset, they are made again."""
    return [
        (*key, oldest_version(rollout) if rollout.turns or tokenless is None else tokenless)
        for key, rollout in keyed.items()
        if rollout.status is not Status.FAILED and (rollout.turns or tokenless is not None)
    ]


def _skip_what_was_skipped(run: Run, dispatch: Dispatch, version: int) -> None:
    while dispatch.controller.version < version:
        skipped = dispatch.controller.version + 1
        if (skip := skip_of(run, skipped)) is None:
            return
        dispatch.tell(happened.IterationSkipped(skipped, skip.code))


def forget(dispatch: Dispatch, keys: Iterable[Key], kept: Collection[Key]) -> None:
    """Begin again those of these rollouts that have an outcome and are not among those that are kept. What a step was decided
    on stays."""
    controller = dispatch.controller
    with dispatch:
        for position, sample in keys:
            group = controller.pool.groups.get(position)  # none of a round that closed with a rollout of an earlier one
            if group is None or controller.has_decided(position) or (position, sample) in kept:
                continue
            if sample in group.failed:
                dispatch.tell(happened.RolloutEvicted(position, sample, "failed"))
            elif sample in group.versions:
                dispatch.tell(happened.RolloutEvicted(position, sample, "lost"))


def unfinished_iterations(run: Run, controller: Controller) -> list[int]:
    """Those of which rollouts have begun, and whose stage is not complete; oldest first."""
    terms, pool = controller.terms, controller.pool
    begun = {terms.iteration_of(position) for position in pool.groups}
    if terms.chooses:  # a stage can end after the step that took the last of its groups
        begun |= {terms.iteration_of(position) for position in pool.trained_ahead}
        iteration = terms.iteration_of(pool.head) - 1
        while iteration > run.first_version and generated_in(run, iteration).reference() is None:
            begun.add(iteration)
            iteration -= 1
    return [iteration for iteration in sorted(begun) if generated_in(run, iteration).reference() is None]


def _open_iterations(controller: Controller, version: int) -> range:
    """Those that may have rollouts and have not been trained."""
    terms = controller.terms
    first = terms.iteration_of(controller.pool.head) - 1 if terms.chooses else version
    last = version + 1 + terms.start_lag
    return range(first + 1, min(last, terms.iterations) + 1)
