"""Forms that start something: a preset and the settings that people change most. Everything else goes into `overrides`.

Invariant: a form does not define defaults: an empty field keeps the value of the preset (or run). `resolve` returns
an ordinary `RunConfig`, checked like any other; its errors name the key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from roundhouse import plugins
from roundhouse.config.loading import apply_override, load_config, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.infra.consents import refuse_unaccepted_code
from roundhouse.shipped import shipped
from roundhouse.stages.fork import Method, fork_config, offline_config
from roundhouse.store.run import load_run

if TYPE_CHECKING:
    from roundhouse.plugins.lab.replays.comparison import Comparison

PRESETS_VARIABLE = "ROUNDHOUSE_PRESETS"
"""Directory of the presets, if it is not `configs` of the working directory."""
DEFAULT_STORE = ".roundhouse/store"


def presets_directory() -> Path:
    """Return the variable's directory, else `configs` of the working directory, else that of the package."""
    if directory := os.environ.get(PRESETS_VARIABLE):
        return Path(directory)
    return shipped("configs")


def preset_names() -> list[str]:
    """Names of all presets: files there that configure a run."""
    files = presets_directory().glob("*.yaml")
    return sorted(path.stem for path in files if re.search(r"^run_id:", path.read_text(), re.MULTILINE))


def own_configurations(state: str | None) -> Iterator[RunConfig]:
    """Yield the presets that load here: their code needs no further consent in a run that a form started from them."""
    for name in preset_names():
        with suppress(ConfigError):  # of a variable that is not set here
            yield _at(load_config(presets_directory() / f"{name}.yaml"), state)


def _preset_choices(schema: dict[str, Any]) -> None:
    schema["enum"] = preset_names()
    if schema["enum"] and schema.get("default") not in schema["enum"]:
        schema["default"] = schema["enum"][0]


def _left_out(schema: dict[str, Any]) -> None:
    """Remove an optional field's default from the form: empty means unchanged."""
    schema.pop("default", None)


def _optional(description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra=_left_out)


def _in_order(schema: dict[str, Any]) -> None:
    """Set `position`, by which Prefect's form orders fields: the order of this file, with free text last."""
    names = sorted(schema["properties"], key=lambda name: name == "overrides")
    for position, name in enumerate(names):
        schema["properties"][name]["position"] = position


RunId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
DatasetChoice = Annotated[str, Field(pattern=r"^[A-Za-z0-9:/._@=-]+$")]
Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?Z$")]
Count = Annotated[int, Field(ge=1)]
Few = Annotated[int, Field(ge=1, le=1024)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Days = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(gt=0, le=4)]


Override = Annotated[str, Field(pattern=rf"^({'|'.join(RunConfig.model_fields)})(\.[^.=\s]+)*=")]
"""As far as a schema can express it: the page refuses an unknown section, and a text without `=`."""


class Form(BaseModel):
    """Base of all forms."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra=_in_order)

    KEYS: ClassVar[dict[str, str]] = {}
    """Field -> key of the configuration."""

    overrides: list[Override] = Field(
        default=[],
        description="Any other key of the configuration, as key.path=value: train.algorithm.kl_coefficient=0.01. "
        "All keys with their values: roundhouse train FILE --dry-run.",
    )

    def changes(self) -> list[str]:
        """Return all changes of the form as overrides, with those written by hand last."""
        values = {key: getattr(self, name) for name, key in self.KEYS.items()}
        named = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
        return named + self.overrides

    def named(self) -> list[str]:
        """Return every `key=value` that the person filled in, for the check of a stored run's code."""
        return self.changes()


