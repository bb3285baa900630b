"""Agents that make their model calls themselves and leave a trace: a tree of spans, in which the calls are found.

Invariant: a rollout's turns are the trace's model calls in the order in which they began, parents before children; a call
without tokens, or with a different number of log-probabilities, fails the rollout: it could not be trained on.

A span is an object {"type", "inputs", "outputs", "children"}. Of spans with type LLM are read

    inputs.messages, inputs.tools               chat messages and tools
    outputs.message, outputs.finish_reason      the reply ("stop" where there is none)
    outputs.nexrl_train                         {"prompt_tokens", "response_tokens", "response_logprobs"}

The agent reaches the policy by itself, at a model server that returns token IDs. NexAU is such an agent framework; nothing of
it is imported here: whatever offers `dump_traces` can be used.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from roundhouse.compat.nexrl.llm import LlmClient
from roundhouse.compat.nexrl.worker import BaseRolloutWorker, NoTrajectory, WorkerFailed
from roundhouse.generation.protocol import Completion

Span = dict[str, Any]


class Tracer(Protocol):
    """Collects the spans of one run."""

    def dump_traces(self) -> list[Span]:
        """The finished root spans, in the order in which they began."""
        ...


class TraceRolloutWorker(BaseRolloutWorker):
    """Runs a traced agent; subclasses say which tracer and which agent."""

    @abstractmethod
    def make_tracer(self) -> Tracer:
        """A tracer for this rollout alone."""

    @abstractmethod
    def run_traced(self, query: str, task: dict[str, Any], tracer: Tracer) -> Any:
        """Run the agent; its final answer as text. May be `async`; as a plain function it runs in a thread."""

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        tracer, query = self.make_tracer(), self.format_task_query(task)
        if inspect.iscoroutinefunction(self.run_traced):
            answer = await self.run_traced(query, task, tracer)
        else:
            answer = await asyncio.to_thread(self.run_traced, query, task, tracer)
        spans = tracer.dump_traces()
        record_calls(spans, self.llm)
        return await self.put_trajectory(task, str(answer), observation=spans)


def record_calls(spans: Iterable[Span], llm: LlmClient) -> None:
    """Put all model calls of a trace on record.

    Raises:
        NoTrajectory: there is none.
        WorkerFailed: one has no tokens.
    """
    calls = list(llm_calls(spans))
    if not calls:
        raise NoTrajectory("The trace has no span of type LLM: is the tracer given to the agent?")
    for number, span in enumerate(calls):
        inputs = span.get("inputs") or {}
        llm.record(list(inputs.get("messages") or []), list(inputs.get("tools") or []), _completion(span, number, llm))


def llm_calls(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans of model calls, depth first."""
    for span in spans:
        if str(span.get("type", "")).upper() == "LLM":
            yield span
        yield from llm_calls(span.get("children") or [])


def _completion(span: Span, number: int, llm: LlmClient) -> Completion:
    outputs = span.get("outputs") or {}
    tokens = outputs.get("nexrl_train") or {}
    prompt, generated = tokens.get("prompt_tokens") or [], tokens.get("response_tokens") or []
    log_probs = tokens.get("response_logprobs") or []
    if not prompt or not generated or len(log_probs) != len(generated):
        raise WorkerFailed(
            f"Model call {number} of the trace has {len(prompt)} prompt tokens, {len(generated)} response tokens and "
            f"{len(log_probs)} log-probabilities in outputs.nexrl_train: let the agent call a server that returns token IDs."
        )
    version = tokens.get("policy_version", llm.policy_version)
    if version is None:
        raise WorkerFailed("The policy version that answered is unknown: the trace does not tell it.")
    message = outputs.get("message") or {"role": "assistant", "content": ""}
    finish = outputs.get("finish_reason") or "stop"
    return Completion(message, finish, list(prompt), list(generated), list(log_probs), int(version), 0.0)
