"""Run many rollouts at once and yield them as they finish; the remaining work; and the two sources of rollouts.

Invariants: each row gives exactly one outcome. At most `concurrency` rows are in flight, and no work exists for rows
that have not begun. A failed row is an outcome and ends nothing. If the consumer stops early, rows in flight are
cancelled and awaited. If the source cannot be reached at all, rows that have not begun are returned untried instead of
failing one by one.

    async with source:
        async for outcome in stream(rows, source, concurrency=64):     in the order of completion
            …
    results = await run_rollouts(rows, source, concurrency=64)         in the order of the rows
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import aiohttp

from roundhouse.config.models import EnvironmentConfig, GenerationConfig, RolloutConfig
from roundhouse.environments.base import Split
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import EngineUnreachable
from roundhouse.plugins.nemo_gym.clients.connection import Connection, json_object, look_up_all
from roundhouse.plugins.nemo_gym.exchange.json_lines import ROLLOUT, TASK, Key, Row, key_of
from roundhouse.plugins.nemo_gym.exchange.outgoing import ATTEMPT, Address, is_index, result_row
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics
from roundhouse.rollout.agents import play_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec, reorder
from roundhouse.rollout.protocol import TERMINAL, AgentFailed, BadAgentAnswer, EnvironmentUnreachable, classify
from roundhouse.trajectories.records import FailureKind, derive_seed

log = logging.getLogger(__name__)

SMALLEST_OUTAGE = 4
"""Consecutive rows that reach no agent, at any concurrency, after which the others are not tried."""


class NotReached(InfraError):
    """The row never got to the source: it costs no attempt."""


class RolloutSource(Protocol):
    """Whatever plays task rows. An async context manager."""

    async def run(self, row: Row) -> Row:
        """Play a row (of the materialized inputs); the answer of `/run`.

        Raises:
            NotReached: no agent took the row.
            InfraError, DataError: it failed; another attempt may help, or will not.
        """
        ...

    async def aggregate(self, agent: str, rows: Sequence[Row]) -> Row:
        """The aggregate metrics of an agent's rollouts, without their conversations."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Outcome of a row."""

    index: int
    """Index of the row."""
    row: Row
    result: Row | None = None
    error: Exception | None = None
    """Instead of a result."""

    @property
    def reached(self) -> bool:
        return not isinstance(self.error, NotReached)

    @property
    def final(self) -> bool:
        """The failure is the data's: trying again fails in the same way."""
        return self.error is not None and classify(self.error)[0] is FailureKind.DATA


async def stream(
    rows: Sequence[Row], source: RolloutSource, concurrency: int | None
) -> AsyncGenerator[RowOutcome, None]:
    """Yield the outcomes of `rows` in the order of completion; all rows at once without `concurrency`."""
    concurrency = concurrency or max(1, len(rows))
    queue: Iterator[tuple[int, Row]] = iter(enumerate(rows))
    finished: asyncio.Queue[RowOutcome] = asyncio.Queue(maxsize=concurrency)
    outage = _Outage(concurrency)

    async def work() -> None:
        for index, row in queue:
            outcome = outage.untried(index, row) or await _outcome(index, row, source)
            outage.record(outcome)
            await finished.put(outcome)

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(rows)))]
    try:
        for _ in rows:
            yield await finished.get()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def run_rollouts(rows: Sequence[Row], source: RolloutSource, concurrency: int | None) -> list[RowOutcome]:
    """Return the outcomes of `rows` in their order.

    Raises:
        ReorderError: a row does not have exactly one outcome.
    """
    async with aclosing(stream(rows, source, concurrency)) as outcomes:
        return reorder([(outcome.index, outcome) async for outcome in outcomes], len(rows))


async def _outcome(index: int, row: Row, source: RolloutSource) -> RowOutcome:
    try:
        return RowOutcome(index, row, await source.run(row))
    except (InfraError, DataError) as error:
        return RowOutcome(index, row, error=error)
    except Exception as error:  # a defect costs this row, not the others
        log.exception("Row %d ended with a defect", index)
        return RowOutcome(index, row, error=error)


