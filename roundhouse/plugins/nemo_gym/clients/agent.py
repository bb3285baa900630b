"""An agent server of NeMo Gym's contract as an environment: by URL, or by name at a head server.

Invariant: /run is sent once per attempt; its status decides about a retry: 408, 429 and 5xx may pass, other refusals
will not. An agent from a head server is looked up again after it could not be reached, because its port may have
changed.

    async with RemoteAgentClient.from_config(config.environment) as environment:
        rollouts = await collect(specs, policy, environment, config.rollout, sampling, policy_version=3)

POST /run plays the whole rollout; its answer is read, never repaired. A rollout for training has the tokens of its
model calls or it fails; if the record of those calls is ambiguous, it is masked with the reason. The tokens come from
the returned items (agents that echo them), or from the model server's record under the rollout's ID (other agents).

`run_request` makes the body of /run: the row with the run's sampling (`generation.sampling`), the rollout's seed, and
the tighter output limit. `_ng_rollout_id` is new with every attempt, so recorded calls belong to this attempt only.

`read_answer` reads the reply. A failure mark means no reward; tokens are those of the items; numbers that the row did
not hold are the rollout's metrics.

    _ng_failure_terminal                       -> AgentGaveUp (data)
    _ng_failure_class judge_failed             -> JudgeFailed (infra)
    _ng_failure_class, _ng_no_persist          -> AgentFailed (infra)
    mask_sample, instance_config.mask_sample   -> masked
    response.incomplete_details, truncated     -> truncated
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import orjson

from roundhouse.config.secrets import read_secret
from roundhouse.environments.base import Restoration, TaskRow, Verdict
from roundhouse.environments.task_files import read_split_rows
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.plugins.nemo_gym.clients.connection import Connection, json_object, look_up
from roundhouse.plugins.nemo_gym.clients.resources import verdict_from_reply
from roundhouse.plugins.nemo_gym.section import AgentEnvironment
from roundhouse.rollout.agents import RolloutAttempt, checked_verdict, rollout_name
from roundhouse.rollout.conversation import ChainedCalls, TurnChain, chain_calls, sampling_overrides
from roundhouse.rollout.protocol import (
    FAILURE,
    TERMINAL,
    AgentFailed,
    AgentGaveUp,
    AgentUnavailable,
    BadAgentAnswer,
    BadTaskRow,
    ClientWithRows,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    JudgeFailed,
    NoTrainableTokens,
    detail_of,
)
from roundhouse.rollout.responses import CARRIED, VERSION_SPANS, item_problem
from roundhouse.trajectories.records import Status, Turn, derive_seed
from roundhouse.trajectories.storable import call_problem

CAPTURES_SECONDS = 60.0


class RemoteAgentClient(ClientWithRows):
    """Rollouts played by an agent server."""

    restoration: Restoration = "none"
    """Only the server knows the finished part of a rollout."""

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
        """Open the client. `model_server`: read tokens from its record of the calls, not from the items.

        Raises:
            ConfigError: neither `url` nor `head_server` and `agent` are given, or one is not a URL.
        """
        if url is None and (head_server is None or agent is None):
            raise ConfigError("environment.url is unset: give it, or head_server and agent.")
        super().__init__(train, heldout)
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
        self._indexes: dict[str, int] | None = None

    @classmethod
    def from_config(cls, config: AgentEnvironment) -> Self:
        """The client of a configuration, its task rows read from their files.

        Raises:
            ConfigError: a file cannot be read, or a row is for another agent.
        """
        train, heldout = read_split_rows(config)
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

    def task_index(self, row: TaskRow, group_id: str) -> int:
        """Return the row's position in its file, for the agent's records; for a row from elsewhere, a new number."""
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
        async with self._looking:  # one look-up, also for many rollouts that begin at once
            if self._server is None:
                assert self._head is not None
                assert self.agent_name is not None
                self._server = Connection(await look_up(self._head, self.agent_name, self._head_token))
            server = self._server
        try:
            status, text = await server.post("run", request, seconds=seconds)
        except EnvironmentUnreachable:
            if self._head is not None and self._server is server:
                self._left.append(server)
                self._server = None
            raise
        where = f"{server.url}/run"
        if status >= 500 or status in (408, 429):
            raise AgentUnavailable(f"{where} answered {status}: {text}")
        if status >= 300:
            raise AgentGaveUp(f"{where} answered {status}: {text}")
        return json_object(text, where, BadAgentAnswer)

    async def captured_calls(self, rollout_name: str) -> dict[str, Any]:
        """Return the model server's record of a rollout and delete it there; empty if the record is missing.

        Raises:
            InfraError: the model server cannot be reached.
        """
        assert self._models is not None, "only asked where captures is true"
        path = f"captures/{rollout_name}"
        headers = {} if self._models_token is None else {"Authorization": f"Bearer {self._models_token}"}
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

    async def close(self) -> None:
        for connection in (self._server, self._head, self._models, *self._left):
            if connection is not None:
                await connection.close()


def _token(variable: str | None, file: str | None) -> str | None:
    return None if variable is None and file is None else read_secret(variable or "", file)


INCOMPLETE_RECORD = "incomplete_record"

NO_TOKENS_IN_ITEMS = (
    "No item of the agent's answer carries generation_token_ids. Either the model server behind the agent does not return "
    "token IDs (ours: return_token_id_information), or the agent does not return the items unchanged (then record its "
    "calls: environment.tokens=captured), or the first call did not fit the model's context."
)
NO_CALLS_RECORDED = (
    "The model server has no calls on record under this rollout's id. The agent must send its model calls under "
    "/ng-rollout/<_ng_rollout_id>/training-token-capture/ to the server at environment.model_server (NeMo Gym: "
    "token_id_capture)."
)
NO_POLICY_VERSION = "The policy version of the answer is unknown: neither the answer nor the collector names it."


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
    """The agent of environments behind an agent server."""

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
        rollout.metrics = {
            "agent_tool_calls": float(sum(item.get("type") == "function_call" for item in answer.response["output"])),
            **answer.verdict.metrics,
        }
        if client.captures:
            record = await attempt.in_environment(client.captured_calls(request["_ng_rollout_id"]))
            chained = chain_calls(record["calls"], attempt.policy_version)
            if record.get("complete") is False and chained.reason is None:
                detail = "the model server lost some of the rollout's calls"
                chained = ChainedCalls(chained.turns, INCOMPLETE_RECORD, detail)
            turns: list[Turn] = chained.turns
            lacking = NO_CALLS_RECORDED if chained.reason is None else ""
        else:
            chained = ChainedCalls()
            turns = [] if attempt.policy_version is None else turns_from_items(answer.response, attempt.policy_version)
            lacking = NO_POLICY_VERSION if attempt.policy_version is None else NO_TOKENS_IN_ITEMS
        rollout.turns = turns
        if attempt.on_policy and not turns and lacking:
            raise NoTrainableTokens(lacking)
        rollout.reward, rollout.reward_components = answer.verdict.reward, answer.verdict.reward_components
        rollout.finish_reason = answer.finish
        if attempt.on_policy and chained.reason is not None:
            rollout.status = Status.MASKED
            rollout.failure_code, rollout.failure_detail = f"token_capture_{chained.reason}", chained.detail
            rollout.metrics |= {"token_capture_masked": 1.0}
        elif answer.verdict.mask:
            rollout.status = Status.MASKED
        else:
            rollout.status = Status.COMPLETED if answer.finish == "stop" else Status.TRUNCATED


def run_request(attempt: RolloutAttempt, agent: str | None, task_index: int) -> dict[str, Any]:
    """Return the body of /run.

    Raises:
        BadTaskRow: the row lacks usable `responses_create_params`, requests another distribution than the run's, or
            names another agent.
    """
    rollout = attempt.rollout
    row: TaskRow = rollout.task
    params = row.get("responses_create_params")
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise BadTaskRow("A task row needs responses_create_params.input, a text or a list of items.")
    sampling = sampling_overrides(params, attempt.sampling, attempt.on_policy).sampling
    # The metadata with seed and top_k in `extra_body`, a JSON text through which model servers take engine parameters
    metadata = params.get("metadata")
    try:
        fields = dict(metadata or {})
        extra = orjson.loads(fields.get("extra_body") or "{}")
        extra = {**extra, "seed": attempt.rollout.seed}
    except (ValueError, TypeError) as error:
        raise BadTaskRow(f"responses_create_params.metadata.extra_body is not a JSON object: {error}") from error
    if sampling.top_k is not None:
        extra["top_k"] = sampling.top_k
    request = {
        "_ng_task_index": task_index,
        "_ng_rollout_index": rollout.sample,
        **row,
        "_ng_rollout_id": rollout_name(rollout.group_id, rollout.sample),
        "responses_create_params": {
            **params,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": sampling.max_new_tokens,
            "metadata": {**fields, "extra_body": orjson.dumps(extra).decode()},
        },
    }
    request.pop("_ng_attempt_index", None)  # part of the name already
    if agent is not None:
        refuse_other_agents([row], agent)
        request.setdefault("agent_ref", {"type": "responses_api_agents", "name": agent})
    return request


def refuse_other_agents(rows: Iterable[TaskRow], agent: str | None) -> None:
    """Refuse rows of different agents: the configured agent, else the one named in the rows, plays all of them.

    Raises:
        BadTaskRow: a row names another; the text names it, and the remedy.
    """
    for row in rows:
        reference = row.get("agent_ref")
        named = reference.get("name") if isinstance(reference, dict) else None
        if named is None:
            continue
        if agent is not None and named != agent:
            raise BadTaskRow(
                f"Task row {row.get('task_id')!r} is for the agent {named!r} (agent_ref.name), but {agent!r} plays all rows of "
                f"this run. Set environment.agent to {named!r} and its server, or keep the rows of each agent in a separate "
                "file."
            )
        agent = named


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """A rollout as its agent returns it."""

    verdict: Verdict
    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Input and output, without token fields."""
    finish: str
    """stop, length, max_turns or environment."""


