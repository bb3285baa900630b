"""NexRL: rollout workers, evaluators, data loaders and the trajectory pool with its interfaces, and its configurations.

A recipe imports its base classes from here:

    from roundhouse.plugins.nexrl import AgentRolloutWorker, EvaluationRunResult, Evaluator
"""

from __future__ import annotations

import importlib
from typing import Any

from roundhouse.imports import provide_foreign_names
from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.worker": Plugin(
        f"{__name__}.client:WorkerClient.from_config", f"{__name__}.section:WorkerEnvironment"
    ),
    "translator.nexrl": Plugin(f"{__name__}.configuration:translate_configuration"),
}
MODULES = frozenset(
    f"nexrl.{name}"
    for name in (
        "activity_tracker", "algorithm", "algorithm.core_algos", "base_module", "controller", "data_loader",
        "data_loader.data_loader", "data_loader.torch_data_loader", "error_reporter", "executor", "llm_service_client", "mock",
        "nexrl_types", "ray_resource_manager", "rollout_worker", "rollout_worker.agent_rollout_worker",
        "rollout_worker.base_nexau_rollout_worker", "rollout_worker.base_rollout_worker",
        "rollout_worker.simple_rollout_worker", "train_service_client", "trainer", "trainer.base_trainer",
        "trainer.remote_api_trainer", "trainer.self_hosted_trainer", "trajectory_pool", "utils", "utils.logging_utils",
        "validator", "weight_sync", "weight_sync.weight_sync_controller",
    )
)  # fmt: skip
"""NexRL's module names that recipes can import; this package provides their contents."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module(f"{__name__}.names"), name)


provide_foreign_names("nexrl", MODULES, __name__)
