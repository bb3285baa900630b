"""The datasets of a configuration's agents, collated: one file of task rows a type.

Invariant: a file is written only if every row of its datasets is a task row; each row names its agent, and stands as often as
its dataset's `num_repeats` says, beside itself (abc -> aabbcc). Metrics that were written before and differ are not replaced
unless that is asked for: they mean that the data changed.

    out/train.jsonl  out/train_metrics.json  out/validation.jsonl  out/validation_metrics.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roundhouse.compat.nemo_gym.config.datasets import DatasetEntry
from roundhouse.compat.nemo_gym.config.sources import SearchRoots
from roundhouse.compat.nemo_gym.exchange.dataset_metrics import DatasetMetrics
from roundhouse.compat.nemo_gym.exchange.json_lines import Row, iter_lines, write_rows
from roundhouse.compat.nemo_gym.exchange.prompts import read_prompt
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
