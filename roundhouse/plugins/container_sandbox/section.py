"""The section of a container as a sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from roundhouse.config.sandboxes import SandboxLimits
from roundhouse.config.section import Code, PositiveFloat, PositiveInt


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
