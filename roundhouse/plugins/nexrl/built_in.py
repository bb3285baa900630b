"""Workers that are ready to use: one completion, an agent with tools, a stand-in without a policy, and a traced agent.

Invariant: a rollout that is trained on has the tokens of all its model calls as turns; otherwise it is masked or fails.

    environment: {kind: worker, worker: simple}         or agent, mock, or a subclass as package.module:Class
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from roundhouse.environments.base import Tool, Toolbox, invalid_arguments, marked_tools, read_arguments
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import Completion
from roundhouse.plugins.nexrl.base import (
    AnswerTag,
    BaseRolloutWorker,
    EvaluationRunResult,
    Evaluator,
    NoTrajectory,
    WorkerFailed,
)
from roundhouse.plugins.programs.model_calls import LlmClient, RolloutLimit
from roundhouse.rollout.protocol import call_function
from roundhouse.rollout.responses import chat_tools, tool_message
from roundhouse.store.location import Location
from roundhouse.store.stage import parse_parquet
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables


class SimpleRolloutWorker(BaseRolloutWorker):
    """Answer the item's `prompt` once. Without an evaluator, the text in <answer> must equal `ground_truth`."""

    evaluator = AnswerTag()

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        if not task.get("prompt"):
            return None
        answer = await self.llm.completion(self.format_task_query(task))
        return await self.put_trajectory(task, answer["response"])


