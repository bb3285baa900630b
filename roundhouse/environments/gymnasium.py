"""Environments that speak the Gymnasium protocol: an observation, an action, a reward, until it is over.

Invariant: everything of one episode lives in the state that `reset` returned; the environment is shared and never changes.
The return of an episode is the sum of its steps' rewards; there is no verifier beside it.

    state, first = await game.reset(row)         first observation, shown after the row's own input
    step = await game.step(state, response)      `response` is the Responses object of the newest model call alone
    …until step.terminated or step.truncated, or the agent's own limit of turns
    await game.close(state)                      once, however the episode ended
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from roundhouse.environments.base import Restoration, Split, TaskRow


@dataclass(frozen=True, slots=True)
class GymStep:
    """What the world answers to an action."""

    observation: str | None
    """Shown to the policy as a user message; None shows nothing."""
    reward: float = 0.0
    terminated: bool = False
    """The episode reached its end."""
    truncated: bool = False
    """A limit of the environment ended it."""
    tool_outputs: dict[str, str] = field(default_factory=dict)
    """Answers to tool calls of the action, by call id."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to report; those of the last step count."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything more, as JSON: kept for the record, not read by the rollout engine."""

    def wire_info(self) -> dict[str, Any]:
        """`info` as it stands in an answer to /step: metrics and tool outputs beside it."""
        told = {**self.info, **self.metrics}
        if self.tool_outputs:
            told["tool_outputs"] = [{"call_id": id, "output": text} for id, text in self.tool_outputs.items()]
        return told

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class GymnasiumEnvironment(ABC):
    """Base class of episodes without a verifier."""

    name: ClassVar[str]
    restoration: ClassVar[Restoration] = "none"

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """All tasks of a split, in a fixed order. The two splits share no task."""

    @abstractmethod
    async def reset(self, row: TaskRow) -> tuple[Any, str | None]:
        """Begin an episode: its state and the first observation."""

    @abstractmethod
    async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
        """Play the policy's newest answer."""

    async def snapshot(self, state: Any) -> Any:
        """The state as a JSON value. Needed where `restoration` is snapshot."""
        raise NotImplementedError(f"{self.name} declares snapshots and has none: define snapshot and restore.")

    async def restore(self, row: TaskRow, snapshot: Any) -> Any:
        """The state that `snapshot` shows. Needed where `restoration` is snapshot."""
        raise NotImplementedError(f"{self.name} declares snapshots and has none: define snapshot and restore.")

    async def close(self, state: Any) -> None:
        """Give back what the state holds. Called once, however the episode ended."""

    def compute_metrics(self, tasks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """More metrics of a collection from its rollouts grouped by task."""
        return {}

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[dict[str, Any]]]:
        """Conversations (chat messages) to warm-start a policy on, if there are any."""
        raise NotImplementedError(f"The environment {self.name} has no demonstrations: start from a pretrained policy.")

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools that every task row carries: none, unless an environment says otherwise."""
        return []
