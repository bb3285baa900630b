"""The transport `adapter`: a LoRA adapter travels alone and is merged with its base on the engine's node.

Invariant: the result is W + (alpha / rank) · B · A for every adapted matrix, computed as the trainer computes its
published weights (`roundhouse.training.layers.merged`), and the base's bytes elsewhere. The digest of the published
checkpoint shows whether both have the same bits; another processor may round differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundhouse.config.models import RunConfig
from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.store.stage import model_location, read_manifest
from roundhouse.weight_sync.base import (
    FetchRequest,
    Published,
    RunCheckpoint,
    WeightSource,
    WeightTransport,
    checkpoint_source,
)
from roundhouse.weight_sync.cache import CacheEntry, entry_key
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import copy_side_files, digest_of, rewrite, weight_files

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


class AdapterSource(WeightSource):
    kind: str = "adapter"
    base: str
    """URI of the checkpoint that the adapter is for."""
    uri: str
    """URI of the adapter's directory."""


class AdapterTransport(WeightTransport):
    """The adapter of `train.lora`; the base is read once a node."""

    Source = AdapterSource

    def check(self, run: RunConfig) -> None:
        if run.train.lora is None:
            raise ValueError(
                "generation.weight_sync is adapter, but train.lora is not set. Set it, or generation.weight_sync to store."
            )

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        with checkpoint.in_engine_format() as directory:
            digest = digest_of(directory)
            run, source = checkpoint.run, checkpoint_source(checkpoint.dtype)
            start = run.checkpoint(0).reference()
            names = read_manifest(checkpoint.reference).model_files.by_name()
            adapter = next((name for name in names if name.endswith(f"/{ADAPTER_FILE}")), None)
            # The starting policy lacks an adapter, and the base of a fork is its parent's.
            if start is not None and run.parent is None and adapter is not None:
                place = model_location(Location(checkpoint.reference.uri)) / adapter.removesuffix(f"/{ADAPTER_FILE}")
                source = AdapterSource(dtype=checkpoint.dtype, base=start.uri, uri=place.uri)
            yield Published(digest, source)

    @classmethod
    def fetch(cls, source: AdapterSource, request: FetchRequest) -> tuple[Path, CacheEntry | None]:
        location = Location(source.uri)
        names = (ADAPTER_FILE, ADAPTER_CONFIG)
        contents = {name: location.read(name) for name in names}
        marks = [hashlib.sha256(data).hexdigest() for data in contents.values()]

        def fill(partial: Path) -> None:
            base, entry = fetch_checkpoint(source.base, request.cache)
            try:
                own = partial / "adapter"
                own.mkdir()
                for name, data in contents.items():
                    (own / name).write_bytes(data)
                merge(base, own, partial, source.dtype)
                for name in names:
                    (own / name).unlink()
                own.rmdir()
            finally:
                if entry is not None:
                    entry.release()

        entry = request.cache.entry(entry_key("adapter", source.base, source.dtype, *marks), fill)
        return entry.path, entry


def merge(base: Path, adapter: Path, target: Path, dtype: str) -> None:
    """Write the merged weights in `dtype`, and the base's JSON files, to an empty directory.

    Raises:
        DataError: the adapter is damaged, of a kind that is not known here, or does not fit the base.
    """
    import torch

    pairs, scaling = _read(adapter)
    torch_dtype = getattr(torch, dtype)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if (pair := pairs.pop(name, None)) is not None:
            low, high = pair
            if weight.shape != (high.shape[0], low.shape[1]) or low.shape[0] != high.shape[1]:
                raise DataError(
                    f"The adapter of {name} has shapes {tuple(high.shape)} and {tuple(low.shape)}, the weight "
                    f"{tuple(weight.shape)}. It is of another model."
                )
            weight = weight.to(low.dtype) + scaling * (high @ low)
        return weight.to(torch_dtype) if weight.is_floating_point() else weight

    rewrite(weight_files(base), target, change, torch_dtype)
    if pairs:
        raise DataError(f"The adapter {adapter} is for {min(pairs)}, which {base} has not. It is of another model.")
    copy_side_files(base, target)


def _read(adapter: Path) -> tuple[dict[str, tuple[Any, Any]], float]:
    """A and B by the name of the weight that they change, and what their product is multiplied with."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from roundhouse.training.expert_adapters import OF_EXPERTS

    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text())
        tensors = load_file(adapter / ADAPTER_FILE)
        scaling = config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise DataError(f"The adapter in {adapter} cannot be read: {error!r}. Fetch the whole checkpoint.") from error
    if unknown := [key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if config.get(key)]:
        raise DataError(
            f"The adapter in {adapter} uses {unknown[0]}, which cannot be merged. Use generation.weight_sync=store."
        )
    if experts := list(filter(OF_EXPERTS.search, tensors)):
        raise DataError(
            f"The adapter in {adapter} changes matrices of experts ({experts[0]}), which are sent merged alone. Use "
            "generation.weight_sync=store."
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
