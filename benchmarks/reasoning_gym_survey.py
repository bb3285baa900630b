"""Survey: the reward of SmolLM2-135M on the data sets of reasoning-gym before any training, in one engine.

    PYTHONHASHSEED=0 python -m benchmarks.reasoning_gym_survey [--datasets NAME …] [--tasks 12] [--samples 2] [--forms text tag]
                                                               [--output docs/images/reasoning-gym-survey] [--state DIR]

A data set has its easiest settings: level 0 of its curriculum, or its defaults. A form is a prompt and the part of the reply
that is judged: `text` is the system prompt below and the whole reply, `tag` is reasoning-gym's prompt `direct` and the text
within `<answer>`. The tasks are held-out ones of the environment, sampled at temperature 1. Data sets with long prompts or
answers are left out, by name. `--output` gets .json. Standard output gets a table, and JSON in its last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.pretrained import ROOT, machine
from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig
from roundhouse.environments import load_any
from roundhouse.environments.base import TaskRow
from roundhouse.generation.interface import VllmGeneration, configure_generation_config
from roundhouse.generation.protocol import Draw
from roundhouse.policy.gguf import converted
from roundhouse.policy.model_directory import bundled_file

SYSTEM = "Reply with the answer only."
FORMS: dict[str, dict[str, Any]] = {
    "text": {"prompt": None, "answer": "text"},
    "tag": {"prompt": "direct", "answer": "tag"},
}
MAX_PROMPT, MAX_ANSWER, MAX_NEW = 300, 32, 40
"""Tokens: the longest prompt and the longest right answer of a data set, and the limit of a reply."""
SLOW = {"sokoban": "its generator takes minutes"}


@dataclass
class Problem:
    """One task in one form, and the scores of its replies."""

    dataset: str
    form: str
    row: TaskRow
    environment: Any
    prompt: list[int]
    rewards: list[float] = field(default_factory=list)
    failures: int = 0
    """Replies at which the package's scorer raised an error."""
    example: str = ""


class LeftOut(Exception):
    """The data set is not in the survey; the text is the reason."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reasoning_gym_survey", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--datasets", nargs="*", help="these data sets instead of all")
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/reasoning-gym-survey")
    parser.add_argument("--state", type=Path, default=ROOT / ".roundhouse", help="keep the converted model here")
    options = parser.parse_args()
    import reasoning_gym

    names = options.datasets or sorted(set(reasoning_gym.factory.DATASETS) - {"composite"})
    directory, _ = converted(bundled_file("smollm2-135m-instruct"), options.state / "cache/converted")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    problems, left_out = list[Problem](), dict[str, str]()
    for name in names:
        try:
            problems += [each for form in options.forms for each in problems_of(name, form, options.tasks, tokenizer)]
        except LeftOut as reason:
            left_out[name] = str(reason)
    answer(problems, tokenizer, directory, options.samples)
    rows = [shown(name, form, problems) for name in names if name not in left_out for form in options.forms]
    facts = {
        "machine": machine(),
        "tasks": options.tasks,
        "samples": options.samples,
        "cpu_seconds": time.process_time(),
    }
    text = json.dumps(facts | {"datasets": rows, "left_out": left_out}, indent=1, ensure_ascii=False)
    options.output.with_suffix(".json").write_text(text + "\n")
    print(table(rows))
    print(json.dumps({"bench": "reasoning-gym-survey", **facts, "datasets": len(rows), "left_out": len(left_out)}))


def problems_of(name: str, form: str, tasks: int, tokenizer: Any) -> Iterator[Problem]:
    """The problems of a data set in one form.

    Raises:
        LeftOut: a prompt or a right answer is too long, or the data set is too slow.
    """
    import reasoning_gym

    if name in SLOW:
        raise LeftOut(SLOW[name])
    level = 0 if reasoning_gym.factory.has_curriculum(name) else None
    keys = {"kind": "reasoning_gym", "dataset": name, "level": level, "train": 1, "heldout": tasks} | FORMS[form]
    environment: Any = load_any(parse_config({"run_id": "survey", "environment": keys}).environment)
    for row in environment.tasks("heldout"):
        messages = row["responses_create_params"]["input"]
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        right = len(tokenizer.encode(str(environment.dataset[row["problem"]]["answer"])))
        if len(prompt) > MAX_PROMPT or right > MAX_ANSWER:
            raise LeftOut(f"a prompt of {len(prompt)} tokens, a right answer of {right}")
        yield Problem(name, form, row, environment, prompt)


def answer(problems: Sequence[Problem], tokenizer: Any, directory: Path, samples: int) -> None:
    """Sample the replies of all problems and score them."""
    config = GenerationConfig(max_model_len=MAX_PROMPT + MAX_NEW, kv_cache_gib=2, engine_args={"block_size": 32})
    engine = VllmGeneration(configure_generation_config(config, tokenizer), str(directory))
    engine.prepare_for_generation()
    asked = [problem for problem in problems for _ in range(samples)]
    draws = [Draw(MAX_NEW, seed=number) for number in range(len(asked))]
    replies = engine.answer([problem.prompt for problem in asked], draws)
    engine.finish_generation()
    for problem, reply in zip(asked, replies, strict=True):
        text = tokenizer.decode(reply.token_ids, skip_special_tokens=True)
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        problem.example = text
        try:
            problem.rewards.append(problem.environment.verify(None, problem.row, {"output": [message]}).reward)
        except Exception:  # noqa: BLE001  # the scorer's own error, at which a rollout of a run fails
            problem.failures += 1


def shown(name: str, form: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """One line of the table."""
    its = [problem for problem in problems if (problem.dataset, problem.form) == (name, form)]
    rewards = [reward for problem in its for reward in problem.rewards]
    return {
        "dataset": name,
        "form": form,
        "reward": round(statistics.fmean(rewards), 4) if rewards else None,
        "whole": round(statistics.fmean(reward >= 1 for reward in rewards), 4) if rewards else None,
        "spread": round(statistics.fmean(len(set(problem.rewards)) > 1 for problem in its), 4),
        "failures": sum(problem.failures for problem in its),
        "prompt_tokens": max(len(problem.prompt) for problem in its),
        "example": [
            its[0].row["question"],
            its[0].environment.dataset[its[0].row["problem"]]["answer"],
            its[0].example,
        ],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The data sets as Markdown, best first."""
    columns = ("dataset", "form", "reward", "whole", "spread", "failures", "prompt_tokens")
    lines = [columns, ["---"] * len(columns)]
    lines += [[row[column] for column in columns] for row in sorted(rows, key=lambda row: -(row["reward"] or 0))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    main()
