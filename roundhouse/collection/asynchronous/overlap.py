"""The two loops of an overlapped run and their exchange.

    generation loop    orders() ──> BeginCollect(k)      Transfer(v): bring the engine to v      … until the plan ends
    training loop      collected(k) ──> training(k): validate, train, checkpoint ──> validating(k): evaluate

Invariants: the controller chooses a step's rollouts before the step begins; they are then complete and never trained on
twice. An error of the generation loop is raised in the waiting training loop; an error of a collect stage only for its
iteration. No loop waits for an ended one. Both loops can be restarted from the store alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import catch_up, resume, unfinished_iterations
from roundhouse.collection.asynchronous.plan import Plan
from roundhouse.collection.collector import refuse_many_failures
from roundhouse.collection.controller import Transfer
from roundhouse.collection.in_process_runner import runner_of
from roundhouse.collection.runner import ENGINE, LOOK_SECONDS
from roundhouse.config.operations import stall_seconds
from roundhouse.environments.base import TaskRow
from roundhouse.errors import DataError, InfraError, TooFewLeft
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.trajectories.records import Rollout


@dataclass(frozen=True, slots=True)
class BeginCollect:
    """Begin the collect stage of this iteration: its first rollout may begin."""

    iteration: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rollouts that a step trains on."""

    groups: tuple[int, ...]
    at_hand: Mapping[int, list[Rollout]]
    """Rollouts of those groups that need not be read from the store."""
    window_seconds: float = 0.0
    """From the first begin to the last end of these."""


class GenerationLoopEnded(InfraError):
    """The generation loop has ended while it was waited for."""


