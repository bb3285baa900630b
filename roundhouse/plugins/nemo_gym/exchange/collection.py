"""A collection: materialized inputs in, rollouts and failures out, each written as it finishes.

Invariants: every row that ran is on one line: of the rollouts file if it was judged, otherwise of the failures sidecar.
A row is omitted if it never reached its agent, or if its agent answers `_ng_no_persist`: a resume runs it again. A
failed row ends nothing. After an interruption at any moment, the files are fit for `resume`.

Without resume the files of an earlier collection are replaced, its sidecar too: attempts belong to one collection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson

from roundhouse.errors import DataError, InfraError
from roundhouse.plugins.nemo_gym.exchange.json_lines import (
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
from roundhouse.plugins.nemo_gym.exchange.outgoing import ATTEMPT, is_index
from roundhouse.plugins.nemo_gym.exchange.statistics import light
from roundhouse.plugins.nemo_gym.exchange.stream import (
    Remaining,
    RolloutSource,
    RowOutcome,
    max_attempts,
    remaining,
    stream,
)
from roundhouse.rollout.protocol import DETAIL, FAILURE, TERMINAL, classify, detail_of

MOST_QUOTED = 300
"""Characters of a reason that is printed; the sidecar has all of it."""
CARRIED = (TASK, ROLLOUT, "agent_ref", "skills_ref", ATTEMPT, "_ng_rollout_id")
"""Fields of a row that its result is stamped with."""


@dataclass(slots=True)
class Summary:
    """Counts of a collection."""

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
    reasons: dict[str, str] = field(default_factory=dict)
    """The first reason in words, by failure class."""
    not_run: int = 0
    """Rows that reached no agent, or that their agent asked not to keep."""
    outage: str = ""
    """Why rows reached no agent."""
    rewarded: int = 0
    """Completed rollouts without the masked ones."""
    reward_sum: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def judged(self) -> int:
        """Rollouts in the file, of this collection and of earlier ones."""
        return self.earlier + self.completed

    def verdict(self, *, require_complete: bool = False) -> str | None:
        """Return the sentence with which the collection ends as a failure, or None."""
        if self.planned and not self.judged:
            return f"None of the {self.planned} rollouts has a result. Their reasons are in {self.files.failures}."
        if require_complete and self.judged < self.planned:
            return (
                f"--require-complete is set, and {self.judged} of {self.planned} rollouts have a result. The others failed "
                f"(see {self.files.failures}) or did not run. --resume repeats failures that a retry can help."
            )
        return None

    def failure_lines(self) -> list[str]:
        """Return a line with count and first reason for each failure class, and the path of the sidecar."""
        if not self.failures:
            return []
        lines = [
            f"  {count} × {name}: {self.reasons.get(name, '')[:MOST_QUOTED]}"
            for name, count in sorted(self.failures.items())
        ]
        return [*lines, f"  all of them: {self.files.failures}"]

    def line(self) -> str:
        """In one line."""
        parts = [f"{self.completed} rollouts"]
        if self.rewarded:
            parts.append(f"mean reward {self.reward_sum / self.rewarded:.3f}")
        if self.earlier:
            parts.append(f"{self.earlier} from before")
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.failures.items()))
        parts += [f"{self.failed} failed ({kinds})"] if self.failures else []
        parts += [f"{self.given_up} not retried"] if self.given_up else []
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
    """Return the rows that an earlier collection left to run. It reads the materialized inputs, not the task file.

    Raises:
        DataError: the materialized inputs cannot be read, or the indexes of a row are missing.
    """
    rows = []
    for number, row in iter_rows(files.materialized_inputs):
        if not is_index(row.get(TASK)) or not is_index(row.get(ROLLOUT)):
            raise DataError(
                f"{files.materialized_inputs}, line {number} has {TASK} {row.get(TASK)!r} and {ROLLOUT} {row.get(ROLLOUT)!r}; "
                "both are whole numbers from 0. Start afresh."
            )
        rows.append(row)
    for path in (files.rollouts, files.failures):
        mend_tail(path)
    rollouts = (row for _, row in iter_rows(files.rollouts)) if files.rollouts.exists() else ()
    failures = (row for _, row in iter_rows(files.failures)) if files.failures.exists() else ()
    return remaining(rows, rollouts, failures, max_attempts())


async def collect(
    files: CollectionFiles,
    left: Remaining,
    source: RolloutSource,
    *,
    concurrency: int | None,
    aggregate: bool = True,
    on_outcome: OnOutcome | None = None,
) -> Summary:
    """Run the remaining rows, inside `source`'s context, and write the aggregate metrics of all rollouts.

    Raises:
        InfraError: no row reached an agent.
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
        metrics = await source.aggregate(name, sorted(rows, key=key_of))
        entries.append({"agent_ref": {"name": name}} | metrics)
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
        # Put a failure's reason into one field, wherever the agent puts it. A result with neither a reward nor a
        # failure is a
        # failure
        if result.get(FAILURE) is not None:
            if DETAIL not in result:
                result = result | {DETAIL: detail_of(result) or "The agent gives no reason."}
            result = result | {TERMINAL: result.get(TERMINAL) is True}
        elif not (result.get("_ng_no_persist") or isinstance(reward, int | float)):
            detail = f"The agent's answer has reward {reward!r}."
            result = result | {FAILURE: "no_reward", TERMINAL: False, DETAIL: detail}
        result = result | _stamps(outcome.row)
    if result.get("_ng_no_persist"):
        summary.not_run += 1
    elif (failure := result.get(FAILURE)) is not None:
        summary.failures[str(failure)] = summary.failures.get(str(failure), 0) + 1
        summary.reasons.setdefault(str(failure), str(result[DETAIL]))
        failures.append(result)
    else:
        summary.completed += 1
        if not result.get("mask_sample"):
            summary.rewarded += 1
            summary.reward_sum += result["reward"]
        rollouts.append(result)


def _stamps(row: Row) -> Row:
    return {name: row[name] for name in CARRIED if name in row}
