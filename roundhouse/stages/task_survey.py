"""A look at all task rows of a run before it starts: their digests, and findings that make its numbers mean something else.

Invariant: environments that make their tasks by the configuration alone are not read, since the configuration is on record.

    {"environment: training tasks": "12 rows, sha256 1f…", "environment.target": "sha256 9a…"}
    4 of 4 held-out tasks are training tasks, too (t0, t1, t2 and 1 more) …
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from roundhouse.code_digest import SHOWN, digest_of_files, digest_of_target
from roundhouse.config.environments import data_source
from roundhouse.config.loading import flatten
from roundhouse.config.models import EnvironmentConfig, RolloutConfig, RunConfig
from roundhouse.config.operations import with_set
from roundhouse.environments import has_own_splits
from roundhouse.environments.base import Split, TaskRow
from roundhouse.errors import DataError
from roundhouse.rollout.clients import first_messages, open_environment

MOST_SHOWN = 3
NAMES: dict[Split, str] = {"train": "training", "heldout": "held-out"}
_BY_PLACE = re.compile(r"(.+/)?(line-)?\d+#*")
"""Ids that count the rows of a file: equal ids of two files do not show equal tasks."""
_CODE = ("target", "function", "verifier", "evaluator", "data_loader", "worker", "policy_loss", "reward")
"""Keys that name user classes and functions with an effect on training."""
_FILES = ("command", "config_paths", "nexau_agent_config_path")
"""Keys that name files, or words among which files may be."""
_SECTIONS = ("environment.", "evaluation.sets.", "rollout.curriculum.", "train.algorithm.")


@dataclass(slots=True)
class SplitSurvey:
    """The rows of one split."""

    rows: int = 0
    ids: Counter[str] = field(default_factory=Counter)
    contents: dict[bytes, str] = field(default_factory=dict)
    """Digests of rows without their ids, with the id of the first such row."""
    prompts: dict[bytes, str] = field(default_factory=dict)
    digest: str = ""

    @property
    def prompts_identify(self) -> bool:
        """Return whether most tasks have a distinct prompt."""
        return 2 * len(self.prompts) > len(self.contents)

    @property
    def repeated_ids(self) -> list[str]:
        """Ids that more than one row has."""
        return [task_id for task_id, count in self.ids.items() if count > 1]


def survey_of(rows: Iterable[TaskRow]) -> SplitSurvey:
    """Return the survey of a split; reads each row once."""
    survey, total = SplitSurvey(), hashlib.sha256()
    for row in rows:
        survey.rows += 1
        task_id, content, prompt = _marks(row)
        total.update(_digest([task_id, row]))
        survey.ids[task_id] += 1
        survey.contents.setdefault(content, task_id)
        survey.prompts.setdefault(prompt, task_id)
    survey.digest = f"{survey.rows} rows, sha256 {total.hexdigest()[:SHOWN]}"
    return survey


def ignores_system_prompt(row: TaskRow, rollout: RolloutConfig) -> bool:
    """Return whether a system prompt is configured for the row, and the row has a system message that takes its place."""
    if rollout.of_environment(str(row.get("task_id", "")).partition("/")[0]).system_prompt is None:
        return False
    try:
        return first_messages(row)[0]["role"] == "system"
    except DataError:
        return False  # its rollouts fail, with the reason


def tasks_in_training(training: SplitSurvey, rows: Iterable[TaskRow]) -> list[str]:
    """Return the IDs of rows that are also training tasks: by their ID, their prompt or everything but the ID.

    Equal prompts count if prompts distinguish the training tasks. IDs that only number the rows do not count.
    """
    shared = []
    for row in rows:
        task_id, content, prompt = _marks(row)
        same_id = task_id in training.ids and _BY_PLACE.fullmatch(task_id) is None
        if same_id or content in training.contents or (training.prompts_identify and prompt in training.prompts):
            shared.append(task_id)
    return shared


def input_digests(config: RunConfig) -> dict[str, str]:
    """Return the digests of a run's task rows and user code, by the keys that name them.

    Raises:
        ConfigError: the environment cannot be opened.
    """
    digests = code_digests(config)
    for prefix, environment, splits in _environments(config):
        if has_own_splits(environment):
            continue
        client = open_environment(environment)
        for split in splits:
            digests[f"{prefix}environment: {NAMES[split]} tasks"] = survey_of(client.tasks(split)).digest
    return digests


def code_digests(config: RunConfig) -> dict[str, str]:
    """Return the digests of the classes, functions and files of the user's that a configuration names."""
    digests: dict[str, str] = {}
    for key, value in flatten(config.model_dump(mode="json")).items():
        leaf = key.rpartition(".")[2]
        if value is None or not key.startswith(_SECTIONS):
            continue
        texts = [value] if isinstance(value, str) else value
        if leaf in _CODE and isinstance(texts, list):
            workspace = getattr(config.environment, "workspace", None)
            for text in texts:
                if (
                    ":" in text
                    and (digest := digest_of_target(text, key, [workspace] if workspace else [])) is not None
                ):
                    digests[key if text is value else f"{key} {text}"] = digest
        elif leaf in _FILES and (files := [Path(each) for each in texts if Path(each).is_file()]):
            digests[key] = digest_of_files(files)
    return digests


