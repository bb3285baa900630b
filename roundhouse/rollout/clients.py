"""Environment clients for environments in this process or on a server, and the mixture of several.

Invariant: all clients return the same texts, verdicts and kinds of failure for the same environment. The protocols are
in `roundhouse.rollout.protocol`; clients for foreign contracts are plug-ins and imported only on use.

    async with open_environment(config.environment) as environment:
        session = await environment.seed_session(environment.tasks("train")[0])
        result = await session.call_tool("calculate", {"expression": "3*4"})
        verdict = await session.verify(response)

`verdict_on` judges a given answer without a policy. The environment sees the same session, tool calls and Responses
object as in a rollout.

    verdict = await verdict_on(LocalEnvironmentClient(Words()), row, "enigne")

A mixture is one client that routes each rollout by the prefix of its `task_id` (`calc/12`). Groups and rollouts keep
the prefix in plan and store; the environment receives its original row. A row with an unknown prefix is rejected when
the mixture is opened.

    {kind: mixture, environments: {calc: {kind: calculator}, words: {kind: custom, …}}, weights: {calc: 3}}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from roundhouse import plugins
from roundhouse.config.environments import (
    EnvironmentConfig,
    MixtureEnvironment,
    SingleEnvironment,
)
from roundhouse.environments import first_task, load_any
from roundhouse.environments.base import (
    Environment,
    GymnasiumEnvironment,
    GymStep,
    Restoration,
    Split,
    TaskRow,
    Toolbox,
    ToolResult,
    Verdict,
)
from roundhouse.environments.task_files import read_task_rows
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.rollout.agents import GymnasiumLoop, RolloutAttempt, ToolLoop, checked_verdict
from roundhouse.rollout.conversation import Conversation
from roundhouse.rollout.hosted import HostedEnvironmentClient, HostedEpisodeClient
from roundhouse.rollout.plan import WeightedTasks
from roundhouse.rollout.protocol import (
    Agent,
    ClosedOnExit,
    EnvironmentClient,
    EnvironmentSession,
    EpisodeSession,
    SeedFailed,
    SnapshotFailed,
    StepFailed,
    ToolEnvironment,
    VerifierFailed,
    call_function,
    rows_of,
)
from roundhouse.rollout.responses import assistant_items, chat_tools, response_object
from roundhouse.rollout.rubric import JudgedEnvironment
from roundhouse.user_code import describe_error


def tools_of(task: TaskRow | None) -> list[dict[str, Any]]:
    """The tools that a task row offers, in chat shape.

    Raises:
        UnsupportedItem: one of them is not a function.
    """
    return chat_tools((task or {}).get("responses_create_params", {}).get("tools") or [])


def first_question(config: EnvironmentConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools of the first training task in chat form, or a placeholder question if a server holds
    the rows.

    Raises:
        ConfigError: the environment or its task cannot be made.
    """
    task = first_task(config)
    return first_messages(task), tools_of(task)


