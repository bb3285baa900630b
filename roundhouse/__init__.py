"""Roundhouse: reinforcement learning post-training of language models as a durable workflow.

    import roundhouse as rh

    run = rh.train("configs/quickstart.yaml", iterations=3)
    run.metrics().plot(y="evaluation/reward/mean")
    run.rollouts(iteration=3, split="train").to_pandas()
    run.checkpoint().export("model/", dtype="bfloat16")

Each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundhouse.api.checkpoints import Checkpoint as Checkpoint
    from roundhouse.api.rows import Rows as Rows
    from roundhouse.api.runs import RunHandle as RunHandle
    from roundhouse.api.runs import RunList as RunList
    from roundhouse.api.runs import open_run as open_run
    from roundhouse.api.runs import query as query
    from roundhouse.api.runs import replay as replay
    from roundhouse.api.runs import rescore as rescore
    from roundhouse.api.runs import runs as runs
    from roundhouse.api.training import train as train
    from roundhouse.config.loading import load_config as load_config
    from roundhouse.config.models import RunConfig as RunConfig
    from roundhouse.environments.base import Environment as Environment
    from roundhouse.environments.base import GymnasiumEnvironment as GymnasiumEnvironment
    from roundhouse.environments.base import GymStep as GymStep
    from roundhouse.environments.base import Rewarded as Rewarded
    from roundhouse.environments.base import Verdict as Verdict
    from roundhouse.environments.base import final_text as final_text
    from roundhouse.environments.base import task_row as task_row
    from roundhouse.environments.base import tool as tool
    from roundhouse.errors import ConfigError as ConfigError
    from roundhouse.errors import DataError as DataError
    from roundhouse.errors import InfraError as InfraError
    from roundhouse.errors import RoundhouseError as RoundhouseError
    from roundhouse.errors import StoreError as StoreError
    from roundhouse.generation.interface import GenerationInterface as GenerationInterface
    from roundhouse.launch.base import Launcher as Launcher
    from roundhouse.rollout.plan import Curriculum as Curriculum
    from roundhouse.tracking.sinks import MetricsSink
    from roundhouse.training.algorithms import Algorithm as Algorithm
    from roundhouse.training.algorithms import AlgorithmInputs as AlgorithmInputs
    from roundhouse.weight_sync.base import WeightTransport as WeightTransport

    Sink = MetricsSink

__version__ = "0.1.0"

_PLACES = {
    "roundhouse.api.checkpoints": ("Checkpoint",),
    "roundhouse.api.rows": ("Rows",),
    "roundhouse.api.runs": ("RunHandle", "RunList", "open_run", "query", "replay", "rescore", "runs"),
    "roundhouse.api.training": ("train",),
    "roundhouse.config.loading": ("load_config",),
    "roundhouse.config.models": ("RunConfig",),
    "roundhouse.environments.base": (
        "Environment", "GymStep", "GymnasiumEnvironment", "Rewarded", "Verdict", "final_text", "task_row", "tool",
    ),
    "roundhouse.errors": ("ConfigError", "DataError", "InfraError", "RoundhouseError", "StoreError"),
    "roundhouse.generation.interface": ("GenerationInterface",),
    "roundhouse.launch.base": ("Launcher",),
    "roundhouse.rollout.plan": ("Curriculum",),
    "roundhouse.tracking.sinks": ("MetricsSink as Sink",),
    "roundhouse.training.algorithms": ("Algorithm", "AlgorithmInputs"),
    "roundhouse.weight_sync.base": ("WeightTransport",),
}  # fmt: skip
"""Public names by the module that has them."""
_MODULES = {
    entry.rpartition(" ")[2]: (module, entry.partition(" ")[0]) for module in _PLACES for entry in _PLACES[module]
}

__all__ = ["__version__", *_MODULES]

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(
                f"module 'roundhouse' has no attribute {name!r}. It has: {', '.join(sorted(_MODULES))}."
            )
        module, own = _MODULES[name]
        value = globals()[name] = getattr(import_module(module), own)
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
