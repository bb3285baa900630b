"""An agent server of NeMo Gym's contract as an environment: by URL, or by name at a head server.

Invariant: /run is sent once an attempt; what its status means decides about a retry: 408, 429 and 5xx may pass, other refusals
will not. An agent that was looked up is looked up again after it could not be reached: it may have come back on another port.

    async with RemoteAgentClient.from_config(config.environment) as environment:
        rollouts = await collect(specs, policy, environment, config.rollout, sampling, policy_version=3)

A remote agent: POST /run on an agent server plays the whole rollout; what comes back is read, never repaired.

Invariant: a rollout for training has the tokens of its model calls or it fails; where the record of those calls is ambiguous,
the rollout is masked with the reason. The tokens come from the items that the agent returns (agents which echo them), or from
the model server's record of the calls made under the rollout's id (agents which do not).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, Self

from roundhouse.compat.nemo_gym.clients.connection import Connection, json_object, look_up
from roundhouse.compat.nemo_gym.clients.run_request import (
    RunAnswer,
    read_answer,
    refuse_other_agents,
    run_request,
    turns_from_items,
)
from roundhouse.config.models import AgentEnvironment
from roundhouse.config.secrets import read_secret
from roundhouse.environments.base import Restoration, Split, TaskRow
from roundhouse.environments.task_files import read_task_rows
from roundhouse.errors import ConfigError
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import (
    AgentGaveUp,
    AgentUnavailable,
    BadAgentAnswer,
    BadTaskRow,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    NoTrainableTokens,
)
from roundhouse.rollout.turns import ChainedCalls, chain_calls
from roundhouse.trajectories.records import Status, Turn
from roundhouse.trajectories.tokens import derive_seed

CAPTURES_SECONDS = 60.0


class RemoteAgentClient:
    """Rollouts played by an agent server."""

    restoration: Restoration = "none"
    """What was played of a rollout, only the server knows."""

    def __init__(
        self,
        url: str | None = None,
        *,
        head_server: str | None = None,
        head_token: str | None = None,
        agent: str | None = None,
        model_server: str | None = None,
        model_server_token: str | None = None,
        train: Sequence[TaskRow] = (),
        heldout: Sequence[TaskRow] = (),
    ) -> None:
        """`model_server`: read tokens from its record of the calls, not from the items.

        Raises:
            ConfigError: neither `url` nor `head_server` and `agent` are given, or one is no URL.
        """
        if url is None and (head_server is None or agent is None):
            raise ConfigError("environment.url is unset: give it, or head_server and agent.")
        self.agent_name = agent
        self.captures = model_server is not None
        self.name = agent or ("" if url is None else Connection(url).authority)
        self.agent = RemoteAgent(self)
        self._server = None if url is None else Connection(url)
        self._head = None if head_server is None else Connection(head_server, key="environment.head_server")
        self._head_token = head_token
        self._models = None if model_server is None else Connection(model_server, key="environment.model_server")
        self._models_token = model_server_token
        self._left: list[Connection] = []
        self._looking = asyncio.Lock()
        self._tasks: dict[Split, Sequence[TaskRow]] = {"train": train, "heldout": heldout}
        self._indexes: dict[str, int] | None = None

    @classmethod
    def from_config(cls, config: AgentEnvironment) -> Self:
        """The client of a configuration, its task rows read from their files.

        Raises:
            ConfigError: a file cannot be read, or a row is for another agent.
        """
        heldout = read_task_rows(config.heldout_tasks, "environment.heldout_tasks") if config.heldout_tasks else []
        train = read_task_rows(config.train_tasks, "environment.train_tasks")
        try:
            refuse_other_agents([*train, *heldout], config.agent)
        except BadTaskRow as error:
            raise ConfigError(f"environment.train_tasks and heldout_tasks: {error}") from error
        return cls(
            config.url,
            head_server=config.head_server,
            head_token=_token(config.head_token_variable, config.head_token_file),
            agent=config.agent,
            model_server=config.model_server if config.tokens == "captured" else None,
            model_server_token=_token(config.model_server_token_variable, config.model_server_token_file),
            train=train,
            heldout=heldout,
        )

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._tasks[split]

    def task_index(self, row: TaskRow, group_id: str) -> int:
        """The row's place in its file, for the agent's records; of a row from elsewhere, a number of its own."""
        if self._indexes is None:
            rows = [*self._tasks["train"], *self._tasks["heldout"]]
            self._indexes = {str(row["task_id"]): index for index, row in enumerate(rows)}
        index = self._indexes.get(str(row.get("task_id")))
        return derive_seed(group_id) if index is None else index

    async def run(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """POST /run; the answer's object.

        Raises:
            InfraError: the server cannot be reached, did not answer within `seconds`, or cannot serve now.
            AgentGaveUp, BadAgentAnswer, UnknownAgent
        """
        server = await self._found()
        try:
            status, text = await server.post("run", request, seconds=seconds)
        except EnvironmentUnreachable:
            self._forget(server)
            raise
        where = f"{server.url}/run"
        if status >= 500 or status in (408, 429):
            raise AgentUnavailable(f"{where} answered {status}: {text}")
        if status >= 300:
            raise AgentGaveUp(f"{where} answered {status}: {text}")
        return json_object(text, where, BadAgentAnswer)

    async def captured_calls(self, rollout_name: str) -> dict[str, Any]:
        """The model server's record of a rollout; an empty one where it has none. It is deleted there.

        Raises:
            InfraError: the model server cannot be asked.
        """
        assert self._models is not None, "only asked where captures is true"
        path = f"captures/{rollout_name}"
        headers = _bearer(self._models_token)
        status, text, _ = await self._models.exchange(
            "GET", path, None, None, headers=headers, seconds=CAPTURES_SECONDS
        )
        if status == 404:
            return {"calls": []}
        if status != 200:
            raise EnvironmentUnavailable(f"{self._models.url}/{path} answered {status}: {text}")
        record = json_object(text, f"{self._models.url}/{path}", BadAgentAnswer)
        if not isinstance(record.get("calls"), list):
            raise EnvironmentUnavailable(f"{self._models.url}/{path} answered no list of calls: {text[:500]}")
        await self._models.exchange("DELETE", path, None, None, headers=headers, seconds=CAPTURES_SECONDS)
        return record

    async def _found(self) -> Connection:
        """The connection to the agent server, looked up if need be."""
        if self._server is not None:
            return self._server
        async with self._looking:
            if self._server is None:
                assert self._head is not None
                assert self.agent_name is not None
                self._server = Connection(await look_up(self._head, self.agent_name, self._head_token))
        return self._server

    def _forget(self, server: Connection) -> None:
        if self._head is not None and self._server is server:
            self._left.append(server)
            self._server = None

    async def close(self) -> None:
        for connection in (self._server, self._head, self._models, *self._left):
            if connection is not None:
                await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _token(variable: str | None, file: str | None) -> str | None:
    return None if variable is None and file is None else read_secret(variable or "", file)


INCOMPLETE_RECORD = "incomplete_record"

NO_TOKENS_IN_ITEMS = (
    "No item of the agent's answer carries generation_token_ids. Either the model server behind the agent does not return "
    "token IDs (ours: return_token_id_information), or the agent does not echo the items as it got them (then record its "
    "calls: environment.tokens=captured), or the first call did not fit the model's context."
)
NO_CALLS_RECORDED = (
    "The model server has no calls on record under this rollout's id. The agent must send its model calls under "
    "/ng-rollout/<_ng_rollout_id>/training-token-capture/ to the server at environment.model_server (NeMo Gym: "
    "token_id_capture)."
)
NO_POLICY_VERSION = (
    "The policy version that answered is unknown: the answer does not tell it and the collector was not told."
)


class RunClient(Protocol):
    """The agent server, and the model server that records."""

    agent_name: str | None
    captures: bool

    def task_index(self, row: TaskRow, group_id: str) -> int: ...

    async def run(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """POST /run; the answer's object.

        Raises:
            InfraError, DataError
        """
        ...

    async def captured_calls(self, rollout_name: str) -> dict[str, Any]:
        """The model server's record of a rollout: `calls`, and whether it is `complete`."""
        ...