def first_messages(task: TaskRow | None, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """Return the initial messages of the row's rollout in chat form, or a placeholder question if they are missing.

    Args:
        system_prompt: `rollout.system_prompt`, or the system prompt of the row's environment.

    Raises:
        BadTaskRow, UnsupportedItem: the row's input or tools cannot be used.
    """
    params = (task or {}).get("responses_create_params", {})
    row = {"responses_create_params": {**params, "input": params.get("input") or "Say a word."}}
    return Conversation(row, "msg", system_prompt).messages


@contextmanager
def _failing_as(failure: type[DataError], call: str, row: TaskRow | None = None) -> Iterator[None]:
    """Convert an exception of the environment's code to `failure`; let typed failures pass."""
    try:
        yield
    except (InfraError, DataError):
        raise
    except Exception as error:
        raise failure(f"{call} raised {describe_error(error, row)}") from error


class _LocalClient(ClosedOnExit):
    """An environment in this process. Its code runs on the event loop: a call that blocks, blocks all rollouts. So a run uses
    it for the bounded code of built-in environments alone."""

    def __init__(self, environment: Environment | GymnasiumEnvironment) -> None:
        self.name = environment.name
        self.restoration = environment.restoration
        self.compute_metrics = environment.compute_metrics
        self._source = environment

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """Return the task rows of a split.

        Raises:
            ConfigError: the environment's own code fails.
        """
        return rows_of(self._source, split)


class LocalEnvironmentClient(_LocalClient):
    """An environment with tools and a verifier, in this process."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._environment = environment
        self._toolbox = Toolbox(environment)
        self.agent = ToolLoop()

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        with _failing_as(SeedFailed, f"{self.name}: seed_session", row):
            state = await self._environment.seed_session(row)
        return _LocalSession(self._environment, self._toolbox, row, state)

    async def restore_session(self, row: TaskRow, snapshot: Any) -> EnvironmentSession:
        with _failing_as(SnapshotFailed, f"{self.name}: restore_session"):
            state = await self._environment.restore_session(row, snapshot)
        return _LocalSession(self._environment, self._toolbox, row, state)


class _LocalSession:
    tools: Sequence[dict[str, Any]] = ()
    answer: dict[str, Any] | None = None

    def __init__(self, environment: Environment, toolbox: Toolbox, row: TaskRow, state: Any) -> None:
        self._environment = environment
        self._toolbox = toolbox
        self._row = row
        self._state = state
        self.needs_close = type(environment).close_session is not Environment.close_session
        self.ordered = type(environment).seed_session is not Environment.seed_session

    async def close(self) -> None:
        await self._environment.close_session(self._state)

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return await self._toolbox.call(self._state, name, arguments)

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        with _failing_as(StepFailed, f"{self._environment.name}: follow_up", self._row):
            return await self._environment.follow_up(self._state, self._row, response)

    async def snapshot(self) -> Any:
        with _failing_as(SnapshotFailed, f"{self._environment.name}: snapshot_session"):
            return await self._environment.snapshot_session(self._state)

    async def verify(self, response: dict[str, Any]) -> Verdict:
        with _failing_as(VerifierFailed, f"{self._environment.name}: verify", self._row):
            return await call_function(self._environment.verify, self._state, self._row, response)


class LocalEpisodeClient(_LocalClient):
    """An environment of the Gymnasium protocol, in this process."""

    def __init__(self, environment: GymnasiumEnvironment) -> None:
        super().__init__(environment)
        self._environment = environment
        self.agent = GymnasiumLoop()

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        with _failing_as(SeedFailed, f"{self.name}: reset", row):
            state, observation = await self._environment.reset(row)
        return _LocalEpisode(self._environment, state), observation

    async def restore_session(self, row: TaskRow, snapshot: Any) -> EpisodeSession:
        with _failing_as(SnapshotFailed, f"{self.name}: restore"):
            state = await self._environment.restore(row, snapshot)
        return _LocalEpisode(self._environment, state)


class _LocalEpisode:
    def __init__(self, environment: GymnasiumEnvironment, state: Any) -> None:
        self._environment = environment
        self._state = state
        self.needs_close = type(environment).close is not GymnasiumEnvironment.close

    async def step(self, response: dict[str, Any]) -> GymStep:
        with _failing_as(StepFailed, f"{self._environment.name}: step"):
            step = await self._environment.step(self._state, response)
        if not isinstance(step, GymStep):
            raise StepFailed(
                f"{self._environment.name}: step returned a {type(step).__name__}; it must return a GymStep."
            )
        return step

    async def snapshot(self) -> Any:
        with _failing_as(SnapshotFailed, f"{self._environment.name}: snapshot"):
            return await self._environment.snapshot(self._state)

    async def close(self) -> None:
        await self._environment.close(self._state)


def open_environment(config: EnvironmentConfig, store: str | None = None) -> EnvironmentClient:
    """The client of the environment that `config` describes, with its task lists.

    Args:
        store: keeps the answers of a rubric's judge; None: they are asked for anew.

    Raises:
        ConfigError: it cannot be loaded, or a remote one's URL or task files are wrong, or its rubric cannot be used.
    """
    if isinstance(config, MixtureEnvironment):
        return open_mixture(config, store)
    if config.rubric is None and config.audit is None:
        return _open_unjudged(config)
    judged: Any = JudgedEnvironment(_open_unjudged(config), config.rubric, config.audit, store)
    return judged


def open_mixture(config: MixtureEnvironment, store: str | None = None) -> EnvironmentClient:
    """The client of several environments; arguments and errors as of `open_environment`."""
    files: dict[Split, str | None] = {"train": config.train_tasks, "heldout": config.heldout_tasks}
    rows = {split: read_task_rows(uri, f"environment.{split}_tasks") for split, uri in files.items() if uri}
    parts = {name: open_environment(each, store) for name, each in config.environments.items()}
    return MixtureClient(config, parts, rows)


def _open_unjudged(config: SingleEnvironment) -> EnvironmentClient:
    if config.elsewhere():
        client: EnvironmentClient = plugins.factory("environment", config.kind)(config)
        return client
    environment = load_any(config)
    if not config.is_included:
        return _hosted(config, environment)
    if isinstance(environment, GymnasiumEnvironment):
        return LocalEpisodeClient(environment)
    return LocalEnvironmentClient(environment)


def _hosted(config: SingleEnvironment, environment: Environment | GymnasiumEnvironment) -> EnvironmentClient:
    servers: Mapping[str, str] = getattr(config, "mcp_servers", {})
    if isinstance(environment, Environment):
        return with_mcp(HostedEnvironmentClient(config, environment), servers)
    if servers:
        raise ConfigError(
            f"environment.mcp_servers is set, but {environment.name} speaks the Gymnasium protocol: its world answers all "
            "tool calls itself. Remove it."
        )
    return HostedEpisodeClient(config, environment)


def with_mcp(environment: ToolEnvironment, servers: Mapping[str, str]) -> ToolEnvironment:
    """Add the tools of MCP servers to an environment."""
    if not servers:
        return environment
    extended: ToolEnvironment = plugins.factory("operation", "mcp_servers")(environment, servers)
    return extended


async def verdict_on(environment: ToolEnvironment, row: TaskRow, text: str) -> Verdict:
    """Return the verdict on a rollout with the single reply `text` and no tool call.

    Raises:
        InfraError, DataError: as in a rollout.
    """
    session = await environment.seed_session(row)
    try:
        items = assistant_items({"role": "assistant", "content": text}, "msg_trial")
        response = response_object("resp_trial", items, model="none", created_at=0.0)
        return checked_verdict(await session.verify(response))
    finally:
        if session.needs_close:
            await session.close()


MOST_NAMED = 5


class MixtureClient(ClosedOnExit):
    """The environments of a configuration as one."""

    name = "mixture"

    def __init__(
        self,
        config: MixtureEnvironment,
        parts: Mapping[str, EnvironmentClient],
        rows: Mapping[Split, Sequence[TaskRow]],
    ) -> None:
        """Map the rows to their environments.

        Args:
            rows: rows of `config.train_tasks` and `config.heldout_tasks`, if these are set.

        Raises:
            ConfigError: a row's prefix is not an environment of the mixture, or a drawn environment is without rows.
        """
        self._config = config
        self._parts = parts
        restorations = {part.restoration for part in parts.values()}
        self.restoration: Restoration = restorations.pop() if len(restorations) == 1 else "none"
        self.agent = MixtureAgent(parts)
        self._rows = {
            split: self._by_row(split_rows, f"environment.{split}_tasks") for split, split_rows in rows.items()
        }
        if "train" not in self._rows and (empty := [name for name, part in parts.items() if not part.tasks("train")]):
            raise ConfigError(
                f"environment.environments.{empty[0]} has no training task. Add tasks, or remove the environment."
            )

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """Rows of one file in its order; else training tasks to be drawn by weight, and held-out tasks of all in turn."""
        if split in self._rows:
            return self._rows[split]
        own = {name: [_named(name, row) for row in part.tasks(split)] for name, part in self._parts.items()}
        if split == "train":
            return WeightedTasks(own, {name: self._config.weights.get(name, 1.0) for name in own})
        return [row for rows in itertools.zip_longest(*own.values()) for row in rows if row is not None]

    def _by_row(self, given: Sequence[TaskRow], key: str) -> list[TaskRow]:
        rows, strangers = [], []
        for number, row in enumerate(given, start=1):
            reference = row.get("agent_ref")
            name = reference.get("name") if isinstance(reference, dict) else None
            if isinstance(name, str) and name in self._parts:
                rows.append(_named(name, row))
            else:
                strangers.append(f"row {number} names {name!r}")
        if strangers:
            more = f" and {len(strangers) - MOST_NAMED} more" if len(strangers) > MOST_NAMED else ""
            raise ConfigError(
                f"{key}: {', '.join(strangers[:MOST_NAMED])}{more} (agent_ref.name), but environment.environments has "
                f"{', '.join(self._parts)}. Add these agents to the mixture, or remove their rows."
            )
        return rows

    async def seed_session(self, row: TaskRow) -> Any:
        name, own = split_row(row)
        part: Any = self._parts[name]
        return await part.seed_session(own)

    async def reset(self, row: TaskRow) -> Any:
        name, own = split_row(row)
        part: Any = self._parts[name]
        return await part.reset(own)

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        name, own = split_row(row)
        part: Any = self._parts[name]
        return await part.restore_session(own, snapshot)

    async def __aenter__(self) -> Self:
        """Enter each environment.

        Raises:
            ConfigError: what one of them connects to, such as an MCP server, cannot be reached.
        """
        try:
            for part in self._parts.values():
                await part.__aenter__()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        for part in self._parts.values():
            await part.close()


class MixtureAgent:
    """Plays each rollout as its environment's own agent does, within the limits of `rollout.environments`."""

    def __init__(self, parts: Mapping[str, EnvironmentClient]) -> None:
        self._parts = parts

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        name, _ = split_row(attempt.rollout.task)
        attempt.rollout.environment = name
        own = attempt.config.environments.get(name)
        attempt.config = attempt.config.of_environment(name)
        if own is not None and own.max_new_tokens is not None:
            attempt.sampling = attempt.sampling.model_copy(update={"max_new_tokens": own.max_new_tokens})
        await self.of(attempt.rollout.task).play(attempt, environment)

    def of(self, row: TaskRow) -> Agent:
        """The agent of the environment that a row belongs to."""
        return self._parts[split_row(row)[0]].agent


def _named(name: str, row: TaskRow) -> TaskRow:
    return {**row, "task_id": f"{name}/{row['task_id']}"}


def split_row(row: TaskRow) -> tuple[str, TaskRow]:
    """The name of the environment that a row of a mixture belongs to, and the row as that environment wrote it."""
    name, _, task_id = str(row["task_id"]).partition("/")
    return name, {**row, "task_id": task_id}
