"""The datasets of a configuration's agents, collated: one file of task rows a type.

Invariant: a file is written only if every row of its datasets is a task row; each row names its agent, and stands as often as
its dataset's `num_repeats` says, beside itself (abc -> aabbcc). Metrics that were written before and differ are not replaced
unless that is asked for: they mean that the data changed.

    out/train.jsonl  out/train_metrics.json  out/validation.jsonl  out/validation_metrics.json

Numbers of a set of task rows, in the shape of NeMo Gym's `*_metrics.json`; no I/O.

Invariant: the statistics of several datasets together equal those of their rows in one: sums are kept, not averages.

    {"Number of examples": 2, "Number of tools": {"Total # non-null values": 2, "Average": 1.0, …}, …,
     "level": {…: …}, "subject": {"unique_count": 2, "total_count": 2}}
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roundhouse.compat.nemo_gym.config.datasets import DatasetEntry
from roundhouse.compat.nemo_gym.config.sources import SearchRoots
from roundhouse.compat.nemo_gym.exchange.json_lines import Row, iter_lines, write_rows
from roundhouse.compat.nemo_gym.exchange.task_rows import read_prompt
from roundhouse.environments.task_files import parsed_row
from roundhouse.errors import ConfigError, DataError

Mode = Literal["train_preparation", "example_validation"]
TYPES: dict[Mode, tuple[str, ...]] = {
    "train_preparation": ("train", "validation", "benchmark"),
    "example_validation": ("example",),
}
"""Which types of datasets a mode collates."""


@dataclass(frozen=True, slots=True)
class AgentDataset:
    """A dataset and the agent instance that it belongs to."""

    agent: str
    entry: DatasetEntry


@dataclass(frozen=True, slots=True)
class Collated:
    """A file that was written."""

    path: Path
    metrics_path: Path
    rows: int


def collate(
    datasets: Sequence[AgentDataset], directory: Path, roots: SearchRoots, *, mode: Mode, overwrite: bool = False
) -> list[Collated]:
    """Collate all datasets of the mode's types.

    Raises:
        ConfigError: a dataset's file is nowhere under the search roots.
        DataError: a line is no task row, or metrics differ from those that were written before.
    """
    written = []
    for kind in TYPES[mode]:
        own = [dataset for dataset in datasets if dataset.entry.type == kind]
        if not own:
            continue
        metrics = DatasetMetrics()
        path = directory / f"{kind}.jsonl"
        rows = write_rows(path, _rows(own, roots, metrics))
        metrics_path = directory / f"{kind}_metrics.json"
        _write_metrics(metrics_path, own[0].entry.model_dump(mode="json") | metrics.shown(), overwrite)
        written.append(Collated(path, metrics_path, rows))
    return written


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """What `before` has and `after` has otherwise, by path. What is only in `after` is no difference."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = [f"{path}.{name} is gone" for name in before.keys() - after.keys()]
        for name in before.keys() & after.keys():
            found += differences(before[name], after[name], f"{path}.{name}")
        return found
    numbers = isinstance(before, int | float) and isinstance(after, int | float)
    if before == after or (numbers and math.isclose(before, after, rel_tol=0, abs_tol=5e-3)):
        return []
    return [f"{path} was {before!r} and is {after!r}"]


def _rows(datasets: Sequence[AgentDataset], roots: SearchRoots, metrics: DatasetMetrics) -> Iterator[Row]:
    for dataset in datasets:
        entry = dataset.entry
        path = roots.find(entry.jsonl_fpath)
        if path is None:
            raise ConfigError(
                f"The dataset {entry.name!r} of {dataset.agent} is not there: {entry.jsonl_fpath} lies under none of "
                f"{', '.join(map(str, roots.roots))}. Fetch it, or add its directory to the search roots."
            )
        prompt_uri = getattr(entry, "prompt_config", None)
        prompt = None if prompt_uri is None else read_prompt(str(roots.find(prompt_uri) or prompt_uri))
        for number, line in iter_lines(path):
            where = f"{path}, line {number}"
            row = parsed_row(line, where, needs_input=prompt is None)
            if prompt is not None:
                row = prompt.applied(row, where)
            metrics.observe(row, entry.num_repeats)
            row["agent_ref"] = {"type": "responses_api_agents", "name": dataset.agent}
            for _ in range(entry.num_repeats):
                yield row


