"""Export a policy version as a plain Hugging Face directory with a model card.

Invariant: a directory of the output's name holds a whole export or nothing. Files are written into a hidden directory in the
same folder, each is compared with the digest that was committed, and one rename publishes them. A killed export leaves the
hidden directory.

    model/config.json  model.safetensors  tokenizer.json  …  README.md           the whole model
    adapter/adapter_config.json  adapter_model.safetensors  tokenizer.json  …    an adapter (`train.lora`)
    adapter/base/config.json  model.safetensors  …                               the model below it, if the run made that
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse.api.model_card import model_card
from roundhouse.errors import ConfigError, DataError, StoreError
from roundhouse.store.directories import DIGESTS, download_files
from roundhouse.store.location import Location
from roundhouse.store.run import TRAINER, Run, state_of
from roundhouse.store.stage import FileEntry, Reference, is_weights, read_manifest
from roundhouse.weight_sync.tensor_files import TensorFile, rewrite, weight_files

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
CARD = "README.md"
ADAPTER_CONFIG, ADAPTER_STEM, BASE_STEM = "adapter_config.json", "adapter_model", "base"
"""Names of an adapter's files and of the frozen matrices below it, in the trainer's state."""
WEIGHTS_INDEX = "model.safetensors.index.json"


def export_model(
    run: Run,
    store: str,
    checkpoint: Reference,
    output: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    merge: bool = False,
) -> Path:
    """Write a checkpoint's model to a directory that is to be made; arguments and errors as of `Checkpoint.export`."""
    target = Path(output)
    _refuse_output(target)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"dtype is {dtype!r}. Choose one of: {', '.join(DTYPES)}; without it the weights stay as stored."
        )
    is_adapter = run.config.train.lora is not None and not merge and checkpoint.policy_version > run.first_version
    with _published(target) as staging:
        if is_adapter:
            _write_adapter(run, checkpoint, staging, target.absolute(), dtype)
        else:
            _write_model(checkpoint, staging, dtype)
        card = model_card(run, store, checkpoint, dtype, is_adapter=is_adapter)
        (staging / CARD).write_text(card, encoding="utf-8")
    return target


