"""An environment over rollout workers: data loaders give items, items become task rows, and a worker plays each row.

Invariant: every rollout has its own worker object, and ends in one of the typed outcomes whatever the worker returns,
raises or leaves. The default loss mask trains on all its model calls.

Invariants of data loaders: `len` is the number of remaining items. An item is returned once, unless it is added again.
`reset` restores the first state of the loader, without later additions. The order is the file's, or with `shuffle` a
function of the seed.

    loader = FileDataLoader("quiz.jsonl", repeat_n=2)     # a, a, b, b; each with group_id, run_id and task_id
    while (item := loader.get_next_item()) is not None: …

A run takes the items of its loader once, as its tasks, and draws them by epochs (`roundhouse.rollout.plan`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from roundhouse.config.secrets import resolved
from roundhouse.environments.base import Restoration, Split, TaskList, TaskRow, Verdict, task_row
from roundhouse.environments.operations import Ask, HostedOperations, HostedSession
from roundhouse.environments.row_files import read_rows
from roundhouse.environments.task_ids import identified_rows
from roundhouse.errors import ConfigError
from roundhouse.imports import add_import_path, load_class
from roundhouse.plugins.nexrl.base import BaseRolloutWorker, Evaluator
from roundhouse.plugins.nexrl.modules import NexRLModule
from roundhouse.plugins.nexrl.plain import ParameterMapping, WorkerConfig
from roundhouse.plugins.nexrl.playing import AskedLlm, HostedWorkers, Played, play_worker, take_over
from roundhouse.plugins.nexrl.section import WorkerEnvironment
from roundhouse.plugins.programs.model_calls import LlmClient
from roundhouse.rollout.agents import RolloutAttempt, checked_verdict
from roundhouse.rollout.plan import epoch_order
from roundhouse.rollout.protocol import BadTaskRow, ClosedOnExit
from roundhouse.trajectories.records import Status
from roundhouse.user_code import lock_limit

WORKERS = {
    "mock": "roundhouse.plugins.nexrl.built_in:MockRolloutWorker",
    "simple": "roundhouse.plugins.nexrl.built_in:SimpleRolloutWorker",
    "agent": "roundhouse.plugins.nexrl.built_in:AgentRolloutWorker",
    "nexau": "roundhouse.plugins.nexrl.nexau:NexAURolloutWorker",
}
"""Workers that come with Roundhouse, by type."""

EVALUATOR_PARAMETER = "evaluator_module_path"
"""Name of an evaluator's class in the parameters of NexAU's workers."""
_NO_CALLS: Any = None
"""In the place of the policy, for a worker that only formats queries."""
MakeWorker = Callable[[LlmClient], BaseRolloutWorker]


class WorkerClient(ClosedOnExit):
    """An environment that plays its rollouts by workers."""

    def __init__(
        self,
        make: MakeWorker,
        name: str,
        train: Sequence[Item],
        heldout: Sequence[Item] = (),
        *,
        max_retries: int = 0,
        hosted: HostedWorkers | None = None,
    ) -> None:
        """`make` is called once a rollout; `hosted`: plays in its place, and is opened and closed with this client."""
        self.name = name
        self._hosted = hosted
        self._open = contextlib.ExitStack()
        self.agent = WorkerAgent(make, train, heldout, max_retries, hosted)
        self.restoration = self.agent.restoration
        self._items: dict[Split, Sequence[Item]] = {"train": train, "heldout": heldout}

    @classmethod
    def from_config(cls, config: WorkerEnvironment) -> Self:
        """The client of a configuration.

        Raises:
            ConfigError: a class or a file cannot be found, or the parameters do not fit.
        """
        make, name = worker_maker(config), config.worker.rpartition(":")[2]
        train = items_of(config, config.train_data, "environment.train_data", is_validate=False)
        heldout: Sequence[Item] = ()
        if config.heldout_data is not None:
            heldout = items_of(config, config.heldout_data, "environment.heldout_data", is_validate=True)
        hosted: HostedWorkers | None = None
        if _has_user_code(config):
            hosted = HostedWorkers(f"{__name__}:worker_service", config.model_dump(mode="json"), name)
        return cls(make, name, train, heldout, max_retries=config.max_retries, hosted=hosted)

    async def __aenter__(self) -> Self:
        if self._hosted is not None:
            await self._hosted.functions.__aenter__()
        self._open.enter_context(lock_limit())
        return self

    async def close(self) -> None:
        self._open.close()
        if self._hosted is not None:
            await self._hosted.functions.close()

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return TaskList(self._items[split], self.agent.row)


class WorkerAgent:
    """Plays a rollout by a worker."""

    def __init__(
        self,
        make: MakeWorker,
        train: Sequence[Item],
        heldout: Sequence[Item],
        max_retries: int,
        hosted: HostedWorkers | None,
    ) -> None:
        self._make = make
        self._train, self._heldout, self._max_retries = train, heldout, max_retries
        self._hosted = hosted
        self._formatter = make(_NO_CALLS)
        self.restoration: Restoration = self._formatter.restoration

    def row(self, item: Item) -> TaskRow:
        """Return an item as a task row. An item that cannot be formatted gets an empty prompt: its rollouts fail, one
        by one."""
        try:
            prompt = self._formatter.format_task_query(item)
        except Exception:  # noqa: BLE001 - the worker's code; it raises again in the rollout, where it is recorded
            prompt = ""
        return task_row(prompt, task_id=str(item["task_id"]), item=item)

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        """From the item to the outcome."""
        rollout = attempt.rollout
        if not isinstance(rollout.task.get("item"), dict):
            raise BadTaskRow("The task row has no `item` for the worker to play.")
        task = {**rollout.task["item"], "group_id": rollout.group_id, "run_id": rollout.sample}
        llm = LlmClient(attempt, self._max_retries)
        if self._hosted is not None:
            played = await self._hosted.play(llm, attempt, task)
        else:
            worker = self._make(llm)
            splits = {"train": self._train, "heldout": self._heldout}
            played = await play_worker(worker, task, on_policy=attempt.on_policy, **splits)
        _judge(attempt, llm, played)


def _judge(attempt: RolloutAttempt, llm: LlmClient, played: Played) -> None:
    """Write the outcome down."""
    result = take_over(llm, played)
    rollout = attempt.rollout
    # Take the turns that the worker's loss mask leaves out, out of training
    for turn, trained in zip(rollout.turns, played.loss_mask, strict=False):
        turn.trained = trained
    verdict = checked_verdict(Verdict(result.reward, metrics=result.metrics))
    cut = llm.limit or ("max_turns" if played.is_truncated else "")
    rollout.reward = verdict.reward
    rollout.metrics = {"llm_calls": float(len(llm.infos)), **played.logged, **verdict.metrics}
    rollout.finish_reason = cut or "stop"
    rollout.status = Status.TRUNCATED if cut else Status.COMPLETED
    if not played.trained_on:
        rollout.status = Status.MASKED
    attempt.response = llm.response(rollout.finish_reason)
    attempt.answer = {
        "reward": verdict.reward,
        "ground_truth": result.ground_truth,
        "metrics": verdict.metrics,
        "extra_info": result.extra_info,
    }


def worker_service(config: dict[str, Any]) -> HostedOperations:
    """Return the operations of the process that hosts the workers."""
    environment = WorkerEnvironment.model_validate(config)
    make, name = worker_maker(environment), environment.worker.rpartition(":")[2]
    train = LaterItems(environment, environment.train_data, "environment.train_data", is_validate=False)
    heldout: Sequence[Item] = ()
    if environment.heldout_data is not None:
        heldout = LaterItems(environment, environment.heldout_data, "environment.heldout_data", is_validate=True)

    async def play(ask: Ask, session: HostedSession, task: dict[str, Any], facts: dict[str, Any]) -> Any:
        session.row = task
        llm = AskedLlm(ask, facts)
        played = await play_worker(make(llm), task, on_policy=facts["on_policy"], train=train, heldout=heldout)
        return [Played.__name__, llm.told(played)]

    return HostedOperations({name: play}, of_row=frozenset({name}), asking=frozenset({name}))


class LaterItems(Sequence[Any]):
    """Items of a split, as `items_of`, read at the first access."""

    def __init__(self, config: WorkerEnvironment, data: str, key: str, *, is_validate: bool) -> None:
        self._read = functools.cache(lambda: items_of(config, data, key, is_validate=is_validate))

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __len__(self) -> int:
        return len(self._read())


def _has_user_code(config: WorkerEnvironment) -> bool:
    """Return whether worker, tools or evaluator are not Roundhouse's."""
    worker, evaluator = _worker_class(config), _evaluator_of(config)
    kinds = [worker] if evaluator is None else [worker, type(evaluator)]
    return worker.calls_user_code or not all(kind.__module__.startswith("roundhouse.") for kind in kinds)


