"""Mutation score in figures: seeded mutants of all built-in environments that their own demonstrations catch.

    python -m benchmarks.mutation_score [--mutants 12] [--tasks 12] [--only KIND]

Each corpus is rollouts of demonstrations, good and bad, played without an engine, some cut off after two turns. Mutants are
drawn by a seed at lines that judging the corpus executes (`roundhouse env test --mutants`); each that survives is listed. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from typing import get_args

from pydantic import TypeAdapter

from roundhouse.config.models import EnvironmentConfig
from roundhouse.environments import BUILT_IN
from roundhouse.replay.environment_tests import Mutant, mutate
from tests.replay.recorded import demonstrated

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)
SEED = 0


def mutants_of(kind: str, count: int, tasks: int) -> list[Mutant]:
    """Mutants of one environment, caught or not by its demonstrations."""
    config = CONFIG.validate_python({"kind": kind})
    corpus = demonstrated(config, tasks=tasks, size=4) + demonstrated(config, tasks=2, size=2, max_turns=2)
    return mutate(corpus, config, count, SEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=12, help="of each environment, at most")
    parser.add_argument("--tasks", type=int, default=12, help="of each corpus, four rollouts each")
    parser.add_argument("--only", default="", help="environments whose kind has this in it")
    arguments = parser.parse_args()
    kinds = [get_args(section.model_fields["kind"].annotation)[0] for section in BUILT_IN]
    made = caught = 0
    for kind in (kind for kind in kinds if arguments.only in kind):
        begun = time.process_time()
        mutants = mutants_of(kind, arguments.mutants, arguments.tasks)
        made, caught = made + len(mutants), caught + sum(each.caught for each in mutants)
        seconds = time.process_time() - begun
        print(f"{kind:<28}{sum(each.caught for each in mutants):>4} of {len(mutants):<4}{seconds:>8.1f} CPU s")
        for each in mutants:
            if not each.caught:
                print(f"    line {each.line}: {each.change}")
        sys.stdout.flush()
    results = [{"case": "mutants caught", "value": caught, "unit": f"of {made}", "peer": None, "ratio": None}]
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    sys.stdout.write("\n" + json.dumps({"bench": "mutation_score", "results": results, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
