"""Task rows of a collection: one for each rollout of each task, prompt templates, and the datasets of a configuration.

Invariants: two rows of one collection differ in (`_ng_task_index`, `_ng_rollout_index`). Lines with the same text are
one task, unless they carry an index. A row changes only as requested. All faulty lines are reported together.

    a b c, 2 repeats  ->  a/0 a/1 b/0 b/1 c/0 c/1
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import fsspec
import orjson
import yaml

from roundhouse.config.yaml_text import load_yaml
from roundhouse.environments.task_files import parsed_row
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_gym.config.instances import DatasetEntry
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
from roundhouse.plugins.nemo_gym.exchange.json_lines import ROLLOUT, TASK, Row, write_rows
from roundhouse.plugins.nemo_gym.exchange.outgoing import is_index
from roundhouse.text_files import decode_text, iter_lines

DEFAULT = "_default"
"""Name in a table of repeats that means every other agent."""
MOST_SHOWN = 10
"""Lines at fault that are quoted in an error."""


_NO_COUNTERPART = "without a counterpart here"
COLLECTION_KEYS: dict[str, str] = {
    "input_jsonl_fpath": "the option --input here",
    "output_jsonl_fpath": "the option --output here",
    "agent_name": "the option --agent here",
    "head_server": "the option --head URL here",
    "limit": "the option --limit here",
    "num_repeats": "the option --num-repeats here",
    "num_samples_in_parallel": "the option --concurrency here; 0: all at once",
    "resume_from_cache": "the option --resume here",
    "prompt_config": "the option --prompt-config here",
    "disable_aggregation": "the option --disable-aggregation here",
    "require_complete": "the option --require-complete here",
    "route_failures_to_sidecar": "the rule here: a failed row never ends a collection. Leave it out",
    "agent_map": f"{_NO_COUNTERPART}: name the agent in each row (agent_ref), or --agent",
    "fan_out": f"{_NO_COUNTERPART}: collect once for each agent, with --agent and another --output",
    "interleave_repeats": f"{_NO_COUNTERPART}: collect once for each repeat, with another --output",
    "skills": f"{_NO_COUNTERPART}: write skills_ref into the rows",
    "environment_routing_mode": f"{_NO_COUNTERPART}: name the agent in each row (agent_ref), or --agent",
    "environment_server_name": f"{_NO_COUNTERPART}: name the agent in each row (agent_ref), or --agent",
    "environment_server_routes": f"{_NO_COUNTERPART}: name the agent in each row (agent_ref), or --agent",
    "dispatch_budget_s": f"{_NO_COUNTERPART}: end the collection with SIGTERM, continue with --resume",
    "drain_margin_s": f"{_NO_COUNTERPART}: end the collection with SIGTERM, continue with --resume",
    "count_failure_classes_as_zero": f"{_NO_COUNTERPART}: a failed rollout counts in no mean",
    "count_missing_rollouts_as_zero": f"{_NO_COUNTERPART}: a missing rollout counts in no mean",
}
"""Keys of NeMo Gym's collection command, and our option for each."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Number of rollouts of a row: one number for all, or by agent."""

    all: int | None = 1
    by_agent: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Repeats:
        """Make it from 4, None (1), or {agent: 4, _default: 1}.

        Raises:
            ConfigError: another form, or a number below 1.
        """
        if value is None:
            return cls()
        if isinstance(value, Mapping) and value and all(map(_is_count, value.values())):
            return cls(None, dict(value))
        if _is_count(value):
            return cls(value)
        raise ConfigError(
            f"num_repeats is {value!r}: give a whole number from 1, or {{agent: number, {DEFAULT}: number}}."
        )

    def of_agent(self, name: str) -> int:
        """
        Raises:
            DataError: the table has neither the agent nor a default.
        """
        count = self.all if self.all is not None else self.by_agent.get(name, self.by_agent.get(DEFAULT))
        if count is None:
            raise DataError(
                f"num_repeats names neither the agent {name!r} nor {DEFAULT}; it has {', '.join(self.by_agent)}."
            )
        return count


@dataclass(frozen=True, slots=True)
class Materialization:
    """Changes that are made to the rows of a file."""

    agent: str | None = None
    """For rows that name none."""
    limit: int | None = None
    """Rows to take."""
    repeats: Repeats = Repeats()
    add_seed: bool = False
    """Ask the engine for seed = rollout index, by `metadata.extra_body`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Replaces fields of `responses_create_params`."""
    prompt: PromptTemplate | None = None
    agents: frozenset[str] | None = None
    """The agents that can play rows; None: any."""


def materialize(uri: str, how: Materialization) -> list[Row]:
    """The rows of a file, one for each rollout.

    Raises:
        DataError: it cannot be read, holds no row, or has lines at fault; the text names them.
    """
    lines = iter_lines(uri)
    rows = expanded(islice(lines, how.limit), how, uri)
    if not rows:
        raise DataError(f"{uri} holds no task rows: one JSON object a line is needed.")
    return rows


