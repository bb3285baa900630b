"""Rollout workers as an environment: data items become task rows, and a worker plays each.

Invariant: every rollout has a worker object of its own; what it returns, raises or leaves is one of the typed outcomes; the
default loss mask trains on all its model calls.

Data loaders: items in an order, with room for some to be put back. A run takes the items of its loader once, as its tasks, and
draws them by epochs (`roundhouse.rollout.plan`).

Invariants: `len` is the number of items still to come; an item is given out once, unless it is added again; `reset` brings back
the loader as it was made, whatever was added since. A file's order is the file's, or with `shuffle` a function of the seed.

    loader = FileDataLoader("quiz.jsonl", repeat_n=2)     # a, a, b, b; each with group_id, run_id and task_id
    while (item := loader.get_next_item()) is not None: …
"""

from __future__ import annotations

import csv
import inspect
import io
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import fsspec
import orjson
import pyarrow as pa

from roundhouse.compat.nexrl.base import (
    BaseRolloutWorker,
    Evaluator,
    LlmClient,
    NoTrajectory,
    ReRollout,
    RolloutLimit,
    StepResult,
    WorkerFailed,
)
from roundhouse.compat.nexrl.plain import WorkerConfig, provide_nexrl
from roundhouse.config.environments import WorkerEnvironment
from roundhouse.config.secrets import resolved
from roundhouse.environments.base import Restoration, Split, TaskList, TaskRow, Verdict, task_row
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.imports import add_import_path, load_class
from roundhouse.rollout.agents import RolloutAttempt, checked_verdict
from roundhouse.rollout.plan import epoch_order
from roundhouse.rollout.protocol import BadTaskRow, ClosedOnExit
from roundhouse.store.stage import parse_parquet
from roundhouse.trajectories.records import Status

WORKERS = {
    "mock": "roundhouse.compat.nexrl.built_in:MockRolloutWorker",
    "simple": "roundhouse.compat.nexrl.built_in:SimpleRolloutWorker",
    "agent": "roundhouse.compat.nexrl.built_in:AgentRolloutWorker",
    "nexau": "roundhouse.compat.nexrl.nexau:NexAURolloutWorker",
}
"""Workers that come with Roundhouse, by type."""

_NO_CALLS: Any = None
"""In the place of the policy, for a worker that only formats queries."""
MakeWorker = Callable[[LlmClient], BaseRolloutWorker]


class WorkerClient(ClosedOnExit):
    """An environment whose rollouts are played by workers."""

    def __init__(
        self, make: MakeWorker, name: str, train: Sequence[Item], heldout: Sequence[Item] = (), *, max_retries: int = 0
    ) -> None:
        """`make` is called once a rollout."""
        self.name = name
        self.agent = WorkerAgent(make, train, heldout, max_retries)
        self.restoration = self.agent.restoration
        self._items: dict[Split, Sequence[Item]] = {"train": train, "heldout": heldout}

    @classmethod
    def from_config(cls, config: WorkerEnvironment) -> Self:
        """The client of a configuration.

        Raises:
            ConfigError: a class or a file cannot be found, or the parameters do not fit.
        """
        make = worker_maker(config)
        train = items_of(config, config.train_data, "environment.train_data", is_validate=False)
        heldout: Sequence[Item] = ()
        if config.heldout_data is not None:
            heldout = items_of(config, config.heldout_data, "environment.heldout_data", is_validate=True)
        return cls(make, config.worker.rpartition(":")[2], train, heldout, max_retries=config.max_retries)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return TaskList(self._items[split], self.agent.row)


class WorkerAgent:
    """Plays a rollout by a worker."""

    def __init__(self, make: MakeWorker, train: Sequence[Item], heldout: Sequence[Item], max_retries: int) -> None:
        self._make = make
        self._train, self._heldout, self._max_retries = train, heldout, max_retries
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
        llm = LlmClient(attempt, self._max_retries)
        worker = self._make(llm)
        worker.set_module_references(
            trajectory_pool=None,
            dataloader=self._train,
            weight_sync_controller=None,
            validate_dataloader=self._heldout,
            validator=None,
        )
        if attempt.on_policy:
            final = await _stepped(worker, task)
        else:
            worker.begin_validate()
            final = await _stepped(worker, task)
            worker.end_validate()
        name = type(worker).__name__
        if final is None:
            raise NoTrajectory(f"{name} returned None: it failed before there was a trajectory.")
        if final not in list(StepResult):
            raise WorkerFailed(f"{name} returned {final!r}; the results are {', '.join(StepResult)} and None.")
        if final == StepResult.RE_ROLLOUT:
            raise ReRollout(f"{name} asks for the task again.")
        if final == StepResult.FAIL:
            raise WorkerFailed(f"{name} gave the task up.")
        if worker.result is None:
            raise WorkerFailed(f"{name} returned success, but put no trajectory.")
        _judge(attempt, worker)


