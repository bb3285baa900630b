"""Contents of the store (runs, iterations, stages), and the part that is viewed (a scope and its filters).

Invariant: what is complete never changes, so it is read once; what is not is looked at again, at most every few seconds.

A scope is the rollouts of one stage of one iteration, or of all iterations of a run. A collected dataset takes the place of a
run in the menu, and its versions that of iterations. Invariant: what a person types is a parameter of a statement, never part
of its text.
"""

from __future__ import annotations

import json
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
from roundhouse.query.parts import READERS, StageFiles, read_manifest_at, stages_in
from roundhouse.store.location import Location, NotFound, is_name
from roundhouse.store.stage import MANIFEST, Manifest, StageKind, current_names, model_location

FRESH_SECONDS = 3.0
"""An unfinished stage is listed again after this time."""
CURVE_STAGES = (StageKind.COLLECT, StageKind.TRAIN, StageKind.EVALUATE, StageKind.REPORT)


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
        """All runs, newest first, and behind them the datasets."""
        with ThreadPoolExecutor(READERS) as pool:
            found = [identity for identity in pool.map(self._identity, self.run_ids()) if identity is not None]
        return [*sorted(found, key=lambda run: -run["created_at"]), *({"run_id": name} for name in self.datasets())]

    def datasets(self) -> list[str]:
        """`datasets/<name>` of each."""
        return [f"{PREFIX}{name}" for name in self._names("datasets")]

    def versions(self, dataset: str) -> dict[int, str]:
        """The versions of `datasets/<name>` by their numbers.

        Raises:
            Missing: there is no such dataset.
        """
        if dataset not in (known := self.datasets()):
            raise Missing(f"No {dataset} in {self.root.uri}. There are: {', '.join(known) or 'none'}.")
        place = self.root / dataset
        return numbered(self._names(dataset), lambda label: self._has_rollouts(place / label))

    def _names(self, directory: str) -> list[str]:
        """What lies there, but for what a person put there under a name that no store has."""
        return [name for name in (self.root / directory).names() if is_name(name)]

    def _has_rollouts(self, version: Location) -> bool:
        if version.uri not in self._with_rollouts and any(name.startswith("rollouts-") for name in version.names()):
            self._with_rollouts.add(version.uri)
        return version.uri in self._with_rollouts

    def iterations(self, run_id: str) -> list[int]:
        """Numbers of the run's iterations, complete or not.

        Raises:
            Missing: there is no such run.
        """
        if is_dataset(run_id):
            return list(self.versions(run_id))
        known = self.run_ids()
        if run_id not in known:
            raise Missing(f"No run {run_id!r} in {self.root.uri}. Runs there: {', '.join(known) or 'none'}.")
        return sorted(int(name) for name in (self.root / f"runs/{run_id}/iterations").names() if name.isdecimal())

    def stages(self, scope: Scope) -> list[StageFiles]:
        """The scope's stages with their manifests; of an iteration also those that are not complete, or not begun."""
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
        """What the manifests of each iteration say, for the line over all of them; `cost` is of the run up to the iteration."""
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
        """The replays of a run, newest first: name, request, and the comparison; None while a replay has none."""
        found = []
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
            found.append(
                {"name": name, "created_at": identity["created_at"], "request": request, "comparison": comparison}
            )
        return sorted(found, key=lambda replay: -replay["created_at"])

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
            identity = json.loads((self.root / f"runs/{run_id}").read("run.json"))
            return {
                "run_id": run_id,
                "created_at": identity["created_at"],
                "environment": identity["config"]["environment"]["kind"],
                "code_version": identity["code_version"],
                "currency": identity["config"].get("cost", {}).get("prices", {}).get("currency", ""),
            }
        except NotFound:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.root.uri}/runs/{run_id}/run.json is damaged: {error!r}") from error

    def _list(self, scope: Scope) -> list[StageFiles]:
        if is_dataset(scope.run_id):
            versions = self.versions(scope.run_id)
            if scope.iteration is not None and scope.iteration not in versions:
                raise Missing(
                    f"{scope.run_id} has no version {scope.iteration}; there are: {', '.join(versions.values())}."
                )
            chosen = versions if scope.iteration is None else {scope.iteration: versions[scope.iteration]}
            found = []
            for number, label in chosen.items():
                place = self.root / f"{scope.run_id}/{label}"
                files = tuple(place.names())
                found.append(StageFiles(scope.run_id, number, "collect", place.uri, files, None, scope.run_id, label))
        elif scope.iteration is None:
            self.iterations(scope.run_id)  # or there is no such run
            place = self.root / f"runs/{scope.run_id}"
            names = [f"{scope.run_id}/{name}" for name in place.tree()]
            found = [stage for stage in stages_in(f"{self.root.uri}/runs", names) if stage.stage in scope.stages]
        else:
            if scope.iteration not in (there := self.iterations(scope.run_id)):
                span = f"{there[0]} to {there[-1]}" if there else "none"
                raise Missing(f"Run {scope.run_id!r} has no iteration {scope.iteration}; there are: {span}.")
            directory = f"runs/{scope.run_id}/iterations/{scope.iteration:06d}"
            found = []
            for stage in scope.stages:
                place = self.root / f"{directory}/{stage}"
                found.append(StageFiles(scope.run_id, scope.iteration, stage, place.uri, tuple(place.names())))
        with ThreadPoolExecutor(READERS) as pool:
            manifests = pool.map(lambda each: self.manifest(each.uri) if MANIFEST in each.names else None, found)
            return [replace(stage, manifest=manifest) for stage, manifest in zip(found, manifests, strict=True)]


