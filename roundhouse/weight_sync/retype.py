"""Weights in the number format that the engine holds.

Invariant: rounding is to the nearest, ties to even, element by element, so the same checkpoint gives the same bytes on every
machine. What is no floating-point number stays as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from roundhouse.weight_sync.tensor_file import TensorFile, weight_files

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATING = frozenset({"F64", "F32", "BF16", "F16"})


def needs_retyping(directory: Path, dtype: str) -> bool:
    """Whether a tensor of the directory is of another floating-point type."""
    wanted = NAMES[dtype]
    return any(
        tensor.dtype in _FLOATING and tensor.dtype != wanted
        for path in weight_files(directory)
        for tensor in TensorFile(path).tensors()
    )


def retype(source: Path, target: Path, dtype: str) -> None:
    """Write the directory's weights and JSON files to another, empty one."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    wanted = getattr(torch, dtype)
    for path in weight_files(source):
        with safe_open(path, "pt", device="cpu") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_tensor(name)
                tensors[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
            save_file(tensors, target / path.name, metadata={"format": "pt"})
    copy_side_files(source, target)


def copy_side_files(source: Path, target: Path) -> None:
    """What an engine asks of a directory of weights beside the weights: its JSON files, but no manifest."""
    for path in sorted(source.glob("*.json")):
        if path.name != "manifest.json" and not path.name.startswith("attempt-"):
            shutil.copyfile(path, target / path.name)
