"""Replay in figures: verdicts and flips of re-scored rollouts, and recorded stages run again.

    python -m benchmarks.replay [--rollouts 100000] [--triples 100]

1. Rollouts of all built-in environments, played from their demonstrations, good and bad, are judged again by the unchanged
   verifier: share of equal verdicts, and rollouts a CPU minute (of this process and its children). Single-turn
   environments are counted as stateless, the others as replayed; the sandbox of `code` starts a process a call and has a line
   of its own.
2. Twenty mutated verifiers judge rollouts of the calculator; the flips that their rule predicts from the stored rows alone are
   held against those that they make.
3. Recorded stages of tiny trained runs, drawn at random, run again with nothing substituted: how many are equal.
   Then the same iterations as one chain, with and without another learning rate.

Nothing here has an engine, so no policy is asked for a token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from benchmarks.mutated_verifier import turned
from roundhouse.config.models import EnvironmentConfig
from roundhouse.environments import included_sections
from roundhouse.plugins.lab.replays import replay
from roundhouse.plugins.lab.replays.verdicts import judge_all
from roundhouse.store.location import Location
from roundhouse.trajectories.records import Rollout
from tests.gym.recorded import demonstrated
from tests.plugins.lab.replays.trained import trained_run

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)
MUTANTS, SANDBOXED = 20, "code"
STATELESS = ("sort", "countdown", "sudoku", "instruction_constraints")


def cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def recorded_rollouts(kind: str, count: int) -> list[Rollout]:
    """So many rollouts of an environment, none twice: its tasks are played in groups of four."""
    return demonstrated(CONFIG.validate_python({"kind": kind}), tasks=-(-count // 4), size=4)[:count]


def rescoring(rollouts: int) -> list[dict[str, Any]]:
    kinds = [get_args(section.model_fields["kind"].annotation)[0] for section in included_sections()]
    share = rollouts // len(kinds)
    outcomes: Counter[str] = Counter()
    rates: dict[str, tuple[int, float]] = {}
    for kind in kinds:
        wanted = min(share, 400) if kind == SANDBOXED else share
        stored = recorded_rollouts(kind, wanted)
        begun, done = cpu_seconds(), 0
        while done < wanted:  # environments with few tasks are judged several times
            part = stored[: wanted - done]
            outcomes.update(each.outcome for each in judge_all(part, CONFIG.validate_python({"kind": kind})))
            done += len(part)
        rates[kind] = (done, cpu_seconds() - begun)
        print(f"{kind:<28}{done:>8} rollouts {60 * done / rates[kind][1]:>12,.0f} a CPU minute")
    found = [row("equal verdicts", outcomes["equal"] / sum(outcomes.values()), f"share of {sum(outcomes.values())}")]
    for case, chosen in (
        ("stateless", [kind for kind in kinds if kind in STATELESS]),
        ("replayed", [kind for kind in kinds if kind not in (*STATELESS, SANDBOXED)]),
        ("replayed, sandboxed code", [SANDBOXED]),
    ):
        done = sum(rates[kind][0] for kind in chosen)
        found.append(row(case, 60 * done / sum(rates[kind][1] for kind in chosen), "rollouts a CPU minute"))
    return found


def mutants(rollouts: int) -> list[dict[str, Any]]:
    stored, exact, flips = recorded_rollouts("calculator", rollouts), 0, 0
    for rule in range(MUTANTS):
        config = CONFIG.validate_python(
            {"kind": "custom", "target": "benchmarks.mutated_verifier:Mutated", "parameters": {"rule": rule}}
        )
        flipped = {each.before.rollout_id for each in judge_all(stored, config) if each.outcome == "flipped"}
        predicted = {each.rollout_id for each in stored if turned(rule, each.items)}
        exact += flipped == predicted
        flips += len(flipped)
    print(f"{exact} of {MUTANTS} mutated verifiers flip exactly the predicted verdicts, {flips} in all")
    return [row("mutated verifiers with exactly the predicted flips", exact, f"of {MUTANTS}")]


def stages(triples: int, iterations: int) -> list[dict[str, Any]]:
    draw, equal, seconds = random.Random(0), 0, []
    with tempfile.TemporaryDirectory() as directory:
        runs = [trained_run(Path(directory) / str(seed), iterations, seed=seed) for seed in (1, 2)]
        for number in range(triples):
            run, k = draw.choice(runs), draw.randint(1, iterations)
            stage = draw.choice(["validate", "train"])
            begun = time.perf_counter()
            found = replay(run.config.store, run.run_id, [k], [stage], name=f"triple-{number}")
            seconds.append(time.perf_counter() - begun)
            equal += found.first is None
        run = runs[0]
        same = replay(run.config.store, run.run_id, range(1, iterations + 1), name="same")
        versions = sum(weights(run.location, k) == weights(Location(same.uri), k) for k in range(1, iterations + 1))
        other = replay(
            run.config.store,
            run.run_id,
            range(1, iterations + 1),
            overrides=["train.optimizer.learning_rate=0.01"],
            name="other",
        )
    wrong = [each for each in other.stages if (each.outcome == "differs") != (each.stage == "train")]
    print(f"{equal} of {triples} stages equal, {sorted(seconds)[len(seconds) // 2]:.2f} s each")
    return [
        row("recorded stages equal when run again", equal, f"of {triples}"),
        row("versions of a chain with byte-equal weights", versions, f"of {iterations}"),
        row("stages misnamed after one substituted key", len(wrong), f"of {len(other.stages)}"),
    ]


def weights(run: Location, version: int) -> list[str]:
    """Digests of a version's weights."""
    manifest = json.loads((run / f"checkpoints/{version:06d}").read("manifest.json"))
    return sorted(entry["sha256"] for entry in manifest["files"] if entry["path"].endswith(".safetensors"))


def row(case: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "value": round(value, 4), "unit": unit, "peer": None, "ratio": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--mutated", type=int, default=400, help="rollouts that each mutated verifier judges")
    parser.add_argument("--triples", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=3)
    arguments = parser.parse_args()
    found = rescoring(arguments.rollouts) + mutants(arguments.mutated) + stages(arguments.triples, arguments.iterations)
    for each in found:
        print(f"{each['case']:<52}{each['value']:>14,} {each['unit']}")
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    sys.stdout.write("\n" + json.dumps({"bench": "replay", "results": found, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
