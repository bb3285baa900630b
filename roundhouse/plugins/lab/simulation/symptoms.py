"""Symptoms of a recorded run, each with its likely cause and the remedy: the first thing to read when a run does not
learn.

Invariant: only stored data of the newest collecting iterations is judged; a symptom names its evidence, and nothing
else is listed.

    symptom                    evidence                                        likely cause
    connection failures        rollouts failed with a kind `infra`             engine or environment not there
    failures by data           rollouts failed with a kind `data`              verifier or environment raises
    uneven failures            `trajectories.uneven_failures`                  they fail for one kind of rollout
    tool calls not parsed      calls in the text of answers, none on record    another model's tool-call parser
    token discontinuity        `validate/token_breaks/<cause>`                 the cause that validate names
    one reward throughout      every verdict is the same number                verifier's default; answers cut off
    many truncated rollouts    more than `MANY_TRUNCATED` of all               a limit of tokens, turns or time
    slow rollouts              seconds in the environment; rollouts in flight  latency; low parallelism
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from roundhouse.config.models import RunConfig
from roundhouse.console import MANY_TRUNCATED
from roundhouse.errors import StoreError
from roundhouse.health.errors import DOUBT
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run
from roundhouse.store.stage import Manifest, StageKind, read_table
from roundhouse.trajectories.records import FailureKind, Status
from roundhouse.trajectories.uneven_failures import Outcome, successful_calls, uneven_failures

LAST = 3
"""Iterations that are looked at."""
CALL_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call", '"arguments":')
"""Marks of calls in the text of different model families."""
SLOW_SHARE = 0.5
"""Share of a rollout's seconds spent in the environment, or of the possible rollouts in flight, that counts as slow."""
COLUMNS = [
    "group_id", "status", "reward", "failure_kind", "failure_code", "failure_detail", "task", "messages", "metrics",
    "turns", "generated_tokens", "finish_reason", "started_at", "seconds", "environment_seconds",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Symptom:
    """An observation and its remedy."""

    symptom: str
    evidence: str
    cause: str
    remedy: str


def symptoms(run: Run) -> list[Symptom]:
    """Return the symptoms of the newest iterations; empty if none shows.

    Raises:
        StoreError: the run has collected nothing.
    """
    collected = [
        (k, reference)
        for k in range(run.first_version + 1, run.config.iterations + 1)
        if (reference := run.stage(k, StageKind.COLLECT).reference()) is not None
    ][-LAST:]
    if not collected:
        raise StoreError(f"Run {run.run_id} has collected no rollouts yet.")
    tables = [read_table(reference, "rollouts").select(COLUMNS) for _, reference in collected]
    rows = pa.concat_tables(tables).to_pylist()
    manifests = [iteration_manifests(run, k) for k, _ in collected]
    validated = [each[StageKind.VALIDATE] for each in manifests if StageKind.VALIDATE in each]
    return [
        *_connections(rows),
        *_data_failures(rows),
        *_uneven_failures([table.to_pylist() for table in tables]),
        *_calls(rows, run.config),
        *_breaks(validated),
        *(_rewards(rows) or _truncations(rows)),
        *_slowness([table.to_pylist() for table in tables], run.config),
    ]


Row = dict[str, Any]


def _connections(rows: Sequence[Row]) -> list[Symptom]:
    codes = Counter(row["failure_code"] for row in rows if row["failure_kind"] == "infra")
    detail = {row["failure_code"]: row["failure_detail"] for row in rows}
    return [
        Symptom(
            f"rollouts fail with {code}",
            f"{count} of {len(rows)}; such as: {detail[code]}",
            "no HTTP server listens there, or the engine is refitting or overloaded"
            if code.startswith("engine")
            else "the environment's server is down, or slower than its time limit",
            "roundhouse doctor CONFIG asks both; time limits are generation.request_timeout_seconds and "
            "rollout.tool_timeout_seconds",
        )
        for code, count in codes.most_common()
    ]


def _data_failures(rows: Sequence[Row]) -> list[Symptom]:
    codes = Counter(row["failure_code"] for row in rows if row["failure_kind"] == "data")
    detail = {row["failure_code"]: row["failure_detail"] for row in rows}
    above = sum(row["reward"] is not None and row["reward"] > 0 for row in rows)
    return [
        Symptom(
            f"rollouts fail with {code}",
            f"{count} of {len(rows)}, and {above} others have a reward above 0; such as: {detail[code]}",
            "the environment, its verifier or the task rows are at fault; the other rollouts are a biased sample if one "
            "kind of answer fails",
            "correct the cause that the detail names (docs/failures.md has the codes)",
        )
        for code, count in codes.most_common()
    ]


def _uneven_failures(iterations: Sequence[Sequence[Row]]) -> list[Symptom]:
    outcomes = [
        Outcome(
            FailureKind(row["failure_kind"]) if row["status"] == Status.FAILED and row["failure_kind"] else None,
            (number, row["group_id"]),
            successful_calls(dict(row["metrics"])),
            row["turns"],
            row["generated_tokens"],
        )
        for number, rows in enumerate(iterations)
        for row in rows
        if row["turns"]
    ]
    return [
        Symptom(
            f"failures depend on {name.replace('_', ' ')}",
            f"chance alone spreads them as unevenly with a probability of {chance:.1g}",
            "a verifier, a judge or a limit fails for one kind of rollout, such as right answers or long ones",
            "correct the cause of the most frequent failure code before training continues",
        )
        for name, chance in uneven_failures(outcomes).items()
        if chance < DOUBT
    ]


def _calls(rows: Sequence[Row], config: RunConfig) -> list[Symptom]:
    offered = [row for row in rows if json.loads(row["task"]).get("responses_create_params", {}).get("tools")]
    conversations = [json.loads(row["messages"]) for row in offered]
    called = sum(any(item.get("type") == "function_call" for item in items) for items in conversations)
    marks = Counter(mark for items in conversations for mark in CALL_MARKS if mark in _said(items))
    marked = sum(any(mark in _said(items) for mark in CALL_MARKS) for items in conversations)
    if marked <= called:
        return []
    return [
        Symptom(
            "tool calls are not parsed",
            f"{marked} of {len(offered)} rollouts with tools have calls in their text ({marks.most_common(1)[0][0]}), {called} "
            "have one on record",
            f"generation.tool_call_parser is {config.generation.tool_call_parser}, the parser of another model; or the policy "
            "does not write calls properly yet",
            "set generation.tool_call_parser to the one for the policy's chat template",
        )
    ]


def _said(items: Sequence[dict[str, Any]]) -> str:
    """All text of the policy."""
    contents = [item.get("content") or "" for item in items if item.get("role") == "assistant"]
    return "\n".join(
        each if isinstance(each, str) else "".join(part.get("text", "") for part in each) for each in contents
    )


def _breaks(validated: Sequence[Manifest]) -> list[Symptom]:
    prefix = "validate/token_breaks/"
    causes: Counter[str] = Counter()
    for each in validated:
        causes.update({name[len(prefix) :]: int(n) for name, n in each.metrics.items() if name.startswith(prefix)})
    texts = [text for each in validated for text in each.details.get("token_breaks", {}).values()]
    return [
        Symptom(
            "token discontinuity",
            f"{count} model calls; such as: {next((text for text in texts if f'cause: {cause} ' in text), '')}",
            cause.replace("_", " "),
            "docs/concepts.md, Breaks of the tokens; validation.on_break decides about such rollouts",
        )
        for cause, count in causes.most_common()
    ]


def _rewards(rows: Sequence[Row]) -> list[Symptom]:
    rewarded = [row for row in rows if row["reward"] is not None and Status(row["status"]).counted]
    if len(rewarded) < 2 or len({row["reward"] for row in rewarded}) > 1:
        return []
    cut = sum(row["status"] == "truncated" for row in rewarded)
    reward = rewarded[0]["reward"]
    if cut > SLOW_SHARE * len(rewarded):
        return [
            Symptom(
                f"every reward is {reward:g}",
                f"{cut} of {len(rewarded)} rollouts were truncated",
                "answers are cut off before they are given",
                "raise generation.sampling.max_new_tokens, rollout.max_tokens or rollout.max_turns",
            )
        ]
    answers = len({_said(json.loads(row["messages"])) for row in rewarded})
    return [
        Symptom(
            f"every reward is {reward:g}",
            f"{len(rewarded)} rollouts with {answers} different answers",
            "the verifier returns its default, or the tasks are all too hard (or too easy) for this policy",
            "try the verifier on a right answer (docs/environments.md); start from an easier split or a better policy",
        )
    ]


def _truncations(rows: Sequence[Row]) -> list[Symptom]:
    cut = [row for row in rows if row["status"] == Status.TRUNCATED]
    if len(cut) <= MANY_TRUNCATED * len(rows):
        return []
    reasons = Counter(row["finish_reason"] for row in cut)
    return [
        Symptom(
            "many rollouts are truncated",
            f"{len(cut)} of {len(rows)} ({', '.join(f'{reason} {count}' for reason, count in reasons.most_common())})",
            "answers are cut off by a limit of tokens, turns or time, and rewarded as they stand",
            "raise generation.sampling.max_new_tokens, rollout.max_tokens, rollout.max_turns or generation.max_model_len",
        )
    ]


def _slowness(iterations: Sequence[Sequence[Row]], config: RunConfig) -> list[Symptom]:
    rows = [row for each in iterations for row in each if row["seconds"]]
    if not rows:
        return []
    share = sum(row["environment_seconds"] for row in rows) / sum(row["seconds"] for row in rows)
    if share > SLOW_SHARE:
        return [
            Symptom(
                "slow rollouts",
                f"{share:.0%} of their seconds are the environment's",
                "network latency to the environment, or slow tools",
                "put environment and engine on one node (same rack at least, never across sites); more replicas of the server",
            )
        ]
    flying_in = []
    for each in filter(None, iterations):  # from the first rollout's beginning to the last one's end
        busy = sum(row["seconds"] for row in each)
        ended = max(row["started_at"] + row["seconds"] for row in each)
        window = ended - min(row["started_at"] for row in each)
        flying_in.append(busy / window if window > 0 else float(len(each)))
    flying = statistics.fmean(flying_in)
    slots = min(config.rollout.concurrency or len(rows), max(map(len, iterations)))
    if flying >= SLOW_SHARE * slots:
        return []
    lasted = sorted(row["seconds"] for row in rows)
    return [
        Symptom(
            "slow rollouts",
            f"{flying:.1f} of {slots} rollouts in flight on average; the median takes {statistics.median(lasted):.1f} s, the "
            f"longest {lasted[-1]:.1f} s",
            "low parallelism: an iteration waits for its few long rollouts",
            "collect ahead (asynchrony.staleness: 1), more groups an iteration, or a lower rollout.max_tokens",
        )
    ]
