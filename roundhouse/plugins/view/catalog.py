"""Contents of the store (runs, iterations, stages), and the viewed part (a scope and its filters).

Invariant: complete stages never change, so they are read once; others are read again, at most every few seconds.

A scope is the rollouts of one stage of one iteration, or of all iterations of a run. In the menu, a collected dataset
is like a run, and its versions like iterations. Invariant: user input is a parameter of a statement, never part of its
text.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.health.heartbeat import read_beat, state_of
from roundhouse.sql.parts import READERS, StageFiles, read_manifest_at, stages_in
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import Location, NotFound, is_name
from roundhouse.store.run import load_run
from roundhouse.store.stage import MANIFEST, Manifest, StageKind, current_names, model_location

FRESH_SECONDS = 3.0
"""An unfinished stage is listed again after this time."""
CURVE_STAGES = (StageKind.COLLECT, StageKind.TRAIN, StageKind.EVALUATE, StageKind.REPORT)

ITERATION_STAGES = (StageKind.REFIT, StageKind.COLLECT, StageKind.VALIDATE, StageKind.TRAIN, StageKind.REPORT)
"""Stages of an iteration that follow one another, apart from its checkpoint and evaluation."""

log = logging.getLogger(__name__)


class Catalog:
    """The store as the viewer knows it. Safe to use from several threads."""

    def __init__(self, store: str) -> None:
        self.root = Location(store)
        self._manifests: dict[str, Manifest] = {}
        self._listed: dict[Scope, tuple[float, list[StageFiles]]] = {}
        self._with_rollouts: set[str] = set()
        """Versions of datasets by their URIs, of which nothing goes."""
        self._lock = threading.Lock()

    def run_ids(self) -> list[str]:
        return self._names("runs")

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs, newest first, followed by the datasets."""
        with ThreadPoolExecutor(READERS) as pool:
            identities = [identity for identity in pool.map(self._identity, self.run_ids()) if identity is not None]
        return [
            *sorted(identities, key=lambda run: -run["created_at"]),
            *({"run_id": name} for name in self.datasets()),
        ]

    def datasets(self) -> list[str]:
        """`datasets/<name>` of each."""
        return [f"{PREFIX}{name}" for name in self._names("datasets")]

    def versions(self, dataset: str) -> dict[int, str]:
        """Return the versions of `datasets/<name>` by number.

        Raises:
            Missing: the dataset does not exist.
        """
        if dataset not in (known := self.datasets()):
            raise Missing(f"No {dataset} in {self.root.uri}. Available: {', '.join(known) or 'none'}.")
        place = self.root / dataset
        return numbered(self._names(dataset), lambda label: self._has_rollouts(place / label))

    def _names(self, directory: str) -> list[str]:
        """Return the names in a directory, without names that are invalid in a store."""
        return [name for name in (self.root / directory).names() if is_name(name)]

    def _has_rollouts(self, version: Location) -> bool:
        if version.uri not in self._with_rollouts and any(name.startswith("rollouts-") for name in version.names()):
            self._with_rollouts.add(version.uri)
        return version.uri in self._with_rollouts

    def iterations(self, run_id: str) -> list[int]:
        """Return the numbers of the run's iterations, complete or not.

        Raises:
            Missing: the run does not exist.
        """
        if is_dataset(run_id):
            return list(self.versions(run_id))
        known = self.run_ids()
        if run_id not in known:
            raise Missing(f"No run {run_id!r} in {self.root.uri}. Runs there: {', '.join(known) or 'none'}.")
        return sorted(int(name) for name in (self.root / f"runs/{run_id}/iterations").names() if name.isdecimal())

    def newest_with_rollouts(self, run_id: str) -> int | None:
        """Return the newest iteration with rollouts, else the newest at all; None without iterations."""
        numbers = self.iterations(run_id)
        if is_dataset(run_id):
            return numbers[-1] if numbers else None
        place = self.root / f"runs/{run_id}/iterations"
        for number in reversed([number for number in numbers if number]):
            if any(name.startswith("rollouts-") for name in (place / f"{number:06d}/collect").names()):
                return number
        return numbers[-1] if numbers else None

    def ended(self, run_id: str) -> dict[str, Any] | None:
        """Return how long ago, and in which stage, a run failed, stopped or crashed; None for other states."""
        if is_dataset(run_id):
            return None
        try:
            run = load_run(self.root.uri, run_id)
            state, beat = state_of(run), read_beat(run.location)
        except RoundhouseError as error:
            log.warning("run %s: its state is not known: %s", run_id, error)
            return None
        if beat is None or state not in ("failed", "stopped", "crashed"):
            return None
        newest = max(self.iterations(run_id), default=0)
        open_stages = [
            stage
            for stage in ITERATION_STAGES
            if self.manifest(f"{self.root.uri}/runs/{run_id}/iterations/{newest:06d}/{stage}") is None
        ]
        place = {"stage": open_stages[0], "iteration": newest} if newest and open_stages else {}
        return {"state": state, "seconds": max(0.0, time.time() - beat.written_at)} | place

    def stages(self, scope: Scope) -> list[StageFiles]:
        """Return the scope's stages with their manifests; for an iteration also incomplete and future ones."""
        with self._lock:
            listed = self._listed.get(scope)
        if listed is not None:
            at, stages = listed
            finished = scope.iteration is not None and all(stage.complete for stage in stages)
            if finished or time.monotonic() - at < FRESH_SECONDS:
                return stages
        stages = self._list(scope)
        with self._lock:
            self._listed[scope] = (time.monotonic(), stages)
        return stages

    def manifest(self, uri: str) -> Manifest | None:
        """The manifest of a stage; kept once it is there."""
        if (known := self._manifests.get(uri)) is None and (known := read_manifest_at(uri)) is not None:
            self._manifests[uri] = known
        return known

    def curve(self, run_id: str) -> list[dict[str, Any]]:
        """Return figures of each iteration's manifests for the chart; `cost` is the run's up to the iteration."""
        if is_dataset(run_id):
            versions: list[dict[str, Any]] = []
            for number, label in self.versions(run_id).items():
                row: dict[str, Any] = {"iteration": number, "label": label, "stages": ["collect"]}
                if (manifest := self.manifest(f"{self.root.uri}/{run_id}/{label}")) is not None:
                    row |= {
                        "reward": manifest.metrics.get("reward/mean"),
                        "requested": manifest.counts.get("requested"),
                    }
                versions.append(row)
            return versions
        iterations = self.iterations(run_id)
        places = [
            (iteration, stage, f"{self.root.uri}/runs/{run_id}/iterations/{iteration:06d}/{stage}")
            for iteration in iterations
            for stage in CURVE_STAGES
        ]
        with ThreadPoolExecutor(READERS) as pool:
            manifests = list(pool.map(lambda place: self.manifest(place[2]), places))
        rows: dict[int, dict[str, Any]] = {
            iteration: {"iteration": iteration, "stages": []} for iteration in iterations
        }
        for (iteration, stage, _), manifest in zip(places, manifests, strict=True):
            if manifest is None:
                continue
            row = rows[iteration]
            row["stages"].append(stage)
            if stage == StageKind.COLLECT:
                row["reward"] = manifest.metrics.get("reward/mean")
                row["requested"] = manifest.counts.get("requested")
            if stage == StageKind.EVALUATE:
                row["evaluation"] = manifest.metrics.get("evaluation/reward/mean")
            if stage == StageKind.REPORT:
                row["cost"] = current_names(manifest.details.get("totals", {}))
        return list(rows.values())

    def replays(self, run_id: str) -> list[dict[str, Any]]:
        """Return the replays of a run, newest first: name, request, and the comparison; None before a replay has one."""
        result = []
        for name in self._names("replays"):
            place = self.root / f"replays/{name}"
            try:
                identity = json.loads(place.read("run.json"))
            except NotFound:
                continue
            if (request := identity["replay"])["run_id"] != run_id:
                continue
            try:
                comparison = json.loads(place.read("comparison.json"))
            except NotFound:
                comparison = None
            result.append(
                {"name": name, "created_at": identity["created_at"], "request": request, "comparison": comparison}
            )
        return sorted(result, key=lambda replay: -replay["created_at"])

    def tokenizer_file(self, run_id: str) -> bytes | None:
        """tokenizer.json of the run's policy; None when no checkpoint has one. Of a dataset, the policy's that collected it."""
        if is_dataset(run_id):
            collected = [self.manifest(f"{self.root.uri}/{run_id}/{label}") for label in self.versions(run_id).values()]
            by = [manifest.run_id for manifest in collected if manifest is not None]
            return self.tokenizer_file(by[-1]) if by else None
        checkpoints = self.root / f"runs/{run_id}/checkpoints"
        for name in checkpoints.names():
            try:
                return model_location(checkpoints / name).read("tokenizer.json")
            except NotFound:
                continue
        return None

    def _identity(self, run_id: str) -> dict[str, Any] | None:
        try:
            identity = read_identity(self.root / f"runs/{run_id}")
            return {
                "run_id": run_id,
                "created_at": identity["created_at"],
                "environment": identity["config"]["environment"]["kind"],
                "code_version": identity["code_version"],
                "currency": identity["config"].get("cost", {}).get("prices", {}).get("currency", ""),
            }
        except NotFound:
            return None
        except (StoreError, KeyError, TypeError) as error:
            log.warning("run %s is left out: %s", run_id, error)
            return None

    def _list(self, scope: Scope) -> list[StageFiles]:
        if is_dataset(scope.run_id):
            versions = self.versions(scope.run_id)
            if scope.iteration is not None and scope.iteration not in versions:
                raise Missing(
                    f"{scope.run_id} has no version {scope.iteration}; available: {', '.join(versions.values())}."
                )
            chosen = versions if scope.iteration is None else {scope.iteration: versions[scope.iteration]}
            stages = []
            for number, label in chosen.items():
                place = self.root / f"{scope.run_id}/{label}"
                files = tuple(place.names())
                stages.append(StageFiles(scope.run_id, number, "collect", place.uri, files, None, scope.run_id, label))
        elif scope.iteration is None:
            self.iterations(scope.run_id)  # or the run does not exist
            place = self.root / f"runs/{scope.run_id}"
            names = [f"{scope.run_id}/{name}" for name in place.tree()]
            stages = [stage for stage in stages_in(f"{self.root.uri}/runs", names) if stage.stage in scope.stages]
        else:
            if scope.iteration not in (iterations := self.iterations(scope.run_id)):
                span = f"{iterations[0]} to {iterations[-1]}" if iterations else "none"
                raise Missing(f"Run {scope.run_id!r} has no iteration {scope.iteration}; available: {span}.")
            directory = f"runs/{scope.run_id}/iterations/{scope.iteration:06d}"
            stages = []
            for stage in scope.stages:
                place = self.root / f"{directory}/{stage}"
                stages.append(StageFiles(scope.run_id, scope.iteration, stage, place.uri, tuple(place.names())))
        with ThreadPoolExecutor(READERS) as pool:
            manifests = pool.map(lambda each: self.manifest(each.uri) if MANIFEST in each.names else None, stages)
            return [replace(stage, manifest=manifest) for stage, manifest in zip(stages, manifests, strict=True)]


