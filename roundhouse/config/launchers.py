"""What starts programs elsewhere, by name: the registry of launchers."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

LAUNCHERS = {
    "subprocess": "roundhouse.launch.subprocesses:SubprocessLauncher",
    "ray": "roundhouse.launch.ray_actors:RayLauncher",
    "kubernetes": "roundhouse.launch.kubernetes_jobs:KubernetesLauncher",
}
"""Their classes (`roundhouse.launch.base.Launcher`); a run may name its own as `module:Class`."""


def _known(name: str) -> str:
    if name not in LAUNCHERS and ":" not in name:
        raise ValueError(f"{name!r} is no launcher. Set it to {', '.join(LAUNCHERS)}, or module:Class.")
    return name


LauncherName = Annotated[str, AfterValidator(_known)]
