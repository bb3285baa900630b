"""Judge stored rollouts again: post each row's recorded response to the present verifier, without the policy.

Invariants: a row is posted to /verify as its agent would post it (the materialized input with the recorded response),
and the result is written to the output like a collection's row, a failure to its sidecar. The input rollouts do not
change, except with `append`, which may add to them. An output is replaced after all inputs are read. A verifier that
judges by its session's state cannot judge a stored rollout: a server that does not report itself stateless (`GET
/reverify_mode`) is refused, or with `force` its output is called `unsafe_…`.

    run_materialized_inputs.jsonl + run.jsonl ── /verify ──> output.jsonl, output_failures.jsonl,
    output_aggregate_metrics.json

`judge_failed_only` recovers a run after an outage of its judge: its rollouts are copied, and only the judge_failed ones
of its failures sidecar are judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_gym.clients.connection import Connection
from roundhouse.plugins.nemo_gym.exchange.json_lines import (
    ROLLOUT,
    TASK,
    Appender,
    CollectionFiles,
    Key,
    Row,
    iter_rows,
    key_of,
    refuse_own,
)
from roundhouse.plugins.nemo_gym.exchange.outgoing import is_index
from roundhouse.plugins.nemo_gym.exchange.stream import (
    EVERY,
    SHORT_SECONDS,
    Remaining,
    RowServers,
    max_attempts,
    remaining,
)
from roundhouse.rollout.protocol import FAILURE, EnvironmentUnavailable, VerifierFailed

JUDGE_FAILED = "judge_failed"
STATELESS = "stateless"


@dataclass(frozen=True, slots=True)
class Reverification:
    """Options of a reverification: the rows to judge, and the treatment of an existing output."""

    inputs: Path
    rollouts: CollectionFiles
    output: Path
    limit: int | None = None
    judge_failed_only: bool = False
    append: bool = False
    overwrite: bool = False
    resume: bool = False
    force: bool = False

    def check(self) -> None:
        """Reject contradictory options.

        Raises:
            ConfigError: two options contradict each other.
        """
        if self.append and not self.judge_failed_only:
            raise ConfigError("--append adds recovered rows to the rollouts, and needs --judge-failed-only.")
        if self.append and self.overwrite:
            raise ConfigError("--append keeps the output and --overwrite removes it: give one.")


class Verifiers(RowServers):
    """Resources servers by agent: each judges the rows of its agent."""

    route = "verify"
    unavailable = EnvironmentUnavailable
    refused = VerifierFailed
    malformed = VerifierFailed

    async def not_stateless(self) -> list[str]:
        """Return URLs of the servers that do not report that they judge by row and response alone."""
        modes = {one.url: await one.get("reverify_mode", seconds=SHORT_SECONDS) for one in self._connections.values()}
        return sorted(url for url, (status, text) in modes.items() if status != 200 or text.strip('"\n') != STATELESS)


async def begin(asked: Reverification, verifiers: Verifiers) -> tuple[CollectionFiles, Remaining]:
    """Prepare the output files, and return them with the rows to judge.

    Raises:
        ConfigError: a verifier is not stateless, the output exists or is an input, or options contradict each other.
        DataError: a file cannot be read; a rollout lacks a row among the inputs, or a response.
    """
    asked.check()
    unfit = [] if asked.judge_failed_only else await verifiers.not_stateless()
    if unfit and not asked.force:
        raise ConfigError(
            f"{', '.join(unfit)} does not declare that it judges by row and response alone (GET /reverify_mode is not "
            f"{STATELESS!r}), so rewards may be wrong. --force judges all the same, into a file named unsafe_…"
        )
    output = asked.output.with_name(f"unsafe_{asked.output.name}") if unfit else asked.output
    files = CollectionFiles(output)
    results = (files.rollouts, files.failures)
    refuse_own("--inputs", asked.inputs, output, results)
    if not (asked.append and output.resolve() == asked.rollouts.rollouts.resolve()):
        for path in (asked.rollouts.rollouts, asked.rollouts.failures):
            refuse_own("--rollouts", path, output, results)
    fresh = not (asked.append or asked.resume)
    for path in results if fresh and not asked.overwrite else ():
        if path.exists():
            raise ConfigError(
                f"{path} exists. Pass --overwrite to remove it, --resume to continue it, or name another --output."
            )
    judged_rows: list[Row] = []
    if asked.judge_failed_only:
        present: set[Key] = set() if fresh else {key_of(row) for row in _rows(files.rollouts)}
        judged_rows = _new(_rows(asked.rollouts.rollouts), present)
        failed = (row for row in _rows(asked.rollouts.failures) if row.get(FAILURE) == JUDGE_FAILED)
        rows = _new(failed, present)
    else:
        rows = [row for _, row in iter_rows(asked.rollouts.rollouts)]
    inputs = {_key(asked.inputs, number, row): row for number, row in iter_rows(asked.inputs)}
    payloads = [_payload(inputs, row, asked.inputs) for row in islice(rows, asked.limit)]
    for path in results if fresh else ():
        path.unlink(missing_ok=True)
    if judged_rows:  # the judged rollouts go to the output as they are
        with Appender(files.rollouts) as file:
            for row in judged_rows:
                file.append(row)
    if not asked.resume:
        return files, Remaining(payloads)
    return files, remaining(payloads, _rows(files.rollouts), _rows(files.failures), max_attempts())


def _new(rows: Iterable[Row], present: set[Key]) -> list[Row]:
    """Return the rows with new keys, each once, and add their keys to `present`."""
    new_rows: list[Row] = []
    for row in rows:
        if key_of(row) not in present:
            new_rows.append(row)
            present.add(key_of(row))
    return new_rows


def _payload(inputs: Mapping[Key, Row], rollout: Row, path: Path) -> Row:
    task_row = inputs.get((rollout.get(TASK, -1), rollout.get(ROLLOUT, -1)))
    if task_row is None:
        raise DataError(
            f"The rollout {rollout.get(TASK)}-{rollout.get(ROLLOUT)} has no row in {path}. Name the materialized inputs of "
            f"that collection."
        )
    if not isinstance(rollout.get("response"), dict):
        raise DataError(f"The rollout {rollout[TASK]}-{rollout[ROLLOUT]} has no response that could be judged.")
    return task_row | {"response": rollout["response"]}


def _key(path: Path, number: int, row: Row) -> Key:
    task, rollout = row.get(TASK), row.get(ROLLOUT)
    if not is_index(task) or not is_index(rollout):
        raise DataError(f"{path}, line {number} has {TASK} {task!r} and {ROLLOUT} {rollout!r}; both are whole numbers.")
    return task, rollout


def _rows(path: Path) -> Iterator[Row]:
    return (row for _, row in iter_rows(path)) if path.exists() else iter(())


async def verifiers_of_head(url: str, seconds: float) -> Verifiers:
    """Return the resources servers of the agents that a head server knows.

    Raises:
        InfraError: the head server does not answer, or not with a configuration.
        ConfigError: the head server knows no such resources server.
    """
    from roundhouse.plugins.nemo_gym.clients.connection import look_up_verifiers

    connection = Connection(url, SHORT_SECONDS, key="--head")
    try:
        verifiers: dict[str, Any] = await look_up_verifiers(connection, every=EVERY)
    finally:
        await connection.close()
    if not verifiers:
        raise ConfigError(f"--head is {url}, which knows no resources server that judges an agent's rows.")
    return Verifiers(verifiers, seconds, key="--head")
