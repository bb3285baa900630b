"""Episodes of an environment in OpenEnv's terms: actions in, observations with a reward out.

Invariant: the rewards of an episode sum up to the reward that the same actions earn in a rollout. With tools and a verifier,
tools earn 0.0, and the reply earns the verdict and ends the episode. In the Gymnasium protocol each action is a step.

    {"text": "The answer is 41."}                                           a reply
    {"type": "call_tool", "tool_name": "calculate", "arguments": {…}}       a call of a tool
    {"type": "list_tools"}                                                  no step; works without an episode
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field

from roundhouse.environments.base import Environment, GymnasiumEnvironment, Split, TaskRow, TaskSource, Toolbox
from roundhouse.errors import ConfigError, DataError
from roundhouse.http.sessions import CLOSE_SECONDS
from roundhouse.rollout.agents import checked_verdict
from roundhouse.rollout.protocol import call_function, rows_of
from roundhouse.rollout.responses import assistant_items, chat_messages, function_call_output

log = logging.getLogger(__name__)
SPLITS: tuple[Split, ...] = get_args(Split)
TOOL_ERRORS = {404: "tool_not_found", 422: "invalid_args"}
"""Kinds of errors by the status of a tool's answer; any other status is an `execution_error`."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Reply(_Fields):
    """Text of the policy: the final reply, or a step of the Gymnasium protocol."""

    text: str


class CallTool(_Fields):
    """One call of a tool."""

    type: Literal["call_tool"]
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ListTools(_Fields):
    """Request for the tools of the task, or of the environment before the first reset."""

    type: Literal["list_tools"]


Action = Reply | CallTool | ListTools


class Reset(BaseModel):
    """Arguments of a reset. Others are ignored, as OpenEnv does."""

    seed: int | None = Field(default=None, ge=0)
    """Number of the task, modulo the number of tasks. Unset: the next task."""
    split: Split = "train"
    episode_id: str | None = Field(default=None, max_length=255)


class Observed(_Fields):
    """Observation, reward and end of an action."""

    text: str | None = None
    """Newest text for the policy."""
    messages: list[dict[str, Any]] | None = None
    """Conversation at the start of an episode, in chat form."""
    tools: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    result: str | None = None
    error: dict[str, str] | None = None
    reward: float | None = Field(default=None, exclude=True)
    done: bool = Field(default=False, exclude=True)

    def wire(self) -> dict[str, Any]:
        """Return the fields that are set, in the form of OpenEnv's replies."""
        return {"observation": self.model_dump(exclude_none=True), "reward": self.reward, "done": self.done}


@dataclass(slots=True)
class Episode:
    """State of one episode."""

    row: TaskRow
    state: Any
    id: str
    output: list[dict[str, Any]] = field(default_factory=list)
    """Items of the policy and of tools so far."""
    steps: int = 0
    done: bool = False


class Tasks:
    """Task rows by split and number."""

    def __init__(self, environment: TaskSource) -> None:
        """
        Raises:
            ConfigError: the environment has no training task.
        """
        self._rows: dict[Split, Sequence[TaskRow]] = {split: rows_of(environment, split) for split in SPLITS}
        self._next = {split: itertools.count() for split in self._rows}
        if not self._rows["train"]:
            raise ConfigError(f"--environment {environment.name} has no training task to serve. Change --parameters.")

    def row(self, split: Split, seed: int | None) -> TaskRow:
        """Return the task of a seed, or the next one.

        Raises:
            DataError: the split is empty.
        """
        if not (rows := self._rows[split]):
            raise DataError(f"The split {split} has no tasks.")
        return rows[(next(self._next[split]) if seed is None else seed) % len(rows)]


