"""NexRL's controller: a run of Roundhouse, from NexRL's configuration.

controller = NexRLController(config)        refuses keys without a counterpart, all in one list controller.run()
as `roundhouse train FILE`, in a separate process, until the run ends
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, InfraError
from roundhouse.imports import load_class
from roundhouse.plugins.nexrl.client import WORKERS
from roundhouse.plugins.nexrl.modules import NexRLModule
from roundhouse.plugins.nexrl.resources import NexRLRole

_PACKAGE = "roundhouse.plugins.nexrl"
_LOADERS = {"mock": f"{_PACKAGE}.client:MockDataLoader", "torch": f"{_PACKAGE}.client:TorchDataLoader"}


class ModuleTypes(Mapping[str, type]):
    """Classes by type, imported when one is asked for."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> type:
        return load_class(self._targets[name], object, f"the type {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


MODULE_REGISTRY: Mapping[NexRLRole, ModuleTypes] = MappingProxyType(
    {
        NexRLRole.ROLLOUT_WORKER: ModuleTypes(WORKERS),
        NexRLRole.TRAINER: ModuleTypes(
            {
                "self_hosted": f"{_PACKAGE}.trainers:SelfHostedTrainer",
                "self_hosted_grpo": f"{_PACKAGE}.trainers:SelfHostedGrpoTrainer",
                "remote_api_grpo": f"{_PACKAGE}.trainers:RemoteApiGrpoTrainer",
                "remote_api_cross_entropy": f"{_PACKAGE}.trainers:RemoteApiCrossEntropyTrainer",
            }
        ),
        NexRLRole.TRAJECTORY_POOL: ModuleTypes({"default": f"{_PACKAGE}.pool:TrajectoryPool"}),
        NexRLRole.WEIGHT_SYNC_CONTROLLER: ModuleTypes({"default": f"{_PACKAGE}.loop:WeightSyncController"}),
        NexRLRole.DATA_LOADER: ModuleTypes(_LOADERS),
        NexRLRole.VALIDATE_DATALOADER: ModuleTypes(_LOADERS),
        NexRLRole.VALIDATOR: ModuleTypes({"default": f"{_PACKAGE}.loop:Validator"}),
    }
)
"""Classes by role and type. A configuration names the user's classes: `module_class`."""


def module_class(role: NexRLRole, config: Mapping[str, Any]) -> type:
    """Return the class of a role's section: by `type`, which is a name or `path/to/file.py:Class`; or by
    `custom_<role>_module_path` and `custom_<role>_class_name`.

    Raises:
        ConfigError: no such type or class; the text lists the types.
    """
    types, name = MODULE_REGISTRY[role], str(config.get("type", "default"))
    if (path := config.get(f"custom_{role.value}_module_path")) is not None:
        name = f"{path}:{config.get(f'custom_{role.value}_class_name')}"
    if ":" in name:
        return load_class(name, object, f"the type of {role.value}")
    if name not in types:
        raise ConfigError(f"{role.value} has no type {name!r}: set it to {', '.join(types)}, or path/to/file.py:Class.")
    return types[name]


def set_logging_basic_config(level: int | str = logging.INFO) -> None:
    """Log to the console, with time and module."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


class NexRLController(NexRLModule):
    """A run from NexRL's configuration, which may contain keys of Roundhouse."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: lists the keys without a counterpart.
        """
        tree: Any = config
        if not isinstance(config, dict):
            from omegaconf import OmegaConf

            tree = OmegaConf.to_container(tree, resolve=False)  # its references are resolved with the others
        self.config = parse_config(tree, "the configuration")
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Train until the run ends.

        Raises:
            InfraError: the run failed; its output has the reason.
        """
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "run.yaml"
            file.write_text(yaml.safe_dump(self.config.model_dump(mode="json", exclude_unset=True)))
            program = "from roundhouse.cli import main; main()"
            self._process = subprocess.Popen([sys.executable, "-c", program, "train", str(file)])
            code = self._process.wait()
        if code != 0:
            raise InfraError(f"The run {self.config.run_id} ended with status {code}: see its output above.")

    def _stop(self) -> None:
        """Stop the run; `run` of the same configuration resumes it, unless resume.mode is disable."""
        if self._process is not None:
            self._process.terminate()

    stop = _stop

    _get_module_class_for_role = staticmethod(module_class)

    @staticmethod
    def _find_latest_checkpoint(checkpoint_folder: str | Path) -> str | None:
        """Return the directory `global_step_<step>` of the highest step, of a training loop of your own."""
        from roundhouse.plugins.nexrl.trainer_loop import find_latest_checkpoint

        latest = find_latest_checkpoint(checkpoint_folder)
        return None if latest is None else str(latest)
