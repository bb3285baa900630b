"""Weights on their way from the store into an engine: found, brought to this node, checked before anything is touched.

Invariant: what `fetch` returns is a local directory whose safetensors files are complete; a download becomes visible under its
final name only when it is whole, so a replica that dies half-way leaves nothing that a later one would trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundhouse.errors import StoreError
from roundhouse.generation.engine import WeightsRefused
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import MANIFEST, Manifest

KEPT_DOWNLOADS = 2
"""Downloads kept on a node: the current version and the one before, so that a replica that restarts finds it."""

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


def local_path(uri: str) -> Path | None:
    """The path of a local directory (plain or file://), None when the URI is remote."""
    if uri.startswith("file://"):
        return Path(uri[len("file://") :])
    return None if "://" in uri else Path(uri)


def fetch(uri: str, cache: Path | None = None) -> Path:
    """A local directory with the weights of `uri`.

    Raises:
        WeightsRefused: there are no safetensors at `uri`.
        OSError: the store cannot be reached; trying again may help.
    """
    path = local_path(uri)
    if path is None:
        return _download(uri, cache or _own_cache())
    if not path.is_dir():
        raise WeightsRefused(f"The weights directory {path} does not exist. Name a Hugging Face directory.")
    return path


def _own_cache() -> Path:
    """A directory of this user's alone: in one that others can write to, they could place weights of theirs."""
    cache = Path(tempfile.gettempdir()) / f"roundhouse-weights-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.is_symlink() or cache.stat().st_uid != os.getuid():
        raise WeightsRefused(f"{cache} belongs to another user. Set TMPDIR to a directory of your own.")
    cache.chmod(0o700)
    return cache


def _download(uri: str, cache: Path) -> Path:
    """Where there is a manifest, it tells the files and their digests, since a bucket's listing may be late; and a run that was
    deleted and begun again under the same id is another one. Elsewhere the listing has to do."""
    source = Location(uri)
    try:
        manifest = _manifest(source)
        final = cache / hashlib.sha256(f"{uri}\n{manifest}".encode()).hexdigest()[:24]
        if final.is_dir():
            os.utime(final)
            return final
        files = _listed(source) if manifest is None else {entry.path: entry.sha256 for entry in manifest.files}
        wanted = {name: digest for name, digest in files.items() if _is_weights(name)}
        if not any(name.endswith(".safetensors") for name in wanted):
            raise WeightsRefused(f"There are no safetensors files at {uri}.")
        return _placed(source, wanted, cache, final)
    except StoreError as error:
        raise OSError(str(error)) from error


def _manifest(source: Location) -> Manifest | None:
    try:
        return Manifest.model_validate_json(source.read(MANIFEST))
    except NotFound:
        return None
    except ValueError as error:
        raise WeightsRefused(f"{source.uri}/{MANIFEST} is not a manifest: {error}") from error


def _listed(source: Location) -> dict[str, str | None]:
    return dict.fromkeys(source.names())


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith((".safetensors", ".json"))


def _placed(source: Location, wanted: dict[str, str | None], cache: Path, final: Path) -> Path:
    partial = cache / f".{final.name}.{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    try:
        source.download(list(wanted), partial)
        for name, digest in wanted.items():
            if digest is not None and _sha256(partial / name) != digest:
                raise WeightsRefused(f"{source.uri}/{name} is not what its manifest says. Restore it.")
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
            # Another replica of this node was quicker.
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _forget_old_downloads(cache, final)
    return final


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _forget_old_downloads(cache: Path, newest: Path) -> None:
    downloads = sorted((d for d in cache.iterdir() if not d.name.startswith(".")), key=lambda d: -d.stat().st_mtime)
    for old in [d for d in downloads if d != newest][KEPT_DOWNLOADS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


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


def check(directory: Path, model_dir: Path, expected: dict[str, tuple[int, ...]], digest: str | None = None) -> None:
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
    if digest is not None and (actual := digest_of(directory)) != digest:
        raise WeightsRefused(f"The weights in {directory} have digest {actual}, wanted was {digest}.")


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
    """`sha256:` over names and contents of the safetensors files."""
    whole = hashlib.sha256()
    for shard in shards(directory):
        with shard.open("rb") as file:
            whole.update(f"{shard.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{whole.hexdigest()}"