ROLLOUT_STAGES = ("collect", "evaluate")
"""Stages that hold rollouts. Collected rollouts are validated and trained on; evaluated ones are not."""


class ViewError(RoundhouseError):
    """A request that cannot be answered; the text lists valid choices."""


class Missing(ViewError, StoreError):
    """The run, dataset, version or iteration is not in the store."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One stage of an iteration, or of all of them."""

    run_id: str
    iteration: int | None
    """None: all iterations of the run."""
    stage: Literal["collect", "evaluate"]

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the stages with datasets about these rollouts. A dataset has only a collection."""
        if is_dataset(self.run_id):
            return ("collect",)
        return ("collect", "validate", "train") if self.stage == "collect" else ("evaluate",)

    @classmethod
    def of(cls, parameters: Mapping[str, str], prefix: str = "") -> Scope:
        """From the parameters of a request: `run`, `iteration` (a number or `all`) and `stage`.

        Raises:
            ViewError: one is missing or impossible.
        """
        run_id = parameters.get(f"{prefix}run", "")
        if not run_id:
            raise ViewError(f"{prefix}run is missing: name a run.")
        stage = parameters.get(f"{prefix}stage", "collect")
        if stage not in ROLLOUT_STAGES:
            raise ViewError(f"{prefix}stage={stage!r} holds no rollouts: {' or '.join(ROLLOUT_STAGES)}.")
        if is_dataset(run_id) and stage != "collect":
            raise ViewError(f"{prefix}stage={stage}: a dataset has no evaluations. Remove it.")
        iteration = parameters.get(f"{prefix}iteration", "all")
        if iteration != "all" and not iteration.isdecimal():
            raise ViewError(f"{prefix}iteration={iteration!r} is neither a number nor 'all'.")
        return cls(
            run_id, None if iteration == "all" else int(iteration), "evaluate" if stage == "evaluate" else "collect"
        )


PREFIX = "datasets/"
"""Prefix of a dataset's name among the runs; run IDs do not contain a slash."""
LARGEST = 2**31 - 1

