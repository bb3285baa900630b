"""Read TRL's completions: `<output_dir>/completions/completions_00010.parquet`.

Invariants: a row is a rollout without tokens: the file lacks them. The file does not mark the columns of rewards, nor their
weights: they are the columns of floats, with weight 1, and the advantages prove it. In each group, the deviations of the
rewards from their mean are the advantages times a positive number. A file that shows otherwise is refused until `rewards` names
the columns and their weights.

    step  prompt    completion    correct  short   advantage         reward of the rows    1 + 0.5    0 + 1
    10    [{…}]     [{…}]         1.0      0.5      0.7
    10    [{…}]     [{…}]         0.0      1.0     -0.7

Adjacent rows of one step with equal prompts are a group. A reward of null (the function returned None) does not count; a row
without any is a failure. A text as the prompt is shown as a message of the user.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from roundhouse.config.section import Section
from roundhouse.environments.null_fields import arguments_without_nulls
from roundhouse.errors import DataError
from roundhouse.rollout.responses import Item, items_from_chat
from roundhouse.store.stage import parse_parquet
from roundhouse.trajectories.foreign_files import (
    NO_REWARD,
    ForeignModel,
    ForeignRollouts,
    Identities,
    Reader,
    Row,
    checked,
    digest_id,
    foreign_table,
)
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.storable import shown

COLUMNS = frozenset({"step", "prompt", "completion", "advantage"})
TOLERANCE = 1e-3
"""Of the cosine between deviations and advantages; advantages are 32-bit floats."""
SMALL = 1e-6
"""Deviations of equal rewards, relative to these."""


class TrlReader(Section):
    """Options of TRL's completions."""

    kind: Literal["trl"]
    rewards: dict[str, float] | None = None
    """Weights of the reward functions, by column. Unset: each column of floats has weight 1, if the advantages agree."""


class _Function(ForeignModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(ForeignModel):
    id: str | None = None
    function: _Function


class _Message(ForeignModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


def read(files: Sequence[Path], options: TrlReader, policy_version: int) -> ForeignRollouts:
    """Read completions (`reader.trl`).

    Raises:
        DataError: a file is not Parquet, a value has another type, or the advantages do not follow from the rewards.
    """
    identities = Identities()
    rollouts: list[Rollout] = []
    foreign: list[tuple[str, str, Row]] = []
    for file in files:
        try:
            table = parse_parquet(file.read_bytes())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} cannot be read as Parquet: {error}. Write or copy the file again.") from error
        if missing := COLUMNS - set(table.column_names):
            raise DataError(f"{file} lacks the columns {', '.join(sorted(missing))} of TRL's completions.")
        weights = _weights(table, options.rewards, file)
        groups = list(_groups(table.to_pylist()))
        for start, rows in groups:
            totals = [_total(row, weights, f"{file}, row {start + index}") for index, row in enumerate(rows)]
            if options.rewards is None and weights:
                _refuse_unexplained(rows, totals, weights, f"{file}, rows {start} to {start + len(rows) - 1}")
            constant = _constant_extras(rows, weights)
            for index, (row, total) in enumerate(zip(rows, totals, strict=True)):
                place = f"{file}, row {start + index}"
                rollout = _rollout(row, total, weights, constant, identities, f"{row['step']}-{start}", place)
                rollouts.append(rollout)
                rest = {name: row[name] for name in row if name not in {*COLUMNS, *weights, *constant}}
                foreign.append((rollout.rollout_id, place, rest | {"step": row["step"], "advantage": row["advantage"]}))
    return ForeignRollouts(rollouts, foreign_table(foreign))


def _weights(table: pa.Table, named: Mapping[str, float] | None, file: Path) -> dict[str, float]:
    if named is not None:
        if missing := [name for name in named if name not in table.column_names]:
            raise DataError(f"{file} has no column {missing[0]!r}, which rewards names. Columns: {table.column_names}.")
        return dict(named)
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type) and field.name not in COLUMNS]
    return dict.fromkeys(floats, 1.0)


