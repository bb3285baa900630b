"""Spans of a run and of its rollouts in OTLP/JSON, with the attributes of OpenTelemetry's conventions for generative AI.

Invariant: a span has only recorded data, and the same store gives the same bytes: IDs are digests of the run's unique ID and of
the place in the run. Not every time is recorded, so each span has the attribute `roundhouse.time`:

    recorded   start and end are in the store                                                    stage, rollout
    bounds     earliest start and latest end of its parts; a run starts when it was created      run, iteration
    duration   the duration is in the store. The start is the earliest possible: the end of the
               model call that the prompt continues, else the start of the rollout               chat
    order      only the order is known: length 0, after its model call, at the rollout's end     tool, verifier

A run is one trace. Each rollout is a separate trace with a link to the span of its stage, because a trace of a whole run could
have millions of spans.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.store.run import Run
from roundhouse.store.stage import Manifest
from roundhouse.tracking.traces import ModelCall, given_messages, model_calls
from roundhouse.trajectories.records import Status, item_text

Span = dict[str, Any]
INTERNAL, CLIENT = 1, 3
"""Kinds of spans in OTLP."""
ERROR = 2
"""Status of a span in OTLP."""
ROLLOUT_FACTS = (
    "rollout_id", "group_id", "status", "reward", "attempt", "seed", "policy_version_first", "policy_version_last",
    "generation_seconds", "environment_seconds",
)  # fmt: skip
"""Columns of a rollout that are attributes of its span."""
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_tokens"}
"""Names of a stage's sampling in the conventions."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Makes the spans of one trace. A span has a place in it, such as ("3", "0"), and its parent is at ("3",)."""

    place: tuple[str, ...]
    """Unique among all traces."""
    facts: Mapping[str, Any]
    """Attributes of each span."""

    def ids(self, *parts: str) -> dict[str, str]:
        return {"traceId": _digest(*self.place)[:32], "spanId": _digest(*self.place, "span", *parts)[:16]}

    def span(
        self,
        parts: tuple[str, ...],
        name: str,
        times: tuple[float, float],
        basis: str,
        facts: Mapping[str, Any],
        kind: int = INTERNAL,
    ) -> Span:
        parent = {"parentSpanId": self.ids(*parts[:-1])["spanId"]} if parts else {}
        begin, end = map(_nanoseconds, times)
        own = attributes({**self.facts, **facts, "roundhouse.time": basis})
        spans = {"name": name, "kind": kind, "startTimeUnixNano": begin, "endTimeUnixNano": end, "attributes": own}
        return {**self.ids(*parts), **parent, **spans}


def run_trace(run: Run) -> Trace:
    """Return the trace of the run, its iterations and stages."""
    return Trace((run.uid,), {"roundhouse.run_id": run.run_id})


def run_span(run: Run, finished_at: float) -> Span:
    """Return the span of the run, to the end of its last complete stage."""
    return run_trace(run).span((), "run", (run.created_at, finished_at), "bounds", {})


def iteration_spans(run: Run, iteration: int, manifests: Sequence[Manifest]) -> Iterator[Span]:
    """Yield the spans of an iteration and of its complete stages, at least one."""
    trace, facts = run_trace(run), {"roundhouse.iteration": iteration}
    times = min(each.started_at for each in manifests), max(each.finished_at for each in manifests)
    yield trace.span((str(iteration),), "iteration", times, "bounds", facts)
    for each in manifests:
        own = {
            "roundhouse.stage": each.kind,
            "roundhouse.attempt": each.attempt,
            "roundhouse.policy_version": each.provenance.policy_version,
            **{f"roundhouse.count.{name}": count for name, count in each.counts.items()},
        }
        times = each.started_at, each.finished_at
        yield trace.span((str(iteration), each.kind), each.kind, times, "recorded", facts | own)


