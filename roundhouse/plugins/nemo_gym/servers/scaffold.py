"""A new environment, as files to start from (`roundhouse gym init`).

Invariant: the written files work: the test passes, the configurations start, and the example rows come from the class.
Nothing that exists is overwritten.

    words/environment.py        the class: tasks, a tool, a verifier, demonstrations for a warm start
    words/run.yaml              a run on it, for `roundhouse train`

and, unless the caller wants these two alone,

    words/test_environment.py   its author's claims
    words/example.jsonl         five task rows
    words/gym.yaml              its server, for `roundhouse gym start`
    words/README.md             how to train on it
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template

import orjson

from roundhouse.errors import ConfigError

EXAMPLES = 5

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_ENVIRONMENT = '''"""$title: say a word backwards. Replace tasks, tool and verifier by your own.

Invariant: the reward depends on the row and on the policy's last message alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from roundhouse.plugins.nemo_gym.exchange.json_lines import read_rows
from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, final_text, task_row, tool
from roundhouse.environments.generated import Message, calls, returns, says, user

WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("engine", "signal", "tunnel", "whistle", "platform", "carriage", "junction", "steam"),
    "heldout": (
        "station", "bridge", "ticket", "freight", "cargo", "parcel",
        "luggage", "terminal", "guard", "coach", "timetable", "canal",
    ),
}


class $class_name(Environment):
    """One word a task; the tool spells it.

    Args:
        train, heldout: files of JSON lines, each {"word": …}; WORDS where they are left out. They are keys of
            `environment.parameters` in run.yaml.
    """

    name = "$name"

    def __init__(self, train: str | None = None, heldout: str | None = None) -> None:
        files: dict[Split, str | None] = {"train": train, "heldout": heldout}
        self.words = {split: WORDS[split] if file is None else _read(file) for split, file in files.items()}

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [
            task_row(
                _prompt(word),
                task_id=f"$name/{split}/{word}",
                tools=self.tool_schemas(),
                word=word,
            )
            for word in self.words[split]
        ]

    @tool("Spell a word, one letter a line.", word="The word.")
    async def spell(self, session: None, word: str) -> str:
        return "\\n".join(word)

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(reward=float(final_text(response).strip() == row["word"][::-1]))

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[Message]]:
        """Conversations for a policy that is made from nothing (`policy.kind: warm_start`); a pretrained one needs none."""
        rng = random.Random(seed)
        shown = []
        for _ in range(count):
            word = rng.choice(self.words[split])
            answer = word[::-1] if rng.random() < good_fraction else word
            spelt = [calls("spell", "call_1", word=word), returns("call_1", "\\n".join(word))]
            shown.append([user(_prompt(word)), *spelt, says(answer)])
        return shown


def _prompt(word: str) -> str:
    return f"Say the word {word!r} backwards. Answer with the reversed word alone."


def _read(file: str) -> tuple[str, ...]:
    return tuple(row["word"] for row in read_rows(file))
'''

_TEST = '''"""What holds for $title."""

import asyncio
from typing import Any

from roundhouse.rollout.clients import verdict_on
from roundhouse.rollout.clients import LocalEnvironmentClient

from $name.environment import $class_name

environment = LocalEnvironmentClient($class_name())


def answer(row: dict[str, Any], text: str) -> float:
    return asyncio.run(verdict_on(environment, row, text)).reward


def test_the_right_answer_is_rewarded_and_another_is_not() -> None:
    for row in environment.tasks("train"):
        assert answer(row, row["word"][::-1]) == 1.0
        assert answer(row, row["word"]) == 0.0


def test_the_tool_spells() -> None:
    async def spelt() -> str:
        session = await environment.seed_session(environment.tasks("train")[0])
        return (await session.call_tool("spell", {"word": "ab"})).text

    assert asyncio.run(spelt()) == "a\\nb"


def test_no_held_out_task_is_trained_on() -> None:
    def words(split: Any) -> set[str]:
        return {row["word"] for row in environment.tasks(split)}

    assert words("train").isdisjoint(words("heldout"))
'''

_GYM = """# roundhouse gym start $name/gym.yaml ++policy_base_url=http://127.0.0.1:8000/v1
policy_base_url: ???
policy_model_name: policy
$name:
  resources_servers:
    roundhouse_environment:
      environment: {kind: custom, target: "$name.environment:$class_name"}
${name}_agent:
  responses_api_agents:
    roundhouse_agent:
      resources_server: {type: resources_servers, name: $name}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
      - {name: example, type: example, jsonl_fpath: $name/example.jsonl}
policy_model:
  responses_api_models:
    roundhouse_model:
      base_url: $${policy_base_url}
      model: $${policy_model_name}
"""

_RUN = """# roundhouse train $name/run.yaml
run_id: $name
iterations: 10

policy: {kind: warm_start} # or {kind: pretrained, path: <Hugging Face directory>}

environment:
  kind: custom
  target: $${CONFIG_DIR}/environment.py:$class_name
  # parameters: {train: $${CONFIG_DIR}/train.jsonl, heldout: $${CONFIG_DIR}/heldout.jsonl} # your own data

generation:
  backend: trainer # it answers, too: a small model needs no engine. Without this line, vLLM on Ray Serve does
  max_model_len: 256
  sampling: {temperature: 1.0, max_new_tokens: 32}

rollout: {prompts_per_iteration: 8, group_size: 8, max_turns: 3}
train:
  minibatches: 4
  optimizer: {learning_rate: 3.0e-4, warmup_steps: 3}
evaluation: {every: 5, tasks: 12, samples: 4}
"""

_README = """# $title

Test: `pytest $name`. Train: `roundhouse train $name/run.yaml`. Your own data: JSON lines, named in `environment.parameters`
there. Serve: `roundhouse gym start $name/gym.yaml ++policy_base_url=<engine>/v1`.
"""


def write_environment(name: str, directory: Path, *, is_minimal: bool = False) -> list[Path]:
    """Write the files, or the class and its run alone; return their paths.

    Raises:
        ConfigError: the name cannot be a module's, or the directory exists.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be an environment's name: small letters, digits and underscores, a letter first."
        )
    place = directory / name
    if place.exists():
        raise ConfigError(f"{place} exists; choose another name, or remove it.")
    words = {
        "name": name,
        "title": name.replace("_", " ").capitalize(),
        "class_name": "".join(part.capitalize() for part in name.split("_")),
    }
    place.mkdir(parents=True)
    texts = {"environment.py": _ENVIRONMENT, "run.yaml": _RUN}
    if not is_minimal:
        texts |= {"__init__.py": "", "test_environment.py": _TEST, "gym.yaml": _GYM, "README.md": _README}
    for file_name, text in texts.items():
        (place / file_name).write_text(Template(text).substitute(words))
    if is_minimal:
        return [place / file_name for file_name in texts]
    spec = importlib.util.spec_from_file_location(f"{name}_example", place / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = getattr(module, words["class_name"])().tasks("train")[:EXAMPLES]
    (place / "example.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return [place / file_name for file_name in [*texts, "example.jsonl"]]
