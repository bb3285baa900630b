"""A driver of one iteration that works on and on at the end of a stage, before it commits it, until it is killed there.

    python -m tests.plugins.lab.replays.killed_driver CONFIG.json STAGE

It prints the CPU seconds of its process when it began to drive, then a line after a second of this work, of
which its lease has recorded nothing yet.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from roundhouse.config.loading import parse_config
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.lease import driving
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Attempt, StageKind
from tests.plugins.lab.replays.trained import collect, own_samples


def drive(run: Run) -> None:
    """Complete the first iteration."""
    base = starting_policy(run)
    stage = run.stage(1, StageKind.COLLECT)
    collected = stage.reference() or collect(run, 1, base, own_samples)
    sequences = validate_iteration(run, 1, collected, vocabulary_size(run))
    publish(run, train_iteration(run, 1, sequences, base, checkpoint_cache(run.config)))
    release_trainers()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(config: str, kind: str) -> None:
    run = open_run(parse_config(json.loads(Path(config).read_text())))
    commit = Attempt.commit

    def work_on(attempt: Attempt, **rest: Any) -> Any:
        if attempt.stage.kind != kind:
            return commit(attempt, **rest)
        began = time.process_time()
        while time.process_time() < began + 1:
            pass
        say("worked")
        while True:
            pass

    Attempt.commit = work_on  # type: ignore[method-assign, assignment]
    before = time.process_time()
    say(str(before))
    with driving(run.location):
        drive(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
