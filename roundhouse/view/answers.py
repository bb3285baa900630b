"""What the page asks, and the answers, as JSON. The same answers fill a static page (`export`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from roundhouse.view.catalog import Catalog
from roundhouse.view.detail import Details
from roundhouse.view.index import Index, Indexes
from roundhouse.view.scope import Filters, Scope, ViewError

Parameters = Mapping[str, str]


class Answers:
    """Answers over one store; each takes the parameters of a request."""

    def __init__(self, store: str) -> None:
        self.catalog = Catalog(store)
        self.indexes = Indexes(self.catalog)
        self.details = Details(self.catalog, self.indexes)

    def routes(self) -> dict[str, Callable[[Parameters], Any]]:
        """By name."""
        return {
            "store": self.store,
            "run": self.run,
            "curve": self.curve,
            "rollouts": self.rollouts,
            "facets": self.facets,
            "rollout": self.rollout,
            "group": self.group,
            "quarantine": self.quarantine,
            "compare": self.compare,
        }

    def store(self, parameters: Parameters) -> dict[str, Any]:
        return {"store": self.catalog.root.uri, "runs": self.catalog.runs()}

    def run(self, parameters: Parameters) -> dict[str, Any]:
        run_id = Scope.of(parameters).run_id
        iterations = self.catalog.iterations(run_id)
        # A large vocabulary takes a moment to load: meanwhile the person looks at the table.
        threading.Thread(target=self.details.decoder, args=(run_id,), daemon=True).start()
        return {"run_id": run_id, "iterations": iterations}

    def curve(self, parameters: Parameters) -> list[dict[str, Any]]:
        return self.catalog.curve(Scope.of(parameters).run_id)

    def rollouts(self, parameters: Parameters) -> dict[str, Any]:
        scope, filters = Scope.of(parameters), Filters.of(parameters)
        index = self.indexes.at(scope)
        page = index.page(filters) | {"stages": stages_told(index)}
        if wanted := parameters.get("find"):
            page["position"] = index.position(filters, _number(parameters, "find_iteration"), wanted)
        return page

    def facets(self, parameters: Parameters) -> dict[str, Any]:
        return self.indexes.at(Scope.of(parameters)).facets(Filters.of(parameters))

    def rollout(self, parameters: Parameters) -> dict[str, Any]:
        iteration = _number(parameters, "rollout_iteration")
        return self.details.rollout(Scope.of(parameters), iteration, parameters.get("rollout", ""))

    def group(self, parameters: Parameters) -> dict[str, Any]:
        group = parameters.get("of", "")
        exact = parameters.get("exact", "1") == "1"
        return {"group": group, "rollouts": self.details.group(Scope.of(parameters), group, exact=exact)}

    def quarantine(self, parameters: Parameters) -> dict[str, Any]:
        scope = Scope.of(parameters)
        index = self.indexes.at(scope)
        return {
            "stages": stages_told(index),
            "reasons": index.refused(),
            "failed": index.facets(Filters())["failure_code"],
            "rows": self.details.quarantined(scope),
        }

    def compare(self, parameters: Parameters) -> dict[str, Any]:
        """The tasks that two scopes share, with the mean reward in each."""
        sides = [Scope.of(parameters), Scope.of(parameters, "b_")]
        found = [{row["task"]: row for row in self.indexes.at(side).groups_compared()} for side in sides]
        shared = [
            {
                "task": task,
                "a": found[0][task],
                "b": found[1][task],
                "delta": _difference(found[0][task], found[1][task]),
            }
            for task in found[0].keys() & found[1].keys()
        ]
        return {
            "tasks": sorted(shared, key=lambda row: (-abs(row["delta"] or 0.0), row["task"])),
            "only_a": len(found[0].keys() - found[1].keys()),
            "only_b": len(found[1].keys() - found[0].keys()),
        }


def stages_told(index: Index) -> dict[str, str]:
    """Each stage as `complete`, `unfinished` (it has parts) or `absent`; over several iterations, the least of them."""
    states: dict[str, str] = {}
    worst = ("absent", "unfinished", "complete")
    for stage in index.stages:
        state = "complete" if stage.complete else "unfinished" if stage.names else "absent"
        states[stage.stage] = min(states.get(stage.stage, "complete"), state, key=worst.index)
    return states


def _difference(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    return None if a["reward"] is None or b["reward"] is None else b["reward"] - a["reward"]


def _number(parameters: Parameters, name: str) -> int:
    text = parameters.get(name, "")
    if not text.isdecimal():
        raise ViewError(f"{name}={text!r} is not the number of an iteration.")
    return int(text)
