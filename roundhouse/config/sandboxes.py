"""Where the commands of a policy run: one section per kind of sandbox, all with the same limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from roundhouse.config.secrets import Parameters
from roundhouse.config.section import PositiveFloat, Section, Target


class SandboxLimits(Section):
    """What every kind of sandbox limits."""

    command_seconds: PositiveFloat = 10
    """Time limit of one command. One that reaches it is killed, and the policy is shown so."""
    output_bytes: Annotated[int, Field(ge=100, le=2**20)] = 10_000
    """Most output of one command; it is killed there."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Memory: of one process (`local`), of the whole sandbox (`container`)."""
    processes: Annotated[int, Field(ge=4, le=10_000)] = 64
    """Most processes and threads at once."""
    disk_mib: Annotated[int, Field(ge=1)] = 64
    """Size of the working directory, and of /tmp; both are kept in memory."""
    lifetime_seconds: PositiveFloat = 3600
    """A sandbox ends by itself after so long, whatever became of its owner."""

    @model_validator(mode="after")
    def _possible(self) -> SandboxLimits:
        if self.lifetime_seconds <= self.command_seconds:
            raise ValueError(
                f"sandbox.lifetime_seconds is {self.lifetime_seconds:g}, but one command may take sandbox.command_seconds = "
                f"{self.command_seconds:g}. Raise lifetime_seconds to the time limit of a rollout."
            )
        return self


class LocalSandbox(SandboxLimits):
    """A confined process of this machine (Linux, with user namespaces or as root); nothing has to be installed."""

    kind: Literal["local"] = "local"


class ContainerSandbox(SandboxLimits):
    """A container of Docker or Podman on the machine of the collector."""

    kind: Literal["container"]
    image: str
    """It must be on the machine, and have `sh`, `tar` and `timeout`."""
    program: Literal["docker", "podman"] | None = None
    """Unset: the first of the two that works."""
    runtime: str | None = None
    """A runtime of it by name, such as `runsc` (gVisor) or `kata`. Unset: its default."""
    network: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "none"
    """`none`, or a network of it by name, such as `bridge`."""
    cpus: PositiveFloat = 1
    """Processors, in parts too."""
    read_only: bool = True
    """The root file system cannot be written, whatever its permissions."""
    user: Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")] = "65534:65534"
    """User and group in the container, by number; never root."""

    @model_validator(mode="after")
    def _fits(self) -> ContainerSandbox:
        if self.disk_mib >= self.memory_mib:
            raise ValueError(
                f"sandbox.disk_mib is {self.disk_mib}, but files of a container count as its memory (sandbox.memory_mib = "
                f"{self.memory_mib}). Lower disk_mib or raise memory_mib."
            )
        return self


class CustomSandbox(SandboxLimits):
    """A sandbox of your own, imported by name."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` or `path/to/file.py:Class` with the methods of `roundhouse.environments.sandboxes.Sandbox`. Its first
    argument is this section, with the limits that it has to hold."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class. A secret is named, as `api_key: {variable: SANDBOX_KEY}` or `{file: …}`."""

    def __hash__(self) -> int:
        """`parameters` has none; equal sections have equal targets."""
        return hash(self.target)


SandboxConfig = Annotated[LocalSandbox | ContainerSandbox | CustomSandbox, Field(discriminator="kind")]
