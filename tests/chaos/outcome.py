"""Outcome of a run and its differences from another run.

Invariant: two outcomes are equal exactly if the last checkpoints (weights and trainer state) are equal byte for byte, every
iteration trained on the same (group, sample) pairs without duplicates, and both stores are intact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify


@dataclass
class Outcome:
    weights: dict[str, str]
    """Digest of each file of the last checkpoint, by name."""
    trained: dict[int, list[str]]
    """Rollout ids of each iteration's sequences, sorted."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run, iterations: int | None = None) -> Outcome:
        """Read it from the store, by default up to the iteration that the run was created for."""
        wanted = run.config.iterations if iterations is None else iterations
        last = run.checkpoint(wanted).reference()
        if last is None:
            return cls({}, {}, ["the run has no last checkpoint"])
        weights = {name: entry.sha256 for name, entry in read_manifest(last).model_files.by_name().items()}
        trained, problems = {}, []
        for iteration in range(1, wanted + 1):
            collected = run.stage(iteration, "collect").reference()
            validated = run.stage(iteration, "validate").reference()
            if collected is None or validated is None:
                problems.append(f"iteration {iteration} is not complete")
                continue
            ids = read_table(collected, "rollouts").column("rollout_id").to_pylist()
            if len(ids) != len(set(ids)) or len(ids) != collected.counts["requested"]:
                problems.append(f"iteration {iteration} has {len(ids)} rollouts, {len(set(ids))} of them different")
            trained[iteration] = sorted(read_table(validated, "sequences").column("rollout_id").to_pylist())
        store = run.location.uri.removesuffix(f"/runs/{run.run_id}")
        problems += [f"{problem.uri}: {problem.what}" for problem in verify(store, run.run_id).problems]
        return cls(weights, trained, problems)

    @property
    def consumed(self) -> int:
        """Rollouts that were trained on, over all iterations."""
        return sum(len(ids) for ids in self.trained.values())

    def differences(self, other: Outcome) -> list[str]:
        """Return the differences from the undisturbed run."""
        found = list(self.problems)
        for name in sorted(self.weights.keys() | other.weights.keys()):
            if self.weights.get(name) != other.weights.get(name):
                found.append(f"{name} of the last checkpoint differs")
        for iteration in sorted(self.trained.keys() | other.trained.keys()):
            lost, extra = _difference(self.trained.get(iteration, []), other.trained.get(iteration, []))
            if lost or extra:
                found.append(f"iteration {iteration}: lost {lost}, too many {extra}")
        return found


def _difference(ids: list[str], wanted: list[str]) -> tuple[list[str], list[str]]:
    """Count lost and surplus ids; a duplicate is one surplus id."""
    here, there = Counter(ids), Counter(wanted)
    return sorted((there - here).elements()), sorted((here - there).elements())
