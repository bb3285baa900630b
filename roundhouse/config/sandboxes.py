"""Sandboxes for the commands of a policy: one section per kind, all with the same limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from roundhouse.config.kinds import Kinds
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import PositiveFloat, Section, Target

SYSTEM_DIRECTORIES = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "sandbox", "sbin", "sys", "tmp", "usr")
)


def checked_directory(path: str) -> str:
    """Return the path of a directory that a sandbox can have in addition to its working directory and /tmp.

    Raises:
        ValueError: it is a directory of the system, or writable anyway.
    """
    if path.split("/")[1] in SYSTEM_DIRECTORIES:
        raise ValueError(f"{path} is in a directory of the system, or in one that is writable anyway. Choose another.")
    return path


Directory = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+$"), AfterValidator(checked_directory)]


class SandboxSection(Section):
    """Limits of every kind of sandbox."""

    has_image: ClassVar[bool] = True
    """Commands see the files of an image. Without one they see the programs of this machine."""
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
    """Size of the working directory, of /tmp and of each of `directories`; all are kept in memory."""
    directories: Annotated[tuple[Directory, ...], Field(max_length=16)] = ()
    """Further writable directories, such as `/app`. Each is empty at first and hides that of an image."""


class LocalSandbox(SandboxLimits):
    """A confined process of this machine (Linux, with user namespaces or as root); nothing has to be installed."""

    has_image: ClassVar[bool] = False
    kind: Literal["local"] = "local"


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
