"""Recorded rollouts of any environment, without an engine: a scripted policy plays the environment's demonstrations."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from roundhouse.config.loading import parse_config
from roundhouse.config.models import EnvironmentConfig
from roundhouse.environments import load_any
from roundhouse.environments.base import TaskRow, TaskSource
from roundhouse.environments.generated import GeneratedEnvironment
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.trajectories.records import Ledger, Rollout, derive_seed
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config

VERSION = 3
TOO_OFTEN = 9
"""Calls of a tool; more than any environment allows, and fewer than the turns of a rollout."""


def opened(directory: Path, environment: dict[str, Any], run_id: str = "recorded", **keys: Any) -> Run:
    """A run that collects from this environment."""
    tree = {"run_id": run_id, "store": str(directory / "store"), "environment": environment}
    return open_run(parse_config(tree | keys))


def demonstrated(config: EnvironmentConfig, tasks: int = 6, size: int = 4, **limits: Any) -> list[Rollout]:
    """Play groups of a task each, by good and bad demonstrations: of this task first, then of any."""
    environment = load_any(config)
    shown = _demonstrations(environment, tasks, size)
    others = [script for _, own in shown for script in own]
    return _played(
        config,
        [
            (row, own[sample] if sample < len(own) else others[(place * size + sample) % len(others)])
            for place, (row, own) in enumerate(shown)
            for sample in range(size)
        ],
        **limits,
    )


def varied(config: EnvironmentConfig, tasks: int, most: int, **limits: Any) -> list[Rollout]:
    """Return variations of the first rollouts of `demonstrated`, each with one change that a policy may make; an even
    selection of at most so many."""
    shown = _demonstrations(load_any(config), tasks, 1)
    scripts = [(row, script) for row, (own, *_) in shown for script in variations(own)]
    return _played(config, scripts[:: -(-len(scripts) // most)], **limits)


def _demonstrations(environment: TaskSource, tasks: int, size: int) -> list[tuple[TaskRow, list[list[dict[str, Any]]]]]:
    """Return tasks, each with the replies of its demonstrations, right before wrong if that is known."""
    rows = environment.tasks("train")
    if isinstance(environment, GeneratedEnvironment):
        draw = random.Random(1)
        return [
            (row, [_replies(environment.demonstration(problem, right, draw)) for right in (True, False)])
            for row, problem in zip(rows[:tasks], environment.problems["train"], strict=False)
        ]
    by_prompt: dict[str, list[list[dict[str, Any]]]] = {}
    for messages in environment.demonstrations("train", tasks * size, 0.5, seed=1):
        by_prompt.setdefault(str(messages[0]["content"]), []).append(_replies(messages))
    named: dict[str, list[TaskRow]] = {}
    for row in rows:
        named.setdefault(str(row["responses_create_params"]["input"][-1]["content"]), []).append(row)
    # several tasks may share a prompt (a hidden number, a lake shown only later)
    found = [(row, own) for prompt, own in by_prompt.items() for row in named.get(prompt, [])[:tasks]]
    return found[:tasks]


def _replies(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"finish_reason": None, **message} for message in messages if message["role"] == "assistant"]


def _played(
    config: EnvironmentConfig, scripts: Iterable[tuple[TaskRow, list[dict[str, Any]]]], **limits: Any
) -> list[Rollout]:
    """A rollout of each script, numbered within its task."""

    async def work() -> list[Rollout]:
        made: list[Rollout] = []
        counts: Counter[str] = Counter()
        settings = rollout_config(**({"max_turns": 12} | limits))
        async with open_environment(config) as client:
            for row, script in scripts:
                task = str(row["task_id"])
                spec = RolloutSpec(task, counts[task], row, derive_seed(7, task, counts[task]))
                counts[task] += 1
                made.append(await run_rollout(spec, ScriptedPolicy(by_turn(*script)), client, settings, SAMPLING))
        return made

    return asyncio.run(work())


def variations(script: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The script with one argument of a call or the last text changed, its calls left out, or its first call made too often."""
    *before, last = script
    for place, reply in enumerate(before):
        for call in reply.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            for name, value in arguments.items():
                for other in near(value):
                    function = call["function"] | {"arguments": json.dumps(arguments | {name: other})}
                    changed = reply | {"tool_calls": [call | {"function": function}]}
                    yield [*before[:place], changed, *before[place + 1 :], last]
    if before:
        yield [last]
        yield [before[0]] * TOO_OFTEN + script
    for other in near(last.get("content") or ""):
        yield [*before, last | {"content": other}]


def near(value: Any) -> list[Any]:
    """Values that are almost this one: its neighbours, or the text with a number, an operator or its form changed."""
    if isinstance(value, int):
        return [value + 1, value - 1, 0]
    text = str(value)
    turned = str.maketrans("+-*/", "-+/*")
    found = [
        "",
        f"{text} {text}",
        f"```\n{text}\n```",
        "unknown",
        re.sub(r"\d+", lambda match: str(int(match[0]) + 1), text, count=1),
        re.sub(r"[-+*/]", lambda match: match[0].translate(turned), text, count=1),
        re.sub(r"(\d+)[-+*/]\d+", r"\1/\1", text, count=1),
        json.dumps({"unknown": text}),
        json.dumps([text]),
    ]
    return [other for other in dict.fromkeys(found) if other != text]


def collected(run: Run, iteration: int, rollouts: list[Rollout]) -> Reference:
    """These rollouts as the collection of an iteration."""
    attempt = run.begin(run.stage(iteration, StageKind.COLLECT), policy_version=VERSION)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    ledger = Ledger.from_rollouts(rollouts, requested=len(rollouts))
    return attempt.commit(
        counts=ledger.counts(), details={"failures": ledger.failures, "sampling": {"temperature": 1.0}}
    )
