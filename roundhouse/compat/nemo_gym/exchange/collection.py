"""A collection: materialized inputs in, rollouts and failures out, each written as it finishes.

Invariants: every row that was run is on one line, of the rollouts file if it was judged, otherwise of the failures sidecar;
a row that never reached its agent, or whose agent says `_ng_no_persist`, is on none, so that a resume runs it again. A row
that fails ends nothing. Interrupted at any moment, the files are good for `resume`.

Without resume the files of an earlier collection are replaced, its sidecar too: attempts belong to one collection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson

from roundhouse.compat.nemo_gym.exchange.json_lines import (
    ROLLOUT,
    TASK,
    Appender,
    CollectionFiles,
    Row,
    iter_rows,
    key_of,
    mend_tail,
    write_rows,
)
from roundhouse.compat.nemo_gym.exchange.outgoing import ATTEMPT, is_index
from roundhouse.compat.nemo_gym.exchange.statistics import light
from roundhouse.compat.nemo_gym.exchange.stream import (
    Remaining,
    RolloutSource,
    RowOutcome,
    max_attempts,
    remaining,
    stream,
)
from roundhouse.errors import DataError, InfraError
from roundhouse.rollout.protocol import DETAIL, FAILURE, TERMINAL, classify, detail_of

CARRIED = (TASK, ROLLOUT, "agent_ref", "skills_ref", ATTEMPT, "_ng_rollout_id")
"""Fields of a row that its result is stamped with."""


@dataclass(slots=True)
class Summary:
    """What came of a collection."""

    files: CollectionFiles
    planned: int
    """Rows of the materialized inputs."""
    earlier: int = 0
    """Rollouts that were there before a resume."""
    given_up: int = 0
    """Rows that a resume leaves, having failed for good or too often."""
    completed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed rows by failure class."""
    not_run: int = 0
    """Rows that reached no agent, or whose agent asked not to keep them."""
    outage: str = ""
    """Why rows reached no agent."""
    reward_sum: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def line(self) -> str:
        """In one line."""
        parts = [f"{self.completed} rollouts"]
        if self.completed:
            parts.append(f"mean reward {self.reward_sum / self.completed:.3f}")
        if self.earlier:
            parts.append(f"{self.earlier} from before")
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.failures.items()))
        parts += [f"{self.failed} failed ({kinds})"] if self.failures else []
        parts += [f"{self.given_up} given up"] if self.given_up else []
        parts += [f"{self.not_run} not run"] if self.not_run else []
        return " · ".join(parts)


OnOutcome = Callable[[Summary], None]
"""Called after each outcome, with the numbers so far."""


def begin(files: CollectionFiles, rows: Sequence[Row]) -> Remaining:
    """Start afresh: write the materialized inputs, remove the results of an earlier collection."""
    write_rows(files.materialized_inputs, rows)
    for path in (files.rollouts, files.failures):
        path.unlink(missing_ok=True)
    return Remaining(list(rows))


def resume(files: CollectionFiles) -> Remaining:
    """What an earlier collection left to do; its materialized inputs are read, not the task file.

    Raises:
        DataError: the materialized inputs cannot be read, or a row of theirs has no indexes.
    """
    wanted = []
    for number, row in iter_rows(files.materialized_inputs):
        if not is_index(row.get(TASK)) or not is_index(row.get(ROLLOUT)):
            raise DataError(
                f"{files.materialized_inputs}, line {number} has {TASK} {row.get(TASK)!r} and {ROLLOUT} {row.get(ROLLOUT)!r}; "
                "both are whole numbers from 0. Start afresh."
            )
        wanted.append(row)
    for path in (files.rollouts, files.failures):
        mend_tail(path)
    done = (row for _, row in iter_rows(files.rollouts)) if files.rollouts.exists() else ()
    failures = (row for _, row in iter_rows(files.failures)) if files.failures.exists() else ()
    return remaining(wanted, done, failures, max_attempts())


async def collect(
    files: CollectionFiles,
    left: Remaining,
    source: RolloutSource,
    *,
    concurrency: int | None,
    aggregate: bool = True,
    on_outcome: OnOutcome | None = None,
) -> Summary:
    """Run what is left, inside `source`'s context, and write the aggregate metrics of all rollouts.

    Raises:
        InfraError: no agent could be reached for any row.
    """
    given_up = left.terminal + left.exhausted
    summary = Summary(files, planned=len(left.rows) + left.done + given_up, earlier=left.done, given_up=given_up)
    with Appender(files.rollouts) as rollouts, Appender(files.failures) as failures:
        async with aclosing(stream(left.rows, source, concurrency)) as outcomes:
            async for outcome in outcomes:
                _write(outcome, rollouts, failures, summary)
                if on_outcome is not None:
                    on_outcome(summary)
    if summary.outage and not (summary.completed or summary.failures):
        raise InfraError(f"None of {len(left.rows)} rows could be run. {summary.outage}")
    if aggregate:
        await write_aggregate(files, source)
    return summary


async def write_aggregate(files: CollectionFiles, source: RolloutSource) -> None:
    """Write the aggregate metrics of the rollouts file, agent by agent."""
    by_agent: dict[str, list[Row]] = {}
    for _, row in iter_rows(files.rollouts):
        by_agent.setdefault(row["agent_ref"]["name"], []).append(light(row))
    entries = []
    for name, rows in by_agent.items():
        found = await source.aggregate(name, sorted(rows, key=key_of))
        entries.append({"agent_ref": {"name": name}} | found)
    files.aggregate_metrics.write_bytes(orjson.dumps(entries, option=orjson.OPT_INDENT_2))


def failure_row(row: Row, error: Exception) -> Row:
    """The sidecar's row of an attempt that gave no answer."""
    kind, code, detail = classify(error)
    return {
        "responses_create_params": row["responses_create_params"],
        FAILURE: code,
        TERMINAL: kind.value == "data",
        DETAIL: detail,
        **_stamps(row),
    }


def _write(outcome: RowOutcome, rollouts: Appender, failures: Appender, summary: Summary) -> None:
    if not outcome.reached:
        summary.not_run += 1
        summary.outage = str(outcome.error)
        return
    if outcome.result is None:
        assert outcome.error is not None
        result = failure_row(outcome.row, outcome.error)
    else:
        result = outcome.result
        reward = result.get("reward")
        # A failure's reason is in one field, wherever the agent has it; a result that says of itself neither what it is worth
        # nor that it failed is a failure
        if result.get(FAILURE) is not None:
            if DETAIL not in result:
                result = result | {DETAIL: detail_of(result) or "The agent gives no reason."}
        elif not (result.get("_ng_no_persist") or isinstance(reward, int | float)):
            detail = f"The agent's answer has reward {reward!r}."
            result = result | {FAILURE: "no_reward", TERMINAL: False, DETAIL: detail}
        result = result | _stamps(outcome.row)
    if result.get("_ng_no_persist"):
        summary.not_run += 1
    elif (failure := result.get(FAILURE)) is not None:
        summary.failures[str(failure)] = summary.failures.get(str(failure), 0) + 1
        failures.append(result)
    else:
        summary.completed += 1
        summary.reward_sum += result["reward"]
        rollouts.append(result)


def _stamps(row: Row) -> Row:
    return {name: row[name] for name in CARRIED if name in row}
