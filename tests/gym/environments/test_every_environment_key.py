"""Every key of a built-in environment's section changes its tasks or its episodes."""

from __future__ import annotations

import functools
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from roundhouse.config.environments import (
    BugFixEnvironment,
    CodeEnvironment,
    FrozenLakeEnvironment,
    GuessNumberEnvironment,
    TerminalEnvironment,
)
from roundhouse.config.loading import parse_config
from roundhouse.environments import included_sections, load_any

BUILT_IN = included_sections()
FEW: dict[str, Any] = {"problems": 40, "digits": 3}
OTHER: dict[str, Any] = {
    "heldout_fraction": 0.5, "digits": 4, "upper": 15, "guesses": 5, "games": 3, "problems": 60, "operators": 4, "hops": 5,
    "entries": 20, "numbers": 4, "largest": 20, "blanks": 8, "most": 30, "worlds": 3, "changes": 0.9, "steps": 5,
    "constraints": 5, "size": 5, "holes": 2, "files": 5, "functions": 3, "families": ("capitals", "sentences"),
    "max_tokens": 20, "orders": 2,
}  # fmt: skip
NOT_IN_TASKS = {
    (CodeEnvironment, "concurrency"),
    (FrozenLakeEnvironment, "steps"),
    (GuessNumberEnvironment, "guesses"),
    (TerminalEnvironment, "sandbox"),
    (BugFixEnvironment, "sandbox"),
}
"""How many processes run answers, when an episode ends, and where commands run."""


def made_small(section: type[BaseModel], **keys: Any) -> Any:
    """The environment of a section, with few tasks."""
    [kind] = typing.get_args(section.model_fields["kind"].annotation)
    few = {key: value for key, value in FEW.items() if key in section.model_fields}
    return made(kind, **few | keys)


@functools.cache
def tasks(section: type[BaseModel], **keys: Any) -> list[list[Any]]:
    """Both splits of the environment."""
    environment = made_small(section, **keys)
    return [list(environment.tasks(split)) for split in ("train", "heldout")]


@pytest.mark.parametrize("section", BUILT_IN, ids=lambda section: section.__name__)
def test_a_built_in_environment_is_made_by_its_kind(section: type[BaseModel]) -> None:
    assert type(made_small(section)).__name__ + "Environment" == section.__name__


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (section, key)
        for section in BUILT_IN
        for key in section.model_fields
        if key not in ("kind", "rubric", "audit") and (section, key) not in NOT_IN_TASKS
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_every_key_of_a_built_in_environment_changes_its_tasks(section: type[BaseModel], key: str) -> None:
    assert tasks(section) != tasks(section, **{key: OTHER[key]})


def made(kind: str, **keys: Any) -> Any:
    return load_any(parse_config({"run_id": "r", "environment": {"kind": kind, **keys}}).environment)


async def test_an_episode_ends_after_as_many_guesses_and_steps_as_are_allowed() -> None:
    game = made("guess_number", upper=7, guesses=1)
    row = next(row for row in game.tasks("train") if row["hidden"] != 1)
    session = await game.seed_session(row)
    answers = [await game.tools()["guess"].call(session, number=1) for _ in range(2)]
    assert answers[1] == "no guesses left"

    lake = made("frozen_lake", problems=40, steps=4)
    state, _ = await lake.reset(lake.tasks("train")[0])
    said = {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "jump"}]}]}
    assert [(await lake.step(state, said)).truncated for _ in range(4)] == [False, False, False, True]


def test_no_more_processes_run_answers_at_once_than_are_allowed() -> None:
    assert made("code", problems=40, concurrency=1)._sandbox._threads._max_workers == 1
