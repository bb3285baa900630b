"""What lies in the store: runs, iterations, stages.

Invariant: what is complete never changes, so it is read once; what is not is looked at again, at most every few seconds.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from roundhouse.errors import StoreError
from roundhouse.query.parts import READERS, StageFiles, read_manifest_at, stages_in
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import MANIFEST, Manifest, model_location
from roundhouse.store.metric_names import current_names
from roundhouse.store.stage import StageKind
from roundhouse.view.scope import PREFIX, Missing, Scope, is_dataset, numbered

FRESH_SECONDS = 3.0
"""An unfinished stage is listed again after this time."""
CURVE_STAGES = (StageKind.COLLECT, StageKind.TRAIN, StageKind.EVALUATE, StageKind.REPORT)


class Catalog:
    """The store as the viewer knows it. Safe to use from several threads."""

    def __init__(self, store: str) -> None:
        self.root = Location(store)
        self._manifests: dict[str, Manifest] = {}
        self._listed: dict[Scope, tuple[float, list[StageFiles]]] = {}
        self._lock = threading.Lock()

    def run_ids(self) -> list[str]:
        return (self.root / "runs").names()

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first, and behind them the datasets."""
        with ThreadPoolExecutor(READERS) as pool:
            found = [identity for identity in pool.map(self._identity, self.run_ids()) if identity is not None]
        return [*sorted(found, key=lambda run: -run["created_at"]), *({"run_id": name} for name in self.datasets())]

    def datasets(self) -> list[str]:
        """`datasets/<name>` of each."""
        return [f"{PREFIX}{name}" for name in (self.root / "datasets").names()]

    def versions(self, dataset: str) -> dict[int, str]:
        """The versions of `datasets/<name>` by their numbers.

        Raises:
            Missing: there is no such dataset.
        """
        if dataset not in (known := self.datasets()):
            raise Missing(f"No {dataset} in {self.root.uri}. There are: {', '.join(known) or 'none'}.")
        return numbered((self.root / dataset).names())

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
            return self._dataset_curve(run_id)
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

    def _dataset_curve(self, dataset: str) -> list[dict[str, Any]]:
        rows = []
        for number, label in self.versions(dataset).items():
            row: dict[str, Any] = {"iteration": number, "label": label, "stages": ["collect"]}
            if (manifest := self.manifest(f"{self.root.uri}/{dataset}/{label}")) is not None:
                row |= {"reward": manifest.metrics.get("reward/mean"), "requested": manifest.counts.get("requested")}
            rows.append(row)
        return rows

    def _list_dataset(self, scope: Scope) -> list[StageFiles]:
        versions = self.versions(scope.run_id)
        if scope.iteration is not None and scope.iteration not in versions:
            raise Missing(
                f"{scope.run_id} has no version {scope.iteration}; there are: {', '.join(versions.values())}."
            )
        chosen = versions if scope.iteration is None else {scope.iteration: versions[scope.iteration]}
        found = []
        for number, label in chosen.items():
            place = self.root / f"{scope.run_id}/{label}"
            names = tuple(place.names())
            found.append(StageFiles(scope.run_id, number, "collect", place.uri, names, None, scope.run_id, label))
        return found

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
            found = self._list_dataset(scope)
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
            return list(pool.map(self._opened, found))

    def _opened(self, stage: StageFiles) -> StageFiles:
        return replace(stage, manifest=self.manifest(stage.uri)) if MANIFEST in stage.names else stage
