"""Every key of an included environment's section changes its tasks or its episodes."""

from __future__ import annotations

import functools
import typing
from typing import Any

import pytest
from pydantic import BaseModel

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
    ("CodeEnvironment", "concurrency"),
    ("FrozenLakeEnvironment", "steps"),
    ("GuessNumberEnvironment", "guesses"),
    ("TerminalEnvironment", "sandbox"),
    ("BugFixEnvironment", "sandbox"),
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
        if key not in ("kind", "rubric", "audit") and (section.__name__, key) not in NOT_IN_TASKS
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_every_key_of_a_built_in_environment_changes_its_tasks(section: type[BaseModel], key: str) -> None:
    assert tasks(section) != tasks(section, **{key: OTHER[key]})


def made(kind: str, **keys: Any) -> Any:
    return load_any(parse_config({"run_id": "r", "environment": {"kind": kind, **keys}}).environment)
