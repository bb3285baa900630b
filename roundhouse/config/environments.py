"""The environment of a run: the bases of all kinds' sections, and the kinds that hold others or code of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from roundhouse import plugins
from roundhouse.config.kinds import Kinds
from roundhouse.config.rubrics import Audit, Rubric
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import (
    Code,
    DataFile,
    EnvironmentName,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Section,
    Target,
    Url,
)

ServerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]+([-_][A-Za-z0-9]+)*$")]
"""Without double underscores, which separate server and tool in a tool's name."""
McpServers = dict[ServerName, Url]
SERVERS_VARIABLE = "ROUNDHOUSE_GYM_HEAD"
"""Environment variable with the address of the servers that the environment of this run started."""


class EnvironmentSection(Section):
    """Base of every single environment. The further keys of a kind are the keyword arguments of its class."""

    if TYPE_CHECKING:
        kind: str
    is_included: ClassVar[bool] = False
    """The environment comes with Roundhouse: its calls never block, and its splits are disjoint and fixed by the section."""
    has_own_loop: ClassVar[bool] = False
    """A separate program plays and records rollouts, under its own limits. It cannot take recorded replies."""
    sends_requests: ClassVar[bool] = False
    """Its programs send their own requests to the engine."""
    own_limits: ClassVar[tuple[str, ...]] = ()
    """Keys of `rollout.environments` that its programs decide themselves."""
    plays_given_rows: ClassVar[bool] = True
    """Tasks can be rows of a file that a mixture names."""
    rubric: Rubric | None = None
    """Judge every rollout by these criteria. Unset: use the environment's reward."""
    audit: Audit | None = None
    """Judge rewarded rollouts again, without changing their reward."""

    @property
    def parts(self) -> Mapping[str, SingleEnvironment]:
        """Return the environments of a mixture by name; of another kind none."""
        return {}

    def elsewhere(self) -> str:
        """Return an error with its remedy if tasks, tools and verifier cannot be loaded into this process."""
        return ""

    def has_heldout(self, read: bool) -> bool | None:
        """Return whether held-out tasks exist, as far as the section shows; None if they have to be listed.

        Args:
            read: rows in a store or on a hub may be read.
        """
        return getattr(self, "heldout_fraction", 1) > 0 if self.is_included else None


def has_rows(train: str | None, heldout: str | None, read: bool) -> bool | None:
    """Return whether a file of held-out rows is named, if one of the files is not to be read."""
    return None if read or not any("://" in (uri or "") for uri in (train, heldout)) else heldout is not None


@dataclass(frozen=True, slots=True)
class EnvironmentTraits:
    """Traits of a plug-in of the role `environment`."""

    servers: str | Callable[..., Any] | None = None
    """Context manager of (run, section, URL of the engine, directory of logs) whose servers run as long as the run does; it
    yields their address."""
    check_pods: str | Callable[..., Any] | None = None
    """Function of (section, section `infra`) that raises a ConfigError if these servers cannot run in pods."""
    addresses: str | Callable[..., Any] | None = None
    """Function of (section, its key) that returns a `ServerAddress` for each server that has to answer before a run. Unset:
    doctor draws a task instead."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server that a run needs."""

    name: str
    url: str
    remedy: str
    problem: str = ""
    """Reason why the URL is unknown."""


def environment_traits(section: EnvironmentSection) -> EnvironmentTraits:
    """Return the traits of a section's plug-in."""
    return plugins.traits("environment", section.kind) or EnvironmentTraits()


class FileEnvironment(EnvironmentSection):
    """Base of environments with task rows in files."""

    train_tasks: DataFile[str | None] = None
    """JSON lines file of training task rows. May be unset only if the rows come from a file of a mixture, or for
    evaluation."""
    heldout_tasks: DataFile[str | None] = None
    """JSON lines file of held-out task rows."""


class SplitEnvironment(EnvironmentSection):
    """Base of environments that split their own problems."""

    heldout_fraction: ProperFraction = 0.2
    """Share of all problems that are held out from the warm start and from training."""


class CustomEnvironment(EnvironmentSection):
    """A custom environment, imported by name."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` or `path/to/file.py:Class` of a `roundhouse.environments.base.Environment` or
    `roundhouse.environments.base.GymnasiumEnvironment`. A relative path starts at the working directory;
    `${CONFIG_DIR}` is the directory of the configuration file."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class. Name a secret by its place: `api_key: {variable: JUDGE_KEY}` or `{file: …}`."""
    mcp_servers: McpServers = Field(default_factory=dict)
    """Additional MCP servers (streamable HTTP), URL by name. The policy sees their tools as `mcp__<name>__<tool>`."""


def data_source(data: str) -> str | None:
    """Return the plug-in that reads `NAME:…`; None for a file."""
    source, separator, rest = data.partition(":")
    return source if separator and not rest.startswith("//") and source in plugins.names("data_source") else None


