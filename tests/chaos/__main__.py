"""Kill a run repeatedly and compare it with an undisturbed run.

    python -m tests.chaos --kills 100 --seed 0                  `make chaos`
    python -m tests.chaos --kills 0 --trials 40 --s3-faults 0.05    no kills: an S3 endpoint that fails one request in 20
    python -m tests.chaos --every-operation 2                   a kill in each phase of each operation of iteration 2

Most kills come at random moments (`tests.chaos.trial`). Planted kills come at exact operations: mid-Parquet, mid-manifest,
mid-checkpoint, in a refit, in calls of MLflow and Prefect (`tests.chaos.strikes`). In every other trial the training steps
are separate processes; the undisturbed run trains in the flow's process. The bytes must be equal in both cases.

The command prints every kill with its stage, and a verdict for each trial; the last line is JSON. It exits with 1 if the
last checkpoint or the trained rollouts of a trial differ from the undisturbed run's, the store is damaged, or a run hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from roundhouse.store.run import load_run
from tests.chaos.outcome import Outcome
from tests.chaos.stand import Stand, faulty_bucket, stand
from tests.chaos.strikes import Strike, by_trainer_process, draw_strikes, every_strike, recorded
from tests.chaos.tally import Tally
from tests.chaos.trial import TARGETS, Kill, Trial, draw_kills, play

STRIKES_PER_TRIAL_OF_ALL = 8
"""Of `--every-operation`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="go on until so many kills at random moments were made")
    parser.add_argument("--kills-per-trial", type=int, default=5)
    parser.add_argument("--planted-per-trial", type=int, default=3, help="kills at exact operations, beside the others")
    parser.add_argument("--every-operation", type=int, nargs="*", metavar="ITERATION", help="only these, all of them")
    parser.add_argument("--trials", type=int, default=0, help="at least so many trials, however many kills they had")
    parser.add_argument("--s3-faults", type=float, default=0.0, help="share of the store's requests that S3 fails")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--minutes", type=float, default=60, help="begin no further trial after this time")
    parser.add_argument("--fresh", action="store_true", help="start every process as a new interpreter (slower)")
    parser.add_argument("--directory", type=Path, help="keep everything here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        failed = _run(options, options.directory or Path(scratch))
    sys.exit(1 if failed else 0)


def _run(options: argparse.Namespace, directory: Path) -> int:
    with contextlib.ExitStack() as stack:
        store = whole = None
        if options.s3_faults > 0:
            directory.mkdir(parents=True, exist_ok=True)
            store, whole = stack.enter_context(faulty_bucket(directory, options.s3_faults, options.seed))
        ready = stack.enter_context(
            stand(
                directory,
                iterations=options.iterations,
                tracked="mlflow" in options.targets,
                store=store,
                whole_endpoint=whole,
                fresh=options.fresh,
            )
        )
        baseline = undisturbed(ready, f"baseline-{options.seed}")
        if baseline.outcome.problems:
            sys.exit(f"The uninterrupted run has problems: {baseline.outcome.problems}")
        print(f"uninterrupted: {baseline.seconds:.0f} s, {baseline.outcome.consumed} rollouts trained on", flush=True)
        tally = Tally(options.seed, baseline)
        try:
            (_every if options.every_operation else _random)(options, ready, baseline, tally)
        finally:
            print(tally.table(), flush=True)
            print(tally.json(), flush=True)
    return tally.failed


def undisturbed(ready: Stand, run_id: str) -> Trial:
    """Return the undisturbed run with its recorded operations; reuse one in the directory."""
    kept = ready.directory / f"{run_id}.seconds"
    if kept.exists():
        seconds, working = json.loads(kept.read_text())
        outcome = Outcome.of(load_run(str(ready.settings["store"]), run_id))
        return Trial(run_id, [], 1, seconds, outcome, working_seconds=working)
    trial = play(ready, run_id, [], record=True)
    kept.write_text(json.dumps([trial.seconds, trial.working_seconds]))
    return trial


def _random(options: argparse.Namespace, ready: Stand, baseline: Trial, tally: Tally) -> None:
    """Trials with kills at random moments and drawn operations, until there were enough."""
    begun, number = time.monotonic(), 0
    operations = recorded(ready.directory / f"{baseline.run_id}.operations")
    while tally.random_kills < options.kills or len(tally.trials) < options.trials:
        if time.monotonic() - begun > options.minutes * 60:
            print("the time is over", flush=True)
            break
        number += 1
        seed = options.seed * 1000 + number
        own_process = number % 2 == 0 and "trainer" in options.targets
        targets = [target for target in options.targets if target != "trainer" or own_process]
        kills = draw_kills(seed, options.kills_per_trial if options.kills else 0, baseline.working_seconds, targets)
        planted = options.planted_per_trial if options.kills else 0
        strikes = draw_strikes(seed, planted, by_trainer_process(operations) if own_process else operations)
        _try(tally, ready, f"trial-{seed}", kills, strikes, own_process)


def _every(options: argparse.Namespace, ready: Stand, baseline: Trial, tally: Tally) -> None:
    """A kill at each phase of each operation, some in a trial."""
    operations = recorded(ready.directory / f"{baseline.run_id}.operations")
    for own_process in (False, True):
        strikes = every_strike(by_trainer_process(operations) if own_process else operations, options.every_operation)
        if own_process:
            strikes = [strike for strike in strikes if strike.process == "trainer"]
        for first in range(0, len(strikes), STRIKES_PER_TRIAL_OF_ALL):
            name = f"every-{'process-' if own_process else ''}{first:03d}"
            _try(tally, ready, name, [], strikes[first : first + STRIKES_PER_TRIAL_OF_ALL], own_process)


def _try(tally: Tally, ready: Stand, run_id: str, kills: list[Kill], strikes: list[Strike], own_process: bool) -> None:
    keys = {"train": ready.settings["train"] | {"service": {"kind": "process"}}} if own_process else {}
    try:
        print(tally.add(play(ready, run_id, kills, strikes, **keys)), flush=True)
    except TimeoutError as hang:
        print(tally.add_hang(run_id, hang), flush=True)


if __name__ == "__main__":
    main()
