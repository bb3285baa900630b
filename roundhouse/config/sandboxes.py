"""Sandboxes for the commands of a policy: one section per kind, all with the same limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from roundhouse.config.kinds import Kinds
from roundhouse.config.kubernetes import DnsLabel
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import Code, PositiveFloat, PositiveInt, Section, Target


class SandboxSection(Section):
    """Limits of every kind of sandbox."""

    if TYPE_CHECKING:
        kind: str
    command_seconds: PositiveFloat = 10
    """Time limit of one command. A command that reaches it is killed, and the policy is informed."""
    output_bytes: Annotated[int, Field(ge=100, le=2**20)] = 10_000
    """Most output of one command; it is killed there."""
    lifetime_seconds: PositiveFloat = 3600
    """A sandbox ends by itself after so long, whatever became of its owner."""

    @model_validator(mode="after")
    def _possible(self) -> SandboxSection:
        if self.lifetime_seconds <= self.command_seconds:
            raise ValueError(
                f"sandbox.lifetime_seconds is {self.lifetime_seconds:g}, but one command may take sandbox.command_seconds = "
                f"{self.command_seconds:g}. Raise lifetime_seconds to the time limit of a rollout."
            )
        return self


class SandboxLimits(SandboxSection):
    """Limits of a sandbox that is made here."""

    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Memory of the whole sandbox. In a `local` one each process is limited by the kernel, and their sum is looked at ten times
    a second; files do not count there."""
    processes: Annotated[int, Field(ge=4, le=10_000)] = 64
    """Most processes and threads at once."""
    disk_mib: Annotated[int, Field(ge=1)] = 64
    """Size of the working directory, and of /tmp; both are kept in memory."""


class LocalSandbox(SandboxLimits):
    """A confined process of this machine (Linux, with user namespaces or as root); nothing has to be installed."""

    kind: Literal["local"] = "local"


class ContainerSandbox(SandboxLimits):
    """A container of Docker or Podman on the machine of the collector."""

    kind: Literal["container"]
    image: Code[str]
    """It must be on the machine, and have `sh`, `tar` and `timeout`."""
    program: Code[Literal["docker", "podman"] | None] = None
    """Unset: the first of the two that works."""
    runtime: Code[str | None] = None
    """A runtime of it by name, such as `runsc` (gVisor) or `kata`. Unset: its default."""
    network: Code[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]] = "none"
    """`none`, or a network of it by name, such as `bridge`."""
    cpus: PositiveFloat = 1
    """Processors, in parts too."""
    read_only: bool = True
    """The root file system cannot be written, whatever its permissions."""
    user: PositiveInt = 65534
    """Number of the user and the group in the container; never root's."""

    @model_validator(mode="after")
    def _apart(self) -> ContainerSandbox:
        if self.network == "host":
            raise ValueError(
                "sandbox.network is host, so that a policy can reach every server of this machine. Name a separate network "
                "such as bridge, or set none."
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> ContainerSandbox:
        if self.disk_mib >= self.memory_mib:
            raise ValueError(
                f"sandbox.disk_mib is {self.disk_mib}, but files of a container count as its memory (sandbox.memory_mib = "
                f"{self.memory_mib}). Lower disk_mib or raise memory_mib."
            )
        return self


class KubernetesSandbox(SandboxSection):
    """A pod of a warm pool, claimed by the resources of kubernetes-sigs/agent-sandbox."""

    kind: Literal["kubernetes"]
    warm_pool: Code[DnsLabel]
    """Name of the SandboxWarmPool. Its SandboxTemplate defines its pods and their permissions."""
    namespace: DnsLabel = "roundhouse"
    """Namespace of the pool."""
    context: Code[str | None] = None
    """Context of the kubeconfig. Unset: the pod's service account, else the current context."""
    runtime_class: str | None = None
    """RuntimeClass that its pods must have, such as `gvisor` or `kata`: others are refused. Unset: any."""
    start_seconds: PositiveFloat = 120
    """Time limit until a claimed pod is ready."""


class CustomSandbox(SandboxLimits):
    """A sandbox of your own, imported by name."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` or `path/to/file.py:Class` with the methods of `roundhouse.environments.sandboxes.Sandbox`. Its first
    argument is this section, with the limits that it has to hold."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class. A secret is named, as `api_key: {variable: SANDBOX_KEY}` or `{file: …}`."""

    def __hash__(self) -> int:
        """Hash by the target: `parameters` cannot be hashed, and equal sections have equal targets."""
        return hash(self.target)


SandboxConfig = Annotated[SandboxSection, Kinds("sandbox")]