def expanded(lines: Iterable[tuple[int, bytes]], how: Materialization, name: str) -> list[Row]:
    """The rows of numbered lines of the file `name`, one for each rollout."""
    tasks: dict[bytes, int] = {}
    rollout_counts: Counter[Any] = Counter()
    faults: list[str] = []
    rows: list[Row] = []
    for number, line in lines:
        try:
            where = f"{name}, line {number}"
            task_row = parsed_row(line, where, needs_input=how.prompt is None)
            if how.prompt is not None:
                task_row = how.prompt.applied(task_row, where)
            if how.agent is not None:
                task_row.setdefault("agent_ref", {"name": how.agent})
            agent = task_row.get("agent_ref")
            if not isinstance(agent, dict) or not isinstance(agent.get("name"), str):
                raise DataError(f"{where} names no agent: name one for all rows, or put agent_ref.name into it.")
            if how.agents is not None and agent["name"] not in how.agents:
                raise DataError(f"{where} names the agent {agent['name']!r}. {_nearest(agent['name'], how.agents)}")
            if not _is_metadata(task_row["responses_create_params"].get("metadata")):
                raise DataError(
                    f"{where}: the values of responses_create_params.metadata are texts. Write JSON into a text."
                )
            if TASK in task_row and not is_index(task_row[TASK]):
                raise DataError(f"{where} has {TASK} {task_row[TASK]!r}. Set a whole number from 0, or remove it.")
            task_row["responses_create_params"] = task_row["responses_create_params"] | how.params
            row, repeats = task_row, how.repeats.of_agent(agent["name"])
        except DataError as error:
            faults.append(str(error))
            continue
        if TASK not in row:
            row[TASK] = tasks.setdefault(line.rstrip(b"\r\n"), len(tasks))
        for _ in range(repeats):
            rollout_index = rollout_counts[row[TASK]]
            copy = row | {ROLLOUT: rollout_index}
            if how.add_seed:
                params = row["responses_create_params"]
                metadata = params.get("metadata") or {}
                body = orjson.loads(metadata.get("extra_body") or "{}") | {"seed": rollout_index}
                copy["responses_create_params"] = params | {
                    "metadata": metadata | {"extra_body": orjson.dumps(body).decode()}
                }
            rows.append(copy)
            rollout_counts[row[TASK]] += 1
    if faults:
        more = f"\n  … and {len(faults) - MOST_SHOWN} more" if len(faults) > MOST_SHOWN else ""
        listing = "".join(f"\n  {fault}" for fault in faults[:MOST_SHOWN])
        raise DataError(f"{len(faults)} line(s) of {name} are not task rows:{listing}{more}")
    return rows


def _nearest(name: str, agents: Iterable[str]) -> str:
    agents = sorted(agents)
    near = difflib.get_close_matches(name, agents, n=1)
    return f"Did you mean {near[0]}?" if near else f"Available: {', '.join(agents)}."