ROLLOUT_STAGES = ("collect", "evaluate")
"""Stages that hold rollouts. Collected rollouts are validated and trained on; evaluated ones are not."""


class ViewError(RoundhouseError):
    """A request that cannot be answered; the text says what there is instead."""


class Missing(ViewError, StoreError):
    """The store has no such run, dataset, version or iteration."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One stage of an iteration, or of all of them."""

    run_id: str
    iteration: int | None
    """None: all iterations of the run."""
    stage: Literal["collect", "evaluate"]

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages whose datasets say something about these rollouts. A dataset is only collected."""
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
            raise ViewError(f"{prefix}stage={stage}: a dataset has no evaluations. Leave it out.")
        iteration = parameters.get(f"{prefix}iteration", "all")
        if iteration != "all" and not iteration.isdecimal():
            raise ViewError(f"{prefix}iteration={iteration!r} is neither a number nor 'all'.")
        return cls(
            run_id, None if iteration == "all" else int(iteration), "evaluate" if stage == "evaluate" else "collect"
        )


PREFIX = "datasets/"
"""Of the name under which a dataset is listed among the runs; no run id has a slash."""
LARGEST = 2**31 - 1

_MOMENT = re.compile(r"(\d{8}T\d{6}Z)-v\d+")
_DRAW = re.compile(r"v(\d+)-i(\d+)")
_IMPORTED = re.compile(r"v(\d+)")
_OF_ITERATION = re.compile(r".+-i(\d{6})(?:-v\d{6}-[0-9a-f]{8})?")
"""Rollouts of a run's iteration, judged anew (`quickstart-i000012`) or branched (`quickstart-i000012-v000015-1f3c9a2e`)."""


def is_dataset(run_id: str) -> bool:
    return run_id.startswith(PREFIX)


def numbered(labels: Iterable[str], has_rollouts: Callable[[str], bool]) -> dict[int, str]:
    """The versions by number, ascending.

    Labels that people chose, as of imports, are asked for rollouts. Their numbers are made of the label alone: a version keeps
    its number, and with it its address and what is cached of it, when others come.
    """
    found: dict[int, str] = {}
    for label in sorted(labels):
        number = _number(label)
        if number is None:
            if not has_rollouts(label):
                continue
            number = zlib.crc32(label.encode()) % LARGEST
        while number in found:  # as of two draws of one number beyond 100,000
            number += 1
        found[number] = label
    return dict(sorted(found.items()))


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
"""What became of a rollout: it moved the policy; it could not, since its group's rewards were all the same (a collapsed
group); or validation kept it from training."""
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
        made: list[tuple[str, Sequence[Any]]] = []
        for name, column in _EQUAL.items():
            if wanted := parameters.get(name):
                choices = [wanted] if name == "group" else wanted.split(",")
                made.append((f"{column} IN ({', '.join('?' * len(choices))})", choices))
        if learning := parameters.get("learning"):
            if learning not in _LEARNING:
                raise ViewError(f"learning={learning!r} is none of {', '.join(_LEARNING)}.")
            made.append((_LEARNING[learning], ()))
        for name, column in _RANGES.items():
            for end, sign in (("min", ">="), ("max", "<=")):
                if text := parameters.get(f"{name}_{end}"):
                    made.append((f"{column} {sign} ?", [_limit_of(f"{name}_{end}", text)]))
        sort = parameters.get("sort", "")
        by = sort.removeprefix("-")
        if by and by not in SORTS:
            raise ViewError(f"sort={sort!r}: there is no such column. There are: {', '.join(SORTS)}.")
        order = "iteration, group_id, sample"
        if by:
            order = f"{by} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, {order}"
        return cls(
            tuple(condition for condition, _ in made),
            tuple(value for _, values in made for value in values),
            parameters.get("q", "").strip(),
            order,
            int(_limit_of("offset", parameters.get("offset", "0"))),
            min(int(_limit_of("limit", parameters.get("limit", "200"))), LARGEST_PAGE),
        )


def spellings(text: str) -> list[str]:
    """How a text may stand in the stored JSON: plain, as a JSON string, and as one inside a JSON string (tool arguments)."""
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
