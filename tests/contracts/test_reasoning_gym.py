"""reasoning-gym's own package: all data sets load, and each reply has the score that the package gives by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from roundhouse.config.loading import load_config, parse_config
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.reasoning_gym.environment import BY_HASH

pytestmark = [pytest.mark.contract("reasoning-gym-0.1.25"), pytest.mark.timeout(900)]
RECIPE = Path(__file__).parents[2] / "docs/examples/reasoning-gym.yaml"
PEER = Path(__file__).parent / "reasoning_gym_peer.py"
SIZE, SEED = 3, 7


@pytest.fixture(autouse=True)
def package(foreign_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable in this process, after all installed packages."""
    [site] = (foreign_python.parent.parent / "lib").glob("python3.*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


def made(**keys: Any) -> Any:
    return load_any(parse_config({"run_id": "r", "environment": {"kind": "reasoning_gym", **keys}}).environment)


def reply(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"output": [{"type": "message", "role": "assistant", "content": content}]}


def played(python: Path, file: Path, hash_seed: str) -> dict[str, Any]:
    """Scores of the package by itself."""
    variables = {**os.environ, "PYTHONHASHSEED": hash_seed}
    subprocess.run([str(python), str(PEER), str(SIZE), str(SEED), str(file)], env=variables, check=True)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", sorted(BY_HASH))
def test_a_data_set_that_depends_on_hashes_needs_a_fixed_seed_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=f"{name} .*PYTHONHASHSEED=0"):
        made(dataset=name)
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as an operator sets it before the run
    environment = made(dataset=name, train=3, heldout=1)
    row = environment.tasks("train")[0]
    right = environment.dataset[row["problem"]]["answer"]
    assert environment.verify(None, row, reply(f"<answer>{right}</answer>")).reward == 1.0


def test_all_data_sets_load_and_score_replies_as_the_package_does(foreign_python: Path, tmp_path: Path) -> None:
    theirs, again = (played(foreign_python, tmp_path / seed, seed) for seed in ("5", "6"))
    assert {name for name in theirs if theirs[name] != again[name]} == BY_HASH
    compared, others = 0, {}
    for name, problems in theirs.items():
        if name in BY_HASH:
            continue
        environment = made(dataset=name, train=SIZE - 1, heldout=1, seed=SEED, prompt=None)
        rows = {row["problem"]: row for split in ("train", "heldout") for row in environment.tasks(split)}
        for number, row in rows.items():
            assert row["responses_create_params"]["input"][-1]["content"] == problems[number]["question"]
            for text, score in problems[number]["scores"].items():
                if isinstance(score, str):
                    continue  # the package's scorer raised an error
                ours = environment.verify(None, json.loads(json.dumps(row)), reply(text)).reward
                compared += 1
                if ours != score:
                    others[name, number, text] = (ours, score)
    assert not others
    assert len(theirs) >= 100
    assert compared >= 1000


def test_a_composite_judges_each_problem_by_its_data_set() -> None:
    parts = {"chain_sum": {"weight": 2, "level": 1}, "letter_counting": {"options": {"max_words": 6}}}
    environment = made(datasets=parts, train=20, heldout=5)
    gym = environment.dataset
    sources = {gym[number]["metadata"]["source_dataset"] for number in range(25)}
    assert sources == set(parts)
    row = environment.tasks("train")[0]
    right = gym[row["problem"]]["answer"]
    assert environment.verify(None, row, reply(f"<answer>{right}</answer>")).reward == 1.0


def test_the_level_of_a_curriculum_sets_options_that_are_not_given() -> None:
    easy, hard, own = (
        made(dataset="chain_sum", **keys).dataset.config
        for keys in ({"level": 0}, {"level": 3}, {"level": 3, "options": {"max_terms": 9, "min_terms": 9}})
    )
    assert easy.max_terms < hard.max_terms
    assert (own.min_terms, own.max_terms, own.max_digits) == (9, 9, hard.max_digits)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums'. Did you mean chain_sum"),
        ({"dataset": "chain_sum", "options": {"terms": 2}}, "Its options: min_terms, max_terms"),
        ({"dataset": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, "do not fit reasoning-gym's chain_sum"),
        ({"dataset": "chain_sum", "prompt": "x"}, "environment.prompt is 'x'; reasoning-gym has DeepSeekZero, default"),
        ({"dataset": "chain_sum", "datasets": {"lcm": {}}}, "environment has both of dataset and datasets"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_the_right_ones(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(**keys)
    assert text in str(error.value)


def test_a_row_of_another_version_fails_instead_of_a_wrong_reward() -> None:
    environment = made(dataset="chain_sum", prompt=None, answer="text")
    row = environment.tasks("train")[0] | {"question": "What is 1 + 1?"}
    with pytest.raises(DataError, match="Use the version of reasoning-gym"):
        environment.verify(None, row, reply("2"))


def test_the_shipped_recipe_trains_on_no_held_out_problem() -> None:
    environment = load_any(load_config(RECIPE).environment)
    train, heldout = ({row["question"] for row in environment.tasks(split)} for split in ("train", "heldout"))
    assert train
    assert heldout
    assert train.isdisjoint(heldout)


def test_the_solved_problems_of_the_shipped_recipe_are_right_and_in_neither_split() -> None:
    config = load_config(RECIPE)
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        Path(config.policy.chat_template).read_text()
    )
    shown = template.render(messages=[{"role": "user", "content": "?"}], add_generation_prompt=True)
    user, assistant, end = (
        re.escape(text) for text in ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n")
    )
    solved = dict(re.findall(f"{user}(.*?){end}{assistant}(.*?){end}", shown, re.DOTALL))
    assert sorted(solved.values()) == ["father", "husband", "mother", "son", "wife"]
    source = made(dataset="family_relationships", level=0, seed=1_000_000, train=60, heldout=1).dataset
    assert solved.items() <= {source[number]["question"]: source[number]["answer"] for number in range(60)}.items()
    environment = load_any(config.environment)
    assert not solved.keys() & {row["question"] for split in ("train", "heldout") for row in environment.tasks(split)}