class TrainForm(Form):
    """A training run."""

    KEYS: ClassVar[dict[str, str]] = {
        "run_id": "run_id",
        "iterations": "iterations",
        "seed": "seed",
        "learning_rate": "train.optimizer.learning_rate",
        "minibatches": "train.minibatches",
        "prompts_per_iteration": "rollout.prompts_per_iteration",
        "group_size": "rollout.group_size",
        "max_turns": "rollout.max_turns",
        "temperature": "generation.sampling.temperature",
        "max_new_tokens": "generation.sampling.max_new_tokens",
        "evaluation_every": "evaluation.every",
        "keep_last": "checkpoint.keep_last",
        "resume": "resume.mode",
    }

    preset: Annotated[str, Field(json_schema_extra=_preset_choices)] = "quickstart"
    """A file of configs/: policy, environment, and everything that is not filled in below."""
    run_id: RunId | SkipJsonSchema[None] = _optional(
        "Identity of the run; an existing id resumes that run. Empty: the preset's."
    )
    iterations: Count | SkipJsonSchema[None] = _optional("Policy versions to train, in all.")
    seed: Seed | SkipJsonSchema[None] = _optional("Tasks, sampling and shuffling derive from it.")
    learning_rate: LearningRate | SkipJsonSchema[None] = _optional("AdamW's, after the warm-up.")
    minibatches: Few | SkipJsonSchema[None] = _optional("Optimizer steps an iteration.")
    prompts_per_iteration: Count | SkipJsonSchema[None] = _optional("Tasks an iteration.")
    group_size: Few | SkipJsonSchema[None] = _optional("Rollouts of each task.")
    max_turns: Count | SkipJsonSchema[None] = _optional("Model calls of a rollout, at most.")
    temperature: Temperature | SkipJsonSchema[None] = _optional("Of the training rollouts.")
    max_new_tokens: Count | SkipJsonSchema[None] = _optional("Tokens of one model call, at most.")
    evaluation_every: Natural | SkipJsonSchema[None] = _optional(
        "Iterations between held-out evaluations; 0: only before and after."
    )
    keep_last: Count | SkipJsonSchema[None] = _optional("Newest checkpoints that are kept.")
    resume: Literal["auto", "disable"] = "auto"
    """auto: continue the run if it exists. disable: refuse a run ID that exists."""

    def resolve(self, state: str | None = None) -> RunConfig:
        """The run's configuration; `state` is the directory of the services that it is to use."""
        if self.preset not in preset_names():
            raise ConfigError(f"preset: {self.preset!r} is not one of {', '.join(preset_names())}.")
        return _at(load_config(presets_directory() / f"{self.preset}.yaml", self.changes()), state)


class RunForm(Form):
    """Something with a run that exists."""

    run_id: RunId
    """The run."""
    store: str = DEFAULT_STORE
    """Store of the run: a path, file:// or s3://bucket/prefix."""

    def resolve(self, state: str | None = None) -> RunConfig:
        """The run's own configuration, with the form's changes."""
        tree = load_run(self.store, self.run_id).config.model_dump(mode="json") | {"store": self.store}
        tree["resume"] = {"mode": "auto"}
        for override in self.changes():
            apply_override(tree, override)
        return _at(parse_config(tree, origin=f"run {self.run_id}"), state)

    def accepted(self, state: str | None = None) -> RunConfig:
        """Return the configuration of `resolve` after checking that the form, or a person on this machine, names all
        its code.

        Raises:
            ConfigError: the stored run names other code.
        """
        config = self.resolve(state)
        refuse_unaccepted_code(config, self.named(), own=own_configurations(state))
        return config


class EvaluateForm(RunForm):
    """Held-out evaluation of a run's checkpoint."""

    version: Natural | SkipJsonSchema[None] = _optional("Policy version. Empty: the newest.")


class ApproveForm(BaseModel):
    """A person's answer about the promotion of a version."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra=_in_order)

    run_id: RunId
    """The run."""
    store: str = DEFAULT_STORE
    """Store of the run: a path, file:// or s3://bucket/prefix."""
    version: Natural
    """Policy version that waits for approval."""
    decision: Literal["approve", "refuse", "on_timeout"] | SkipJsonSchema[None] = _optional(
        "Empty: ask, and wait for the answer. on_timeout: the answer that the run has for its time limit, once that is over."
    )
    comment: str = ""
    """Why; it is kept with the answer."""