def _evaluator_of(config: WorkerEnvironment) -> Evaluator | None:
    """Return `environment.evaluator`, else the parameter of NexAU's recipes, else the worker class's own evaluator."""
    worker = _worker_class(config)  # which also lets the workspace's files import each other
    target, key = config.evaluator, "environment.evaluator"
    if target is None:
        target, key = config.parameters.get(EVALUATOR_PARAMETER), f"environment.parameters.{EVALUATOR_PARAMETER}"
    if target is None:
        own: Evaluator | None = worker.evaluator
        return own
    kind: Any = load_class(target, Evaluator, key, _bases(config))
    evaluator: Evaluator = _made(kind, key, target)
    return evaluator


def _bases(config: WorkerEnvironment) -> list[str]:
    return [config.workspace] if config.workspace else []


def _worker_class(config: WorkerEnvironment) -> Any:
    bases = _bases(config)
    for base in bases:
        add_import_path(base)
    target = WORKERS.get(config.worker, config.worker)
    if ":" not in target:
        raise ConfigError(
            f"environment.worker is {target!r}; the types are {', '.join(WORKERS)}, or name a class: path/to/file.py:Class or "
            "package.module:Class."
        )
    kind: Any = load_class(target, BaseRolloutWorker, "environment.worker", bases)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if kind.step is BaseRolloutWorker.step and kind.run_agent is BaseRolloutWorker.run_agent:
        missing = ["step or run_agent"]
    if missing:
        raise ConfigError(f"environment.worker is {target!r}, which does not define {', '.join(missing)}.")
    return kind