class Overlap:
    """One life of both loops; see the module's docstring."""

    def __init__(self, run: Run, engine_url: str, tasks: Sequence[TaskRow] | None = None) -> None:
        """`tasks`: the run's training tasks; unset, all of its environment."""
        self.run = run
        self.plan = Plan(run, tasks)
        self.dispatch = resume(run, self.plan)
        self.number = self.dispatch.segments
        """Number of this process among the run's processes; each writes to the journal when it starts."""
        self.runner = runner_of(run.config, self.plan, self.dispatch, engine_url)
        self.error: BaseException | None = None
        """Exception that ended the generation loop."""
        self.ended = False
        self.given_up = False
        """A collect stage's error has been raised: both loops are to be begun again."""
        self._failed: dict[int, BaseException] = {}
        self._stopped = False

    @property
    def first(self) -> int:
        """The iteration that is trained next."""
        return self.dispatch.controller.version + 1

    @property
    def finished(self) -> bool:
        """Return whether the plan's last version is stored."""
        return self.dispatch.controller.finished

    # The generation loop

    def orders(self) -> Iterator[BeginCollect | Transfer | None]:
        """Yield the next order, or None from time to time to check started work. Ends with the plan or when the loop is
        stopped.

        Raises:
            Exception: the error that ended the rollouts.
        """
        self.runner.start()
        opened: set[int] = set()
        for iteration in unfinished_iterations(self.run, self.dispatch.controller):
            opened.add(iteration)  # all of its rollouts may be there, and none left to begin
            yield BeginCollect(iteration)
        while True:
            with self.dispatch as dispatch:
                if self._stopped or dispatch.controller.finished:
                    return
                if self.runner.ended.is_set():
                    raise self.runner.error or GenerationLoopEnded("The rollouts have ended before the plan.")
                transfer = self.dispatch.controller.transfer(ENGINE)
                order: BeginCollect | Transfer | None = transfer
                if transfer is not None:
                    self.dispatch.tell(happened.TransferStarted(ENGINE, transfer.version))
                elif (next_iteration := self.runner.wanted) is not None and next_iteration not in opened:
                    order = BeginCollect(next_iteration)
                if order is None:
                    dispatch.wait(LOOK_SECONDS)
            if isinstance(order, BeginCollect):
                opened.add(order.iteration)
            yield order

    def transferred(self, version: int) -> None:
        """The engine has proved that it holds this version."""
        self.dispatch.tell(happened.TransferFinished(ENGINE, version))

    def failed(self, iteration: int, error: BaseException) -> None:
        """Record that an iteration's collect stage failed. The step that needs it decides about the failure."""
        self._failed[iteration] = error
        self.dispatch.wake()

    @property
    def failure(self) -> BaseException | None:
        """Return the error of the first failed collect stage."""
        return self._failed[min(self._failed)] if self._failed else None

    def end(self, error: BaseException | None) -> None:
        """Called once by the generation loop, last of all: its rollouts are ended, and waiting loops are notified."""
        try:
            self.runner.stop()
        except InfraError as hanging:
            error = error or hanging
        finally:
            self.error, self.ended = error, True
            self.dispatch.wake()

    def stop(self) -> None:
        """Ask the generation loop to end."""
        self._stopped = True
        self.dispatch.wake()

    # The training loop

    @property
    def chooses(self) -> bool:
        """Return whether the controller chooses a step's groups from several iterations."""
        return self.dispatch.controller.terms.chooses

    def collected(self, k: int) -> Reference | None:
        """Wait for the collect stage that iteration k trains on. Return None if the controller chooses the groups and
        can do so now.

        Raises:
            Exception: the error of this stage, or the error of the generation loop.
        """
        catch_up(self.run, self.dispatch, k - 1)
        controller = self.dispatch.controller
        # Evaluations that were due and will not come any more, as of a skipped iteration, hold nothing up.
        while (due := controller.terms.due(controller.evaluated, k - 1)) is not None:
            with self.validating(due):
                pass
        stage, patience = self.run.stage(k, StageKind.COLLECT), stall_seconds(self.run.config)
        quiet_since = time.monotonic()
        while True:
            if (reference := stage.reference()) is not None:
                return reference
            with self.dispatch as dispatch:
                if (failure := self.failure if self.chooses else self._failed.get(k)) is not None:
                    raise self._gives_up(failure)
                if self.chooses and dispatch.controller.training() is not None:
                    return None
                self._refuse_ended()
                at_work = dispatch.works_elsewhere or dispatch.controller.pool.running
                quiet_since = time.monotonic() if at_work else quiet_since
                dispatch.wait(LOOK_SECONDS)
            if time.monotonic() - quiet_since > patience:
                raise GenerationLoopEnded(
                    f"No rollout, transfer or step has been at work for {patience:g} s (failures.stall_seconds), and iteration "
                    f"{k} is not collected."
                )

    @contextmanager
    def training(self, k: int) -> Iterator[StepBatch]:
        """Make version k in the block from exactly the groups that the controller chose.

        Raises:
            DataError: it chose groups of other iterations without a window.
            TooFewRollouts, FailingRollouts: more of the chosen rollouts failed than `rollout.max_failed_fraction`; they
                are rolled out again.
        """
        if self.dispatch.controller.version >= k:  # the version exists, but its following work is missing
            yield StepBatch((), {})
            return
        with self.dispatch as dispatch:
            controller = self.dispatch.controller
            train = controller.training()
            if (
                train is None
                or train.iteration != k
                or (not self.chooses and any(self.plan.iteration_of(position) != k for position in train.groups))
            ):
                raise DataError(f"Iteration {k} is collected, but the controller decides on {train}. Fork the run.")
            batch = StepBatch(train.groups, self.runner.at_hand(train.groups), self.runner.window_seconds(train.groups))
            if self.chooses and controller.batch is None:
                try:
                    refuse_many_failures(self.runner.outlines(train.groups), self.run.config.rollout, self.runner.url)
                except TooFewLeft as failure:
                    raise self._gives_up(failure) from None
            dispatch.tell(happened.TrainingStarted(k, batch.groups))
        try:
            self.runner.flush()  # a step that is begun again has the same groups
            yield batch
        except BaseException as error:
            self.dispatch.tell(happened.TrainingFailed(k, f"{type(error).__name__}"))
            raise
        self.dispatch.tell(happened.TrainingFinished(k))
        self.dispatch.record(keep_state=True)

    def _gives_up(self, failure: BaseException) -> BaseException:
        """Restart both loops with their failures."""
        self.given_up = True
        self.stop()
        return failure

    @contextmanager
    def validating(self, version: int) -> Iterator[None]:
        """Evaluate a version in the block, during which the weights do not change.

        Raises:
            Exception: the error that ended the generation loop.
        """
        with self.dispatch as dispatch:
            controller = dispatch.controller
            if controller.terms.due(controller.evaluated, version) != version or controller.finished:
                is_current = False
            else:
                is_current = True
                while controller.evaluating is None:
                    if (validate := controller.validation()) is not None:
                        dispatch.tell(happened.ValidationStarted(validate.version))
                        break
                    self._refuse_ended()
                    dispatch.wait(LOOK_SECONDS)
        yield
        if is_current:
            self.dispatch.tell(happened.ValidationEnded(version))
            self.dispatch.record()

    def _refuse_ended(self) -> None:
        if self.ended:
            raise self.error or GenerationLoopEnded("The generation loop has ended.")
