"""The configuration of `roundhouse train --data … --reward … --model …`: rows, reward functions, defaults for this machine.

Invariant: it is an ordinary configuration. Saved as a file, it makes the same run.

    --data rows.jsonl --reward rewards.py:correct --model smollm2    run_id: rows-correct
                                                                     environment: {kind: dataset, data: rows.jsonl, …}
                                                                     policy: {kind: pretrained, path: smollm2}
"""

from __future__ import annotations

import importlib.util
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundhouse.config.training import BundledPolicy

ON_CPU: dict[str, Any] = {
    "iterations": 10,
    "generation": {"max_model_len": 512, "sampling": {"max_new_tokens": 48}},
    "rollout": {"prompts_per_iteration": 8, "group_size": 8, "max_turns": 1},
    "train": {
        "minibatches": 2,
        "tokens_per_microbatch": 2048,
        "optimizer": {"learning_rate": 4e-5, "warmup_steps": 2, "schedule": "linear", "decay_steps": 18},
    },
    "evaluation": {"every": 5, "tasks": 64},
    "checkpoint": {"keep_last": 2},
}
"""For a model of some hundred million parameters: a learning curve in minutes."""
ON_GPU: dict[str, Any] = {
    "iterations": 100,
    "generation": {
        "max_model_len": 2048,
        "gpus_per_replica": 1,
        "dtype": "bfloat16",
        "sampling": {"max_new_tokens": 1024},
    },
    "rollout": {"prompts_per_iteration": 32, "group_size": 8, "max_turns": 1},
    "train": {
        "device": "cuda",
        "dtype": "bfloat16",
        "logits_chunk_tokens": 1024,
        "activation_checkpointing": True,
        "tokens_per_microbatch": 16384,
        "minibatches": 4,
    },
    "placement": {"colocation": "gpu", "engine_sleeps": True},
    "evaluation": {"every": 10, "tasks": 200},
}
"""For one GPU that engine and trainer use by turns; the learning rate is the default of the policy."""


def rows_tree(data: str, rewards: Sequence[str], model: str, prompt: str, heldout: float) -> dict[str, Any]:
    """Return the keys of a run; `parse_config` checks them.

    Args:
        model: directory, or the name of a bundled model.
    """
    bundled = typing.get_args(BundledPolicy.model_fields["name"].annotation)
    names = [reward.rpartition(":")[2] for reward in rewards]
    stem = data.removeprefix("hf:") if data.startswith("hf:") else Path(data).stem
    run_id = re.sub(r"[^a-z0-9._-]+", "-", "-".join([stem, *names]).lower()).strip("-._")[:63]
    defaults = ON_GPU if has_gpu() else ON_CPU
    generation = defaults["generation"]
    if importlib.util.find_spec("vllm") is None:  # the trainer generates: slower, and nothing more to install
        generation = {key: value for key, value in generation.items() if key != "gpus_per_replica"} | {
            "backend": "trainer"
        }
    tree = {
        "run_id": run_id or "rows",
        **{"policy": {"kind": "bundled", "name": model} if model in bundled else {"kind": "pretrained", "path": model}},
        "environment": {
            "kind": "dataset",
            "data": data,
            "prompt": prompt,
            "reward": rewards[0] if len(rewards) == 1 else list(rewards),
            "heldout": heldout,
        },
        **defaults,
        "generation": generation,
    }
    if generation.get("backend") == "trainer":
        tree.pop("placement", None)
    return tree


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
