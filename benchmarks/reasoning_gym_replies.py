"""Count the replies of a run's evaluations on reasoning-gym, by right answer.

    python -m benchmarks.reasoning_gym_replies CONFIG RUN_DIRECTORY … [--output FILE]

CONFIG is the configuration of the runs. RUN_DIRECTORY is `<store>/runs/<run_id>`. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from roundhouse.config.loading import load_config
from roundhouse.environments import load_any


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reasoning_gym_replies", description=__doc__.split("\n")[0]
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    environment: Any = load_any(load_config(options.config).environment)
    counts = {
        run.name: {
            str(stage.relative_to(run / "iterations")): count_replies(stage, environment.dataset)
            for stage in stages(run)
        }
        for run in options.runs
    }
    if options.output:
        options.output.write_text(json.dumps(counts, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({"bench": "reasoning-gym-replies", "results": counts}, ensure_ascii=False))


def stages(run: Path) -> list[Path]:
    """Return the directories of the run's evaluations, by version."""
    return sorted((run / "iterations").glob("*/evaluate*"))


def count_replies(stage: Path, dataset: Any) -> dict[str, dict[str, int]]:
    """Return the number of each reply, by right answer; most frequent first."""
    replies: dict[str, Counter[str]] = {}
    for file in sorted(stage.glob("rollouts-*.parquet")):
        for row in pq.read_table(file, columns=["task", "messages"]).to_pylist():
            problem = dataset[json.loads(row["task"])["problem"]]
            [*_, reply] = json.loads(row["messages"])
            text = "".join(part["text"] for part in reply["content"])
            replies.setdefault(problem["answer"], Counter())[text] += 1
    return {answer: dict(counter.most_common()) for answer, counter in sorted(replies.items())}


if __name__ == "__main__":
    main()