class RemoteAgent:
    """The agent of environments that live behind an agent server."""

    def __init__(self, client: RunClient) -> None:
        self._client = client

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        """Send the row, read the rollout."""
        client, rollout = self._client, attempt.rollout
        request = run_request(attempt, client.agent_name, client.task_index(rollout.task, rollout.group_id))
        reply = await attempt.in_environment(client.run(request, attempt.config.timeout_seconds))
        answer = read_answer(reply, rollout.task)
        attempt.response, attempt.answer = answer.response, reply
        rollout.items = answer.items
        rollout.metrics = {"agent_tool_calls": _calls(answer), **answer.verdict.metrics}
        doubt = await self._record_turns(attempt, answer, request["_ng_rollout_id"])
        _judge(attempt, answer, doubt)

    async def _record_turns(self, attempt: RolloutAttempt, answer: RunAnswer, rollout_name: str) -> ChainedCalls | None:
        """Fill in the turns; what is doubtful about them."""
        if self._client.captures:
            chained = await self._captured(attempt, rollout_name)
            turns: list[Turn] = chained.turns
            lacking = NO_CALLS_RECORDED if chained.reason is None else ""
        else:
            chained = ChainedCalls()
            turns = [] if attempt.policy_version is None else turns_from_items(answer.response, attempt.policy_version)
            lacking = NO_POLICY_VERSION if attempt.policy_version is None else NO_TOKENS_IN_ITEMS
        attempt.rollout.turns = turns
        if attempt.on_policy and not turns and lacking:
            raise NoTrainableTokens(lacking)
        return chained if attempt.on_policy and chained.reason is not None else None

    async def _captured(self, attempt: RolloutAttempt, rollout_name: str) -> ChainedCalls:
        record = await attempt.in_environment(self._client.captured_calls(rollout_name))
        chained = chain_calls(record["calls"], attempt.policy_version)
        if record.get("complete") is False and chained.reason is None:
            return ChainedCalls(chained.turns, INCOMPLETE_RECORD, "the model server lost some of the rollout's calls")
        return chained


def _judge(attempt: RolloutAttempt, answer: RunAnswer, doubt: ChainedCalls | None) -> None:
    rollout, verdict = attempt.rollout, answer.verdict
    rollout.reward, rollout.reward_components = verdict.reward, verdict.reward_components
    rollout.finish_reason = answer.finish
    if doubt is not None:
        rollout.status = Status.MASKED
        rollout.failure_code, rollout.failure_detail = f"token_capture_{doubt.reason}", doubt.detail
        rollout.metrics |= {"token_capture_masked": 1.0}
    elif verdict.mask:
        rollout.status = Status.MASKED
    else:
        rollout.status = Status.COMPLETED if answer.finish == "stop" else Status.TRUNCATED


def _calls(answer: RunAnswer) -> float:
    return float(sum(item.get("type") == "function_call" for item in answer.response["output"]))
