"""Mutation score in figures: seeded mutants of all built-in environments that their own demonstrations catch.

    python -m benchmarks.mutation_score [--mutants 12] [--seed 0] [--repeats 1000] [--only KIND]

Each corpus is rollouts played without an engine: demonstrations, good and bad, some cut off after two turns, and variations of
the good ones, each with one thing changed (`tests/gym/recorded.py`). Mutants are drawn by a seed at lines that judging the
corpus executes (`roundhouse env test --mutants`); each that survives is listed. Seconds are of judging, by the environment as
it is and by its mutants: what a check before a merge takes once the corpus is recorded.

With --repeats, so many tests of the unchanged environments, spread over all of them, are run in processes of their own, and
those that find anything are counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import get_args

from pydantic import TypeAdapter

from roundhouse.config.models import EnvironmentConfig
from roundhouse.environments import included_sections
from roundhouse.plugins.lab.replays.environment_tests import check_environment, mutate
from roundhouse.trajectories.records import Rollout
from tests.gym.recorded import demonstrated, varied

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)
SANDBOXED = ("code", "terminal", "bug_fix")
"""Each rollout starts processes; their corpora are smaller."""
A_PROCESS, SANDBOXED_ROLLOUTS = 50, 4
"""Of the repeats of an unchanged environment's test: those until a new process begins, and what is judged of `SANDBOXED`."""


def recorded_corpus(kind: str, tasks: int) -> list[Rollout]:
    config = CONFIG.validate_python({"kind": kind})
    if kind in SANDBOXED:
        whole, changed = demonstrated(config, tasks=max(1, tasks // 4), size=2), varied(config, tasks, most=tasks)
    else:
        whole, changed = demonstrated(config, tasks=tasks, size=4), varied(config, tasks, most=20 * tasks)
    return whole + demonstrated(config, tasks=2, size=2, max_turns=2) + changed


def flakes(kind: str, corpus: list[Rollout], repeats: int) -> int:
    """Of so many tests of the unchanged environment, those that find anything."""
    config = CONFIG.validate_python({"kind": kind})
    return sum(not check_environment(corpus, config).unchanged for _ in range(repeats))


def flakes_in_processes(corpora: dict[str, list[Rollout]], repeats: int) -> int:
    """The same over all environments, in turn; each process has other hashes and another order of sets."""
    share = {kind: repeats // len(corpora) + (place < repeats % len(corpora)) for place, kind in enumerate(corpora)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        parts = [
            processes.submit(
                flakes,
                kind,
                corpora[kind][: SANDBOXED_ROLLOUTS if kind in SANDBOXED else None],
                min(A_PROCESS, count - done),
            )
            for kind, count in share.items()
            for done in range(0, count, A_PROCESS)
        ]
        return sum(part.result() for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=12, help="of each environment, at most")
    parser.add_argument("--tasks", type=int, default=12, help="of each corpus, four rollouts each and variations")
    parser.add_argument("--seed", type=int, default=0, help="that the mutants are drawn by")
    parser.add_argument("--repeats", type=int, default=0, help="tests of unchanged environments, in all")
    parser.add_argument("--only", default="", help="environments whose kind has this in it")
    arguments = parser.parse_args()
    kinds = [get_args(section.model_fields["kind"].annotation)[0] for section in included_sections()]
    corpora = {kind: recorded_corpus(kind, arguments.tasks) for kind in kinds if arguments.only in kind}
    made = caught = 0
    seconds = used = 0.0
    for kind, corpus in corpora.items():
        begun, begun_cpu = time.perf_counter(), sum(os.times()[:4])
        mutants = mutate(corpus, CONFIG.validate_python({"kind": kind}), arguments.mutants, arguments.seed)
        lasted = time.perf_counter() - begun
        made, caught = made + len(mutants), caught + sum(each.caught for each in mutants)
        seconds, used = seconds + lasted, used + sum(os.times()[:4]) - begun_cpu
        counts = f"{sum(each.caught for each in mutants):>4} of {len(mutants):<4}"
        print(f"{kind:<28}{counts}{len(corpus):>6} rollouts{lasted:>8.1f} s")
        for each in mutants:
            if not each.caught:
                print(f"    line {each.line}: {each.change}")
        sys.stdout.flush()
    results = [
        ("mutants caught", caught, f"of {made}"),
        ("all corpora and mutants judged", round(seconds, 1), "s"),
        ("the same, CPU time with children", round(used, 1), "s"),
    ]
    if arguments.repeats:
        found = flakes_in_processes(corpora, arguments.repeats)
        results.append(("unchanged environments that failed", found, f"of {arguments.repeats} tests"))
    rows = [{"case": case, "value": value, "unit": unit, "peer": None, "ratio": None} for case, value, unit in results]
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    sys.stdout.write("\n" + json.dumps({"bench": "mutation_score", "results": rows, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