def _groups(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Return adjacent rows of one step and prompt, with the number of the first (from 1)."""
    groups: list[tuple[int, list[Row]]] = []
    for number, row in enumerate(rows, start=1):
        if groups and all(groups[-1][1][0][name] == row[name] for name in ("step", "prompt")):
            groups[-1][1].append(row)
        else:
            groups.append((number, [row]))
    return groups


def _total(row: Row, weights: Mapping[str, float], place: str) -> float | None:
    """Return the reward of a row; None if no function gave one."""
    parts = []
    for name, weight in weights.items():
        value = row[name]
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"{place}: {name} is {shown(value)}, not a finite number. Correct or remove the row.")
        parts.append(weight * value)
    return math.fsum(parts) if parts else None


def _refuse_unexplained(rows: Sequence[Row], totals: Sequence[float | None], weights: Row, place: str) -> None:
    judged = [(total, row["advantage"]) for total, row in zip(totals, rows, strict=True) if total is not None]
    if not judged:
        return
    reward, advantage = (np.array(values, np.float64) for values in zip(*judged, strict=True))
    deviation = reward - reward.mean()
    sizes = float(np.linalg.norm(deviation)), float(np.linalg.norm(advantage))
    if min(sizes) < SMALL * (1.0 + np.abs(reward).max()):
        agree = max(sizes) < TOLERANCE
    else:
        agree = float(deviation @ advantage) > (1 - TOLERANCE) * sizes[0] * sizes[1]
    if not agree:
        columns = ", ".join(weights)
        raise DataError(
            f"{place}: the advantages do not follow from the sum of the columns {columns}. Name the reward functions with the "
            f"weights of the run (reward_weights): --set rewards.{next(iter(weights))}=1"
        )


def _constant_extras(rows: Sequence[Row], weights: Mapping[str, float]) -> Row:
    """Return the further columns with one value in the group: they belong to its task."""
    first = rows[0]
    names = [name for name in first if name not in COLUMNS and name not in weights]
    return {name: first[name] for name in names if all(row[name] == first[name] for row in rows)}


def _rollout(
    row: Row,
    total: float | None,
    weights: Mapping[str, float],
    extras: Row,
    identities: Identities,
    group: str,
    place: str,
) -> Rollout:
    prompt, completion = (_messages(row[name], role, f"{place}: {name}") for name, role in _ROLES)
    task_id = digest_id("prompt", row["prompt"])
    rollout = Rollout(
        group_id=f"step-{group}",
        sample=identities.next_sample(group),
        task={"task_id": task_id, **extras, "prompt": row["prompt"], "responses_create_params": {"input": prompt}},
        environment="trl",
        status=Status.COMPLETED,
        items=prompt + completion,
        finish_reason="stop",
    )
    if total is None:
        rollout.status, rollout.failure_kind, rollout.finish_reason = Status.FAILED, FailureKind.DATA, ""
        rollout.failure_code, rollout.failure_detail = NO_REWARD, "no reward function gave one"
        return rollout
    rollout.reward = total
    values = {name: row[name] for name in weights if row[name] is not None and not math.isnan(row[name])}
    if len(weights) > 1:
        rollout.reward_components = {name: weights[name] * value for name, value in values.items()}
    if any(weights[name] != 1 for name in values):
        rollout.metrics = {name: float(value) for name, value in values.items()}
    return rollout


_ROLES = (("prompt", "user"), ("completion", "assistant"))


def _messages(value: Any, role: str, place: str) -> list[Item]:
    """Return a text or a list of messages as items."""
    if isinstance(value, str):
        return items_from_chat([{"role": role, "content": value}], f"msg_{role}")
    if not isinstance(value, list) or not value:
        raise DataError(f"{place} is {shown(value)}, not a text or a list of messages. Correct or remove the row.")
    messages: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for index, raw in enumerate(value):
        message = checked(_Message, _without_nulls(raw), f"{place}.{index}")
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            calls = [_call(call, f"call_{index}_{number}") for number, call in enumerate(message.tool_calls)]
            plain["tool_calls"] = calls
            unanswered = [call["id"] for call in calls]
        if message.role == "tool":
            if message.tool_call_id is None and not unanswered:
                raise DataError(f"{place}.{index}: the output of a tool follows no call. Correct or remove the row.")
            plain["tool_call_id"] = message.tool_call_id or unanswered.pop(0)
        messages.append(plain)
    return items_from_chat(messages, f"msg_{role}")


def _call(call: _Call, call_id: str) -> dict[str, Any]:
    """Return a call in the form of chat. Arrow fills arguments with the names of all calls: nulls are removed."""
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments_without_nulls(arguments or {}, None), ensure_ascii=False)
    return {
        "id": call.id or call_id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _without_nulls(value: Any) -> Any:
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


READER = Reader(lambda head: head.columns >= COLUMNS, "completions_*.parquet")
