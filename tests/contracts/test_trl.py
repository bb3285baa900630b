"""TRL's GRPOTrainer and `kind: dataset` give stored completions the same rewards, with the same functions."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.included_environments import CalculatorEnvironment
from roundhouse.config.loading import parse_config
from roundhouse.config.training import WarmStartPolicy
from roundhouse.environments import load, load_any
from roundhouse.environments.base import Verdict
from roundhouse.policy.warm_start import make_starting_policy

pytestmark = [pytest.mark.contract("trl-1.16.0"), pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
REWARDS = """
import asyncio, re

def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]

def correct(completions, answer, **kwargs):
    return [float(text_of(each).strip() == right) for each, right in zip(completions, answer)]

def short(prompts, completions, **kwargs):
    assert len(prompts) == len(completions)
    return [-0.01 * len(text_of(each)) for each in completions]

async def numbers(completions, hard, **kwargs):
    await asyncio.sleep(0)
    return [sum(map(int, re.findall(r"[0-9]", text_of(each)))) / 7 if easy else None for each, easy in zip(completions, hard)]

def asked(prompts, completions, **kwargs):
    return [text_of(prompt if isinstance(prompt, str) else prompt[-1:]).count("1") for prompt in prompts]

def sometimes(completions, hard, **kwargs):
    return [None if each else 1 for each in hard]
"""
CASES: list[tuple[list[str], list[float], bool]] = [
    (["correct"], [1.0], False),
    (["correct", "short", "numbers"], [1.0, 0.5, -0.25], False),
    (["correct", "asked", "numbers"], [1.0, 2.0, 0.5], True),
    (["sometimes"], [1.0], True),
]
EACH = 250


def stored(functions: list[str], weights: list[float], chat: bool, seed: int) -> dict[str, Any]:
    """Rows with a completion each, as TRL's trainer has them."""
    rng = random.Random(seed)
    rows, completions = [], []
    for number in range(EACH):
        question = f"{number} {rng.randint(0, 99)}+{rng.randint(0, 99)}?"
        answer = str(rng.randint(0, 9))
        text = rng.choice([answer, f" {answer}\n", "", "It is é " + "9" * rng.randint(0, 30)])
        prompt = [{"role": "system", "content": "Count."}, {"role": "user", "content": question}] if chat else question
        rows.append({"prompt": prompt, "answer": answer, "hard": rng.random() < 0.5, "task_id": str(number)})
        completions.append([{"role": "assistant", "content": text}] if chat else text)
    return {"functions": functions, "weights": weights, "rows": rows, "completions": completions}


def ours(case: dict[str, Any], directory: Path) -> list[float | None]:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case["rows"]))
    section = {
        "kind": "dataset",
        "data": str(directory / "rows.jsonl"),
        "reward": [f"{directory}/rewards.py:{name}" for name in case["functions"]],
        "reward_weights": case["weights"],
    }
    environment: Any = load_any(parse_config({"run_id": "r", "environment": section}).environment)
    rows = {row["task_id"]: row for split in ("train", "heldout") for row in environment.tasks(split)}

    async def verdicts() -> list[Verdict]:
        found = []
        for row, completion in zip(case["rows"], case["completions"], strict=True):
            text = completion if isinstance(completion, str) else completion[0]["content"]
            message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            found.append(await environment.verify(None, rows[row["task_id"]], {"output": [message]}))
        return found

    return [None if each.mask else each.reward for each in asyncio.run(verdicts())]


def test_both_commands_of_the_page_train_on_the_same_files(foreign_python: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/from-trl.md").read_text()
    for name in ("rewards.py", "train.py"):
        [code] = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```", page, re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(code)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("logging_steps=1,", "logging_steps=1, use_cpu=True, bf16=False,"))
    environment: Any = load(CalculatorEnvironment())
    rows = [{"question": f"What is {n}*2+1?", "answer": str(2 * n + 1)} for n in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_starting_policy(WarmStartPolicy(steps=1), environment, 0, tmp_path / "model")
    variables = {**os.environ, "PYTHONPATH": str(site_of(foreign_python))}
    theirs = run([sys.executable, "train.py"], tmp_path, variables)
    assert "'reward':" in theirs.replace('"', "'"), theirs
    [command] = re.findall(r"^    (roundhouse train --data .*)$", page, re.MULTILINE)
    keys = ["iterations=1", "generation.backend=trainer", "evaluation.tasks=2", "tracking.sinks=[json_lines]"]
    words = [str(Path(sys.executable).with_name("roundhouse")), *command.split()[1:], "--set", *keys]
    try:
        ours = run(words, tmp_path, dict(os.environ))
    finally:
        run([words[0], "down"], tmp_path, dict(os.environ))
    assert "run_id: rows-correct" in ours
    [line] = (tmp_path / ".roundhouse/metrics/rows-correct.jsonl").read_text().splitlines()[-1:]
    assert "reward/mean" in json.loads(line)


def site_of(python: Path) -> Path:
    """Return the directory of the packages of an environment."""
    return next(python.parents[1].glob("lib/python*/site-packages"))


def run(words: list[str], directory: Path, variables: dict[str, str]) -> str:
    """Return the output of a command that succeeds."""
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, cwd=directory, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_a_thousand_stored_completions_earn_what_they_earn_in_trl(foreign_python: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    cases = [stored(*case, seed) for seed, case in enumerate(CASES)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words = [sys.executable, str(Path(__file__).with_name("trl_rewards.py"))]
    files = [str(tmp_path / name) for name in ("rewards.py", "cases.json", "theirs.json")]
    run([*words, *files], tmp_path, {**os.environ, "PYTHONPATH": str(site_of(foreign_python)), "HF_HUB_OFFLINE": "1"})
    theirs = json.loads((tmp_path / "theirs.json").read_text())
    assert sum(map(len, theirs)) == 1000
    for case, expected in zip(cases, theirs, strict=True):
        rewards = ours(case, tmp_path)
        assert rewards == pytest.approx(expected, abs=1e-5), case["functions"]  # TRL counts in float32
        assert len({*rewards}) > 1
