"""The section of an environment on task directories of Harbor."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roundhouse.config.environments import SplitEnvironment
from roundhouse.config.sandboxes import LocalSandbox, SandboxConfig
from roundhouse.config.section import Code


class HarborSection(SplitEnvironment):
    """Task directories of Harbor: the policy works in a sandbox, which the tests of the task judge."""

    kind: Literal["harbor"]
    path: Code[str]
    """A task directory, a directory of task directories, or a pattern of such, as `tasks/*/easy-*`."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each number of `reward.json`: the reward is their weighted sum. Unset: its number `reward`, or its only one."""
    sandbox: SandboxConfig = LocalSandbox()
    """Sandbox of the commands. `image` of a container may contain `{task}`, the name of the task, or of its verifier, or
    `{docker_image}`, that of its task.toml."""
