"""Questions and scores of reasoning-gym by itself, as JSON: `python reasoning_gym_peer.py SIZE SEED FILE`, in its own
interpreter. (Some data sets print.)

Each data set is asked for SIZE problems; each problem is answered by the right answer, that of the next problem, a part of the
right answer, and a word that no tag surrounds.
"""

import json
import sys
from pathlib import Path

import reasoning_gym
from reasoning_gym.utils import extract_answer


def replies(right: str, other: str) -> list[str]:
    return [f"<answer>{right}</answer>", f"I think <answer>{other}</answer>", f"<answer>{right[:-1]}</answer>", "none"]


def main() -> None:
    size, seed = int(sys.argv[1]), int(sys.argv[2])
    found: dict[str, list[object]] = {}
    for name in sorted(reasoning_gym.factory.DATASETS):
        if name == "composite":
            continue
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=size)
        problems = [dataset[index] for index in range(size)]
        found[name] = [
            {
                "question": problem["question"],
                "scores": {
                    reply: _score(dataset, extract_answer(reply), problem)
                    for reply in replies(str(problem["answer"]), str(problems[index - 1]["answer"]))
                },
            }
            for index, problem in enumerate(problems)
        ]
    Path(sys.argv[3]).write_text(json.dumps(found))


def _score(dataset: reasoning_gym.dataset.ProceduralDataset, answer: str | None, problem: dict) -> float | str:
    try:
        return float(dataset.score_answer(answer, problem))
    except Exception as error:  # noqa: BLE001 (the scorer is foreign code)
        return repr(error)


if __name__ == "__main__":
    main()
