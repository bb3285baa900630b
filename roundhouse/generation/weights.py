"""Weights that an engine is about to take: found, and checked before anything is touched.

Invariant: what passes `check` has every tensor of the served model in its shape, and no other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundhouse.config.generation import GenerationConfig
from roundhouse.errors import DataError, StoreError
from roundhouse.generation.engine import WeightsRefused
from roundhouse.weight_sync import base
from roundhouse.weight_sync.base import local_path
from roundhouse.weight_sync.cache import NodeCache, node_cache, private_directory
from roundhouse.weight_sync.tensor_digest import digest_of_tensors, tensor_digests

__all__ = ["check", "digest_of", "expected_shapes", "fetch", "iterate", "local_path", "own_cache", "shapes", "shards"]

DEFAULT_CACHE_BYTES = int(GenerationConfig().weights_cache_gib * 2**30)

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


def own_cache(kind: str) -> Path:
    """A directory of this user's alone, for copies on this node."""
    return private_directory(Path(tempfile.gettempdir()), f"roundhouse-{kind}")


def fetch(uri: str, cache: Path | None = None) -> Path:
    """A local directory with the weights of `uri`.

    Raises:
        WeightsRefused: there are no safetensors at `uri`.
        OSError: the store cannot be reached; trying again may help.
    """
    try:
        place = node_cache(DEFAULT_CACHE_BYTES) if cache is None else NodeCache(cache, DEFAULT_CACHE_BYTES)
        directory, entry = base.fetch(uri, place)
    except (DataError, StoreError) as error:
        raise WeightsRefused(str(error)) from error
    if entry is not None:
        entry.release()
    return directory


def shards(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory.

    Raises:
        WeightsRefused: there are none, or the index names one that is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise WeightsRefused(f"{index} names {outside[0][:200]!r}, which lies outside of its directory.")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise WeightsRefused(f"{directory} lacks {missing[0]}, which its index names. The weights are incomplete.")
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise WeightsRefused(f"{directory} has no safetensors files. Name a Hugging Face directory with weights.")
    return found


def iterate(directory: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the directory by its name, as torch tensors on the CPU."""
    from safetensors import safe_open

    for shard in shards(directory):
        with safe_open(shard, "pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the files' headers.

    Raises:
        WeightsRefused: a file is damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    for shard in shards(directory):
        try:
            with safe_open(shard, "pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{shard} is damaged: {error}. Point to a complete checkpoint.") from error
    return found


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
    for name, shape in expected.items():
        if name not in found:
            raise WeightsRefused(
                f"{directory} lacks the tensor {name}. The weights are incomplete or of another model."
            )
        if found[name] != shape:
            raise WeightsRefused(f"{name} in {directory} has shape {found[name]}, the served model wants {shape}.")
    if surplus := sorted(found.keys() - expected.keys() - _tied_names(model_dir)):
        raise WeightsRefused(f"{directory} has the tensor {surplus[0]}, which the served model has not.")


def _tied_names(model_dir: Path) -> set[str]:
    """Tensors that a checkpoint may repeat although they are tied to another."""
    tied = json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings", False)
    return {"lm_head.weight"} if tied else set()


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


def digest_of(directory: Path) -> str:
    """`sha256:` over names, dtypes, shapes and contents of all tensors; how they are spread over files does not matter."""
    return digest_of_tensors(tensor_digests(shards(directory)))