def _is_metadata(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(one, str) for one in value.values()))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Templates of a prompt configuration: they make a row's conversation from its fields.

    A row has an input or a template makes it, never both. A placeholder without a field of the row is refused with the
    line.

        {system: "Be brief.", user: "{question} Options: {options[0]}"}      {{ and }} give braces
    """

    user: str
    system: str | None = None

    def applied(self, row: Row, where: str) -> Row:
        """A copy of the row with `responses_create_params.input` made; its other parameters stay.

        Raises:
            DataError: the row has an input already, or lacks a field.
        """
        params = row.get("responses_create_params") or {}
        if not isinstance(params, dict) or params.get("input"):
            raise DataError(
                f"{where} has responses_create_params.input already; a prompt configuration would replace it."
            )
        messages = []
        for role, template in (("system", self.system), ("user", self.user)):
            if template is None:
                continue
            try:
                messages.append({"role": role, "content": template.format_map(row)})
            except KeyError as error:
                raise DataError(
                    f"{where}: the prompt names the field {error}; the row has {', '.join(row)}."
                ) from error
            except (ValueError, IndexError, AttributeError, TypeError) as error:
                raise DataError(
                    f"{where}: the prompt {template!r} cannot be filled: {error}. Braces are doubled: {{{{."
                ) from error
        return row | {"responses_create_params": params | {"input": messages}}


def read_prompt(uri: str) -> PromptTemplate:
    """Read a prompt configuration (YAML).

    Raises:
        ConfigError: it cannot be read, or is not {user: text, system?: text}.
    """
    try:
        with fsspec.open(uri, "rb") as file:
            prompt: Any = load_yaml(decode_text(file.read(), uri))
    except (OSError, ValueError, ImportError, yaml.YAMLError, DataError) as error:
        raise ConfigError(f"The prompt configuration {uri} cannot be read: {error}") from error
    known = isinstance(prompt, dict) and isinstance(prompt.get("user"), str)
    if not known or not isinstance(prompt.get("system"), str | None):
        raise ConfigError(f"The prompt configuration {uri} needs `user`, a text, and may have `system`, a text.")
    return PromptTemplate(prompt["user"], prompt.get("system"))


Mode = Literal["train_preparation", "example_validation"]
TYPES: dict[Mode, tuple[str, ...]] = {
    "train_preparation": ("train", "validation", "benchmark"),
    "example_validation": ("example",),
}
"""Types of datasets that a mode collates."""


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
    """Collate all datasets of the mode's types: one file of task rows for each type.

    A file is written only if every row of its datasets is a task row. Each row names its agent, and is repeated
    `num_repeats` times, consecutively (abc -> aabbcc). Metrics on disk that differ are replaced only on request,
    because a difference means that the data changed.

        out/train.jsonl  out/train_metrics.json  out/validation.jsonl  out/validation_metrics.json

    Raises:
        ConfigError: a dataset's file is under none of the search roots.
        DataError: a line is not a task row, or metrics differ from those on disk.
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
        summary = own[0].entry.model_dump(mode="json") | metrics.shown()
        text = json.dumps(summary, indent=4)
        if (
            metrics_path.exists()
            and not overwrite
            and (changes := differences(json.loads(metrics_path.read_bytes()), summary))
        ):
            conflict = metrics_path.with_name(f"{metrics_path.stem}_conflict.json")
            conflict.write_text(text)
            raise DataError(
                f"{metrics_path} has other numbers than the data: {'; '.join(changes[:5])}. The new ones are in "
                f"{conflict.name}. Delete the file, or collate with --overwrite, if the data was meant to change."
            )
        metrics_path.write_text(text)
        written.append(Collated(path, metrics_path, rows))
    return written


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the values of `before` that differ in `after`, by path. Further values of `after` are not differences."""
    if isinstance(before, dict) and isinstance(after, dict):
        changes = [f"{path}.{name} is gone" for name in before.keys() - after.keys()]
        for name in before.keys() & after.keys():
            changes += differences(before[name], after[name], f"{path}.{name}")
        return changes
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
        return {"Total # non-null values": self.count} | {
            name: round(float(value), 2 if abs(value) >= 1 else 3) for name, value in numbers.items()
        }


@dataclass(slots=True)
class DatasetMetrics:
    """Metrics of a set of task rows, in the shape of NeMo Gym's `*_metrics.json`; it takes rows one by one.

    The statistics of several datasets together equal those of their rows in one: sums are kept, not averages.

        {"Number of examples": 2, "Number of tools": {"Total # non-null values": 2, "Average": 1.0, …}, …,
         "level": {…: …}, "subject": {"unique_count": 2, "total_count": 2}}
    """

    examples: int = 0
    spreads: dict[str, Spread] = field(
        default_factory=lambda: {name: Spread() for name in (TOOLS, WORDS, TURNS, TEMPERATURE)}
    )
    numbers: dict[str, Spread] = field(default_factory=dict)
    """The verifier's fields that hold numbers, or lists with numbers."""
    texts: dict[str, Counter[str]] = field(default_factory=dict)
    """The verifier's fields that hold texts."""

    def observe(self, row: Row, times: int = 1) -> None:
        """Take a row into account, as often as it is repeated."""
        for _ in range(times):
            self.examples += 1
            params = row["responses_create_params"]
            conversation, tools = params.get("input"), params.get("tools")
            items = [{"role": "user"}] if isinstance(conversation, str) else conversation or []
            turns = sum(item.get("role") == "user" for item in items)
            self.spreads[WORDS].observe(len(json.dumps(params).split()))
            numbers = {TOOLS: None if tools is None else len(tools), TURNS: turns or None}
            for name, number in (numbers | {TEMPERATURE: params.get("temperature")}).items():
                if number is not None:
                    self.spreads[name].observe(number)
            for name, column in row.items():
                if name in ("responses_create_params", "response"):
                    continue
                for value in column if isinstance(column, list) else [column]:
                    if isinstance(value, int | float) and name not in self.texts:
                        self.numbers.setdefault(name, Spread()).observe(value)
                    elif isinstance(value, str) and name not in self.numbers:
                        self.texts.setdefault(name, Counter())[value] += 1

    def shown(self) -> dict[str, Any]:
        """Return the form of the file."""
        fields = {name: spread.shown() for name, spread in self.numbers.items()}
        counts = {
            name: {"unique_count": len(counter), "total_count": sum(counter.values())}
            for name, counter in self.texts.items()
        }
        return {
            "Number of examples": self.examples,
            **{name: spread.shown() for name, spread in self.spreads.items()},
            **fields,
            **counts,
        }
