"""Kill a run at random moments, many times over, and compare with the run that was left alone.

    python -m tests.chaos --kills 100 --seed 0                  `make chaos`
    python -m tests.chaos --kills 0 --trials 40 --s3-faults 0.05    no kills: an S3 endpoint that fails one request in 20

Prints every kill with the stage it fell into, and a verdict for each trial; the last line is JSON. Exits with 1 when a trial's
last checkpoint or its trained rollouts differ from the uninterrupted run's, or the store is damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.stand import faulty_bucket, stand
from tests.chaos.trial import TARGETS, Trial, draw_kills, play


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-per-trial", type=int, default=5)
    parser.add_argument("--trials", type=int, default=0, help="at least so many trials, however many kills they had")
    parser.add_argument("--s3-faults", type=float, default=0.0, help="share of the store's requests that S3 fails")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--minutes", type=float, default=60, help="begin no further trial after this time")
    parser.add_argument("--directory", type=Path, help="keep everything here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        failed = _run(options, options.directory or Path(scratch))
    sys.exit(1 if failed else 0)


def _run(options: argparse.Namespace, directory: Path) -> int:
    begun, trials, failed = time.monotonic(), [], 0
    with contextlib.ExitStack() as stack:
        store = None
        if options.s3_faults > 0:
            directory.mkdir(parents=True, exist_ok=True)
            store = stack.enter_context(faulty_bucket(directory, options.s3_faults, options.seed))
        tracked = "mlflow" in options.targets
        ready = stack.enter_context(stand(directory, iterations=options.iterations, tracked=tracked, store=store))
        baseline = play(ready, f"baseline-{options.seed}", [])
        if baseline.outcome.problems:
            sys.exit(f"The uninterrupted run has problems: {baseline.outcome.problems}")
        print(f"uninterrupted: {baseline.seconds:.0f} s", flush=True)
        number = 0
        while sum(len(trial.done) for trial in trials) < options.kills or len(trials) < options.trials:
            if time.monotonic() - begun > options.minutes * 60:
                print("the time is over", flush=True)
                break
            number += 1
            seed = options.seed * 1000 + number
            count = options.kills_per_trial if options.kills else 0
            kills = draw_kills(seed, count, baseline.seconds, options.targets)
            trial = play(ready, f"trial-{seed}", kills)
            trials.append(trial)
            failed += _tell(trial, trial.outcome.differences(baseline.outcome))
    results = [
        {"case": "kills", "value": sum(len(trial.done) for trial in trials), "unit": "kills"},
        {"case": "trials", "value": len(trials), "unit": "runs"},
        {"case": "trials that differ", "value": failed, "unit": "runs"},
        {"case": "uninterrupted", "value": round(baseline.seconds, 1), "unit": "s"},
    ]
    print(json.dumps({"bench": "chaos", "seed": options.seed, "results": results}))
    return failed


def _tell(trial: Trial, differences: list[str]) -> int:
    verdict = "DIFFERENT" if differences else "equal"
    print(
        f"{trial.run_id}: {verdict}, {len(trial.done)} kills, {trial.starts} starts, {trial.seconds:.0f} s", flush=True
    )
    for line in (*trial.done, *differences):
        print(f"    {line}", flush=True)
    return 1 if differences else 0


if __name__ == "__main__":
    main()