def _refuse_output(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"The directory {target} is not empty. Name another for the model, or delete it.")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file. Name a directory for the model.")


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Yield a directory in the target's folder, and rename it to the target at the end of the block."""
    final = target.absolute()
    staging = final.with_name(f".{final.name}-{uuid.uuid4().hex[:8]}")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"The directory {target} cannot be written ({error.strerror}). Name another.") from error
    try:
        yield staging
        for path in filter(Path.is_file, staging.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            staging.rename(final)
        except OSError as error:  # another process made it meanwhile
            raise ConfigError(f"The directory {target} cannot be made ({error.strerror}). Name another.") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_model(checkpoint: Reference, directory: Path, dtype: str | None) -> None:
    files = _side_files(checkpoint) | _weights(checkpoint)
    if dtype is None:
        download_files(Location(checkpoint.uri), files, directory)
        return
    with tempfile.TemporaryDirectory(dir=directory) as stored:
        download_files(Location(checkpoint.uri), files, Path(stored))
        _retype(Path(stored), directory, dtype)


def _weights(checkpoint: Reference) -> dict[str, FileEntry]:
    files = read_manifest(checkpoint).model_files
    if not (weights := files.weights()):
        raise DataError(
            f"{checkpoint.uri} has no weights: the service that trains the run keeps them. Export the model there."
        )
    return weights | {name: entry for name, entry in files.by_name().items() if name == WEIGHTS_INDEX}


def _side_files(checkpoint: Reference) -> dict[str, FileEntry]:
    """Return configuration, tokenizer and chat template by name."""
    files = read_manifest(checkpoint).model_files.by_name()
    return {
        name: entry
        for name, entry in files.items()
        if "/" not in name and not is_weights(name) and name not in (WEIGHTS_INDEX, CARD)
    }


def _retype(source: Path, target: Path, dtype: str) -> None:
    """Write the files of a model with floating-point tensors in another type."""
    _rewrite(weight_files(source), target, dtype)
    for path in source.iterdir():
        if not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _rewrite(
    files: Sequence[Path], target: Path, dtype: str | None, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write files of tensors anew, one tensor in memory at a time.

    Args:
        dtype: of floating-point tensors; as they are without it.
        tensors: that take the place of those of the same name.
    """
    import torch

    kind: torch.dtype | None = None if dtype is None else getattr(torch, dtype)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        target_dtype = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
        return (tensors or {}).get(name, tensor).to(target_dtype)

    rewrite(files, target, change, kind)
    (target / DIGESTS).unlink()


def _write_adapter(run: Run, checkpoint: Reference, directory: Path, target: Path, dtype: str | None) -> None:
    """Write the adapter of a version, and the model below it unless that is a directory of the user's."""
    state = state_of(checkpoint)
    files = {} if state is None else read_manifest(state).model_files.by_name()
    own = {Path(name).name: entry for name, entry in files.items() if Path(name).parent.name == TRAINER}
    if state is None or ADAPTER_CONFIG not in own:
        raise StoreError(
            f"Version {checkpoint.policy_version} of run {run.run_id!r} keeps no trainer state, which holds the adapter. "
            "Export the whole model with --merge (in Python merge=True), or a version that keeps its state."
        )
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        stored, place = Path(temporary), Location(state.uri)
        download_files(
            place, {n: e for n, e in own.items() if n == ADAPTER_CONFIG or n.startswith(ADAPTER_STEM)}, stored
        )
        _refuse_experts(stored)
        _rewrite(weight_files(stored, ADAPTER_STEM), directory, dtype)
        for path in filter(lambda path: path.suffix == ".json", stored.iterdir()):
            shutil.copyfile(path, directory / path.name)
    download_files(
        Location(checkpoint.uri), {n: e for n, e in _side_files(checkpoint).items() if n != "config.json"}, directory
    )
    policy, base = run.config.policy, str(target / BASE_STEM)
    if policy.model is not None and run.parent is None and (Path(policy.model) / "config.json").is_file():
        base = str(Path(policy.model).resolve())
    else:
        frozen = {
            name: entry for name, entry in own.items() if re.fullmatch(rf"{BASE_STEM}(-\d+-of-\d+)?\.safetensors", name)
        }
        _write_base(checkpoint, Location(state.uri), frozen, directory / BASE_STEM, dtype)
    settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings |= {"base_model_name_or_path": base, "inference_mode": True}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _refuse_experts(stored: Path) -> None:
    """Refuse an adapter of matrices that are fused over experts, for which PEFT's files have no form like ours."""
    from roundhouse.training.expert_adapters import OF_EXPERTS

    names = (tensor.name for path in weight_files(stored, ADAPTER_STEM) for tensor in TensorFile(path).tensors())
    if (name := next(filter(OF_EXPERTS.search, names), None)) is not None:
        raise ConfigError(
            f"The adapter changes matrices of experts ({name}), which PEFT does not load. Export the whole model with --merge "
            "(in Python merge=True)."
        )


def _write_base(
    checkpoint: Reference, state: Location, frozen: Mapping[str, FileEntry], directory: Path, dtype: str | None
) -> None:
    """Write the model below an adapter: the version's files, in which the adapter is merged, with the frozen matrices."""
    from safetensors.torch import load_file

    directory.mkdir()
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        stored = Path(temporary)
        download_files(state, frozen, stored)
        tensors = {name: tensor for file in sorted(frozen) for name, tensor in load_file(stored / file).items()}
        for name in frozen:
            (stored / name).unlink()
        download_files(Location(checkpoint.uri), _side_files(checkpoint) | _weights(checkpoint), stored)
        _rewrite(weight_files(stored), directory, dtype, tensors)
        for path in stored.iterdir():
            if not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)