def worker_maker(config: WorkerEnvironment) -> MakeWorker:
    """Return the function that makes the workers of a configuration.

    Raises:
        ConfigError: a class cannot be found or made, or the parameters do not fit.
    """
    kind, target = _worker_class(config), WORKERS.get(config.worker, config.worker)
    named = config.evaluator or config.parameters.get(EVALUATOR_PARAMETER)
    evaluator = None if named is None else _evaluator_of(config)
    parameters, of_nexrl = resolved(config.parameters), list(inspect.signature(kind).parameters) == ["config"]
    if not of_nexrl:
        try:
            inspect.signature(kind).bind(None, evaluator, **config.parameters)
        except TypeError as error:
            raise ConfigError(f"environment.parameters {config.parameters!r} do not fit {target}: {error}.") from error

    def make(llm: LlmClient) -> BaseRolloutWorker:
        worker: BaseRolloutWorker = (
            kind(WorkerConfig(parameters, llm, evaluator)) if of_nexrl else kind(llm, evaluator, **parameters)
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
    if config.data_loader in ("file", "torch"):
        return _drained(FileDataLoader(data, is_validate=is_validate, key=key), key)
    if config.data_loader == "mock":
        if not data.isdecimal():
            raise ConfigError(f"{key} is {data!r}, but environment.data_loader is mock: give the number of its items.")
        loader: BaseDataLoader = MockDataLoader(int(data), is_validate)
    elif ":" not in config.data_loader:
        raise ConfigError(
            f"environment.data_loader is {config.data_loader!r}; the loaders are file (also torch) and mock, or name a class: "
            "path/to/file.py:Class or package.module:Class."
        )
    else:
        loader_class: Any = load_class(config.data_loader, BaseDataLoader, "environment.data_loader", _bases(config))
        source: Any = data
        if next(iter(inspect.signature(loader_class).parameters), "") == "config":
            files = {"data_files": data.split(","), "seed": 42, "shuffle": False}
            source = ParameterMapping({**files, **resolved(config.parameters)})
        loader = _made(
            lambda: loader_class(source, is_validate=is_validate), "environment.data_loader", config.data_loader
        )
    items = _drained(loader, f"environment.data_loader {config.data_loader}")
    return named_items(items, f"environment.data_loader is {config.data_loader!r}, and {key}", data)


LOADER_SECONDS = 60.0
"""Time after which a loader that has returned None counts as finished."""


def _drained(loader: BaseDataLoader, key: str) -> list[Item]:
    """Return all items of a loader, asked for one by one.

    Raises:
        ConfigError: it returns none for too long.
    """
    items: list[Item] = []
    until = time.monotonic() + LOADER_SECONDS
    while not loader.is_finished():
        if loader.can_return_item():
            if (item := loader.get_next_item()) is None:
                break
            items.append(item)
            until = time.monotonic() + LOADER_SECONDS
        elif time.monotonic() > until:
            raise ConfigError(
                f"{key} returned no item for {LOADER_SECONDS:g} seconds after {len(items)}, and is not finished. A run reads "
                "all items at its start: let is_finished return true at the end."
            )
        else:
            time.sleep(0.01)
    return items


def _made(make: Callable[[], Any], key: str, target: str) -> Any:
    try:
        return make()
    except Exception as error:  # the class's own code
        raise ConfigError(f"{key} is {target!r}, which cannot be made: {error!r}") from error


Item = dict[str, Any]


class BaseDataLoader(NexRLModule):
    """A queue of items. A subclass defines `load`, or NexRL's methods: `__len__`, `__getitem__`, `get_next_item`,
    `is_finished`, `can_return_item` and `reset`."""

    def __init__(self, config: Any = None, is_validate: bool = False) -> None:
        """
        Args:
            config: NexRL's section `data`, or the file of the items, for subclasses that read them.
            is_validate: the items are for validation, not for training.
        """
        if isinstance(config, bool):
            warnings.warn(
                "BaseDataLoader is made with (config, is_validate): name is_validate, or give the file first.",
                DeprecationWarning,
                stacklevel=2,
            )
            config, is_validate = None, config
        self._config, self.is_validate = config, is_validate
        self._items: deque[Item] = deque(self.load())

    def load(self) -> Sequence[Item]:
        """Return all items in their first order."""
        return ()

    def reset(self) -> None:
        self._items = deque(self.load())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def get_next_item(self) -> Item | None:
        """Return the next item and remove it from the loader; None if it is empty."""
        return self._items.popleft() if self._items else None

    def is_finished(self) -> bool:
        return not self._items

    def can_return_item(self) -> bool:
        """Return whether an item is available now. A loader that waits for something overrides this."""
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
        super().__init__(count, is_validate)

    def load(self) -> list[Item]:
        return [{"prompt": f"mock prompt {index}", "ground_truth": str(index)} for index in range(self._count)]


class FileDataLoader(BaseDataLoader):
    """Loader of the rows of .parquet, .csv or .jsonl files, each row `repeat_n` times.

    The URI is local or of any fsspec scheme; commas separate several. Copies of a row have the same `group_id` and
    `task_id` (the row's own `task_id`, or its number) and the `run_id`s 0, 1, ….
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
        super().__init__(uri, is_validate)

    def load(self) -> list[Item]:
        places = epoch_order(len(self._rows), self._seed, 0) if self._shuffle else range(len(self._rows))
        return [{**self._rows[place], "run_id": run} for place in places for run in range(self._repeat_n)]


class TorchDataLoader(FileDataLoader):
    """`FileDataLoader` with the keys of NexRL's section `data`: `data_files`, `rollout_repeat_n`, `shuffle` and `seed`."""

    def __init__(self, config: Mapping[str, Any], is_validate: bool = False) -> None:
        super().__init__(
            ",".join(config["data_files"]),
            repeat_n=config.get("rollout_repeat_n", 1),
            shuffle=config.get("shuffle", False),
            seed=config.get("seed", 42),
            is_validate=is_validate,
        )
        self._config = config


def read_items(uris: str, key: str) -> list[Item]:
    """Return the rows of one or several files, separated by commas, each with `task_id` and `group_id`.

    Raises:
        ConfigError: a file cannot be read, holds no rows, or has another ending.
        DataError: a line of it cannot be read.
    """
    return named_items([row for uri in uris.split(",") for row in read_rows(uri, key)], key, uris)


def named_items(rows: Sequence[Any], key: str, uri: str) -> list[Item]:
    """Return the rows with `task_id` and `group_id`: their own, or their number, counted from 0.

    Raises:
        ConfigError: rows are missing, one is not an object, or a `task_id` is empty or repeated.
    """
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{key} is {uri!r}, which holds no rows, or rows that are not objects.")
    names = [f"row {number}" for number in range(1, len(rows) + 1)]
    named = identified_rows(rows, names, str, f"{key} is {uri!r}")
    return [{"group_id": row["task_id"], **row} for row in named]
