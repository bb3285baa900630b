"""The keys of task.toml that decide something here. Others are ignored, as in Harbor.

Invariant: a wrong value is refused, as in Harbor, and so is a feature of Harbor that is missing here (`missing_features`).
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field, ValidationError, model_validator

Seconds = Annotated[float, Field(gt=0, le=1e6)]
Variables = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Annotated[str, Field(pattern=r"^[^\x00]*$")]
]
Network = Literal["public", "no-network", "allowlist"]
User = str | int | None
MAIN = (None, "main")
"""Names of the service in which the policy works."""
PUBLISHED = "/logs/artifacts"
"""A directory that is always an artifact."""


def _without_dots(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError("it contains `..`")
    return path


def _distinct(steps: list[Step]) -> list[Step]:
    if len({step.name.casefold() for step in steps}) < len(steps):
        raise ValueError("two steps have one name")
    return steps


class Artifact(BaseModel):
    """A file or directory that a separate verifier receives."""

    source: Annotated[str, AfterValidator(_without_dots)]
    destination: Annotated[str, Field(pattern=r"^[^/\\][^\\]*$"), AfterValidator(_without_dots)] | None = None
    """Place in the directory to which Harbor copies it."""
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None

    @property
    def path(self) -> str:
        return self.source.rstrip("/") or "/"


def _as_table(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Artifacts = list[Annotated[Artifact, BeforeValidator(_as_table)]]


def _as_numbers(value: Any) -> Any:
    return {"reward": value} if isinstance(value, int | float) else value


class _Package(BaseModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*$")]


class _Phase(BaseModel):
    user: User = None
    network_mode: Network | None = None


class _Agent(_Phase):
    timeout_sec: Seconds | None = None


class Hook(BaseModel):
    """A command after the policy's last turn, before the artifacts are collected."""

    command: Annotated[str, Field(pattern=r"^[^\x00]*$")]
    service: str | None = None
    timeout_sec: Seconds = 60
    user: User = None


class EnvironmentTable(BaseModel):
    """[environment], or [verifier.environment]."""

    docker_image: str | None = None
    os: str = "linux"
    workdir: str | None = None
    env: Variables = Field(default_factory=dict)
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    network_mode: Network = "public"
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list)
    healthcheck: dict[str, Any] | None = None
    skills_dir: str | None = None


class Verifier(_Phase):
    """[verifier] of a task or of a step."""

    timeout_sec: Seconds = 600
    env: Variables = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[Hook] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Verifier:
        if self.environment is not None:
            if self.environment_mode == "shared":
                raise ValueError("environment_mode is shared, but an environment is set")
            self.environment_mode = "separate"
        return self


class Step(BaseModel):
    """An entry of [[steps]]. A task without steps is a single one, which has no name."""

    name: Annotated[str, Field(max_length=255, pattern=r'^[^<>:"/\\|?*\x00-\x1f\x7f]*[^<>:"/\\|?*\x00-\x1f\x7f. ]$')]
    agent: _Agent = _Agent()
    verifier: Verifier = Verifier()
    min_reward: Annotated[dict[str, float], BeforeValidator(_as_numbers)] = Field(default_factory=dict)
    healthcheck: dict[str, Any] | None = None
    artifacts: Artifacts = Field(default_factory=list)


class _Solution(BaseModel):
    env: dict[str, str] = Field(default_factory=dict)


class TaskToml(BaseModel):
    """A whole file."""

    schema_version: str = Field("1.4", validation_alias=AliasChoices("schema_version", "version"))
    task: _Package | None = None
    agent: _Agent = _Agent()
    verifier: Verifier = Verifier()
    environment: EnvironmentTable = EnvironmentTable()
    solution: _Solution = _Solution()
    steps: Annotated[list[Step], AfterValidator(_distinct)] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: Artifacts = Field(default_factory=list)

    @property
    def verifiers(self) -> list[Verifier]:
        return [self.verifier, *(step.verifier for step in self.steps)]

    @property
    def phases(self) -> list[_Phase]:
        return [self.agent, *(step.agent for step in self.steps), *self.verifiers]

    @property
    def environments(self) -> list[EnvironmentTable]:
        return [self.environment, *(each.environment for each in self.verifiers if each.environment is not None)]

    def mode(self, step: Step) -> str:
        """Return `shared` or `separate`."""
        return step.verifier.environment_mode or self.verifier.environment_mode or "shared"

    def artifacts_of(self, step: Step) -> list[Artifact]:
        """Return the artifacts of a step, with `PUBLISHED` and without its parts.

        Raises:
            ValueError: two overlap.
        """
        artifacts = [*self.artifacts, *step.artifacts]
        if all(each.path != PUBLISHED for each in artifacts):
            others = [each for each in artifacts if not each.path.startswith(f"{PUBLISHED}/")]
            artifacts = [Artifact(source=PUBLISHED), *others]
        for pair in itertools.permutations(artifacts, 2):
            inner, outer = ((each.destination or each.path).strip("/") + "/" for each in pair)
            if inner.startswith(outer):
                raise ValueError(f"its artifacts {pair[0].source} and {pair[1].source} overlap. Name one of them.")
        return artifacts


def read_toml(text: str) -> TaskToml:
    """
    Raises:
        ValueError: a value is wrong.
    """
    try:
        return TaskToml.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise ValueError(f"task.toml: {key} is {problem['input']!r:.100}: {problem['msg']}. Correct it.") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"task.toml is not TOML: {error}. Correct it.") from error


def missing_features(toml: TaskToml, root: Path) -> Iterator[str]:
    """Yield the name of each feature that the task uses and that is missing here."""
    steps, verifiers, environments = toml.steps, toml.verifiers, toml.environments
    artifacts = [*toml.artifacts, *(each for step in steps for each in step.artifacts)]
    hooks = [hook for each in verifiers for hook in each.collect]
    variables = [*(each.env for each in environments), *(each.env for each in verifiers)]
    users = [*(each.user for each in toml.phases), *(hook.user for hook in hooks)]
    services = [*(hook.service for hook in hooks), *(each.service for each in artifacts)]
    separate = any(each.environment_mode == "separate" for each in verifiers)
    folders = ("environment", *(("tests", "steps/*/tests") if separate else ()))
    features = {
        "[environment] os": any(each.os.lower() != "linux" for each in environments),
        "[environment] gpus or tpu": any(each.gpus or each.tpu for each in environments),
        "[environment] mcp_servers, healthcheck or skills_dir": any(
            each.mcp_servers or each.healthcheck or each.skills_dir for each in environments
        ),
        "[[steps]] healthcheck": any(step.healthcheck for step in steps),
        "a user": any(user is not None for user in users),
        "a service of docker-compose": any(service not in MAIN for service in services),
        "an artifact with a relative path": separate and any(not each.source.startswith("/") for each in artifacts),
        "variables of this machine (${…}) in env": any("${" in value for each in variables for value in each.values()),
        "docker-compose.yaml": any(any(root.glob(f"{folder}/docker-compose.yaml")) for folder in folders),
        "trajectory.json": any(any(root.glob(f"{folder}trajectory.json")) for folder in ("", "steps/*/")),
        ".harborignore": any(root.rglob(".harborignore")),
    }
    return (name for name, is_used in features.items() if is_used)