def read_answer(reply: Mapping[str, Any], row: TaskRow) -> RunAnswer:
    """Read the rollout of an answer with status 200.

    Raises:
        AgentFailed, AgentGaveUp, JudgeFailed: it carries a failure mark.
        BadAgentAnswer: it lacks a reward or a response.
        BadReward: its numbers are invalid.
    """
    failure = reply.get(FAILURE)
    if not (failure is None and not reply.get("_ng_no_persist")):
        text = f"The agent reports {failure or 'a rollout that is not to be kept'}: {detail_of(reply) or 'no detail given'}"
        if reply.get(TERMINAL):
            raise AgentGaveUp(text)
        raise (JudgeFailed if failure == "judge_failed" else AgentFailed)(text)
    response = reply.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if "reward" not in reply or not isinstance(response, dict) or not isinstance(output, list):
        raise BadAgentAnswer(
            f"/run answered without a reward or a response with output items; it holds: {', '.join(map(str, reply))}."
        )
    _refuse_malformed_items("response.output", output)
    verdict = checked_verdict(verdict_from_reply(dict(reply), row))
    instance = reply.get("instance_config")
    if isinstance(instance, dict) and not verdict.mask:
        verdict = checked_verdict(replace(verdict, mask=instance.get("mask_sample", False)))
    # The input as the agent played it (some add to it), or as the row has it
    params = reply.get("responses_create_params")
    conversation = params.get("input") if isinstance(params, dict) else None
    if not isinstance(conversation, str | list):
        conversation = row["responses_create_params"]["input"]
    if isinstance(conversation, list):
        _refuse_malformed_items("responses_create_params.input", conversation)
    items = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
    return RunAnswer(
        verdict,
        response,
        [
            {"type": "message", **{key: value for key, value in item.items() if key not in CARRIED}}
            for item in [*items, *output]
        ],
        _finish(reply, response, output),
    )


