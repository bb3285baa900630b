"""The environment: a problem is made from its number, and judged by the data set that made it.

Invariant: a reward is the score that reasoning-gym gives to the same answer. A task row holds the number of its problem and no
metadata: the verifier makes the problem again, because metadata (tuples, fractions) does not survive JSON, and fails if the
question differs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, final_text
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import kind_package
from roundhouse.plugins.reasoning_gym.section import ReasoningGymPart

VERSION = "0.1."
"""Versions with the interface that this module uses."""
BY_HASH = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Data sets that iterate over sets of text, in an order that differs between processes."""


class ReasoningGym(Environment):
    """Problems of one data set, or of a composite."""

    name = "reasoning_gym"

    def __init__(
        self,
        dataset: str | None = None,
        options: Mapping[str, Any] | None = None,
        level: int | None = None,
        datasets: Mapping[str, ReasoningGymPart] | None = None,
        train: int = 1000,
        heldout: int = 100,
        seed: int = 0,
        prompt: str | None = "default",
        answer: Literal["tag", "text"] = "tag",
    ) -> None:
        """
        Raises:
            ConfigError: the package is missing or of another version, or does not know a name or an option.
        """
        gym = kind_package("reasoning_gym", VERSION)
        self._numbers: dict[Split, range] = {"train": range(train), "heldout": range(train, train + heldout)}
        common = {"seed": seed, "size": train + heldout}
        if dataset is not None:
            self.dataset = _made(gym, dataset, options or {}, level, common, "environment")
        else:
            self.dataset = _composite(gym, datasets or {}, common)
        prompts = gym.utils.SYSTEM_PROMPTS
        if prompt is not None and prompt not in prompts:
            raise ConfigError(
                f"environment.prompt is {prompt!r}; reasoning-gym has {', '.join(prompts)}. Set one, or null."
            )
        self._system = [] if prompt is None else [{"role": "system", "content": prompts[prompt]}]
        self._answer = answer
        self._extract = gym.utils.extract_answer

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        rows = [self._row(number) for number in self._numbers[split]]
        if split == "heldout":
            return rows
        heldout = {self.dataset[number]["question"] for number in self._numbers["heldout"]}
        return [row for row in rows if row["question"] not in heldout]

    def verify(  # type: ignore[override]  # a plain function, which runs in a thread: scorers compute
        self, session: None, row: TaskRow, response: dict[str, Any]
    ) -> Verdict:
        problem = self.dataset[row["problem"]]
        if problem["question"] != row["question"]:
            raise DataError(
                f"Problem {row['problem']} of reasoning-gym is {problem['question']!r:.200}, but the task row has "
                f"{row['question']!r:.200}. Use the version of reasoning-gym and the section that made the row."
            )
        text = final_text(response)
        answer = self._extract(text) if self._answer == "tag" else text.strip()
        return Verdict(float(self.dataset.score_answer(answer, problem)))

    def _row(self, number: int) -> TaskRow:
        question = self.dataset[number]["question"]
        return {
            "task_id": f"{number}",
            "responses_create_params": {"input": [*self._system, {"role": "user", "content": question}]},
            "question": question,
            "problem": number,
        }


def _made(
    gym: Any, name: str, options: Mapping[str, Any], level: int | None, common: Mapping[str, int], place: str
) -> Any:
    """Make a data set, by the level of its curriculum if there is one."""
    if name not in gym.factory.DATASETS or name == "composite":
        near = difflib.get_close_matches(name, gym.factory.DATASETS, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"{place}: reasoning-gym has no data set {name!r}.{hint} It has {len(gym.factory.DATASETS)}.")
    if name in BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"{place}: the problems of {name} differ between processes, because reasoning-gym iterates over sets. Start the "
            "run with the environment variable PYTHONHASHSEED=0, or choose another data set."
        )
    try:
        return gym.create_dataset(name, **{**_of_level(gym, name, level), **options, **common})
    except (TypeError, ValueError, AssertionError) as error:
        names = gym.factory.DATASETS[name][1].__dataclass_fields__
        fields = ", ".join(each for each in names if each not in common)
        raise ConfigError(
            f"{place}.options {dict(options)!r} do not fit reasoning-gym's {name}: {error}. Its options: {fields}."
        ) from error


def _of_level(gym: Any, name: str, level: int | None) -> dict[str, Any]:
    if level is None:
        return {}
    if not gym.factory.has_curriculum(name):
        raise ConfigError(f"environment.level is {level}, but {name} of reasoning-gym has no curriculum. Remove level.")
    curriculum = gym.factory.create_curriculum(name)
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    return {key: getattr(config, key) for key in config.__dataclass_fields__}


def _composite(gym: Any, parts: Mapping[str, ReasoningGymPart], common: Mapping[str, int]) -> Any:
    specs = []
    for index, (name, part) in enumerate(parts.items()):
        own = dict(common, seed=common["seed"] + index + 1)  # as its composite derives them
        dataset = _made(gym, name, part.options, part.level, own, f"environment.datasets.{name}")
        options = {key: getattr(dataset.config, key) for key in dataset.config.__dataclass_fields__}
        specs.append(gym.composite.DatasetSpec(name=name, weight=part.weight, config=options))
    return gym.create_dataset("composite", datasets=specs, **common)