class AgentRolloutWorker(BaseRolloutWorker):
    """Agent of several turns: the policy calls the worker's tools until it answers without a call.

    Every call gets a text as its answer, as with the tools of an `Environment`. If a limit of turns or tokens ends the
    run, the answer up to then is judged as truncated. Tools are methods marked with
    `roundhouse.environments.base.tool`; in the place of the session they get the task.

        class Librarian(AgentRolloutWorker):
            @tool("Look a word up.", word="The word.")
            async def define(self, task, word: str) -> str:
                return task["dictionary"].get(word, "unknown")
    """

    evaluator = AnswerTag()

    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        return marked_tools(self)

    def first_messages(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The conversation to begin with: the query as a user message."""
        return [{"role": "user", "content": self.format_task_query(task)}]

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        toolbox = Toolbox(self)
        tools = chat_tools([tool.schema() for tool in self.tools().values()])
        messages = self.first_messages(task)
        while True:
            try:
                reply = await self.llm.generate(messages, tools)
            except RolloutLimit as limit:
                return await self.cut_short(task, str(limit))
            if self.llm.limit or not reply["tool_calls"]:
                return await self.put_trajectory(task, reply["response"])
            messages.append(reply["message"])
            for call in reply["tool_calls"]:
                try:
                    arguments = read_arguments(call["function"]["arguments"])
                except ValueError as error:
                    result = invalid_arguments(call["function"]["arguments"], error)
                else:
                    result = await toolbox.call(task, call["function"]["name"], arguments)
                messages.append(tool_message(call["id"], result.text))


class MockRolloutWorker(BaseRolloutWorker):
    """Worker without a policy, for tests of everything else: it computes rewards from a hash, or plays recorded
    rollouts back.

    It calls no model. The same group and run give the same reward and record in every process. Its rollouts are masked,
    because the training policy did not generate their tokens, unless a recording is played back with `trainable`.

        parameters: {}                              reward 0 or 1 by the hash of (group_id, run_id); no turns
        parameters: {recorded: store/…/collect}     the rollout of that group and run, from a collect stage's Parquet files
    """

    def __init__(
        self, llm: LlmClient, evaluator: Evaluator | None = None, recorded: str | None = None, trainable: bool = False
    ) -> None:
        super().__init__(llm, evaluator)
        self._recorded = recorded
        self.trained_on = trainable and recorded is not None

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        if self._recorded is None:
            reward = hash_reward(str(task["group_id"]), int(task["run_id"]))
            return await self.put_trajectory(task, "", result=EvaluationRunResult(reward))
        played = recording(self._recorded).get((str(task["group_id"]), int(task["run_id"])))
        if played is None or played.reward is None:
            return None
        self.llm.play_back(played)
        return await self.put_trajectory(task, "", result=EvaluationRunResult(played.reward, metrics=played.metrics))


def hash_reward(group_id: str, run_id: int) -> float:
    """0 or 1, about as often."""
    return float(hashlib.sha256(f"{group_id}/{run_id}".encode()).digest()[0] & 1)


@functools.lru_cache(maxsize=4)
def recording(uri: str) -> dict[tuple[str, int], Rollout]:
    """Return the rollouts under `uri`, by group and sample; of several attempts at one, the last file's.

    Raises:
        ConfigError: none exist.
    """
    location = Location(uri)
    names = sorted(name for name in location.names() if name.startswith("rollouts-") and name.endswith(".parquet"))
    if not names:
        raise ConfigError(f"environment.parameters.recorded is {uri!r}, which has no rollouts-*.parquet.")
    rollouts: dict[tuple[str, int], Rollout] = {}
    for name in names:
        tables = [parse_parquet(location.read(part)) for part in (name, f"turns-{name.removeprefix('rollouts-')}")]
        rollouts |= {(rollout.group_id, rollout.sample): rollout for rollout in rollouts_from_tables(*tables)}
    return rollouts


Span = dict[str, Any]


class Tracer(Protocol):
    """Collects the spans of one run."""

    def dump_traces(self) -> list[Span]:
        """The finished root spans, in the order in which they began."""
        ...


class TraceRolloutWorker(BaseRolloutWorker, ABC):
    """Worker for agents that make their model calls themselves and leave a trace, a tree of spans with these calls.
    Subclasses choose the tracer and the agent.

    Invariant: a rollout's turns are the trace's model calls in the order of their starts, parents before children. A
    call without tokens, or with a different number of log-probabilities, fails the rollout, because it cannot be
    trained on.

    A span is an object {"type", "inputs", "outputs", "children"}. Fields that are read of spans with type LLM:

        inputs.messages, inputs.tools               chat messages and tools
        outputs.message, outputs.finish_reason      the reply ("stop" if it is missing)
        outputs.nexrl_train                         {"prompt_tokens", "response_tokens", "response_logprobs"}, and
                                                    "policy_version" and "version_spans", if the server's reply had them

    The agent calls the policy at a model server that returns token IDs. NexAU is such an agent framework. This module
    does not import it: any tracer with `dump_traces` works.
    """

    @abstractmethod
    def make_tracer(self) -> Tracer:
        """A tracer for this rollout alone."""

    @abstractmethod
    def run_traced(self, query: str, task: dict[str, Any], tracer: Tracer) -> Any:
        """Run the agent; its final answer as text. May be `async`; as a plain function it runs in a thread."""

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        tracer, query = self.make_tracer(), self.format_task_query(task)
        answer = await call_function(self.run_traced, query, task, tracer)
        spans = tracer.dump_traces()
        record_calls(spans, self.llm)
        return await self.put_trajectory(task, str(answer), observation=spans)


def record_calls(spans: Iterable[Span], llm: LlmClient) -> None:
    """Record all model calls of a trace.

    Raises:
        NoTrajectory: the trace does not contain one.
        WorkerFailed: the tokens of a call are missing.
    """
    calls = list(llm_calls(spans))
    if not calls:
        raise NoTrajectory("The trace has no span of type LLM: is the tracer given to the agent?")
    for number, span in enumerate(calls):
        inputs = span.get("inputs") or {}
        outputs = span.get("outputs") or {}
        tokens = outputs.get("nexrl_train") or {}
        prompt, generated = tokens.get("prompt_tokens") or [], tokens.get("response_tokens") or []
        log_probs = tokens.get("response_logprobs") or []
        if not prompt or not generated or len(log_probs) != len(generated):
            raise WorkerFailed(
                f"Model call {number} of the trace has {len(prompt)} prompt tokens, {len(generated)} response tokens and "
                f"{len(log_probs)} log-probabilities in outputs.nexrl_train: let the agent call a server that returns "
                "token IDs."
            )
        version = tokens.get("policy_version", llm.policy_version)
        if version is None:
            raise WorkerFailed("The policy version is unknown: the trace does not name it.")
        message = outputs.get("message") or {"role": "assistant", "content": ""}
        finish, drawn_by = outputs.get("finish_reason") or "stop", tokens.get("version_spans")
        llm.record(
            list(inputs.get("messages") or []),
            list(inputs.get("tools") or []),
            Completion(message, finish, list(prompt), list(generated), list(log_probs), int(version), 0.0, drawn_by),
        )


def llm_calls(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans of model calls, depth first."""
    for span in spans:
        if str(span.get("type", "")).upper() == "LLM":
            yield span
        yield from llm_calls(span.get("children") or [])
