"""Rollout workers as an environment: data items become task rows, and a worker plays each.

Invariant: every rollout has a worker object of its own; what it returns, raises or leaves is one of the typed outcomes; the
default loss mask trains on all its model calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

from roundhouse.compat.nexrl.base import BaseRolloutWorker, Evaluator, NoTrajectory, ReRollout, StepResult, WorkerFailed
from roundhouse.compat.nexrl.data import Item, read_items
from roundhouse.compat.nexrl.llm import LlmClient, RolloutLimit
from roundhouse.config.environments import WorkerEnvironment
from roundhouse.config.secrets import resolved
from roundhouse.environments.base import Restoration, Split, TaskRow, Verdict, task_row
from roundhouse.environments.generated import TaskList
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.import_string import add_import_path, load_class
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import BadTaskRow
from roundhouse.rollout.protocol import checked_verdict
from roundhouse.trajectories.records import Status

WORKERS = {
    "mock": "roundhouse.compat.nexrl.built_in:MockRolloutWorker",
    "simple": "roundhouse.compat.nexrl.built_in:SimpleRolloutWorker",
    "agent": "roundhouse.compat.nexrl.built_in:AgentRolloutWorker",
}
"""Workers that come with Roundhouse, by type."""

_NO_CALLS: Any = None
"""In the place of the policy, for a worker that only formats queries."""
MakeWorker = Callable[[LlmClient], BaseRolloutWorker]


class WorkerClient:
    """An environment whose rollouts are played by workers."""

    def __init__(self, make: MakeWorker, name: str, train: Sequence[Item], heldout: Sequence[Item] = ()) -> None:
        """`make` is called once a rollout."""
        self.name = name
        self.agent = WorkerAgent(make)
        self.restoration = self.agent.restoration
        self._items: dict[Split, Sequence[Item]] = {"train": train, "heldout": heldout}

    @classmethod
    def from_config(cls, config: WorkerEnvironment) -> Self:
        """The client of a configuration.

        Raises:
            ConfigError: a class or a file cannot be found, or the parameters do not fit.
        """
        make = worker_maker(config)
        train = read_items(config.train_data, "environment.train_data")
        heldout = read_items(config.heldout_data, "environment.heldout_data") if config.heldout_data else []
        return cls(make, config.worker.rpartition(":")[2], train, heldout)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return TaskList(self._items[split], self.agent.row)

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class WorkerAgent:
    """Plays a rollout by a worker."""

    def __init__(self, make: MakeWorker) -> None:
        self._make = make
        self._formatter = make(_NO_CALLS)
        self.restoration: Restoration = self._formatter.restoration

    def row(self, item: Item) -> TaskRow:
        """An item as a task row. One that cannot be formatted has an empty prompt here: its rollouts fail, one by one."""
        try:
            prompt = self._formatter.format_task_query(item)
        except Exception:  # noqa: BLE001 - the worker's code; it raises again in the rollout, where it is recorded
            prompt = ""
        return task_row(prompt, task_id=str(item["task_id"]), item=item)

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        """From the item to the outcome."""
        rollout = attempt.rollout
        if not isinstance(rollout.task.get("item"), dict):
            raise BadTaskRow("The task row has no `item`, which is what workers play.")
        task = {**rollout.task["item"], "group_id": rollout.group_id, "run_id": rollout.sample}
        llm = LlmClient(attempt)
        worker = self._make(llm)
        _require_trajectory(worker, await _stepped(worker, task))
        _judge(attempt, worker)


async def _stepped(worker: BaseRolloutWorker, task: dict[str, Any]) -> str | None:
    try:
        return await worker.step(task)
    except RolloutLimit as limit:
        return await worker.cut_short(task, str(limit))
    except (InfraError, DataError, TimeoutError):
        raise
    except Exception as error:  # the worker's code ends here; its failure becomes an outcome
        raise WorkerFailed(f"{type(worker).__name__} raised {error!r}") from error


def _require_trajectory(worker: BaseRolloutWorker, told: str | None) -> None:
    name = type(worker).__name__
    if told is None:
        raise NoTrajectory(f"{name} returned None: it failed before there was a trajectory.")
    if told not in list(StepResult):
        raise WorkerFailed(f"{name} returned {told!r}; the results are {', '.join(StepResult)} and None.")
    if told == StepResult.RE_ROLLOUT:
        raise ReRollout(f"{name} asks for the task again.")
    if told == StepResult.FAIL:
        raise WorkerFailed(f"{name} gave the task up.")
    if worker.result is None:
        raise WorkerFailed(f"{name} returned success, but put no trajectory.")


def _judge(attempt: RolloutAttempt, worker: BaseRolloutWorker) -> None:
    """Write the outcome down."""
    rollout, result, llm = attempt.rollout, worker.result, worker.llm
    assert result is not None
    _exclude(worker, attempt)
    verdict = checked_verdict(Verdict(result.reward, metrics=result.metrics))
    cut = llm.limit or ("max_turns" if worker.is_truncated else "")
    rollout.reward = verdict.reward
    rollout.metrics = {"llm_calls": float(len(llm.infos)), **verdict.metrics}
    rollout.finish_reason = cut or "stop"
    rollout.status = Status.TRUNCATED if cut else Status.COMPLETED
    if not worker.trained_on:
        rollout.status = Status.MASKED
    attempt.response = llm.response(rollout.finish_reason)
    attempt.answer = {
        "reward": verdict.reward,
        "ground_truth": result.ground_truth,
        "metrics": verdict.metrics,
        "extra_info": result.extra_info,
    }


def _exclude(worker: BaseRolloutWorker, attempt: RolloutAttempt) -> None:
    """Take the turns that the worker's loss mask leaves out, out of training."""
    infos, turns = worker.llm.infos, attempt.rollout.turns
    try:
        mask = worker.get_train_loss_mask(infos)
    except Exception as error:  # the worker's code ends here
        raise WorkerFailed(f"{type(worker).__name__}.get_train_loss_mask raised {error!r}") from error
    if len(mask) != len(infos) or not all(isinstance(each, bool) for each in mask):
        raise WorkerFailed(
            f"{type(worker).__name__}.get_train_loss_mask returned {mask!r} for {len(infos)} model calls; it must return one "
            "truth value a call."
        )
    for turn, trained in zip(turns, mask, strict=False):
        turn.trained = trained