async def _stepped(worker: BaseRolloutWorker, task: dict[str, Any]) -> str | None:
    try:
        return await worker.play(task)
    except RolloutLimit as limit:
        return await worker.cut_short(task, str(limit))
    except (InfraError, DataError, TimeoutError):
        raise
    except Exception as error:  # the worker's code ends here; its failure becomes an outcome
        raise WorkerFailed(f"{type(worker).__name__} raised {error!r}") from error


def _judge(attempt: RolloutAttempt, worker: BaseRolloutWorker) -> None:
    """Write the outcome down."""
    rollout, result, llm = attempt.rollout, worker.result, worker.llm
    assert result is not None
    # Take the turns that the worker's loss mask leaves out, out of training
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


def worker_maker(config: WorkerEnvironment) -> MakeWorker:
    """What makes the workers of a configuration.

    Raises:
        ConfigError
    """
    provide_nexrl()
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
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if found.step is BaseRolloutWorker.step and found.run_agent is BaseRolloutWorker.run_agent:
        missing = ["step or run_agent"]
    if missing:
        raise ConfigError(f"environment.worker is {target!r}, which does not define {', '.join(missing)}.")
    evaluator = None
    if config.evaluator is not None:
        evaluator_class: Any = load_class(config.evaluator, Evaluator, "environment.evaluator", bases)
        evaluator = _made(evaluator_class, "environment.evaluator", config.evaluator)
    parameters, of_nexrl = resolved(config.parameters), list(inspect.signature(found).parameters) == ["config"]
    if not of_nexrl:
        try:
            inspect.signature(found).bind(None, evaluator, **config.parameters)
        except TypeError as error:
            raise ConfigError(f"environment.parameters {config.parameters!r} do not fit {target}: {error}.") from error

    def make(llm: LlmClient) -> BaseRolloutWorker:
        worker: BaseRolloutWorker = (
            found(WorkerConfig(parameters, llm, evaluator)) if of_nexrl else found(llm, evaluator, **parameters)
        )
        return worker

    _made(lambda: make(_NO_CALLS), "environment.worker", target)
    return make


def items_of(config: WorkerEnvironment, data: str, key: str, *, is_validate: bool) -> list[Item]:
    """The items that the configured loader gives, in its order, each with `task_id` and `group_id`.

    Raises:
        ConfigError: the loader cannot be found or made, or gives no items.
        DataError: a line of the file cannot be read.
    """
    if config.data_loader == "file":
        return list(iter(FileDataLoader(data, is_validate=is_validate, key=key).get_next_item, None))
    if config.data_loader == "mock":
        if not data.isdecimal():
            raise ConfigError(f"{key} is {data!r}, but environment.data_loader is mock: give the number of its items.")
        loader: BaseDataLoader = MockDataLoader(int(data), is_validate)
    else:
        bases = [config.workspace] if config.workspace else []
        found: Any = load_class(config.data_loader, BaseDataLoader, "environment.data_loader", bases)
        loader = _made(lambda: found(data, is_validate=is_validate), "environment.data_loader", config.data_loader)
    items = list(iter(loader.get_next_item, None))
    return named_items(items, f"environment.data_loader is {config.data_loader!r}, and {key}", data)


def _made(make: Callable[[], Any], key: str, target: str) -> Any:
    try:
        return make()
    except Exception as error:  # the class's own code
        raise ConfigError(f"{key} is {target!r}, which cannot be made: {error!r}") from error


Item = dict[str, Any]
_MORE = "\0"
"""Under which cells beyond the columns come; no column has this name."""


class BaseDataLoader(ABC):
    """A queue of items."""

    def __init__(self, is_validate: bool = False) -> None:
        self.is_validate = is_validate
        """The items are for validation, not for training."""
        self._items: deque[Item] = deque()
        self.reset()

    @abstractmethod
    def load(self) -> Sequence[Item]:
        """All items in their first order."""

    def reset(self) -> None:
        self._items = deque(self.load())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def get_next_item(self) -> Item | None:
        """The next item, which leaves the loader; None when there is none."""
        return self._items.popleft() if self._items else None

    def is_finished(self) -> bool:
        return not self._items

    def can_return_item(self) -> bool:
        """Whether an item can be had right now. A loader that waits for something overrides this."""
        return bool(self._items)

    def add_item(self, item: Item) -> None:
        self.add_item_back(item)

    def add_item_front(self, item: Item) -> None:
        self._items.appendleft(item)

    def add_item_back(self, item: Item) -> None:
        self._items.append(item)