class _Outage:
    """Opens when a whole wave in a row was not reached; stays open."""

    def __init__(self, concurrency: int) -> None:
        self._threshold = max(concurrency, SMALLEST_OUTAGE)
        self._in_a_row = 0
        self._cause: Exception | None = None

    def record(self, outcome: RowOutcome) -> None:
        self._in_a_row = 0 if outcome.reached else self._in_a_row + 1
        if self._in_a_row >= self._threshold and self._cause is None:
            self._cause = outcome.error

    def untried(self, index: int, row: Row) -> RowOutcome | None:
        if self._cause is None:
            return None
        return RowOutcome(index, row, error=NotReached(f"Not tried: {self._threshold} rows before it. {self._cause}"))


MAX_ATTEMPTS = 3
MAX_ATTEMPTS_VARIABLE = "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS"


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rows to run, and why the others are not."""

    rows: list[Row]
    done: int = 0
    terminal: int = 0
    """Failed for good."""
    exhausted: int = 0
    """Failed as often as is allowed."""


def remaining(
    wanted: Sequence[Row], done: Iterable[Row], failures: Iterable[Row], max_attempts: int = MAX_ATTEMPTS
) -> Remaining:
    """Return the rows of `wanted` (materialized inputs) that remain to run; failed rows get the number of their next
    attempt.

    A written rollout is not made again. A rollout that failed for good, or as often as allowed, is not tried again. All
    others are.

        wanted a/0 a/1 b/0 b/1, rollouts a/0, failures a/1 (3 times) b/0 (terminal) b/1 (once)
            ->  to run b/1, its `_ng_attempt_index` 1
    """
    finished = {key_of(row) for row in done}
    attempts: Counter[Key] = Counter()
    terminal: set[Key] = set()
    for row in failures:
        if is_index(row.get(TASK)) and is_index(row.get(ROLLOUT)):
            attempts[key_of(row)] += 1
            if row.get(TERMINAL):
                terminal.add(key_of(row))
    rows = []
    counts: Counter[str] = Counter()
    for row in wanted:
        key = key_of(row)
        tried = attempts[key]
        if key in finished:
            counts["done"] += 1
        elif key in terminal:
            counts["terminal"] += 1
        elif tried >= max_attempts:
            counts["exhausted"] += 1
        else:
            rows.append(row | {ATTEMPT: tried} if tried else row)
    return Remaining(rows, counts["done"], counts["terminal"], counts["exhausted"])


def max_attempts(environ: Mapping[str, str] = os.environ) -> int:
    """Return the limit of attempts at a rollout, over all resumes: NEMO_GYM_MAX_ROLLOUT_ATTEMPTS, by default 3.

    Raises:
        ConfigError: it is not a whole number from 1.
    """
    text = environ.get(MAX_ATTEMPTS_VARIABLE) or str(MAX_ATTEMPTS)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{MAX_ATTEMPTS_VARIABLE} is {text!r}: give a whole number from 1, or unset it.")
    return int(text)


RUN_SECONDS = 3600.0
"""Time limit of one /run: a whole rollout, its tools and its verifier."""
SHORT_SECONDS = 60.0
RETRIABLE = frozenset({408, 409, 425, 429})
"""4xx answers that ask to come again."""
MOST_QUOTED = 2000
EVERY = "*"
"""In place of an instance name: the agent server for all rows."""


class AgentRefused(DataError):
    """The agent answered with a 4xx."""


class RowServers:
    """Servers by the instance name of an agent; a row goes to the server of its `agent_ref`, or to `*`."""

    route: ClassVar[str]
    unavailable: ClassVar[type[InfraError]]
    """Raised for a 5xx, or a request to come again."""
    refused: ClassVar[type[DataError]]
    """Raised for another 4xx."""
    malformed: ClassVar[type[DataError]]
    """Error for an answer that is not a JSON object."""

    def __init__(self, urls: Mapping[str, str], seconds: float = RUN_SECONDS, *, key: str = "--agent-url") -> None:
        """`key` is the option that holds the URLs, for errors. The name `*` means every agent."""
        self._connections = {name: Connection(url, seconds, key=key) for name, url in urls.items()}

    async def run(self, row: Row) -> Row:
        connection = self._of(row["agent_ref"]["name"])
        try:
            status, text = await connection.post(self.route, row)
        except EnvironmentUnreachable as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                raise NotReached(str(error)) from error
            raise
        where = f"{connection.url}/{self.route}"
        if status >= 500 or status in RETRIABLE:
            raise self.unavailable(f"{where} answered {status}: {text[:MOST_QUOTED]}")
        if status >= 300:
            raise self.refused(f"{where} answered {status}: {text[:MOST_QUOTED]}")
        return json_object(text, where, self.malformed)

    async def aggregate(self, agent: str, rows: Sequence[Row]) -> Row:
        """Return the server's statistics; ours if the request fails."""
        connection = self._of(agent)
        try:
            status, text = await connection.post("aggregate_metrics", {"verify_responses": rows}, seconds=SHORT_SECONDS)
        except InfraError:
            return aggregate_metrics(rows)
        return aggregate_metrics(rows) if status >= 300 else json_object(text, connection.url, self.malformed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections.values():
            await connection.close()

    def _of(self, agent: str) -> Connection:
        connection = self._connections.get(agent, self._connections.get(EVERY))
        if connection is None:
            known = ", ".join(self._connections) or "none"
            raise DataError(f"The row's agent_ref names {agent!r}; agents there: {known}.")
        return connection


class AgentServers(RowServers):
    """Source of rollouts: agent servers of NeMo Gym's contract, which play a whole row on POST /run.

    A row is posted once. The result is the agent's unchanged answer, or a typed failure. A 4xx is the row's fault,
    except if it asks for a later retry; a 5xx is not.
    """

    route = "run"
    unavailable = AgentFailed
    refused = AgentRefused
    malformed = BadAgentAnswer


async def agents_of_head(url: str) -> dict[str, str]:
    """The agent servers that a head server knows, as base URLs by instance name.

    Raises:
        InfraError: it does not answer, or not with a configuration.
        ConfigError: it knows no agent that has an address.
    """
    connection = Connection(url, SHORT_SECONDS, key="--head")
    try:
        agents = await look_up_all(connection)
    finally:
        await connection.close()
    if not agents:
        raise ConfigError(f"--head is {url}, which knows no agent that has an address. Is the configuration started?")
    return agents


ENGINE_GONE = classify(EngineUnreachable())[1]


class OwnPolicy:
    """Source of rollouts: the engine at `engine_url` and an environment in this process, without an agent server.

    A row's result holds the whole rollout record under `_roundhouse`, so that an import loses nothing. The seed of a
    rollout depends on the collection's seed and the row's indexes alone.
    """

    def __init__(
        self,
        engine_url: str,
        environment: EnvironmentConfig,
        generation: GenerationConfig,
        rollout: RolloutConfig,
        seed: int = 0,
    ) -> None:
        self._rollout = rollout
        self._sampling = generation.sampling
        self._seed = seed
        self._policy = HttpPolicyClient(engine_url, generation)
        self._environment = open_environment(environment)
        self._open = AsyncExitStack()

    @property
    def agent(self) -> str:
        """The name of its rows and metrics."""
        return self._environment.name

    def tasks(self, split: Split) -> Sequence[Row]:
        """The environment's own task rows."""
        return self._environment.tasks(split)

    async def run(self, row: Row) -> Row:
        task, rollout = row[TASK], row[ROLLOUT]
        seed = derive_seed(self._seed, task, rollout)
        group = str(row.get("task_id") or f"task-{task}")
        attempt = await play_rollout(
            RolloutSpec(group, rollout, row, seed),
            self._policy,
            self._environment,
            self._rollout,
            self._sampling,
            attempt=row.get(ATTEMPT, 0) + 1,
            judges_overflow=True,
            on_policy=False,  # a row may choose its temperature; the log-probabilities belong to the distribution of the draw
        )
        played = attempt.rollout
        if played.failure_code == ENGINE_GONE and not played.turns:
            raise NotReached(played.failure_detail)
        return result_row(played, Address(task, rollout, self.agent), attempt.answer)

    async def aggregate(self, agent: str, rows: Sequence[Row]) -> Row:
        return aggregate_metrics(rows, getattr(self._environment, "compute_metrics", None))

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._policy)
        await self._open.enter_async_context(self._environment)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
