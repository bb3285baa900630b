"""NexRL's controller: a run of Roundhouse, from NexRL's configuration.

controller = NexRLController(config)        refuses keys without a counterpart, all in one list controller.run()
as `roundhouse train FILE`, in a separate process, until the run ends
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from roundhouse.compat.nexrl.client import WORKERS
from roundhouse.compat.nexrl.modules import NexRLModule
from roundhouse.compat.nexrl.resources import NexRLRole
from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError

_PACKAGE = "roundhouse.compat.nexrl"
MODULE_REGISTRY: Mapping[NexRLRole, Mapping[str, str]] = MappingProxyType(
    {
        NexRLRole.ROLLOUT_WORKER: MappingProxyType(WORKERS),
        NexRLRole.TRAINER: MappingProxyType(
            {
                "self_hosted": f"{_PACKAGE}.trainers:SelfHostedTrainer",
                "self_hosted_grpo": f"{_PACKAGE}.trainers:SelfHostedGrpoTrainer",
                "remote_api_grpo": f"{_PACKAGE}.trainers:RemoteApiGrpoTrainer",
                "remote_api_cross_entropy": f"{_PACKAGE}.trainers:RemoteApiCrossEntropyTrainer",
            }
        ),
        NexRLRole.TRAJECTORY_POOL: MappingProxyType({"default": f"{_PACKAGE}.pool:TrajectoryPool"}),
        NexRLRole.WEIGHT_SYNC_CONTROLLER: MappingProxyType({"default": f"{_PACKAGE}.loop:WeightSyncController"}),
        NexRLRole.DATA_LOADER: MappingProxyType(
            {"mock": f"{_PACKAGE}.client:MockDataLoader", "torch": f"{_PACKAGE}.client:TorchDataLoader"}
        ),
        NexRLRole.VALIDATOR: MappingProxyType({"default": f"{_PACKAGE}.loop:Validator"}),
    }
)
"""Classes by role and type. The configuration names the user's classes: `environment.worker`,
`environment.data_loader`, `train.algorithm.target`."""


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
