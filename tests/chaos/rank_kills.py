"""Kill one rank of several in each phase of training, and compare with an undisturbed run of the same layout.

    python -m tests.chaos.rank_kills --kills 40 --ranks 2 4          `make chaos-ranks`

The run is the train and checkpoint stages over recorded sequences, with resident ranks; this program repeats an iteration
after a lost rank, as a flow does. A kill comes at a random moment of a verb (by its undisturbed duration), or between train
and publish. No kill may leave a rank running or change a byte of any version's weights and optimizer state. The program
counts losses that are reported under another rank's name (a peer that lost its connection may report first). The last line
is JSON; exit code 1: bytes differ, the store is damaged, or a rank is still running.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.launch.resident_ranks import ResidentRanks
from roundhouse.stages import train as stage
from roundhouse.stages import trainer_home, trainers
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import Run, open_run
from roundhouse.store.verification import verify
from tests.stages.test_distributed import is_alive
from tests.stages.test_train import checkpoint_digests, make_run, sequences

VERBS = {
    "load": "load_checkpoint",
    "forward": "forward",
    "backward": "forward_backward",
    "update": "optim_step",
    "save": "store_checkpoint",
}
PHASES = (*VERBS, "publish")
POLICY = {"kind": "warm_start", "steps": 3, "hidden_size": 256, "intermediate_size": 1024, "layers": 5}
"""18 MB, of which each of four ranks writes a part."""


@dataclass
class RankKill:
    """SIGKILL of one rank, at this share of the time that the phase takes undisturbed."""

    phase: str
    rank: int
    share: float
    report: str = ""
    """The error that followed."""


@dataclass
class Striker:
    """Watches the verbs of resident ranks, and strikes when the next kill's phase begins."""

    kills: Iterator[RankKill] = field(default_factory=lambda: iter(()))
    done: list[RankKill] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each phase, as often as it was left alone."""
    left: set[int] = field(default_factory=set)
    """Processes of groups that lost a rank."""

    def __post_init__(self) -> None:
        self._service: ResidentRanks | None = None
        self._next = next(self.kills, None)

    def watch(self, service: Any) -> Any:
        """The service, with its verbs watched."""
        self._service = service
        for phase, verb in VERBS.items():
            setattr(service, verb, self._watched(phase, getattr(service, verb)))
        return service

    def _watched(self, phase: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            struck, began = self.begin(phase), time.monotonic()
            try:
                found = verb(*arguments, **keywords)
            finally:
                if struck is not None:
                    struck.join()
            if struck is None:
                self.seconds[phase].append(time.monotonic() - began)
            return found

        return call

    def begin(self, phase: str) -> threading.Timer | None:
        """Strike, if the next kill falls into this phase."""
        kill, service = self._next, self._service
        if kill is None or kill.phase != phase or service is None:
            return None
        self._next = next(self.kills, None)
        self.done.append(kill)
        self.left |= {*service.ranks.pids.values()}
        usual = statistics.median(self.seconds[phase]) if self.seconds[phase] else 0.0
        timer = threading.Timer(kill.share * usual, os.kill, (service.ranks.pids[kill.rank], signal.SIGKILL))
        timer.start()
        return timer


def train(run: Run, iterations: int, striker: Striker) -> list[dict[str, str]]:
    """Train and publish, an iteration again after each lost rank; the files of every version."""
    opened, trainers.open_service = trainers.open_service, lambda *given, **keys: striker.watch(opened(*given, **keys))
    checkpoint, found = starting_policy(run), []
    try:
        while checkpoint.policy_version < iterations:
            iteration = checkpoint.policy_version + 1
            batch = run.stage(iteration, "validate").reference() or sequences(run, iteration)
            try:
                update = stage.train_iteration(run, iteration, batch, checkpoint, run.location.local_path / "cache")
            except InfraError as error:
                if not striker.done or striker.done[-1].report:
                    raise
                striker.done[-1].report = str(error)
                continue
            if (struck := striker.begin("publish")) is not None:
                struck.join()
            checkpoint = publish(run, update)
            found.append(checkpoint_digests(checkpoint))
    finally:
        trainer_home.release_trainers()
        trainers.open_service = opened
    return found


def draw(count: int, ranks: int, seed: int) -> list[RankKill]:
    """Every phase and every rank in turn; the same for the same seed."""
    rng = random.Random(f"{seed}/{ranks}")
    return [RankKill(PHASES[n % len(PHASES)], rng.randrange(ranks), rng.random()) for n in range(count)]


def run_of(place: Path, ranks: int) -> Run:
    tree = make_run(str(place / "other"), place).config.model_dump(mode="json") | {"store": str(place / "store")}
    tree["train"]["service"] = {"kind": "resident", "processes": ranks, "timeout_seconds": 300}
    return open_run(parse_config(tree | {"policy": POLICY, "iterations": 1000}))


def campaign(place: Path, ranks: int, kills: int, seed: int) -> dict[str, Any]:
    """Run the undisturbed run, then the disturbed one; return the findings."""
    iterations = 2 + kills // len(PHASES)  # a kill at publish ends one, and no other does
    undisturbed, began = Striker(), time.monotonic()
    expected = train(run_of(place / "undisturbed", ranks), iterations, undisturbed)
    alone = time.monotonic() - began
    striker = Striker(kills=iter(draw(kills, ranks, seed)), seconds=undisturbed.seconds)
    found = train(run_of(place / "killed", ranks), iterations, striker)
    named = [
        f"rank {kill.rank} of {ranks} was killed by signal {signal.SIGKILL.value}" in kill.report
        for kill in striker.done
    ]
    for kill, was_named in zip(striker.done, named, strict=True):
        print(
            f"{ranks} ranks: rank {kill.rank} in {kill.phase} at {kill.share:.2f}: {'named' if was_named else kill.report}"
        )
    return {
        "ranks": ranks,
        "kills": len(striker.done),
        "by_phase": {phase: sum(kill.phase == phase for kill in striker.done) for phase in PHASES},
        "versions": len(found),
        "differing": sum(ours != theirs for ours, theirs in zip(found, expected, strict=True)),
        "unnamed": named.count(False),
        "left": sum(map(is_alive, striker.left)),
        "problems": len(verify(str(place / "killed/store")).problems),
        "seconds": [round(alone, 1), round(time.monotonic() - began - alone, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.rank_kills", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--kills", type=int, default=40, help="in all, in equal parts for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            results.append(campaign(Path(scratch), ranks, options.kills // len(options.ranks), options.seed))
        print(json.dumps(results[-1]), flush=True)
    failed = any(found["differing"] or found["left"] or found["problems"] for found in results)
    print(json.dumps({"chaos": "ranks", "seed": options.seed, "results": results, "failed": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
