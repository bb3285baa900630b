"""Weights that an engine is about to take, checked before the engine is touched.

Invariant: what passes `check` has every tensor of the served model in its shape, and no other.
"""

from __future__ import annotations

import json
from pathlib import Path

from roundhouse.errors import DataError
from roundhouse.generation.engine import WeightsRefused
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

_SHAPING_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the files' headers.

    Raises:
        WeightsRefused: a file is missing, damaged or cut short.
    """
    try:
        return {tensor.name: tensor.shape for path in weight_files(directory) for tensor in TensorFile(path).tensors()}
    except DataError as error:
        raise WeightsRefused(str(error)) from error


def expected_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config.json is made of; tied ones are counted once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # parameters are listed once even where two modules share one (tied embeddings)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=True)}


def check(directory: Path, model_dir: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse weights that are not whole or not of the served model, before the engine is touched.

    Raises:
        WeightsRefused: names the first thing that is wrong.
    """
    _check_config(directory, model_dir)
    found = shapes(directory)
    served = json.loads((model_dir / "config.json").read_text())
    # A checkpoint may repeat a tensor although it is tied to another.
    tied = {"lm_head.weight"} if served.get("tie_word_embeddings", False) else set()
    for name, shape in expected.items():
        if name not in found:
            raise WeightsRefused(
                f"{directory} lacks the tensor {name}. The weights are incomplete or of another model."
            )
        if found[name] != shape:
            raise WeightsRefused(f"{name} in {directory} has shape {found[name]}, the served model wants {shape}.")
    if surplus := sorted(found.keys() - expected.keys() - tied):
        raise WeightsRefused(f"{directory} has the tensor {surplus[0]}, which the served model has not.")


def _check_config(directory: Path, model_dir: Path) -> None:
    path = directory / "config.json"
    if not path.is_file():
        return
    try:
        new, served = json.loads(path.read_text()), json.loads((model_dir / "config.json").read_text())
    except ValueError as error:
        raise WeightsRefused(f"{path} is not JSON: {error}.") from error
    for key in _SHAPING_KEYS:
        if new.get(key) != served.get(key):
            raise WeightsRefused(
                f"{path} has {key}={new.get(key)}, the served model has {served.get(key)}. A refit replaces weights of the "
                "same model; deploy another model with its own run."
            )
