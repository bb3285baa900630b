"""A base and an adapter (LoRA), merged on the node where the engine is, so that only the adapter travels.

Invariant: what is written is W + (alpha / rank) · B · A for every adapted matrix, computed as the trainer computes what it
publishes (`roundhouse.training.lora.merged`), and the base's own bytes elsewhere. Whether both came to the same bits is told by
the digest of the published checkpoint, not assumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roundhouse.errors import DataError
from roundhouse.weight_sync.retype import copy_side_files
from roundhouse.weight_sync.tensor_file import weight_files

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def merge(base: Path, adapter: Path, target: Path, dtype: str) -> None:
    """Write the merged weights in `dtype`, and the base's JSON files, to an empty directory.

    Raises:
        DataError: the adapter is damaged, of a kind that is not known here, or does not fit the base.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    pairs, scaling = _read(adapter)
    wanted = getattr(torch, dtype)
    for path in weight_files(base):
        tensors = {}
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                weight = file.get_tensor(name)
                if (pair := pairs.pop(name, None)) is not None:
                    weight = _merged(name, weight, *pair, scaling)
                tensors[name] = weight.to(wanted) if weight.is_floating_point() else weight
        save_file(tensors, target / path.name, metadata={"format": "pt"})
    if pairs:
        raise DataError(f"The adapter {adapter} is for {min(pairs)}, which {base} has not. It is of another model.")
    copy_side_files(base, target)


def _merged(name: str, weight: Any, low: Any, high: Any, scaling: float) -> Any:
    if weight.shape != (high.shape[0], low.shape[1]) or low.shape[0] != high.shape[1]:
        raise DataError(
            f"The adapter of {name} has shapes {tuple(high.shape)} and {tuple(low.shape)}, the weight {tuple(weight.shape)}. "
            "It is of another model."
        )
    return weight.to(low.dtype) + scaling * (high @ low)


def _read(adapter: Path) -> tuple[dict[str, tuple[Any, Any]], float]:
    """A and B by the name of the weight that they change, and what their product is multiplied with."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text())
        tensors = load_file(adapter / ADAPTER_FILE)
        scaling = config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise DataError(f"The adapter in {adapter} cannot be read: {error!r}. Fetch the whole checkpoint.") from error
    if unknown := [key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if config.get(key)]:
        raise DataError(
            f"The adapter in {adapter} uses {unknown[0]}, which is not merged here. Use generation.weight_sync=store."
        )
    pairs = {}
    for name, low in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        stem = name.removesuffix(".lora_A.weight")
        if (high := tensors.get(f"{stem}.lora_B.weight")) is None:
            raise DataError(f"The adapter in {adapter} lacks {stem}.lora_B.weight. Fetch the whole checkpoint.")
        pairs[f"{stem.removeprefix(_PREFIX)}.weight"] = (low, high)
    return pairs, scaling
