"""NeMo Gym's integration patterns by the names of its guide: as environment, as data source, and its helper by itself.

async with GymSource(…) as source:                                   any `RolloutSource` of plugins.nemo_gym
    results = await NemoGym(source).run_rollouts(examples, tokenizer)        pattern 1
    save_jsonl(await RolloutCollectionHelper(source).run_examples(examples), "rollouts.jsonl")       pattern 2
training_data = load_jsonl("rollouts.jsonl")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import DataError
from roundhouse.plugins.nemo_gym.exchange.outgoing import message_log
from roundhouse.plugins.nemo_gym.exchange.stream import RolloutSource, run_rollouts
from roundhouse.text_files import numbered_lines, parse_json

Row = dict[str, Any]


class RolloutCollectionHelper:
    """Plays examples at a source, in parallel; results in their order."""

    def __init__(self, source: RolloutSource, concurrency: int | None = None) -> None:
        self._source, self._concurrency = source, concurrency

    async def run_examples(self, examples: Sequence[Row]) -> list[Row]:
        """Return the result of each example.

        Raises:
            InfraError, DataError: of the first example that failed, after all have ended.
        """
        outcomes = await run_rollouts(examples, self._source, self._concurrency)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.result or {} for outcome in outcomes]


class NemoGym:
    """NeMo Gym as an environment of a training loop: rollouts with their tokens."""

    def __init__(self, source: RolloutSource, concurrency: int | None = None) -> None:
        self.rollout_helper = RolloutCollectionHelper(source, concurrency)

    async def run_rollouts(self, examples: Sequence[Row], tokenizer: Any = None) -> list[Row]:
        """Return training data of each example, in their order; `tokenizer` decodes the messages, if it is given."""
        results = await self.rollout_helper.run_examples(examples)
        return [self._postprocess(result, tokenizer) for result in results]

    def _postprocess(self, result: Row, tokenizer: Any = None) -> Row:
        """Return `message_log`, `input_message_log`, `reward` and `full_result`.

        Raises:
            DataError: an item lacks tokens, or a prompt does not continue the tokens before it.
        """
        messages = message_log(result)
        if tokenizer is not None:
            for message in messages:
                message["content"] = tokenizer.decode(message["token_ids"])
        return {
            "message_log": messages,
            "input_message_log": messages[:1],
            "reward": result.get("reward"),
            "full_result": result,
        }


Penguin = NemoGym
"""The name in NeMo Gym's guide."""


def save_jsonl(rows: Iterable[Row], path: str | Path) -> None:
    """Write a JSON object a line."""
    Path(path).write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def load_jsonl(path: str | Path) -> list[Row]:
    """Return the objects of a file.

    Raises:
        DataError: names the line that is not a JSON object.
    """
    with open(path, "rb") as file:
        rows = [
            (number, parse_json(line, f"{path}, line {number}")) for number, line in numbered_lines(file, str(path))
        ]
    for number, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is not a JSON object.")
    return [row for _, row in rows]
