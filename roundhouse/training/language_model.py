"""The language model of a composite model, and the frozen rest of it.

Invariant: training on text changes the language model alone. Every other parameter (vision and audio towers, projectors)
is frozen, is held in the number format of its file, and is written to each checkpoint bit for bit, so that the
checkpoint stays one of its own architecture:

    Gemma3ForConditionalGeneration      model.language_model, lm_head                      trained
                                        model.vision_tower, model.multi_modal_projector    frozen

The configuration of a composite model contains another for text (`text_config`). A text model is its own language
model: nothing of it is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_composite(model: PreTrainedModel) -> bool:
    """Return whether the model has parts other than its language model."""
    return model.config.get_text_config() is not model.config


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part that computes text, perhaps without the output layer; a text model itself."""
    return model.get_decoder() if is_composite(model) else model


def hidden_states(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part that returns states after the last norm."""
    return language_model(model).base_model


def frozen_towers(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters outside the language model, by name."""
    if not is_composite(model):
        return {}
    parts = [language_model(model), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in trained}


def frozen_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the outermost modules, except lists, that hold parameters of towers alone, by name."""
    frozen = {id(parameter) for parameter in frozen_towers(model).values()}
    outermost: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules() if frozen else ():
        own = {id(parameter) for parameter in module.parameters()}
        within = any(name.startswith(f"{outer}.") for outer in outermost)
        if own and own <= frozen and not within and not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            outermost[name] = module
    return outermost


def freeze_towers(model: PreTrainedModel, directory: Path) -> None:
    """Freeze the towers of a model without numbers, and give them the number format of the directory's files."""
    towers = frozen_towers(model)
    if not towers:
        return
    trained = {name for name, _ in model.named_parameters()} - towers.keys()
    inside = f"{_name_of(language_model(model), model)}."
    tensors = [tensor for path in weight_files(directory) for tensor in TensorFile(path).tensors()]
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for tensor, name in zip(tensors, parameter_names(model, [tensor.name for tensor in tensors]), strict=True):
        if name in state and name not in trained and not name.startswith(inside) and tensor.dtype in _DTYPES:
            state[name].data = state[name].data.to(_DTYPES[tensor.dtype])
    for parameter in towers.values():
        parameter.requires_grad_(False)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By their names in safetensors."""


def _name_of(part: torch.nn.Module, model: PreTrainedModel) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def parameter_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the parameter to which each tensor of a file belongs, by the renaming that transformers applies on loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes: list[Any] = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    own: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    return [rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0] for name in names]


def file_name(model: PreTrainedModel, name: str) -> str:
    """Return the name that a parameter, which transformers neither fuses nor splits, has in files."""
    from transformers.core_model_loading import revert_weight_conversion

    return next(iter(revert_weight_conversion(model, {name: torch.empty(0, device="meta")})))
