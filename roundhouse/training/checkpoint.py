"""A checkpoint's directory: a Hugging Face model for transformers and vLLM, and `trainer/` to continue training.

    config.json  model.safetensors  tokenizer.json  …      float32 weights (frozen ones as held), named as in the
                                                           starting model
    trainer/optimizer.safetensors                          AdamW's moments
    trainer/state.json                                     cursor: updates done, last iteration, seed
    trainer/critic/                                        of an algorithm with a critic: its model, with a value head as
                                                           output layer, and its own trainer/optimizer.safetensors

Files of tensors above `tensor_files.SHARD_BYTES` are split, with an index. They are written tensor by tensor and hashed
in passing, so saving takes the memory of one tensor in addition to the model's.

Invariant: loading fails rather than start from weights that were not in the files. The state is complete: all
randomness of a step is derived from (seed, iteration), so no generator state is saved.

A model is built from shapes alone, gets its adapters and its layout over the ranks, and then its numbers: each rank
reads its own rows of each file, or its own experts if the model fuses a layer's experts into one parameter.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import lean_transformers
from roundhouse.pretrained import build_model, load_pretrained, without_progress_bars
from roundhouse.store import disk

with lean_transformers():
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        Transpose,
        WeightConverter,
        revert_weight_conversion,
    )
    from transformers.modeling_utils import LoadStateDictConfig

from roundhouse.training.expert_adapters import expert_adapters
from roundhouse.training.language_model import freeze_towers, is_composite, parameter_names
from roundhouse.training.layers import merged, put_value_head, under_adapter
from roundhouse.training.packed_attention import PACKED, check_packable, register_packed_attention, why_not_packed
from roundhouse.training.parallel import Ranks, sent_row
from roundhouse.training.saved_tensors import SavedTensor, SavedTensors, freed_at_once, save_tensors
from roundhouse.weight_sync.sending import Described
from roundhouse.weight_sync.tensor_files import TorchDigest, digest_of_tensors, weight_files

STATE_FILE = "state.json"
TRAINER_DIRECTORY = "trainer"
CRITIC_DIRECTORY = "critic"
"""In the trainer's."""
GENERATION_CONFIG = "generation_config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_NOT_COPIED = re.compile(r"config\.json|manifest\.json|attempt-\d+\.json|\..*")
"""Files that each checkpoint writes anew: by the trainer, and by the store if the directory is a stage. A hidden file
remains from an interrupted write and is not part of a model."""


class Cursor(BaseModel):
    """The state of training."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    optimizer_steps: int = 0
    """Updates since the run began: the scheduler's clock."""
    iteration: int | None = None
    """Last iteration trained on; None before the first."""
    seed: int = 0
    """Seed from which each iteration's shuffling was derived."""
    kl_coefficient: float | None = None
    """State of the adaptive KL controller; None without one, and before the first iteration."""
    critic_steps: int = 0
    """Updates of the critic since it began; 0 without one."""
    critic_iterations: int = 0
    """Iterations that the critic learnt from."""


def load_model(
    directory: Path,
    *,
    packed: Literal["auto"] | bool,
    device: torch.device,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
    ranks: Ranks | None = None,
    values: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in float32, unless `prepare` changes that, and in eval mode.

    Args:
        packed: for rows of packed sequences; auto: if they do not mix in its layers.
        values: with a new value head in the place of the output layer.
        prepare: attaches adapters and spreads the model over the ranks. Receives the model in eval mode.

    Raises:
        ConfigError: the model directory is missing, or the model cannot be packed.
        DataError: the weights are damaged, incomplete, or of another architecture than config.json.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json: it is not a Hugging Face model directory.")
    register_packed_attention()
    try:
        with without_progress_bars():
            model = _without_numbers(directory, packed, values)
            freeze_towers(model, directory)
            if packed is True:
                check_packable(model)
            if ranks is None or ranks.size == 1 or _keeps_rows(model, ranks):
                prepare(model)
                wrong = _fill(model, directory, device)
            else:  # whole on each rank
                wrong = _fill(model, directory, torch.device("cpu"))
                prepare(model)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"The model in {directory} cannot be loaded: {error}") from error
    for problem, names in wrong.items():
        if names:
            raise DataError(
                f"The weights in {directory} do not fit its config.json: {problem} {', '.join(names[:5])}"
                f"{' …' if len(names) > 5 else ''}. The files are incomplete or from another model."
            )
    output = model.get_output_embeddings()
    if model.config.tie_word_embeddings and output.weight is not model.get_input_embeddings().weight:
        raise DataError(
            f"{directory} has a separate lm_head.weight, but config.json ties it to the embedding: engine and trainer would "
            "use different heads. Set tie_word_embeddings to false in config.json, or remove the tensor."
        )
    return model


