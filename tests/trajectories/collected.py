"""Rollouts of the real environments, played by the real loops over real tokens; only the policy is a fake."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig, Sampling, WarmStartPolicy
from roundhouse.environments import load_any
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.client import request_body
from roundhouse.generation.protocol import Completion, Generated, read_request
from roundhouse.policy.warm_start import write_engine_files
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.validate import DecodedText, limits_of, recorded_counts
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table
from roundhouse.trajectories.validation import Recorded, Validated, validate
from tests.gym.collecting import collect

VERSION, GROUPS, SIZE = 3, 3, 4


class FakeDemonstrator:
    """Replies with a demonstration of the task, as tokens; its log-probabilities are drawn by the seed."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._environment = load_any(config.environment)
        self._codec = ChatCodec(str(directory), 2048)
        self.shown_by_prompt = {}
        for shown in self._environment.demonstrations("train", 4000, 0.5, 5):
            self.shown_by_prompt.setdefault(shown[0]["content"], []).append(
                [m for m in shown if m["role"] == "assistant"]
            )

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        request = read_request(request_body(messages, tools, sampling, seed, "policy"), "policy")
        prompt = self._codec.prompt(request)
        turn = sum(message["role"] == "assistant" for message in messages)
        rng = random.Random(seed)
        asked = next(message["content"] for message in messages if message["role"] == "user")
        replies = self.shown_by_prompt.get(asked, [[{"content": f"I <think>hm</think> do not know {asked}"}]])
        said = replies[seed % len(replies)]
        ids = self._codec.encode(_text(said[min(turn, len(said) - 1)]))[: sampling.max_new_tokens - 1]
        ids.append(self._codec.end_of_turn_id)
        generated = Generated(ids, [-rng.expovariate(1) for _ in ids], "stop")
        message, finish = self._codec.message(generated, request.tools)
        return Completion(message, finish, prompt.token_ids, ids, generated.log_probs, VERSION, rng.random())


def _text(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    told = [f'{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}' for call in calls]
    return (message["content"] or "") + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in told)


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


class Batch:
    """An iteration's rollouts from the store, and the expected values."""

    def __init__(self, config: RunConfig, directory: Path, made: Sequence[Rollout]) -> None:
        self.config, self.text = config, DecodedText(directory)
        self.tables = rollouts_table(made), turns_table(made)
        self.vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
        self.rollouts = rollouts_from_tables(*self.tables)
        self.recorded: dict[str, Recorded] = recorded_counts(*self.tables)

    def again(self) -> Batch:
        """The same, to be changed."""
        other = object.__new__(Batch)
        other.__dict__ |= self.__dict__ | {"rollouts": rollouts_from_tables(*self.tables)}
        return other

    def validate(self) -> Validated:
        return validate(
            self.rollouts,
            self.config.validation,
            vocabulary_size=self.vocabulary,
            policy_version=VERSION,
            terms=limits_of(self.config, self.vocabulary, VERSION),
            recorded=self.recorded,
            text=self.text,
        )


@functools.cache
def collected(kind: str) -> Batch:
    """Three groups of four."""
    tree = {
        "run_id": kind,
        "environment": {"kind": kind},
        "rollout": {"group_size": SIZE, "max_tokens": 4000, "max_turns": 6},
        "generation": {"max_model_len": 4096, "sampling": {"max_new_tokens": 200}},
    }
    config = parse_config(tree)
    directory = Path(tempfile.mkdtemp())
    write_engine_files(WarmStartPolicy(), load_any(config.environment), 0, directory / "engine")
    policy = FakeDemonstrator(config, directory / "engine")

    async def play() -> list[Rollout]:
        environment = open_environment(config.environment)
        asked = [row for row in environment.tasks("train") if _prompt(row) in policy.shown_by_prompt]
        rows = (asked or list(environment.tasks("train")))[:GROUPS]
        specs = plan_rollouts(rows, SIZE, seed=1, iteration=1)
        async with environment:
            return await collect(specs, policy, environment, config.rollout, config.generation.sampling)

    return Batch(config, directory / "engine", asyncio.run(play()))


def _prompt(row: dict[str, Any]) -> Any:
    given = row["responses_create_params"]["input"]
    return given[0]["content"] if given and not isinstance(given, str) else given