def worker_maker(config: WorkerEnvironment) -> MakeWorker:
    """What makes the workers of a configuration.

    Raises:
        ConfigError
    """
    bases = [config.workspace] if config.workspace else []
    for base in bases:
        add_import_path(base)
    target = WORKERS.get(config.worker, config.worker)
    if ":" not in target:
        raise ConfigError(
            f"environment.worker is {target!r}; the types are {', '.join(WORKERS)}, or name a class: path/to/file.py:Class or "
            "package.module:Class."
        )
    found: Any = load_class(target, BaseRolloutWorker, "environment.worker", bases)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"environment.worker is {target!r}, which does not define {missing}.")
    evaluator = None
    if config.evaluator is not None:
        evaluator_class: Any = load_class(config.evaluator, Evaluator, "environment.evaluator", bases)
        evaluator = _made(evaluator_class, "environment.evaluator", config.evaluator)
    try:
        inspect.signature(found).bind(None, evaluator, **config.parameters)
    except TypeError as error:
        raise ConfigError(f"environment.parameters {config.parameters!r} do not fit {target}: {error}.") from error

    parameters = resolved(config.parameters)

    def make(llm: LlmClient) -> BaseRolloutWorker:
        worker: BaseRolloutWorker = found(llm, evaluator, **parameters)
        return worker

    _made(lambda: make(_NO_CALLS), "environment.worker", target)
    return make


def _made(make: Callable[[], Any], key: str, target: str) -> Any:
    try:
        return make()
    except Exception as error:  # the class's own code
        raise ConfigError(f"{key} is {target!r}, which cannot be made: {error!r}") from error