def _write_metrics(path: Path, metrics: dict[str, Any], overwrite: bool) -> None:
    text = json.dumps(metrics, indent=4)
    if path.exists() and not overwrite and (found := differences(json.loads(path.read_bytes()), metrics)):
        conflict = path.with_name(f"{path.stem}_conflict.json")
        conflict.write_text(text)
        raise DataError(
            f"{path} has other numbers than the data: {'; '.join(found[:5])}. The new ones are in {conflict.name}. "
            "Delete the file, or collate with --overwrite, if the data was meant to change."
        )
    path.write_text(text)


TOOLS, WORDS = "Number of tools", "Json-dumped number of words (proxy for token count)"
TURNS, TEMPERATURE = "Number of turns", "Temperature"


@dataclass(slots=True)
class Spread:
    """Average, extremes and deviation of a number; constant memory (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""
    least: float = math.inf
    most: float = -math.inf

    def observe(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    def shown(self) -> dict[str, float]:
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        numbers = {
            "Average": self.mean,
            "Min": self.least if self.count else 0.0,
            "Max": self.most if self.count else 0.0,
            "Standard deviation": deviation,
        }
        return {"Total # non-null values": self.count} | {name: _rounded(value) for name, value in numbers.items()}


@dataclass(slots=True)
class DatasetMetrics:
    """Takes rows one by one."""

    examples: int = 0
    spreads: dict[str, Spread] = field(
        default_factory=lambda: {name: Spread() for name in (TOOLS, WORDS, TURNS, TEMPERATURE)}
    )
    numbers: dict[str, Spread] = field(default_factory=dict)
    """Of the verifier's fields that hold numbers, or lists with numbers."""
    texts: dict[str, Counter[str]] = field(default_factory=dict)
    """Of those that hold texts."""

    def observe(self, row: Row, times: int = 1) -> None:
        """Take a row into account, as often as it is repeated."""
        for _ in range(times):
            self.examples += 1
            self._params(row["responses_create_params"])
            for name, value in row.items():
                if name not in ("responses_create_params", "response"):
                    self._field(name, value if isinstance(value, list) else [value])

    def shown(self) -> dict[str, Any]:
        """As the file has it."""
        fields = {name: spread.shown() for name, spread in self.numbers.items()}
        counts = {
            name: {"unique_count": len(found), "total_count": sum(found.values())} for name, found in self.texts.items()
        }
        return {
            "Number of examples": self.examples,
            **{name: spread.shown() for name, spread in self.spreads.items()},
            **fields,
            **counts,
        }

    def _params(self, params: Row) -> None:
        given = params.get("input")
        items = [{"role": "user"}] if isinstance(given, str) else given or []
        turns = sum(item.get("role") == "user" for item in items)
        tools, temperature = params.get("tools"), params.get("temperature")
        self.spreads[WORDS].observe(len(json.dumps(params).split()))
        for name, value in (
            (TOOLS, None if tools is None else len(tools)),
            (TURNS, turns or None),
            (TEMPERATURE, temperature),
        ):
            if value is not None:
                self.spreads[name].observe(value)

    def _field(self, name: str, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, int | float) and name not in self.texts:
                self.numbers.setdefault(name, Spread()).observe(value)
            elif isinstance(value, str) and name not in self.numbers:
                self.texts.setdefault(name, Counter())[value] += 1


def _rounded(value: float) -> float:
    return round(float(value), 2 if abs(value) >= 1 else 3)
