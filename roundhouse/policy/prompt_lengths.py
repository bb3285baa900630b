"""Training prompts in tokens: the tasks that `rollout.max_prompt_tokens` leaves.

Invariant: preflight and collection render with the same template and count with the same tokenizer, so that a run which
begins has tasks to draw.

    limit 100, prompts of 31, 240 and 52 tokens     ->     the first and the third task
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from roundhouse.config.models import RolloutConfig
from roundhouse.environments.base import TaskList, TaskRow
from roundhouse.errors import ConfigError
from roundhouse.policy.model_directory import ChatTemplate
from roundhouse.rollout.clients import first_messages, tools_of
from roundhouse.rollout.plan import WeightedTasks

Tokens = Callable[[str], int]
"""Counts the tokens of a text."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Renders the first prompt of a task, and counts its tokens."""

    rollout: RolloutConfig
    template: ChatTemplate
    tokens: Tokens

    def text(self, task: TaskRow) -> str:
        """Return the prompt, with the task's tools and the system prompt of its environment."""
        name = str(task.get("task_id", "")).partition("/")[0]  # without a mixture, no environment name
        messages = first_messages(task, self.rollout.of_environment(name).system_prompt)
        return self.template.render(messages, tools_of(task))

    def above(self, task: TaskRow, limit: int) -> int | None:
        """Return the tokens of a prompt that has more than `limit`; else None."""
        text = self.text(task)
        if len(text.encode()) <= limit:  # a token has one byte or more
            return None
        count = self.tokens(text)
        return count if count > limit else None

    def fitting(self, tasks: Sequence[TaskRow], enough: int | None = None) -> Sequence[TaskRow]:
        """Return the tasks with at most `rollout.max_prompt_tokens`.

        Args:
            enough: stop after so many, in each environment of a mixture.

        Raises:
            ConfigError: no task fits.
        """
        if (limit := self.rollout.max_prompt_tokens) is None:
            return tasks
        if isinstance(tasks, WeightedTasks):
            own = {name: self.fitting(rows, enough) for name, rows in tasks.tasks.items()}
            return WeightedTasks(own, tasks.weights)
        places: list[int] = []
        longer: list[int] = []
        for place, task in enumerate(tasks):
            if (count := self.above(task, limit)) is None:
                places.append(place)
            else:
                longer.append(count)
            if len(places) == enough:
                break
        if not places:
            raise ConfigError(
                f"rollout.max_prompt_tokens is {limit}, and the shortest prompt of {len(longer)} training tasks has "
                f"{min(longer, default=0)} tokens. Raise it."
            )
        return TaskList(places, tasks.__getitem__)


def tokens_by(read: Callable[[], bytes]) -> Tokens:
    """Return a counter that reads a tokenizer.json before the first count."""

    @cache
    def tokenizer() -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_buffer(read())

    def count(text: str) -> int:
        return len(tokenizer().encode(text, add_special_tokens=False).ids)

    return count


def longer_than_allowed(config: RolloutConfig, fitting: Sequence[TaskRow], tasks: Sequence[TaskRow]) -> str | None:
    """Return the report that tasks are left out; None if all fit."""
    if (left_out := _count(tasks) - _count(fitting)) == 0:
        return None
    return (
        f"{left_out} of {_count(tasks)} training tasks have prompts of more than {config.max_prompt_tokens} tokens "
        "(rollout.max_prompt_tokens) and are left out."
    )


def _count(tasks: Sequence[TaskRow]) -> int:
    return sum(map(len, tasks.tasks.values())) if isinstance(tasks, WeightedTasks) else len(tasks)
