"""Rows of a data file as tasks, judged by reward functions: `environment: {kind: dataset}`.

Invariants
- Train and held-out share no prompt. A row's split depends on its prompt and `heldout` alone, so that more rows move none. Only
  if a split would be empty, one prompt moves to it.
- A completion that a function cannot judge (it raises, or returns something else than a number or None) fails its rollout. It
  never earns a reward.

A function has one of two forms, by the names of its parameters. It may be `async`.

    def correct(completions, answer, **kwargs):     TRL's: each argument is a list, and so is the result
        return [float(text == right) for text, right in zip(completions, answer)]

    def correct(completion, answer):                plain: one completion, one number
        return float(completion == answer)

TRL calls a function once for a batch. Here it is called once for each rollout, with lists of one: a rollout is judged as soon
as it ends, and a failed rollout does not produce a completion to compare. In TRL's form, a completion is a list of
messages if the row's prompt is one, and a text otherwise; the plain form always gets the text.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import orjson

from roundhouse import plugins
from roundhouse.config.environments import data_source
from roundhouse.environments.base import BadReward, Environment, Split, TaskRow, Verdict
from roundhouse.environments.generated import position
from roundhouse.environments.task_ids import own_id, unused_id
from roundhouse.errors import ConfigError
from roundhouse.imports import load_function

PARAMETERS = "responses_create_params"
RESERVED = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass to a function."""
ONLY_IN_TRL = {
    "completion_ids": "Judge the text; train.algorithm.reward.overlong shortens replies",
    "trainer_state": "Write the reward without it",
    "log_extra": "Print, or return several functions",
    "log_metric": "Name several functions: each is reported",
}
"""Arguments that TRL's trainer passes and a run does not, with the remedy."""