_MOMENT = re.compile(r"(\d{8}T\d{6}Z)-v\d+")
_DRAW = re.compile(r"v(\d+)-i(\d+)")
_IMPORTED = re.compile(r"v(\d+)")
_OF_ITERATION = re.compile(r".+-i(\d{6})(?:-v\d{6}-[0-9a-f]{8})?")
"""Rollouts of a run's iteration, judged anew (`quickstart-i000012`) or branched (`quickstart-i000012-v000015-1f3c9a2e`)."""


def is_dataset(run_id: str) -> bool:
    return run_id.startswith(PREFIX)


def numbered(labels: Iterable[str], has_rollouts: Callable[[str], bool]) -> dict[int, str]:
    """Return the versions by number, ascending.

    Versions with free labels, such as imports, are checked for rollouts. Their numbers are derived from the label
    alone, so a version keeps its number, address and cache entries when others appear.
    """
    by_number: dict[int, str] = {}
    for label in sorted(labels):
        number = _number(label)
        if number is None:
            if not has_rollouts(label):
                continue
            number = zlib.crc32(label.encode()) % LARGEST
        while number in by_number:  # as of two draws of one number beyond 100,000
            number += 1
        by_number[number] = label
    return dict(sorted(by_number.items()))


def _number(label: str) -> int | None:
    if (match := _MOMENT.fullmatch(label)) is not None:
        moment = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return int(moment.timestamp()) // 60
    if (match := _DRAW.fullmatch(label)) is not None:
        return (int(match[1]) * 100_000 + int(match[2])) % LARGEST
    if (match := _OF_ITERATION.fullmatch(label)) is not None:
        return int(match[1])
    if (match := _IMPORTED.fullmatch(label)) is not None:
        return int(match[1]) % LARGEST
    return None