def _refuse_malformed_items(name: str, items: list[Any]) -> None:
    for place, item in enumerate(items):
        if problem := item_problem(item):
            raise BadAgentAnswer(
                f"/run answered with {name}[{place}] that is not an item of a conversation: {problem}."
            )


def turns_from_items(response: Mapping[str, Any], policy_version: int) -> list[Turn]:
    """One turn for each output item that carries generated tokens.

    Raises:
        BadAgentAnswer: the token fields of an item do not belong together, or one of their values cannot be recorded.
    """
    chain = TurnChain()
    carrying = [item for item in response["output"] if item.get("generation_token_ids")]
    for item in carrying:
        prompt, generated, log_probs = (item.get(name) for name in TOKEN_FIELDS)
        spans = item.get(VERSION_SPANS)
        problem = call_problem(prompt, generated, log_probs, policy_version, spans)
        if not problem and not log_probs:
            problem = f"{len(generated)} generated tokens and no log-probabilities"
        if problem:
            raise BadAgentAnswer(
                f"An item of type {item.get('type')!r} carries token fields of another shape: {problem}."
            )
        cut_short = item is carrying[-1] and bool(response.get("incomplete_details"))
        called = "tool_calls" if item.get("type") == "function_call" else "stop"
        chain.add(
            prompt,
            generated,
            log_probs,
            policy_version=min((span["version"] for span in spans or ()), default=policy_version),
            finish_reason="length" if cut_short else called,
            version_spans=spans,
        )
    return chain.turns


def _finish(reply: Mapping[str, Any], response: Mapping[str, Any], output: list[dict[str, Any]]) -> str:
    if response.get("incomplete_details"):
        return "length"
    if reply.get("truncated") is True:
        return "environment"
    if reply.get("terminated") is not True and output and output[-1].get("type") == "function_call_output":
        return "max_turns"  # the agent stopped before the policy had seen the output
    return "stop"