class RewardedDataset(Environment):
    """Rows of one file or Hugging Face data set."""

    name = "dataset"
    restoration = "replay"

    def __init__(
        self,
        data: str,
        reward: str | Sequence[str],
        prompt: str = "prompt",
        reward_weights: Sequence[float] = (),
        heldout: float = 0.2,
        subset: str | None = None,
        split: str = "train",
        limit: int | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: a function cannot be imported, or has parameters of neither form.
        """
        targets = [reward] if isinstance(reward, str) else list(reward)
        names = Counter(target.rpartition(":")[2] for target in targets)
        self._rewards = [
            RewardFunction(target, target if names[target.rpartition(":")[2]] > 1 else target.rpartition(":")[2])
            for target in targets
        ]
        self._weights = list(reward_weights) or [1.0] * len(targets)
        self._prompt = prompt
        self._source = (data, subset, split, limit, prompt, heldout)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """Return the rows of a split, each with its columns as fields.

        Raises:
            ConfigError: the data cannot be read, or lacks a column.
        """
        data = self._source[0]
        file = Path(data)
        stamp = (status.st_mtime_ns, status.st_size) if file.is_file() and (status := file.stat()) else None
        columns, rows = dealt_rows(*self._source, stamp)
        for reward in self._rewards:
            reward.refuse_missing(columns, data)
        return rows[split]

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        columns = {name: value for name, value in row.items() if name != PARAMETERS and name not in RESERVED}
        text, prompt = _reply(response), row[self._prompt]
        # In turn and in this task, which the process watches: it would not notice a further task that blocks.
        values = [await reward.value(prompt, text, columns) for reward in self._rewards]
        scores = {
            reward.name: weight * value
            for reward, weight, value in zip(self._rewards, self._weights, values, strict=True)
            if value is not None
        }
        if not scores:
            return Verdict(0.0, metrics={"unscored": 1.0}, mask=True)
        if len(self._rewards) == 1:
            return Verdict(math.fsum(scores.values()))
        raw = {each.name: value for each, value in zip(self._rewards, values, strict=True) if value is not None}
        return Verdict(math.fsum(scores.values()), scores, raw)


def _reply(response: dict[str, Any]) -> str:
    """Return the policy's text as it wrote it, with its thoughts."""
    parts: list[str] = []
    for item in response.get("output", []):
        if item.get("type") == "reasoning":
            parts += [f"<think>{part.get('text', '')}</think>" for part in item.get("summary", [])]
        elif item.get("type") == "message" and item.get("role") == "assistant":
            parts += [part.get("text", "") for part in item.get("content", [])]
    return "".join(parts)


class RewardFunction:
    """A reward function of the user's, in TRL's form or the plain one."""

    def __init__(self, target: str, name: str) -> None:
        """
        Args:
            name: of its component of the reward.

        Raises:
            ConfigError: it cannot be imported, or has parameters of neither form.
        """
        self.name, self._target = name, target
        self._function = load_function(target, "environment.reward")
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except ValueError as error:  # written in C
            raise ConfigError(f"environment.reward is {target!r}, which shows no parameters: {error}.") from error
        kinds = inspect.Parameter
        named = [each for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        self._parameters = [each.name for each in named]
        self._takes_all = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
        self._required = [each.name for each in named if each.default is kinds.empty]
        self._is_batched = "completions" in self._parameters or (
            self._takes_all and "completion" not in self._parameters
        )
        for parameter, remedy in ONLY_IN_TRL.items():
            if parameter in self._required:
                raise ConfigError(
                    f"environment.reward is {target!r}, which needs {parameter}: only TRL's trainer has it. {remedy}."
                )
        if not self._is_batched and "completion" not in self._parameters:
            raise ConfigError(
                f"environment.reward is {target!r}, with the parameters {', '.join(self._parameters) or '()'}. Name one of "
                "them `completion` (a text; the function returns a number), or `completions` (lists, as in TRL)."
            )

    def refuse_missing(self, columns: Iterable[str], data: str) -> None:
        """Refuse a parameter without a default that is not a column.

        Raises:
            ConfigError: names the parameter and the columns.
        """
        passed = {*columns, "task_id"} - RESERVED
        passed |= {"prompts", "completions"} if self._is_batched else {"prompt", "completion"}
        if missing := [name for name in self._required if name not in passed]:
            raise ConfigError(
                f"environment.reward is {self._target!r}, and its parameter {missing[0]} is not a column of environment.data "
                f"({data}). Its columns: {', '.join(columns)}. Rename the parameter, or give it a default."
            )

    async def value(self, prompt: Any, text: str, columns: Mapping[str, Any]) -> float | None:
        """Return the reward of one completion; None if the function does not apply to it.

        Raises:
            BadReward: the function returned something else.
        """
        arguments: dict[str, Any]
        if self._is_batched:
            completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            arguments = {name: [value] for name, value in columns.items()}
            arguments |= {"prompts": [prompt], "completions": [completion]}
        else:
            arguments = {**columns, "prompt": prompt, "completion": text}
        result = self._function(
            **{name: value for name, value in arguments.items() if self._takes_all or name in self._parameters}
        )
        result = await result if inspect.isawaitable(result) else result
        return self._number(self._only(result) if self._is_batched else result)

    def _only(self, result: Any) -> Any:
        """Return the one element of a batch's result."""
        if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__iter__"):
            raise self._refusal(
                _described(result),
                "A function of `completions` returns a list with a number for each; a function that returns a number has the "
                "parameter `completion`",
            )
        values = list(result)
        if len(values) != 1:
            description = f"{len(values)} rewards ({values!r:.80}) for 1 completion"
            raise self._refusal(description, "Return one for each of `completions`")
        return values[0]

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        remedy = "Return a finite number, or None if the function does not apply"
        if not isinstance(number, Real):
            raise self._refusal(_described(value), remedy)
        if not math.isfinite(number):
            raise self._refusal(str(number), remedy)
        return float(number)

    def _refusal(self, returned: str, remedy: str) -> BadReward:
        return BadReward(f"environment.reward: {self._target} returned {returned}. {remedy}.")


def _described(value: Any) -> str:
    return f"{value!r:.80}, a {type(value).__name__}"


@functools.lru_cache(maxsize=4)
def dealt_rows(
    data: str, subset: str | None, split: str, limit: int | None, prompt: str, heldout: float, stamp: object
) -> tuple[list[str], dict[Split, list[TaskRow]]]:
    """Return the columns of the data, and its task rows by split.

    Args:
        limit: number of rows to read, from the first; None: all.
        stamp: changes with the file.
    """
    if (source := data_source(data)) is None:
        raw_rows = _file_rows(data)
    else:
        raw_rows = plugins.factory("data_source", source)(data.partition(":")[2], subset, split, limit)
    rows = _json_rows(list(islice(raw_rows, limit)), data)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if prompt not in columns:
        raise ConfigError(
            f"environment.prompt is {prompt!r}, but environment.data ({data}) lacks this column. Its columns: "
            f"{', '.join(columns)}. Set environment.prompt to one of them."
        )
    if PARAMETERS in columns:
        raise ConfigError(
            f"environment.data ({data}) has a column {PARAMETERS}, which task rows have for the prompt. Rename it."
        )
    return columns, _split(_task_rows(rows, columns, prompt, data), prompt, heldout)


def _file_rows(data: str) -> list[Any]:
    from roundhouse.environments.row_files import read_rows

    rows = read_rows(data, "environment.data", typed=True)
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"environment.data is {data!r}, and some of its rows are not objects. Write an object for each row."
        )
    return rows


def hub_rows(name: str, subset: str | None, split: str, limit: int | None) -> list[Any]:
    """Return the rows of a Hugging Face data set, `data: hf:NAME`. With a limit the data set is streamed: only its first files
    are downloaded.

    Raises:
        ConfigError: the package datasets is missing, or the data set cannot be loaded.
    """
    data = f"hf:{name}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"environment.data is {data!r}, which needs the package datasets ({error}). Install it: "
            "pip install 'roundhouse[datasets]'. Files that end in .jsonl, .csv or .parquet need nothing."
        ) from error
    try:
        return list(islice(load_dataset(name, subset, split=split, streaming=limit is not None), limit))
    except Exception as error:  # of many types, by the library, its builders and its HTTP client
        raise ConfigError(
            f"environment.data is {data!r} (subset {subset}, split {split}), which cannot be loaded: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Check the name, environment.subset and environment.split."
        ) from error