class CollectForm(RunForm):
    """Rollouts of a run's checkpoint, as a dataset that outlives the run."""

    KEYS: ClassVar[dict[str, str]] = {
        "prompts_per_iteration": "rollout.prompts_per_iteration",
        "group_size": "rollout.group_size",
    }

    name: DatasetName = "offline"
    """Name of the dataset, whose versions are in the store as datasets/NAME/VERSION."""
    checkpoint: Literal["newest", "promoted"] = "newest"
    """The run's checkpoint that plays: the newest, or the promoted one."""
    version: Natural | SkipJsonSchema[None] = _optional("Policy version that plays. Empty: by `checkpoint`.")
    prompts_per_iteration: Count | SkipJsonSchema[None] = _optional("Tasks to collect.")
    group_size: Few | SkipJsonSchema[None] = _optional("Rollouts of each task.")
    moment: Moment | SkipJsonSchema[None] = _optional(
        "The moment that this collection is for (2026-11-21T02:00Z): it names the dataset's version and draws the tasks. "
        "Empty: the moment that a schedule planned, else draw 1."
    )
    keep_last: Count | SkipJsonSchema[None] = _optional(
        "Keep this many newest versions of the dataset and delete older ones. Versions in use by a run are kept. Empty: all."
    )
    keep_days: Days | SkipJsonSchema[None] = _optional(
        "Keep versions younger than so many days; with both, what either keeps stays. Empty: whatever their age."
    )

    @model_validator(mode="after")
    def _one_checkpoint(self) -> Self:
        if self.version is not None and self.checkpoint == "promoted":
            raise ValueError(f"version is {self.version} and checkpoint is promoted: name one of them.")
        return self


class TrainOfflineForm(RunForm):
    """A new run that starts from a checkpoint of another and learns from collected datasets."""

    KEYS: ClassVar[dict[str, str]] = {
        "epochs": "offline.epochs",
        "groups": "offline.groups",
        "learning_rate": "train.optimizer.learning_rate",
        "minibatches": "train.minibatches",
        "seed": "seed",
        "max_age": "offline.max_age",
        "min_ess": "offline.min_ess_fraction",
        "on_stale": "offline.on_stale",
        "evaluate": "offline.evaluate",
    }

    new_run_id: RunId
    """ID of the new run: the same ID continues it."""
    datasets: list[DatasetChoice] = Field(
        default=["offline"],
        min_length=1,
        description="Of the same store: nightly is its newest version, nightly@all every version, nightly@VERSION one. "
        "Or the path or URI of a version's directory, or of a file of chat rows (.jsonl).",
    )
    method: Method = "grpo"
    """grpo: policy gradient with truncated importance weights. rejection: likelihood of the best rollout of each group. sft:
    likelihood of all rows. distillation: towards a teacher."""
    at: Annotated[str, Field(pattern=r"^(newest|promoted|\d+)$")] = "newest"
    """Checkpoint of the run to start from: newest, promoted or a version."""
    teacher: str | SkipJsonSchema[None] = _optional("Directory of the teacher's model; for distillation.")
    reward_threshold: float | SkipJsonSchema[None] = _optional(
        "The least reward of a rollout that is learnt; for rejection. Empty: 1."
    )
    epochs: Few | SkipJsonSchema[None] = _optional("Passes over the data. Empty: 1.")
    groups: Count | SkipJsonSchema[None] = _optional("Groups (tasks) an iteration. Empty: as the run collects.")
    learning_rate: LearningRate | SkipJsonSchema[None] = _optional("AdamW's. Empty: as the run has it.")
    minibatches: Few | SkipJsonSchema[None] = _optional("Optimizer steps an iteration. Empty: as the run has it.")
    seed: Seed | SkipJsonSchema[None] = _optional("Of shuffling. Empty: the run's.")
    max_age: Natural | SkipJsonSchema[None] = _optional("Policy versions that the data may be old. Empty: 20.")
    min_ess: Share | SkipJsonSchema[None] = _optional(
        "Least effective sample of the importance weights, as a share of the tokens. Empty: 0.5."
    )
    on_stale: Literal["refuse", "warn"] = "refuse"
    """Reaction to data that is too old."""
    evaluate: bool = True
    """Evaluate on held-out tasks, which needs an engine."""

    def named(self) -> list[str]:
        """Return the named fields as for any form, with the teacher."""
        return self.changes() + ([] if self.teacher is None else [f"train.algorithm.teacher={self.teacher}"])

    def resolve(self, state: str | None = None) -> RunConfig:
        """The new run's configuration; of a run that exists, with what may change of it."""
        config = offline_config(
            self.store,
            self.run_id,
            self.new_run_id,
            self.datasets,
            self.method,
            self.at,
            teacher=self.teacher,
            reward_threshold=self.reward_threshold,
            overrides=self.changes(),
        )
        return _at(config, state)


