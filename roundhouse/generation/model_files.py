"""A model's config and tokenizer on this node, wherever they are kept.

Invariant: what `local_model` returns is a directory of this node with every file that was committed, digests checked, but the
weights: an engine starts from it, and its weights come by refit. A directory of this node is used where it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from roundhouse.errors import ConfigError, StoreError
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import MANIFEST, FileEntry, Manifest, model_location, sha256
from roundhouse.weight_sync.cache import private_directory
from roundhouse.weight_sync.checkpoint_files import local_path
from roundhouse.weight_sync.tensor_files import INDEX


def local_model(uri: str, cache: Path | None = None) -> Path:
    """A local directory with config and tokenizer of the model at `uri`: a path, file:// or s3://.

    Raises:
        ConfigError: there is no committed model at `uri`.
        StoreError: the store cannot be read, or a file is not what its manifest says.
    """
    path = local_path(uri)
    if path is not None:
        return model_location(Location(str(path))).local_path
    source = Location(uri)
    try:
        data = source.read(MANIFEST)
    except NotFound as error:
        raise ConfigError(
            f"There is no committed model at {uri}. Name the directory of a checkpoint: <store>/runs/<run>/checkpoints/…"
        ) from error
    final = (
        cache or private_directory(Path(tempfile.gettempdir()), "roundhouse-models")
    ) / f"model-{hashlib.sha256(uri.encode() + data).hexdigest()[:24]}"
    if not final.is_dir():
        files = Manifest.model_validate_json(data).model_files.by_name()
        _place(
            source,
            {
                name: entry
                for name, entry in files.items()
                if "/" not in name and not name.endswith(".safetensors") and name != INDEX
            },
            final,
        )
    return final


def _place(source: Location, entries: dict[str, FileEntry], final: Path) -> None:
    partial = final.parent / f".{final.name}.{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    try:
        for name, entry in entries.items():
            data = source.read(entry.path)
            if sha256(data) != entry.sha256:
                raise StoreError(
                    f"{source.uri}/{entry.path} is not what its manifest says. Look with `roundhouse store verify`."
                )
            (partial / name).write_bytes(data)
        try:
            os.rename(partial, final)
        except OSError:
            if not final.is_dir():
                raise
            # Another replica of this node was quicker.
    finally:
        shutil.rmtree(partial, ignore_errors=True)
