"""The environment: an episode is one environment of gymnasium, from its reset with a seed to `terminated` or `truncated`.

Invariant: the return of an episode is the sum of the rewards that the environment gives. A reply without a valid action is
answered with the problem, and is not a step.

    Text                            the reply
    Discrete                        the last name of `actions` in the reply, or the last number
    any other space                 the last JSON list or number of the reply
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskRow, final_text, read_arguments
from roundhouse.errors import ConfigError
from roundhouse.imports import kind_package

VERSION = "1."
"""Versions with the interface that this module uses."""


class Gymnasium(GymnasiumEnvironment):
    """Episodes of one id."""

    name = "gymnasium"
    restoration = "replay"

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        observation: Literal["state", "render"] = "state",
        prompt: str | None = None,
        train: int = 1000,
        heldout: int = 100,
        seed: int = 0,
    ) -> None:
        """
        Raises:
            ConfigError: the package is missing or of another version, or the environment cannot be made or described.
        """
        self._gym = kind_package("gymnasium", VERSION)
        self._id, self._options = id, dict(options or {})
        if observation == "render":
            self._options["render_mode"] = "ansi"
        self._actions, self._renders = list(actions), observation == "render"
        self._seeds: dict[Split, range] = {
            "train": range(seed, seed + train),
            "heldout": range(seed + train, seed + train + heldout),
        }
        env = self._made()
        space = env.action_space
        env.close()
        if actions and (not isinstance(space, self._gym.spaces.Discrete) or space.n != len(actions)):
            raise ConfigError(f"environment.actions has {len(actions)} names, but the actions of {id} are {space}.")
        listed = ", ".join(self._actions) if actions else str(space)
        self._prompt = prompt or f"Choose one action in each turn. Actions: {listed}."

    def _made(self) -> Any:
        try:
            return self._gym.make(self._id, **self._options)
        except Exception as error:  # of many types, by the registry and by the environment
            raise ConfigError(
                f"environment.id {self._id!r} with environment.options {self._options} cannot be made by gymnasium: "
                f"{type(error).__name__}: {error}"
            ) from error

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        params = {"input": [{"role": "system", "content": self._prompt}]}
        return [{"task_id": str(seed), "responses_create_params": params, "seed": seed} for seed in self._seeds[split]]

    async def reset(self, row: TaskRow) -> tuple[Any, str | None]:
        env = self._made()
        env.action_space.seed(row["seed"])
        observation, _ = env.reset(seed=row["seed"])
        return env, self._shown(env, observation)

    async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
        try:
            action = self._action(state.action_space, final_text(response))
        except ValueError as error:
            return GymStep(f"Invalid action: {error}", metrics={"invalid_action": 1.0})
        observation, reward, terminated, truncated, _ = state.step(action)
        text = None if terminated or truncated else self._shown(state, observation)
        return GymStep(text, float(reward), terminated=bool(terminated), truncated=bool(truncated))

    async def close(self, state: Any) -> None:
        state.close()

    def _shown(self, env: Any, observation: Any) -> str:
        if self._renders:
            return re.sub(
                r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", r"[\1]", str(env.render())
            )  # a colour marks the position
        if isinstance(observation, str):
            return observation
        return json.dumps(env.observation_space.to_jsonable([observation])[0], default=lambda value: value.tolist())

    def _action(self, space: Any, text: str) -> Any:
        if isinstance(space, self._gym.spaces.Text):
            action: Any = text
        elif self._actions:
            names = {name.lower(): number for number, name in enumerate(self._actions, int(space.start))}
            matches = re.findall("|".join(rf"\b{re.escape(name)}\b" for name in names), text.lower())
            if not matches:
                raise ValueError(f"name one of {', '.join(self._actions)}")
            action = names[matches[-1]]
        else:
            matches = re.findall(r"\[[^\[\]]*\]|-?\d+(?:\.\d+)?", text)
            if not matches:
                raise ValueError(f"choose from {space}")
            value = read_arguments(matches[-1])
            action = value if isinstance(value, int) else space.from_jsonable([value])[0]
        if not space.contains(action):
            raise ValueError(f"choose from {space}")
        return action
