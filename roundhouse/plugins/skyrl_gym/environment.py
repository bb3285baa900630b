"""The environment: an episode is one environment of skyrl-gym, from `init` to `done`.

Invariant: the return of an episode is the sum of the rewards of its steps, each taken over as it is. A step is the text of one
reply. The messages of a step are one user message of the conversation.

An environment that rewrites a reply (`postprocessed_action`) fails the rollout: the conversation holds the generated tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskRow, final_text
from roundhouse.environments.dataset import PARAMETERS, dealt_rows
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import kind_package, load_class

VERSION = "0.4."
"""Versions with the interface that this module uses."""


class SkyRLGym(GymnasiumEnvironment):
    """Episodes on the rows of one data set."""

    name = "skyrl_gym"

    def __init__(
        self,
        data: str,
        subset: str | None = None,
        split: str = "train",
        env: str | None = None,
        env_config: Mapping[str, Any] | None = None,
        heldout: float = 0.2,
    ) -> None:
        """
        Raises:
            ConfigError: the package is missing or of another version, or it lacks the environment.
        """
        self._gym = kind_package("skyrl_gym", VERSION)
        self._source = (data, subset, split, None, "prompt", heldout)
        self._class = load_class(env, self._gym.Env, "environment.env") if env is not None and ":" in env else None
        self._env, self._config = env, SimpleNamespace(**(env_config or {}))
        if env is not None and self._class is None and env not in self._gym.registry:
            raise ConfigError(f"environment.env is {env!r}; skyrl-gym has {', '.join(sorted(self._gym.registry))}.")

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """Return the rows of a split.

        Raises:
            ConfigError: the data cannot be read, or a row lacks its environment.
        """
        file = Path(self._source[0])
        stamp = (status.st_mtime_ns, status.st_size) if file.is_file() and (status := file.stat()) else None
        rows = dealt_rows(*self._source, stamp)[1][split]
        if self._env is None and (strange := {str(row.get("env_class")) for row in rows} - self._gym.registry.keys()):
            raise ConfigError(
                f"environment.data has rows whose env_class is {', '.join(sorted(strange)[:5])}; skyrl-gym has "
                f"{', '.join(sorted(self._gym.registry))}. Set environment.env."
            )
        return rows

    async def reset(self, row: TaskRow) -> tuple[Any, str | None]:
        extras = {name: value for name, value in row.items() if name not in (PARAMETERS, "prompt", "task_id")}
        factory = self._class or self._gym.make
        names = () if self._class is not None else (self._env or row["env_class"],)
        env = await asyncio.to_thread(factory, *names, env_config=self._config, extras=extras)
        prompt = [dict(message) for message in row[PARAMETERS]["input"]]
        messages, _ = await asyncio.to_thread(env.init, prompt)
        if messages != row[PARAMETERS]["input"]:
            raise DataError(
                f"{type(env).__name__}.init returns another prompt than that of the row. Write it into the data."
            )
        return env, None

    async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
        text = final_text(response)
        output = await asyncio.to_thread(state.step, text)
        if output.get("postprocessed_action") not in (None, text):
            raise DataError(f"{type(state).__name__} rewrites a reply, which differs from the generated tokens.")
        observation = "\n".join(message["content"] for message in output["observations"] or ())
        terminated = bool(output["done"])
        metrics = {name: value for name, value in state.get_metrics().items() if isinstance(value, int | float)}
        return GymStep(
            None if terminated else observation, float(output["reward"]), terminated=terminated, metrics=metrics
        )

    async def close(self, state: Any) -> None:
        await asyncio.to_thread(state.close)
