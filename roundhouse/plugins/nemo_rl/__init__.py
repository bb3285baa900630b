"""NeMo RL: its configuration (`configuration`), and the names of its generation example and of NeMo Gym's integration patterns.

from nemo_rl.models.generation.vllm import VllmConfig, VllmGeneration      after `import roundhouse.plugins.nemo_rl`
"""

from __future__ import annotations

import importlib
from typing import Any

from roundhouse.imports import provide_foreign_names
from roundhouse.plugins import Plugin

PLUGINS = {"translator.nemo_rl": Plugin(f"{__name__}.configuration:translate_configuration")}

MODULES = frozenset(
    f"nemo_rl.{name}"
    for name in (
        "algorithms", "algorithms.utils", "distributed", "distributed.batched_data_dict", "distributed.virtual_cluster",
        "environments", "environments.nemo_gym", "environments.penguin", "models", "models.generation",
        "models.generation.interfaces", "models.generation.vllm",
    )
)  # fmt: skip
"""Modules of NeMo RL: programs import this package's names from them."""
_GENERATION, _ROLLOUTS = "roundhouse.plugins.nemo_rl.generation", "roundhouse.plugins.nemo_rl.gym_rollouts"
_NAMES = {
    **dict.fromkeys(
        (
            "BatchedDataDict",
            "GenerationConfig",
            "RayVirtualCluster",
            "VllmConfig",
            "VllmGeneration",
            "configure_generation_config",
            "get_tokenizer",
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        ("GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec"), "roundhouse.generation.interface"
    ),
    **dict.fromkeys(("NemoGym", "Penguin", "RolloutCollectionHelper", "load_jsonl", "save_jsonl"), _ROLLOUTS),
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


provide_foreign_names("nemo_rl", MODULES, __name__)