def _json_rows(rows: Sequence[Any], data: str) -> list[dict[str, Any]]:
    """Return the rows as JSON values, which the store and the other process need.

    Raises:
        ConfigError: rows are missing, or a value is not JSON.
    """
    if not rows:
        raise ConfigError(f"environment.data is {data!r}, which holds no rows. Name a file with rows.")
    try:
        return [orjson.loads(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY, default=_json_value)) for row in rows]
    except TypeError as error:
        raise ConfigError(
            f"environment.data is {data!r}, and some of its values are not JSON: {error}. Remove that column."
        ) from error


def _json_value(value: Any) -> Any:
    from decimal import Decimal

    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"a {type(value).__name__}")


def _task_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str], prompt: str, data: str) -> list[TaskRow]:
    tasks: list[TaskRow] = []
    ids: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        where = f"environment.data ({data}), row {number}"
        task_id = own_id(row, where)
        if task_id is None:
            task_id = unused_id(hashlib.sha256(_canonical(row)).hexdigest()[:12], ids)
        elif task_id in ids:
            raise ConfigError(f"{where}: task_id {task_id!r} is already used on row {ids[task_id]}.")
        ids[task_id] = number
        messages = _messages(row.get(prompt), f"{where}: column {prompt}")
        # A missing column of a row becomes None, as in a data frame.
        tasks.append(
            {**dict.fromkeys(columns), **row, "task_id": task_id, PARAMETERS: {"input": messages, "tools": []}}
        )
    return tasks


def _messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages that a prompt begins a rollout with.

    Raises:
        ConfigError: it is neither a text nor messages.
    """
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt):
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if all(isinstance(each.get("role"), str) and isinstance(each.get("content"), str) for each in messages):
            return messages
    raise ConfigError(
        f"{where} is {prompt!r:.80}. Give a text, or a list of messages with `role` and `content` (a text)."
    )


def _split(tasks: Sequence[TaskRow], prompt: str, heldout: float) -> dict[Split, list[TaskRow]]:
    """Deal the rows by the digests of their prompts; equal prompts stay together."""
    places = {task["task_id"]: position(_canonical(task[prompt]).decode()) for task in tasks}
    ordered = sorted(tasks, key=lambda task: (places[task["task_id"]], task["task_id"]))
    lowest, highest = places[ordered[0]["task_id"]], places[ordered[-1]["task_id"]]

    def is_heldout(task: TaskRow) -> bool:
        place = places[task["task_id"]]
        if not heldout or lowest == highest:
            return False
        return place == lowest or (place < heldout and place != highest)

    return {
        "train": [task for task in ordered if not is_heldout(task)],
        "heldout": [task for task in ordered if is_heldout(task)],
    }


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
