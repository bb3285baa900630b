"""The reward profile of a collection: statistics of each task's rollouts, and of each agent's.

Invariant: every rollout belongs to a row of the materialized inputs; rows without a rollout count as missing, and only on
request are they let pass.

    run_materialized_inputs.jsonl + run.jsonl  ->  run_reward_profiling.jsonl (a line a task) + run_agent_metrics.json
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from roundhouse.compat.nemo_gym.exchange.files import CollectionFiles
from roundhouse.compat.nemo_gym.exchange.json_lines import Row, iter_rows, read_rows, write_rows
from roundhouse.compat.nemo_gym.exchange.resume import Key, key_of
from roundhouse.compat.nemo_gym.servers.aggregate import (
    ROLLOUT,
    TASK,
    describe,
    expected_by_task,
    group_metrics,
    light,
    rollouts_by_task,
)
from roundhouse.errors import DataError

MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Profile:
    """Statistics by task and by agent."""

    tasks: list[dict[str, Any]]
    agents: list[dict[str, Any]]
    expected: int
    """Rows of the materialized inputs."""
    completed: int


def profile(inputs: Iterable[Row], rollouts: Iterable[Row], *, allow_partial: bool = False) -> Profile:
    """The profile of `rollouts` (their conversations are not looked at) against the rows that asked for them.

    Raises:
        DataError: a rollout has no row, stands twice, or is missing while `allow_partial` is False.
    """
    wanted = _by_key(inputs, "the materialized inputs")
    found = _by_key(rollouts, "the rollouts")
    _refuse(found.keys() - wanted.keys(), "rollout(s) belong to no row of the materialized inputs")
    if not allow_partial:
        _refuse(
            wanted.keys() - found.keys(), "row(s) have no rollout; --allow-partial profiles what there is. They are"
        )
    expected = expected_by_task(wanted.values())
    ordered = [found[key] for key in sorted(found)]
    tasks = [
        group_metrics(own, expected[own[0][TASK]], _sample(wanted[own[0][TASK], own[0][ROLLOUT]]))
        for own in rollouts_by_task(ordered)
    ]
    agents: dict[str, list[Row]] = {}
    for row in ordered:
        agents.setdefault(wanted[key_of(row)]["agent_ref"]["name"], []).append(row)
    by_agent = [describe(own) | {"agent_ref": {"name": name}} for name, own in sorted(agents.items())]
    return Profile(tasks, by_agent, len(wanted), len(found))


def write_profile(files: CollectionFiles, inputs: Path | None = None, *, allow_partial: bool = False) -> Profile:
    """Profile a collection and write the result beside it; `inputs` are its materialized inputs, if they lie elsewhere."""
    rollouts = (light(row) for _, row in iter_rows(files.rollouts))
    found = profile(read_rows(inputs or files.materialized_inputs), rollouts, allow_partial=allow_partial)
    write_rows(files.reward_profile, found.tasks)
    files.agent_metrics.write_bytes(orjson.dumps(found.agents))
    return found


def _sample(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in (TASK, ROLLOUT)}


def _by_key(rows: Iterable[Row], where: str) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for row in rows:
        if TASK not in row or ROLLOUT not in row:
            raise DataError(f"A row of {where} has no {TASK} and {ROLLOUT}: it cannot be profiled.")
        if key_of(row) in found:
            raise DataError(f"Task {row[TASK]}, rollout {row[ROLLOUT]} stands twice in {where}.")
        found[key_of(row)] = row
    return found


def _refuse(keys: Iterable[Key], what: str) -> None:
    if found := sorted(keys):
        shown = ", ".join(f"{task}:{rollout}" for task, rollout in found[:MOST_SHOWN])
        raise DataError(f"{len(found)} {what}: {shown}{', …' if len(found) > MOST_SHOWN else ''}.")