class Session:
    """Episodes of one client, one after the other. Each is closed once."""

    def __init__(self, environment: Environment | GymnasiumEnvironment, toolbox: Toolbox | None, tasks: Tasks) -> None:
        self._environment, self._toolbox, self._tasks = environment, toolbox, tasks
        self._episode: Episode | None = None

    async def reset(self, data: Any) -> Observed:
        """Close the current episode and begin another one.

        Raises:
            ValidationError: the arguments are not valid.
            DataError: the split is empty.
        """
        reset = Reset.model_validate(data)
        row = self._tasks.row(reset.split, reset.seed)
        await self.close()
        messages = chat_messages(row["responses_create_params"]["input"])
        if isinstance(self._environment, GymnasiumEnvironment):
            state, observation = await self._environment.reset(row)
            messages += [] if observation is None else [{"role": "user", "content": observation}]
        else:
            state = await self._environment.seed_session(row)
        self._episode = Episode(row, state, reset.episode_id or str(uuid.uuid4()))
        text = messages[-1]["content"] if messages and isinstance(messages[-1]["content"], str) else None
        return Observed(text=text, messages=messages, metadata={"task_id": row.get("task_id"), "split": reset.split})

    async def step(self, data: Any) -> Observed:
        """Play an action.

        Raises:
            ValidationError: the action is not valid.
            DataError: no episode is open, or its reward is not a finite number.
        """
        kinds: dict[str, type[Action]] = {"call_tool": CallTool, "list_tools": ListTools}
        kind = kinds.get(str(data.get("type")), Reply) if isinstance(data, dict) else Reply
        action = kind.model_validate(data)
        if isinstance(action, ListTools):
            return Observed(tools=self._tools())
        if self._episode is None or self._episode.done:
            raise DataError("No episode is open. Send a reset first.")
        self._episode.steps += 1
        observed = await self._play(self._episode, action)
        self._episode.done = observed.done
        return observed

    async def _play(self, episode: Episode, action: Reply | CallTool) -> Observed:
        items, environment = _items(action, episode.steps), self._environment
        if isinstance(environment, GymnasiumEnvironment):
            step = await environment.step(episode.state, {"object": "response", "output": items})
            observed = Observed(text=step.observation, reward=checked_verdict(step.reward).reward, done=step.done)
            observed.metadata = {"metrics": step.metrics, "truncated": step.truncated}
            if isinstance(action, CallTool):
                observed.tool_name, observed.result = action.tool_name, step.tool_outputs.get(items[-1]["call_id"])
            return observed
        episode.output += items
        if isinstance(action, CallTool):
            assert self._toolbox is not None
            answer = await self._toolbox.call(episode.state, action.tool_name, action.arguments)
            episode.output.append(function_call_output(items[-1]["call_id"], answer.text))
            if answer.ok:
                return Observed(tool_name=action.tool_name, result=answer.text, reward=0.0)
            error = {"error_type": TOOL_ERRORS.get(answer.status, "execution_error"), "message": answer.text}
            return Observed(tool_name=action.tool_name, error=error, reward=0.0)
        newest = {"object": "response", "output": items}
        if message := await environment.follow_up(episode.state, episode.row, newest):
            episode.output.append({"type": "message", "role": "user", "content": message})
            return Observed(text=message, reward=0.0)
        response = {"object": "response", "output": episode.output}
        verdict = checked_verdict(await call_function(environment.verify, episode.state, episode.row, response))
        metadata = {"reward_components": verdict.reward_components, "metrics": verdict.metrics, "mask": verdict.mask}
        return Observed(reward=verdict.reward, done=True, metadata=metadata)

    def state(self) -> dict[str, Any]:
        """Return the state that OpenEnv shows of each environment."""
        episode = self._episode
        return {"episode_id": episode and episode.id, "step_count": episode.steps if episode else 0}

    async def close(self) -> None:
        """Close the episode. An error of the environment is logged."""
        episode, self._episode, environment = self._episode, None, self._environment
        if episode is None:
            return
        close = environment.close if isinstance(environment, GymnasiumEnvironment) else environment.close_session
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await close(episode.state)
        except Exception:  # the environment's code ends here, and nobody waits for it
            log.exception("An episode could not be closed")

    def _tools(self) -> list[dict[str, Any]]:
        row = self._episode.row["responses_create_params"].get("tools") if self._episode else None
        return [
            {"name": each["name"], "description": each.get("description") or "", "input_schema": each["parameters"]}
            for each in (self._environment.tool_schemas() if row is None else row)
        ]


def _items(action: Reply | CallTool, number: int) -> list[dict[str, Any]]:
    """Return the action as items of a Responses object."""
    if isinstance(action, Reply):
        return assistant_items({"role": "assistant", "content": action.text}, f"msg_{number}")
    function = {"name": action.tool_name, "arguments": orjson.dumps(action.arguments).decode()}
    return assistant_items({"tool_calls": [{"id": f"call_{number}", "function": function}]}, f"msg_{number}")