SORTS = (
    "iteration", "group_id", "sample", "environment", "status", "reward", "advantage", "turns", "generated_tokens",
    "total_tokens", "seconds", "started_at", "policy_version", "finish_reason", "reason",
)  # fmt: skip
"""Columns that a table can be sorted by."""

_EQUAL = {
    "environment": "environment",
    "status": "status",
    "group": "group_id",
    "reason": "reason",
    "code": "failure_code",
}
_LEARNING = {
    "trained": "advantage <> 0",
    "collapsed": "(iteration, group_id) IN "
    "(SELECT iteration, group_id FROM rollouts GROUP BY ALL HAVING max(abs(advantage)) = 0)",
    "refused": "reason IS NOT NULL",
}
"""Effect of a rollout: it moved the policy; it could not, because its group's rewards were equal (a collapsed group);
or validation excluded it."""
_RANGES = {"reward": "reward", "tokens": "generated_tokens", "turns": "turns"}
LARGEST_PAGE = 500


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions on the rows of an index, and their order."""

    conditions: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    search: str = ""
    """Text to be found in task or conversation."""
    order: str = "iteration, group_id, sample"
    offset: int = 0
    limit: int = 200

    @property
    def where(self) -> str:
        return " AND ".join(self.conditions) or "true"

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Filters:
        """`environment`, `status`, `group`, `reason`, `code` (several with commas), `learning`, `reward_min`, `reward_max`, …
        `q`, `sort` (`-reward` descends), `offset`, `limit`.

        Raises:
            ViewError: a value cannot be understood.
        """
        conditions: list[tuple[str, Sequence[Any]]] = []
        for name, column in _EQUAL.items():
            if choice := parameters.get(name):
                choices = [choice] if name == "group" else choice.split(",")
                conditions.append((f"{column} IN ({', '.join('?' * len(choices))})", choices))
        if learning := parameters.get("learning"):
            if learning not in _LEARNING:
                raise ViewError(f"learning={learning!r} is unknown. Known: {', '.join(_LEARNING)}.")
            conditions.append((_LEARNING[learning], ()))
        for name, column in _RANGES.items():
            for end, sign in (("min", ">="), ("max", "<=")):
                if text := parameters.get(f"{name}_{end}"):
                    conditions.append((f"{column} {sign} ?", [_limit_of(f"{name}_{end}", text)]))
        sort = parameters.get("sort", "")
        by = sort.removeprefix("-")
        if by and by not in SORTS:
            raise ViewError(f"sort={sort!r}: this column is unknown. Available: {', '.join(SORTS)}.")
        order = "iteration, group_id, sample"
        if by:
            order = f"{by} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, {order}"
        return cls(
            tuple(condition for condition, _ in conditions),
            tuple(value for _, values in conditions for value in values),
            parameters.get("q", "").strip(),
            order,
            int(_limit_of("offset", parameters.get("offset", "0"))),
            min(int(_limit_of("limit", parameters.get("limit", "200"))), LARGEST_PAGE),
        )


def spellings(text: str) -> list[str]:
    """Return the forms of a text in the stored JSON: plain, as a JSON string, and as one inside a JSON string (tool
    arguments)."""
    once = json.dumps(text.lower(), ensure_ascii=False)[1:-1]
    return sorted({once, json.dumps(once, ensure_ascii=False)[1:-1]})


def _limit_of(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ViewError(f"{name}={text!r} is not a number.") from None
    if not (abs(number) < 1e15 and (number >= 0 or name not in ("offset", "limit"))):
        raise ViewError(f"{name}={text!r} is out of range.")
    return number