def rollout_spans(
    run: Run, manifest: Manifest, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], messages: bool
) -> list[Span]:
    """Return the spans of a rollout: the agent, its model calls and tool calls, and the verifier.

    Args:
        manifest: of the rollout's stage.
        row: of the dataset `rollouts`.
        turns: rows of `turns` in order, with the number of generated tokens as `generated`.
        messages: include contents: messages, arguments and results of tools, texts of failures.
    """
    name, items = row["environment"], json.loads(row["messages"])
    calls = model_calls(items)
    iteration = str(manifest.iteration)
    place = (iteration, manifest.kind, row["rollout_id"])
    trace = Trace((run.uid, *place), {"gen_ai.conversation.id": "/".join((run.run_id, *place))})
    sampling = manifest.details.get("sampling", {})
    policy = {"gen_ai.provider.name": run.config.generation.backend, "gen_ai.request.model": run.run_id}
    call = policy | {f"gen_ai.request.{name}": sampling.get(key) for key, name in SAMPLING.items()}
    begin, end = row["started_at"], row["started_at"] + row["seconds"]
    agent = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": name,
        "gen_ai.response.finish_reasons": [row["finish_reason"]] if row["finish_reason"] else None,
        "gen_ai.input.messages": _messages("user", given_messages(items)) if messages else None,
        "gen_ai.output.messages": _messages("assistant", calls[-1].said) if messages and calls else None,
        "error.type": row["failure_code"] or None,
        "roundhouse.iteration": manifest.iteration,
        "roundhouse.stage": manifest.kind,
        **{f"roundhouse.{key}": row[key] for key in ROLLOUT_FACTS},
    }
    root = trace.span((), f"invoke_agent {name}", (begin, end), "recorded", policy | agent)
    root["links"] = [run_trace(run).ids(iteration, manifest.kind)]
    if row["status"] == Status.FAILED:
        root["status"] = {"code": ERROR, "message": row["failure_detail"] if messages else ""}
    spans = [root, *_calls(trace, begin, calls, turns, call, messages)]
    if row["reward"] is not None:
        verdict = trace.span(("verify",), f"verify {name}", (end, end), "order", {})
        scores = [("reward", row["reward"]), *row["reward_components"]]
        verdict["events"] = [_evaluation(end, *score) for score in scores]
        spans.append(verdict)
    return spans


def _calls(
    trace: Trace,
    begin: float,
    calls: Sequence[ModelCall],
    turns: Sequence[Mapping[str, Any]],
    policy: Mapping[str, Any],
    messages: bool,
) -> Iterator[Span]:
    ends: list[float] = []
    for number, (call, turn) in enumerate(itertools.zip_longest(calls, turns)):
        reply = [] if call is None else call.said
        facts = {**policy, "gen_ai.operation.name": "chat"}
        if turn is None:  # the agent's record has more calls than turns
            last = ends[-1] if ends else begin
            times = last, last
        else:
            start = begin if turn["parent"] is None else ends[turn["parent"]]
            times = start, start + turn["latency_seconds"]
            facts |= {
                "gen_ai.response.model": f"{policy['gen_ai.request.model']}/{turn['policy_version']}",
                "gen_ai.response.finish_reasons": [turn["finish_reason"]],
                "gen_ai.usage.input_tokens": turn["prompt_length"],
                "gen_ai.usage.output_tokens": turn["generated"],
                "roundhouse.policy_version": turn["policy_version"],
                "roundhouse.reward": turn.get("reward"),
            }
        ends.append(times[1])
        if messages:
            facts["gen_ai.output.messages"] = _messages("assistant", reply)
        name = f"chat {policy['gen_ai.request.model']}"
        yield trace.span((str(number),), name, times, "order" if turn is None else "duration", facts, CLIENT)
        results = {} if call is None else {item.get("call_id"): item.get("output") for item in call.answered}
        for index, request in enumerate(item for item in reply if item.get("type") == "function_call"):
            tool = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": request.get("name"),
                "gen_ai.tool.call.id": request.get("call_id"),
                "gen_ai.tool.call.arguments": request.get("arguments") if messages else None,
                "gen_ai.tool.call.result": results.get(request.get("call_id")) if messages else None,
            }
            place = (str(number), str(index))
            yield trace.span(place, f"execute_tool {request.get('name')}", (ends[-1], ends[-1]), "order", tool)


def _evaluation(time: float, name: str, score: float) -> dict[str, Any]:
    facts = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": float(score)}
    return {"timeUnixNano": _nanoseconds(time), "name": "gen_ai.evaluation.result", "attributes": attributes(facts)}


def _messages(role: str, items: Iterable[Mapping[str, Any]]) -> str:
    """Return items of a conversation as JSON: messages with parts, as the conventions have them."""
    messages = []
    for item in items:
        if item.get("type") == "function_call":
            part = {"type": "tool_call", "id": item.get("call_id")}
            part |= {key: item.get(key) for key in ("name", "arguments")}
        else:
            kind = "reasoning" if item.get("type") == "reasoning" else "text"
            part = {"type": kind, "content": item_text(dict(item))}
        messages.append({"role": item.get("role", role), "parts": [part]})
    return json.dumps(messages)


def attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return facts as attributes in OTLP/JSON; omit None values."""
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()


def _nanoseconds(seconds: float) -> str:
    """Return a time as nanoseconds, in whole microseconds: the precision of the stored number."""
    return str(round(seconds * 1_000_000) * 1000)