class DatasetEnvironment(EnvironmentSection):
    """Rows of a data file, judged by reward functions."""

    kind: Literal["dataset"]
    data: DataFile[str]
    """A .jsonl, .csv or .parquet file, or `hf:NAME` of a Hugging Face data set (`pip install 'roundhouse[datasets]'`).
    A relative path starts at the working directory; `${CONFIG_DIR}` is the directory of the configuration file."""
    subset: str | None = None
    """Configuration of a Hugging Face data set, such as `main` of gsm8k."""
    split: str = "train"
    """Split of a Hugging Face data set to read."""
    limit: PositiveInt | None = None
    """Number of rows to read, from the first. A Hugging Face data set is streamed then, so that a large one is not downloaded.
    Unset: all rows."""
    prompt: str = "prompt"
    """Column of the prompt: a text (the user's message) or a list of messages."""
    reward: Code[Target | Annotated[tuple[Target, ...], Field(min_length=1)]]
    """`path/to/file.py:function` or `module:function`, or a list of them; the reward is their weighted sum. With TRL's
    parameters, `f(prompts, completions, **columns)`, a function gets lists and returns a list of numbers or None. With the
    plain parameters, `f(completion, **columns)`, it returns a number."""
    reward_weights: tuple[float, ...] = ()
    """A weight for each function. Unset: 1."""
    heldout: ProperFraction = 0.2
    """Share of the prompts that are held out from training."""

    @model_validator(mode="after")
    def _fits(self) -> DatasetEnvironment:
        count = 1 if isinstance(self.reward, str) else len(self.reward)
        if self.reward_weights and len(self.reward_weights) != count:
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} numbers, but reward names {count} functions. Give each "
                "function one weight, or leave reward_weights out."
            )
        if data_source(self.data) is None and (self.subset is not None or self.split != "train"):
            raise ValueError(
                f"data is {self.data}, a file, but subset is {self.subset} and split is {self.split}, which only a Hugging "
                "Face data set (hf:NAME) has. Remove both."
            )
        return self

    def has_heldout(self, read: bool) -> bool | None:
        return self.heldout > 0 if not read and ("://" in self.data or data_source(self.data) is not None) else None


SingleEnvironment = Annotated[EnvironmentSection, Kinds("environment", besides=("mixture",))]


class MixtureEnvironment(Section):
    """Several environments in one run. Each task belongs to one of them: its `task_id`, its group and its rollouts begin with
    the environment's name. Each environment has separate metrics and held-out tasks."""

    kind: Literal["mixture"]
    environments: Annotated[dict[EnvironmentName, SingleEnvironment], Field(min_length=1)]
    """Environments by name. Each is a section like `environment` itself."""
    weights: dict[EnvironmentName, PositiveFloat] = Field(default_factory=dict)
    """Draw frequency of each environment's tasks, relative to the others; 1 if unset."""
    train_tasks: DataFile[str | None] = None
    """JSON lines file with training task rows of all environments, as in a blend of NeMo Gym: `agent_ref.name` names the
    environment of a row. Unset: each environment's own tasks, by weight."""
    heldout_tasks: DataFile[str | None] = None
    """As `train_tasks`, for held-out task rows. Unset: each environment's own, in turn."""

    @property
    def parts(self) -> Mapping[str, SingleEnvironment]:
        return self.environments

    @model_validator(mode="after")
    def _names(self) -> MixtureEnvironment:
        if unknown := sorted(self.weights.keys() - self.environments.keys()):
            raise ValueError(
                f"environment.weights names {', '.join(unknown)}, but environment.environments has "
                f"{', '.join(self.environments)}. Name one of these."
            )
        if self.weights and self.train_tasks is not None:
            raise ValueError(
                f"environment.weights is set, but environment.train_tasks ({self.train_tasks}) names the environment of each "
                "row. Remove one of the two."
            )
        return self

    @model_validator(mode="after")
    def _rows(self) -> MixtureEnvironment:
        for key in ("train_tasks", "heldout_tasks"):
            if getattr(self, key) is None:
                continue
            for name, environment in self.environments.items():
                if (own := getattr(environment, key, None)) is not None:
                    raise ValueError(
                        f"environment.environments.{name}.{key} is {own}, but environment.{key} has the rows of all "
                        "environments. Leave one of the two out."
                    )
                if not environment.plays_given_rows:
                    raise ValueError(
                        f"environment.{key} is set, but environment.environments.{name}.kind is "
                        f"{environment.kind}, which plays the items of its data file. Leave environment.{key} out."
                    )
        return self

    def has_heldout(self, read: bool) -> bool | None:
        """Return None: the tasks have to be listed."""
        return None

    def elsewhere(self) -> str:
        """Return an error: the environments of a mixture are loaded one by one."""
        return (
            f"environment.kind is mixture ({', '.join(self.environments)}), but one environment is needed here. Name one of "
            "these."
        )


EnvironmentConfig = Annotated[EnvironmentSection | MixtureEnvironment, Kinds("environment")]


def environments_in(config: EnvironmentConfig) -> dict[str, SingleEnvironment]:
    """Return the environments of a configuration, keyed by their section: one, or all of a mixture."""
    if isinstance(config, MixtureEnvironment):
        return {f"environment.environments.{name}": each for name, each in config.environments.items()}
    return {"environment": config}