class ForkForm(RunForm):
    """A new run from an iteration of another."""

    KEYS: ClassVar[dict[str, str]] = {
        "iterations": "iterations",
        "seed": "seed",
        "learning_rate": "train.optimizer.learning_rate",
        "prompts_per_iteration": "rollout.prompts_per_iteration",
        "group_size": "rollout.group_size",
    }

    new_run_id: RunId
    """Id of the fork."""
    at: Natural | SkipJsonSchema[None] = _optional("Iteration of the parent to continue from. Empty: its newest.")
    iterations: Count | SkipJsonSchema[None] = _optional("Policy versions in all, the parent's counted.")
    seed: Seed | SkipJsonSchema[None] = _optional("Another seed draws other tasks and samples.")
    learning_rate: LearningRate | SkipJsonSchema[None] = _optional("AdamW's.")
    prompts_per_iteration: Count | SkipJsonSchema[None] = _optional("Tasks an iteration.")
    group_size: Few | SkipJsonSchema[None] = _optional("Rollouts of each task.")

    def resolve(self, state: str | None = None) -> RunConfig:
        """The fork's configuration."""
        return _at(fork_config(self.store, self.run_id, self.new_run_id, self.at, self.changes()), state)


class ReplayForm(RunForm):
    """Recorded stages of a run, run again and compared; nothing is generated."""

    KEYS: ClassVar[dict[str, str]] = {"learning_rate": "train.optimizer.learning_rate", "seed": "seed"}

    first: Count
    """First iteration."""
    last: Count | SkipJsonSchema[None] = _optional("Last iteration. Empty: the first alone.")
    stages: list[Literal["validate", "train"]] = Field(
        default=["validate", "train"],
        min_length=1,
        description="Stages to run again; the others are read from the record.",
    )
    rollouts: DatasetName | SkipJsonSchema[None] = _optional(
        "Dataset with new verdicts (roundhouse rescore) instead of the recorded rollouts."
    )
    learning_rate: LearningRate | SkipJsonSchema[None] = _optional("AdamW's. Empty: as it was.")
    seed: Seed | SkipJsonSchema[None] = _optional("Of shuffling. Empty: as it was.")
    name: DatasetName | SkipJsonSchema[None] = _optional("Of the replay. Empty: it follows from all of the above.")
    drift_gate: bool = True
    """Stop when the recorded rollouts no longer fit the policy."""

    def replay(self, say: Callable[[str], None] = lambda line: None) -> Comparison:
        """Run it.

        Raises:
            StoreError, ConfigError: a stage, checkpoint or input is missing; the run names code that nobody accepted here.
        """

        def accept(config: RunConfig) -> None:
            refuse_unaccepted_code(config, self.named(), own=own_configurations(None))

        return plugins.factory("operation", "replay")(
            self.store,
            self.run_id,
            range(self.first, (self.last or self.first) + 1),
            self.stages,
            self.changes(),
            {} if self.rollouts is None else {"rollouts": self.rollouts},
            self.name,
            accept,
            gated=self.drift_gate,
            say=say,
        )


def _at(config: RunConfig, state: str | None) -> RunConfig:
    """Return the configuration with these local services, if it uses local ones."""
    if state is None or not config.infra.runs_here:
        return config
    return config.model_copy(update={"infra": config.infra.model_copy(update={"state": state})})
