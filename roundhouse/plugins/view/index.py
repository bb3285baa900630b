"""The rows of a scope without their texts and tokens, in memory, for the table of rollouts, its filters and sorting.

Invariant: a rollout takes a few dozen bytes, whatever its size. Each row includes its position, so that the text of one
rollout is read from one file.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from roundhouse.plugins.view.catalog import Catalog, Filters, Scope, spellings
from roundhouse.sql.database import COLUMNS
from roundhouse.sql.parts import StageFiles, dataset_of
from roundhouse.store.stage import StageKind
from roundhouse.trajectories.schemas import QUARANTINE, ROLLOUTS

KEPT = 6
"""Indexes in memory; one over 100,000 rollouts takes about 25 MB."""
SEARCHES_KEPT = 16

_READ = (
    "iteration", "rollout_id", "group_id", "sample", "environment", "status", "attempt", "reward", "finish_reason",
    "failure_kind", "failure_code", "policy_version_first", "policy_version_last", "turns", "generated_tokens",
    "total_tokens", "started_at", "seconds",
)  # fmt: skip
_BUILD = """
CREATE TABLE rollouts AS
SELECT r.* EXCLUDE (policy_version_first, policy_version_last), r.policy_version_last AS policy_version,
       q.outcome, q.reason, c.advantage
FROM read r
LEFT JOIN refused q USING (iteration, rollout_id)
LEFT JOIN (SELECT iteration, rollout_id, first(advantage) AS advantage FROM trained GROUP BY ALL) c
       USING (iteration, rollout_id)
