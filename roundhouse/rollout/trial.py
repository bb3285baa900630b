"""A trial of an environment: a few rollouts with scripted or random replies, without services, engine and model.

Invariant: the environment runs as in a run: sessions, tool calls, a Responses object, its own process and limits.

    replies            turn 1: the first reply, turn 2: the second, …; the last one is repeated
                       `calculate({"expression": "9*2"})` calls a tool; any other text is an answer
    no replies         one call of a random tool if there are tools, then random words of the conversation
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import orjson

from roundhouse.config.models import RunConfig, Sampling
from roundhouse.generation.protocol import Completion
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Rollout

ROLLOUTS = 3
_CALL = re.compile(r"\s*([\w.-]+)\((\{.*\})\)\s*", re.DOTALL)


class TrialPolicy:
    """A policy that answers from a script, or at random by the rollout's seed. A word is a token, so that limits on tokens
    apply about as in a run."""

    def __init__(self, replies: Sequence[str] = ()) -> None:
        self._replies = list(replies)

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        turn = sum(message["role"] == "assistant" for message in messages)
        offered = {tool["function"]["name"]: tool["function"] for tool in tools}
        if self._replies:
            reply = self._replies[min(turn, len(self._replies) - 1)]
        else:
            reply = _random_reply(messages, offered, turn, random.Random(seed))
        called = _CALL.fullmatch(reply)
        message: dict[str, Any] = {"role": "assistant", "content": reply}
        if called is not None and called[1] in offered:
            function = {"name": called[1], "arguments": called[2]}
            calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        text = " ".join(str(each.get("content") or each.get("tool_calls")) for each in messages)
        prompt, generated = [len(word) for word in text.split()], [len(word) for word in reply.split()] or [0]
        finish = "tool_calls" if "tool_calls" in message else "stop"
        return Completion(message, finish, prompt, generated, [-1.0] * len(generated), 0, 0.0)


def _random_reply(
    messages: Sequence[dict[str, Any]], offered: dict[str, dict[str, Any]], turn: int, rng: random.Random
) -> str:
    words = re.findall(r"\w+", " ".join(str(message.get("content") or "") for message in messages)) or ["yes"]
    if offered and turn == 0:
        name = rng.choice(sorted(offered))
        properties = offered[name].get("parameters", {}).get("properties", {})
        arguments = {key: _random_value(schema, words, rng) for key, schema in properties.items()}
        return f"{name}({orjson.dumps(arguments).decode()})"
    return " ".join(rng.choices(words, k=rng.randint(1, 5)))


def _random_value(schema: dict[str, Any], words: Sequence[str], rng: random.Random) -> Any:
    """Return a value of a parameter's schema, as far as it names a simple type."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    if kind in ("integer", "number"):
        return rng.randint(0, 9)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [_random_value(schema.get("items", {}), words, rng)]
    return {} if kind == "object" else rng.choice(words)


async def play_trial(config: RunConfig, replies: Sequence[str] = (), count: int = ROLLOUTS) -> list[Rollout]:
    """Play rollouts of so many training tasks, drawn by the run's seed, each once.

    Raises:
        ConfigError: the environment or its tasks cannot be made.
    """
    retry = config.rollout.retry.model_copy(update={"attempts": 1})
    limits = config.rollout.model_copy(update={"retry": retry})
    async with open_environment(config.environment) as environment:
        tasks = environment.tasks("train")
        places = random.Random(config.seed).sample(range(len(tasks)), min(count, len(tasks)))
        specs = plan_rollouts([tasks[place] for place in sorted(places)], 1, config.seed, 0)
        policy = TrialPolicy(replies)
        return [await run_rollout(spec, policy, environment, limits, config.generation.sampling) for spec in specs]