class MockDataLoader(BaseDataLoader):
    """`count` made-up items."""

    def __init__(self, count: int = 16, is_validate: bool = False) -> None:
        self._count = count
        super().__init__(is_validate)

    def load(self) -> list[Item]:
        return [{"prompt": f"mock prompt {index}", "ground_truth": str(index)} for index in range(self._count)]


class FileDataLoader(BaseDataLoader):
    """The rows of a .parquet, .csv or .jsonl file, local or of any fsspec scheme; each `repeat_n` times.

    Copies of a row have the same `group_id` and `task_id` (the row's own `task_id`, or its number) and the `run_id`s 0, 1, ….
    """

    def __init__(
        self,
        uri: str,
        *,
        repeat_n: int = 1,
        shuffle: bool = False,
        seed: int = 42,
        is_validate: bool = False,
        key: str = "data",
    ) -> None:
        """`key` names the configuration key in errors.

        Raises:
            ConfigError: the file cannot be read, holds no rows, or has another ending.
            DataError: a line of it cannot be read.
        """
        self._rows = read_items(uri, key)
        self._repeat_n, self._shuffle, self._seed = repeat_n, shuffle, seed
        super().__init__(is_validate)

    def load(self) -> list[Item]:
        places = epoch_order(len(self._rows), self._seed, 0) if self._shuffle else range(len(self._rows))
        return [{**self._rows[place], "run_id": run} for place in places for run in range(self._repeat_n)]


def read_items(uri: str, key: str) -> list[Item]:
    """The rows of a file, each with `task_id` and `group_id`.

    Raises:
        ConfigError: the file cannot be read, holds no rows, or has another ending.
        DataError: a line of it cannot be read.
    """
    ending = uri.rpartition(".")[2]
    if ending not in _READERS:
        raise ConfigError(f"{key} is {uri!r}: a data file ends in .{', .'.join(_READERS)}.")
    try:
        with fsspec.open(uri, "rb") as file:
            rows = _READERS[ending](file.read())
    except DataError as error:
        raise DataError(f"{key} is {uri!r}: {error}") from error
    except (OSError, ValueError, ImportError, pa.ArrowException) as error:
        raise ConfigError(f"{key} is {uri!r}, which cannot be read: {error}") from error
    return named_items(rows, key, uri)


def named_items(rows: Sequence[Any], key: str, uri: str) -> list[Item]:
    """The rows with `task_id` and `group_id`: their own, or their number.

    Raises:
        ConfigError: there is none, one is no object, or two have the same `task_id`.
    """
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{key} is {uri!r}, which holds no rows, or rows that are no objects.")
    named = [
        {**row, "task_id": str(index if row.get("task_id") is None else row["task_id"])}
        for index, row in enumerate(rows)
    ]
    if len({row["task_id"] for row in named}) < len(named):
        raise ConfigError(f"{key} is {uri!r}, in which several rows have the same task_id.")
    return [{"group_id": row["task_id"], **row} for row in named]


def _lines(raw: bytes) -> list[Any]:
    rows = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            rows += [orjson.loads(line)] if line.strip() else []
        except orjson.JSONDecodeError as error:
            raise DataError(f"line {number} is no JSON: {error}.") from error
    return rows


def _table(raw: bytes) -> list[Any]:
    reader = csv.DictReader(io.StringIO(raw.decode("utf-8-sig"), newline=""), restkey=_MORE)
    rows = []
    try:
        for row in reader:
            if more := row.pop(_MORE, None):
                raise DataError(
                    f"line {reader.line_num} has {len(more)} cells more than there are columns. Quote cells with commas."
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(
            f"line {reader.reader.line_num} cannot be read: {error}. Cells may have {csv.field_size_limit()} characters; "
            ".jsonl and .parquet have no such limit."
        ) from error
    return rows


_READERS: dict[str, Callable[[bytes], list[Any]]] = {
    "jsonl": _lines,
    "csv": _table,
    "parquet": lambda raw: parse_parquet(raw).to_pylist(),
}