def task_warnings(config: RunConfig, *, remote: bool = True) -> list[str]:
    """Return warnings about the task rows: repeated ids, held-out tasks that are training tasks, and rows that ignore
    `rollout.system_prompt`.

    Args:
        remote: read files in buckets, too.

    Raises:
        ConfigError: the environment cannot be opened.
    """
    has_other_rows = has_own_splits(config.environment) or config.offline is not None
    if has_other_rows or not (remote or has_local_rows(config.environment)):
        return []
    client = open_environment(config.environment)
    surveys = {split: survey_of(client.tasks(split)) for split in NAMES}
    warnings = [_repeated(split, survey) for split, survey in surveys.items() if survey.repeated_ids]
    if shared := tasks_in_training(surveys["train"], client.tasks("heldout")):
        warnings.append(
            f"{len(shared)} of {surveys['heldout'].rows} held-out tasks are training tasks, too ({_shown(shared)}): their "
            "reward does not measure tasks that were not trained on. Remove them from one of the splits."
        )
    every = [row for split in NAMES for row in client.tasks(split)] if _has_system_prompt(config.rollout) else []
    if own := sum(ignores_system_prompt(row, config.rollout) for row in every):
        warnings.append(
            f"rollout.system_prompt has no effect on {own} of {len(every)} task rows, which have a system message. Remove "
            "the key or these messages."
        )
    return warnings


def has_local_rows(config: EnvironmentConfig) -> bool:
    """Return whether all files of task rows are on this machine."""
    keys = ("train_tasks", "heldout_tasks", "train_data", "heldout_data", "data")
    places = [
        str(value) for key, value in flatten(config.model_dump(mode="json")).items() if key.rpartition(".")[2] in keys
    ]
    return not any("://" in place or data_source(place) is not None for place in places)


def _has_system_prompt(rollout: RolloutConfig) -> bool:
    prompts = [rollout.system_prompt, *(each.system_prompt for each in rollout.environments.values())]
    return any(prompt is not None for prompt in prompts)


def _repeated(split: Split, survey: SplitSurvey) -> str:
    ids = survey.repeated_ids
    rows = sum(survey.ids[task_id] for task_id in ids)
    return (
        f"{rows} of {survey.rows} {NAMES[split]} tasks share {len(ids)} ids ({_shown(ids)}): rollouts and metrics of different "
        "tasks differ only by an appended number. Give each row an id."
    )


def _shown(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(ids[:MOST_SHOWN]) + more


def _environments(config: RunConfig) -> list[tuple[str, EnvironmentConfig, tuple[Split, ...]]]:
    """The run's environment, and those of its evaluation sets, with the splits that the run reads."""
    own: tuple[Split, ...] = ("train", "heldout") if config.offline is None else ("heldout",)
    sets = [(f"evaluation.sets.{name}.", with_set(config, name).environment) for name in config.evaluation.sets]
    other = [(prefix, environment) for prefix, environment in sets if environment != config.environment]
    return [("", config.environment, own), *((prefix, each, ("heldout",)) for prefix, each in other)]


def _marks(row: TaskRow) -> tuple[str, bytes, bytes]:
    """The id of a row, and the digests of its content and its prompt."""
    content = {name: value for name, value in row.items() if name not in ("task_id", "group_id", "run_id")}
    if isinstance(item := content.get("item"), dict):  # of a worker's row
        content["item"] = {name: value for name, value in item.items() if name not in ("task_id", "group_id", "run_id")}
    return str(row.get("task_id", "")), _digest(content), _digest(_params(row).get("input"))


def _params(row: TaskRow) -> dict[str, Any]:
    params = row.get("responses_create_params")
    return params if isinstance(params, dict) else {}


def _digest(value: Any) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # an integer beyond 64 bits, or a value that is not JSON
        data = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__).encode()
    return hashlib.sha256(data).digest()