def _without_numbers(directory: Path, packed: Literal["auto"] | bool, values: bool) -> PreTrainedModel:
    config = load_pretrained(AutoConfig, directory)
    if packed == "auto":
        packed = why_not_packed(config) is None
    if values:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    attention = {"attn_implementation": PACKED} if packed else {}  # else transformers' own for the model
    with torch.device("meta"):
        model: PreTrainedModel = build_model(config, dtype=torch.float32, **attention)
    if not values and (directory / GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    if values:
        put_value_head(model)
    return model.eval()  # here, because `prepare` may flag layers for recomputation


def _keeps_rows(model: PreTrainedModel, ranks: Ranks) -> bool:
    """Return whether a rank can make its rows of each parameter from the same rows, or experts, of tensors in files."""
    changes = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightConverter)]
    for operation in (each for change in changes for each in change.operations):
        dimensions = [value for name, value in vars(operation).items() if name in ("dim", "dim0", "dim1")]
        merges = isinstance(operation, MergeModulelist) and operation.dim == 0
        if not merges and not (isinstance(operation, Concatenate | Transpose) and min(dimensions) > 0):
            return False
    over = ranks.shards // ranks.expert_groups
    experts = [len(parameter) // ranks.expert_groups for parameter in model.parameters() if parameter.ndim > 2]
    return all(-(-count // over) * (over - 1) < count for count in experts)  # transformers fails on none


def _fill(model: PreTrainedModel, directory: Path, device: torch.device) -> dict[str, list[str]]:
    """Read the numbers of empty parameters, each rank its part, and compute those of buffers.

    Returns:
        Names of missing tensors, and of surplus ones.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    own = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    for parameter in own.values():
        parameter.data = parameter.data.to(device)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # else transformers draws its numbers anew
    mapping: Any = get_model_conversion_mapping(model)  # typed as their base class, which the settings do not take
    settings = LoadStateDictConfig(device_map={"": device}, dtype=torch.float32, weight_mapping=mapping)
    adapted = {
        name.removesuffix(".base_layer.weight") for name, _ in model.named_parameters() if ".base_layer." in name
    }
    with ExitStack() as opened:
        parts: dict[str, Any] = {}
        for path in weight_files(directory):
            file = opened.enter_context(safe_open(path, "pt", device="cpu"))
            names = list(file.keys())
            parameters = parameter_names(model, names) if is_composite(model) else names
            for name, parameter in zip(names, parameters, strict=True):
                if parameter not in own:
                    parts[under_adapter(name, adapted, parameter)] = file.get_slice(name)
        with freed_at_once():
            report, _ = model._load_pretrained_model(model, parts, None, settings)
    report.missing_keys -= own.keys()
    report = model._finalize_model_loading(model, settings, report)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return {"missing keys": sorted(report.missing_keys), "unexpected keys": sorted(report.unexpected_keys)}


def read_side_files(directory: Path) -> dict[str, bytes]:
    """Return the files other than weights and config.json (tokenizer, chat template, …), by name.

    They are kept in memory, because retention may delete the directory during the trainer's life.
    """
    return {
        file.name: file.read_bytes()
        for file in sorted(directory.iterdir())
        if file.is_file() and not _NOT_COPIED.fullmatch(file.name) and not file.name.endswith(_WEIGHT_SUFFIXES)
    }


def save_model(model: PreTrainedModel, side_files: dict[str, bytes], directory: Path, ranks: Ranks) -> None:
    """Write the model's directory: config.json, side files as they are, and weights, an adapter merged into them.

    The leading rank writes all but its peers' files of weights.
    """
    weights = published_weights(model, ranks)
    if ranks.leads:
        own = model.generation_config
        if GENERATION_CONFIG in side_files:
            model.generation_config = GenerationConfig()  # transformers refuses to save some that it has loaded
        try:
            with without_progress_bars(), disk.naming(directory):
                model.save_pretrained(directory, state_dict={})  # config.json and what else accompanies weights
        finally:
            model.generation_config = own
        for name, data in side_files.items():
            with disk.writing(directory / name) as stream:
                stream.write(data)
    ranks.wait()  # save_pretrained deletes files of weights that it did not write
    save_tensors(weights, directory, "model", ranks)


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Description of the weights that `save_model` would write now."""

    digest: str
    """`digest_of_tensors`."""
    described: list[Described]
    """The tensors in another number format, in the order of `weights_in`."""
    sent_digest: str
    """`digest_of_tensors` of those."""


def held_weights(model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> HeldWeights:
    """Describe the ranks' weights together and their conversion to a floating-point type. All ranks return the same;
    they take turns at the tensors and each hashes its own while it sends the next."""
    weights = published_weights(model, ranks)
    owners = 1 if any(saved.on_leader for saved in weights.values()) else min(ranks.size, ranks.here)
    own, sent = {}, {}
    described = []
    with ThreadPoolExecutor(1) as hasher, freed_at_once():
        for number, (name, saved) in enumerate(weights.items()):
            kind = sent_as(saved, dtype)
            described.append(Described(name, str(kind).removeprefix("torch."), tuple(saved.shape)))
            taken = [TorchDigest(each) for each in dict.fromkeys((saved.dtype, kind))]
            under_way: Future[None] | None = None
            owner = number % owners
            for piece in saved.pieces(ranks, owner):
                if under_way is not None:
                    under_way.result()  # no more than two pieces are held
                under_way = hasher.submit(_update_all, taken, piece)
            if ranks.rank == owner:
                own[name] = hasher.submit(taken[0].of_shape, saved.shape)
                sent[name] = hasher.submit(taken[-1].of_shape, saved.shape)
        digests = [{name: each.result() for name, each in part.items()} for part in (own, sent)]
    every = ranks.gather(digests)
    all_own, all_sent = ({name: each for parts in every for name, each in parts[at].items()} for at in (0, 1))
    return HeldWeights(digest_of_tensors(all_own), described, digest_of_tensors(all_sent))


def _update_all(taken: list[TorchDigest], piece: torch.Tensor) -> None:
    for each in taken:
        each.update(piece)


def weights_in(model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the tensors that `save_model` would write now in a floating-point type, whole, one after the other, on the
    leading rank's CPU. Every rank exhausts the iterator; closing the leading one's early consumes the rest."""
    tensors = iter(published_weights(model, ranks).items())
    try:
        for name, saved in tensors:
            whole = torch.empty(saved.shape, dtype=sent_as(saved, dtype)) if ranks.leads else None
            begin = 0
            for piece in saved.pieces(ranks, 0):
                assert whole is not None, "the leading rank's own"
                if piece.shape == whole.shape:
                    whole.copy_(piece)
                else:
                    whole[begin : begin + len(piece)] = piece
                    begin += len(piece)
            if whole is not None:
                yield name, whole
    finally:
        for _, saved in tensors:
            deque(saved.pieces(ranks, 0), maxlen=0)


def sent_as(saved: SavedTensor, dtype: torch.dtype) -> torch.dtype:
    """The type that a tensor has in weights of a floating-point type."""
    return dtype if saved.dtype.is_floating_point else saved.dtype


def published_weights(model: PreTrainedModel, ranks: Ranks) -> SavedTensors:
    """Yield the weights as the model's files have them, with the adapter merged.

    Fused experts are sent expert by expert; other changes of transformers are undone by the leading rank, which must
    hold all such tensors.
    """
    weights = merged(model)
    for name in model._keys_to_ignore_on_save or ():
        weights.pop(name, None)
    described = {name: torch.empty(saved.shape, dtype=saved.dtype, device="meta") for name, saved in weights.items()}
    shapes = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(described)).items()}
    published: SavedTensors = {}
    together: dict[str, torch.Tensor] = {}
    for name, tensor in described.items():
        parts = revert_weight_conversion(model, {name: tensor})
        if len(parts) == 1 and next(iter(parts.values())) is tensor:
            published[next(iter(parts))] = weights[name]
        elif (rows := _rows(model, name)).keys() == parts.keys() and all(
            shapes.get(part) == saved.shape for part, saved in rows.items()
        ):
            published |= rows
        else:
            pieces = [piece.cpu() for piece in weights[name].pieces(ranks, 0)]
            together[name] = torch.cat(pieces) if pieces else tensor
    for name, tensor in revert_weight_conversion(model, together).items():
        published[name] = SavedTensor(tensor.shape, tensor.dtype, SavedTensor.of(tensor).pieces, on_leader=True)
    return published


def _rows(model: PreTrainedModel, name: str) -> SavedTensors:
    """Return the tensors that each row (expert) of a fused parameter comes from; empty for a single tensor."""
    parameter: Any = dict(model.named_parameters()).get(name)
    if parameter is None or name in expert_adapters(model):  # its rows are not the published ones
        return {}

    def saved(row: int, part: str, described: torch.Tensor) -> SavedTensor:
        def taken(one: torch.Tensor) -> torch.Tensor:
            return revert_weight_conversion(model, {name: one})[part]

        return SavedTensor.by_whole(
            described.shape, described.dtype, lambda ranks, owner: sent_row(parameter, row, ranks, owner, taken)
        )

    # not of a slice of it, for which DTensor would gather the whole on every rank
    one = torch.empty(1, *parameter.shape[1:], dtype=parameter.dtype, device="meta")
    apart = revert_weight_conversion(model, {name: one})
    return {
        re.sub(r"(.*\.)0\.", rf"\g<1>{row}.", part): saved(row, part, described)  # the last number is the expert's
        for part, described in apart.items()
        for row in range(len(parameter))
    }


def save_cursor(cursor: Cursor, directory: Path) -> None:
    with disk.writing(directory / STATE_FILE) as stream:
        stream.write((json.dumps(cursor.model_dump(), indent=2) + "\n").encode())


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
