"""One trial: a run whose processes are killed at given moments, started again until it has finished, and its verdict.

Invariant: a trial passes exactly when the run's last checkpoint, weights and trainer state, is byte for byte that of the
uninterrupted run, every iteration trained on exactly the same (group, sample)s, none twice, and the store is whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify
from tests.chaos.stand import Stand

TARGETS = ("flow", "engine", "environment", "prefect", "mlflow")
TRIAL_SECONDS = 900.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a process, so many seconds after the one before (or after the start)."""

    target: str
    after: float


@dataclass
class Outcome:
    """What a run has come to."""

    weights: dict[str, str]
    """Digest of each file of the last checkpoint, by name."""
    trained: dict[int, list[str]]
    """Rollout ids of each iteration's sequences, sorted."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> Outcome:
        """Read it from the store."""
        last = run.checkpoint(run.config.iterations).reference()
        if last is None:
            return cls({}, {}, ["the run has no last checkpoint"])
        weights = {entry.path: entry.sha256 for entry in read_manifest(last).files}
        trained, problems = {}, []
        for iteration in range(1, run.config.iterations + 1):
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

    def differences(self, other: Outcome) -> list[str]:
        """In what it differs from the uninterrupted run; empty when in nothing."""
        found = list(self.problems)
        for name in sorted(self.weights.keys() | other.weights.keys()):
            if self.weights.get(name) != other.weights.get(name):
                found.append(f"{name} of the last checkpoint differs")
        for iteration in sorted(self.trained.keys() | other.trained.keys()):
            lost = set(other.trained.get(iteration, [])) - set(self.trained.get(iteration, []))
            extra = set(self.trained.get(iteration, [])) - set(other.trained.get(iteration, []))
            if lost or extra:
                found.append(f"iteration {iteration}: lost {sorted(lost)}, too many {sorted(extra)}")
        return found


@dataclass
class Trial:
    """A finished trial."""

    run_id: str
    kills: list[Kill]
    done: list[str]
    """What was killed, when, and in which stage."""
    starts: int
    seconds: float
    outcome: Outcome


def draw_kills(seed: int, count: int, span: float, targets: Sequence[str]) -> list[Kill]:
    """Moments spread over about `span` seconds of a run; the same for the same seed."""
    rng = random.Random(seed)
    return [Kill(rng.choice(targets), rng.uniform(0, 2 * span / count)) for _ in range(count)]


def play(
    stand: Stand, run_id: str, kills: Sequence[Kill], environment: dict[str, str] | None = None, **keys: Any
) -> Trial:
    """Run under fire until it has finished."""
    configuration = stand.configuration(run_id, **keys)
    store = str(keys.get("store", stand.settings["store"]))
    begun, starts, done = time.monotonic(), 1, []
    flow = stand.train(configuration, environment)
    waiting = list(kills)
    due = begun + waiting[0].after if waiting else float("inf")
    while True:
        if time.monotonic() - begun > TRIAL_SECONDS:
            flow.kill()
            raise TimeoutError(f"{run_id} has not finished after {TRIAL_SECONDS:g} s; killed so far: {done}")
        stand.keep()
        if waiting and time.monotonic() >= due:
            kill = waiting.pop(0)
            pid = flow.pid if kill.target == "flow" else stand.pid_of(kill.target)
            if pid is not None and _kill(pid):
                done.append(f"{kill.target} at {time.monotonic() - begun:.1f} s in {_where(store, run_id)}")
            due = time.monotonic() + waiting[0].after if waiting else float("inf")
        if (code := flow.poll()) is not None:
            if code == 0:
                break
            starts += 1
            flow = stand.train(configuration, environment)
        time.sleep(0.05)
    return Trial(run_id, list(kills), done, starts, time.monotonic() - begun, Outcome.of(load_run(store, run_id)))


def _kill(pid: int) -> bool:
    """Kill a process and its children at once, as losing the machine would."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        children = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return True
    return False


def _where(store: str, run_id: str) -> str:
    """The newest stage that was begun, for the record; not asked of a bucket."""
    if store.startswith("s3://"):
        return "S3"
    root = f"{store}/runs/{run_id}/iterations".removeprefix("file://")
    begun = [
        (os.stat(os.path.join(folder, name)).st_mtime, folder.removeprefix(root + "/"))
        for folder, _, names in os.walk(root)
        for name in names
        if name.startswith("attempt-")
    ]
    return max(begun)[1] if begun else "start"
