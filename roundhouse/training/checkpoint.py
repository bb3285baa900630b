"""A checkpoint's directory: a Hugging Face model that transformers and vLLM load, and `trainer/` to continue from.

    config.json  model.safetensors  tokenizer.json  …      weights in float32, names as in the starting model
    trainer/optimizer.safetensors                          AdamW's moments
    trainer/state.json                                     cursor: updates done, last iteration, seed

Files of tensors above `tensor_files.SHARD_BYTES` are several, with an index. They are written tensor by tensor and hashed in
passing, so saving takes the memory of one tensor beside the model's own.

Invariant: loading fails rather than start from weights that were not in the files, and the state is everything: all
randomness of a step is derived from (seed, iteration), so no generator state exists to be saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from roundhouse.errors import ConfigError, DataError
from roundhouse.fast_imports import lean_transformers

with lean_transformers():
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

from roundhouse.training.layers import PACKED, check_packable, merged, register_packed_attention
from roundhouse.training.parallel import Ranks
from roundhouse.training.saved_tensors import SavedTensor, SavedTensors, save_tensors

STATE_FILE = "state.json"
TRAINER_DIRECTORY = "trainer"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_NOT_COPIED = re.compile(r"config\.json|manifest\.json|attempt-\d+\.json|\..*")
"""Written anew for each checkpoint: by the trainer, and by the store where the directory is a stage of it. A hidden file is the
rest of a write that was cut off, and no part of a model."""


class Cursor(BaseModel):
    """Where training stands."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    optimizer_steps: int = 0
    """Updates since the run began: the scheduler's clock."""
    iteration: int | None = None
    """Last iteration trained on; None before the first."""
    seed: int = 0
    """Seed from which each iteration's shuffling was derived."""
    kl_coefficient: float | None = None
    """Where the adaptive KL controller stands; None without one, and before the first iteration."""


def load_model(directory: Path, *, packed: bool, device: torch.device) -> PreTrainedModel:
    """A causal language model in float32 and eval mode.

    Raises:
        ConfigError: there is no model directory, or the model cannot be packed.
        DataError: the weights are damaged, incomplete, or of another architecture than config.json says.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json: it is not a Hugging Face model directory.")
    register_packed_attention()
    try:
        with _no_progress_bars():
            model, loaded = _from_pretrained(directory, PACKED if packed else "sdpa")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"The model in {directory} cannot be loaded: {error}") from error
    for problem in ("missing_keys", "unexpected_keys"):
        if names := sorted(loaded[problem]):
            raise DataError(
                f"The weights in {directory} do not fit its config.json: {problem.replace('_', ' ')} "
                f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}. The files are incomplete or from another model."
            )
    output = model.get_output_embeddings()
    if model.config.tie_word_embeddings and output.weight is not model.get_input_embeddings().weight:
        raise DataError(
            f"{directory} holds an lm_head.weight of its own although config.json ties it to the embedding: engine and trainer "
            "would use different ones. Set tie_word_embeddings to false in config.json, or remove the tensor."
        )
    if packed:
        check_packable(model)
    torch.nn.Module.to(model, device)  # transformers' own `to` hides its types and adds nothing here
    return model.eval()


def _from_pretrained(directory: Path, attention: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation=attention,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    return model, report


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws its own bars on the terminal, over ours."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


def read_side_files(directory: Path) -> dict[str, bytes]:
    """What stands beside weights and config.json (tokenizer, chat template, …), by name.

    It is kept in memory, because retention may delete the directory while the trainer lives on.
    """
    return {
        file.name: file.read_bytes()
        for file in sorted(directory.iterdir())
        if file.is_file() and not _NOT_COPIED.fullmatch(file.name) and not file.name.endswith(_WEIGHT_SUFFIXES)
    }


def save_model(model: PreTrainedModel, side_files: dict[str, bytes], directory: Path, ranks: Ranks) -> None:
    """Write the model's directory: side files, then config.json and weights, an adapter merged into them.

    The leading rank writes all but its peers' files of weights.
    """
    weights = _under_published_names(model, merged(model), ranks)
    if ranks.leads:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in side_files.items():
            (directory / name).write_bytes(data)
        with _no_progress_bars():
            model.save_pretrained(directory, state_dict={})  # config.json and what else lies beside weights
    ranks.wait()  # save_pretrained deletes files of weights that it did not write
    save_tensors(weights, directory, "model", ranks)


def _under_published_names(model: PreTrainedModel, weights: SavedTensors, ranks: Ranks) -> SavedTensors:
    """The weights as the model's files have them. What transformers has fused or split it puts back for all at once."""
    for name in model._keys_to_ignore_on_save or ():
        weights.pop(name, None)
    described = {name: torch.empty(saved.shape, dtype=saved.dtype, device="meta") for name, saved in weights.items()}
    if revert_weight_conversion(model, described).keys() == weights.keys():
        return weights
    held = {name: whole.cpu() for name, saved in weights.items() if (whole := saved.whole(ranks, 0)) is not None}
    converted = revert_weight_conversion(model, held if ranks.leads else described)
    return {
        name: SavedTensor(tensor.shape, tensor.dtype, SavedTensor.of(tensor).whole, on_leader=True)
        for name, tensor in converted.items()
    }


def save_cursor(cursor: Cursor, directory: Path) -> None:
    (directory / STATE_FILE).write_text(json.dumps(cursor.model_dump(), indent=2) + "\n")


def load_cursor(directory: Path) -> Cursor:
    """Read the cursor.

    Raises:
        DataError: it is missing or damaged.
    """
    path = directory / STATE_FILE
    try:
        return Cursor.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise DataError(
            f"The trainer state {path} cannot be read: {error}. Resume from an older checkpoint."
        ) from error