"""
_MEAN_REWARD = "avg(reward) FILTER (status IN ('completed', 'truncated'))"
"""The reward of a masked rollout does not count."""
_SHOWN = """iteration, rollout_id, group_id, sample, environment, status, attempt, reward, advantage, finish_reason,
failure_kind, failure_code, policy_version, turns, generated_tokens, total_tokens, started_at, seconds, outcome, reason"""


class Index:
    """One scope's rows. Queries may come from several threads."""

    def __init__(self, stages: Sequence[StageFiles], stage: str) -> None:
        self.stages = list(stages)
        self._rollouts = [stage_files for stage_files in stages if stage_files.stage == stage]
        self._database = duckdb.connect(":memory:", config={"enable_external_access": "false", "temp_directory": ""})
        self._searches: OrderedDict[str, str] = OrderedDict()
        self._names = itertools.count()
        self._lock = threading.Lock()
        read = dataset_of(self._rollouts, "rollouts", ROLLOUTS).to_table(columns=[*_READ, "__filename"])
        files: dict[str, int] = {}
        numbers = [files.setdefault(name, len(files)) for name in read.column("__filename").to_pylist()]
        self._files = list(files)
        read = read.drop(["__filename"]).append_column("part", pa.array(numbers, pa.int32()))
        validated = [stage_files for stage_files in self.stages if stage_files.stage == StageKind.VALIDATE]
        trained = [stage_files for stage_files in self.stages if stage_files.stage == StageKind.TRAIN]
        tables = {
            "read": read,
            "refused": dataset_of(validated, "quarantine", QUARANTINE).to_table(
                columns=["iteration", "rollout_id", "outcome", "reason"]
            ),
            "trained": dataset_of(trained, "columns", COLUMNS).to_table(
                columns=["iteration", "rollout_id", "advantage"]
            ),
        }
        for name, table in tables.items():
            self._database.register(name, table)
        self._database.execute(_BUILD)
        for name in tables:
            self._database.unregister(name)

    def page(self, filters: Filters) -> dict[str, Any]:
        """Matching rows from `offset` on, and how many match."""
        where, values = self._where(filters)
        rows = self._rows(
            f"SELECT {_SHOWN} FROM rollouts WHERE {where} ORDER BY {filters.order} LIMIT ? OFFSET ?",
            [*values, filters.limit, filters.offset],
        )
        [counted] = self._rows(f"SELECT count(*) AS n FROM rollouts WHERE {where}", values)
        return {"total": self.count, "matched": counted["n"], "offset": filters.offset, "rows": rows}

    @property
    def count(self) -> int:
        return self._rows("SELECT count(*) AS n FROM rollouts")[0]["n"]

    def position(self, filters: Filters, iteration: int, rollout_id: str) -> int | None:
        """Position of a rollout among the matching rows."""
        where, values = self._where(filters)
        rows = self._rows(
            f"""SELECT place FROM (SELECT iteration, rollout_id, row_number() OVER (ORDER BY {filters.order}) - 1 AS place
                FROM rollouts WHERE {where}) WHERE iteration = ? AND rollout_id = ?""",
            [*values, iteration, rollout_id],
        )
        return rows[0]["place"] if rows else None

    def facets(self, filters: Filters) -> dict[str, Any]:
        """Return the filter values over all rows, and the distribution of the matching rows' rewards."""
        where, values = self._where(filters)
        counted = {
            name: self._rows(
                f"SELECT {name} AS value, count(*) AS n FROM rollouts WHERE {name} <> '' GROUP BY 1 ORDER BY n DESC"
            )
            for name in ("status", "environment", "reason", "failure_code")
        }
        [span] = self._rows(
            f"""SELECT count(*) AS n, {_MEAN_REWARD} AS reward, min(reward) AS low, max(reward) AS high,
               max(generated_tokens) AS tokens, max(turns) AS turns, max(seconds) AS seconds, max(abs(advantage)) AS advantage,
               count(DISTINCT (iteration, group_id)) AS groups FROM rollouts"""
        )
        low, high = span["low"], span["high"]
        bins = 24
        histogram: list[dict[str, Any]] = []
        if low is not None:
            width = (high - low) / bins or 1.0
            rows = self._rows(
                f"SELECT least(floor((reward - ?) / ?), ?)::INTEGER AS bin, count(*) AS n FROM rollouts "
                f"WHERE reward IS NOT NULL AND {where} GROUP BY 1",
                [low, width, bins - 1, *values],
            )
            by_bin = {row["bin"]: row["n"] for row in rows}
            histogram = [
                {"low": low + k * width, "high": low + (k + 1) * width, "n": by_bin.get(k, 0)}
                for k in range(bins if high > low else 1)
            ]
        return {**counted, "span": span, "histogram": histogram}

    def groups_compared(self) -> list[dict[str, Any]]:
        """Each task with its mean reward, over all samples in the scope."""
        return self._rows(
            f"""SELECT regexp_replace(group_id, '#[0-9]+$', '') AS task, count(*) AS n, count(reward) AS rewarded,
               {_MEAN_REWARD} AS reward, avg(generated_tokens) AS tokens FROM rollouts GROUP BY 1 ORDER BY 1"""
        )

    def members(self, task: str, *, exact: bool, iteration: int | None = None) -> list[dict[str, Any]]:
        """The rollouts of a group, in all iterations or in one; of all groups of a task, unless `exact`."""
        column = "group_id" if exact else "regexp_replace(group_id, '#[0-9]+$', '')"
        return self._rows(
            f"SELECT {_SHOWN} FROM rollouts WHERE {column} = ? AND iteration = coalesce(?, iteration) "
            "ORDER BY iteration, group_id, sample LIMIT 256",
            [task, iteration],
        )

    def refused(self) -> list[dict[str, Any]]:
        """Count the rollouts excluded from training by reason."""
        return self._rows(
            "SELECT reason, outcome, count(*) AS n FROM rollouts WHERE reason IS NOT NULL GROUP BY 1, 2 ORDER BY n DESC"
        )

    def file_of(self, iteration: int, rollout_id: str) -> str | None:
        """The part that holds a rollout; None when it is not here."""
        rows = self._rows("SELECT part FROM rollouts WHERE iteration = ? AND rollout_id = ?", [iteration, rollout_id])
        return self._files[rows[0]["part"]] if rows else None

    def _where(self, filters: Filters) -> tuple[str, list[Any]]:
        where, values = filters.where, list(filters.values)
        if filters.search:
            where += (
                f" AND (iteration, rollout_id) IN (SELECT (iteration, rollout_id) FROM {self._search(filters.search)})"
            )
        return where, values

    def _search(self, text: str) -> str:
        """Return the table of rollouts with the text in their ID, task or conversation. Read once for each text."""
        with self._lock:
            if (known := self._searches.get(text)) is not None:
                self._searches.move_to_end(text)
                return known
            name = (
                f"found_{next(self._names)}"  # never used twice: a query of another thread may still read the old one
            )
            cursor = self._database.cursor()
            if len(self._searches) == SEARCHES_KEPT:
                cursor.execute(f"DROP TABLE {self._searches.popitem(last=False)[1]}")
            cursor.register("texts", dataset_of(self._rollouts, "rollouts", ROLLOUTS))
            forms = spellings(text)
            each = " OR ".join(f"contains(lower({column}), ?)" for column in ("messages", "task") for _ in forms)
            cursor.execute(
                f"CREATE TABLE {name} AS SELECT iteration, rollout_id FROM texts "
                f"WHERE {each} OR contains(lower(rollout_id), ?)",
                [*forms, *forms, text.lower()],
            )
            cursor.unregister("texts")
            self._searches[text] = name
            return name

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        cursor = self._database.cursor()
        try:
            result = cursor.execute(sql, list(values))
            names = [column[0] for column in result.description or ()]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
        finally:
            cursor.close()


class Indexes:
    """The indexes last used, by scope and by what lay in the store when they were made."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._kept: OrderedDict[Scope, tuple[Any, Index]] = OrderedDict()
        self._locks: dict[Scope, threading.Lock] = {}
        self._lock = threading.Lock()

    def at(self, scope: Scope) -> Index:
        """Return the scope's index, rebuilt if the store has new data."""
        stages = self.catalog.stages(scope)
        seen = tuple((stage.uri, stage.complete, () if stage.complete else stage.names) for stage in stages)
        with self._lock:
            own = self._locks.setdefault(scope, threading.Lock())
        with own:
            with self._lock:
                index = self._kept.get(scope)
                if index is not None:
                    self._kept.move_to_end(scope)
            if index is not None and index[0] == seen:
                return index[1]
            new_index = Index(stages, scope.stage)
            with self._lock:
                self._kept[scope] = (seen, new_index)
                self._kept.move_to_end(scope)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return new_index
