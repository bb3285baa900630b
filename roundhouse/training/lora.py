"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model: what is trained, saved and published.

Invariant: the model that is published is W + (alpha / rank) · B · A in every adapted matrix, an ordinary Hugging Face directory
that engines, references and stages load without knowing of adapters; and what training continues from is bit for bit what it
was, because the frozen matrices lie beside the adapter and are never recovered from the merged ones.

    model.safetensors                                           merged
    trainer/adapter_model.safetensors, adapter_config.json      the adapter, as peft and vLLM load it
    trainer/base.safetensors                                    the frozen matrices that have an adapter

A starts from a fixed seed and B from zero, so a fresh adapter changes nothing. There is no dropout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from roundhouse.config.training import LoraConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.parallel import Ranks, full, whole_on_leader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FILE, ADAPTER_CONFIG, BASE_FILE = "adapter_model.safetensors", "adapter_config.json", "base.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
"""What peft puts before the names of an adapter's tensors."""


def attach(model: PreTrainedModel, config: LoraConfig | None, trainer_state: Path | None, directory: Path) -> None:
    """Freeze the model and put adapters on it, those of `trainer_state` where it is given; nothing without `config`.

    Args:
        directory: where the model was loaded from, for messages.

    Raises:
        ConfigError: a target matches nothing, or the output layer.
        DataError: the state has no adapter, a damaged one, one of other shapes, or one that the configuration does not want.
    """
    held = trainer_state is not None and (trainer_state / ADAPTER_CONFIG).is_file()
    if config is None:
        if held:
            raise DataError(
                f"{trainer_state} holds an adapter, but train.lora is not set. Set it as it was, or begin from {directory} "
                "without its trainer state."
            )
        return
    if trainer_state is not None and not held:
        raise DataError(
            f"{trainer_state} was trained without an adapter, but train.lora is set. Remove it, or begin from {directory} "
            "without its trainer state."
        )
    _inject(model, config)
    if trainer_state is not None:
        _restore(model, trainer_state)


def merged(model: PreTrainedModel, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Every weight whole, by the names of a model without adapters; of tied ones the first. Empty but on the leading rank: all
    take part, and hold one weight at a time."""
    adapted, held = _adapted(model), model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, value in held.items():
        first.setdefault(id(value), name)
    weights = {}
    for name in first.values():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner not in adapted:
            if ".lora_" not in name and (whole := whole_on_leader(held[name], ranks)) is not None:
                weights[name] = whole
            continue
        weight = full(held[name].detach())
        if leaf == "weight":
            layer = adapted[owner]
            low, high = (full(part[_NAME].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            weight = weight + layer.scaling[_NAME] * (high @ low)
        if ranks.leads:
            weights[f"{owner}.{leaf}"] = weight.cpu()
    return weights


def save_adapter(model: PreTrainedModel, state: Path, ranks: Ranks) -> None:
    """Write adapter and frozen matrices to the trainer's state; the leading rank writes, all take part."""
    adapted = _adapted(model)
    if not adapted:
        return
    frozen: dict[str, torch.Tensor] = {}
    trained: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            kept, key = trained, _PREFIX + name.replace(f".{_NAME}.", ".")
        elif name.endswith(".base_layer.weight"):
            kept, key = frozen, name.replace(".base_layer.", ".")
        else:
            continue
        if (whole := whole_on_leader(parameter, ranks)) is not None:
            kept[key] = whole
    if ranks.leads:
        save_file(trained, state / ADAPTER_FILE)
        save_file(frozen, state / BASE_FILE)
        settings: Any = model.peft_config
        config = {key: sorted(v) if isinstance(v, set) else v for key, v in settings[_NAME].to_dict().items()}
        (state / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _inject(model: PreTrainedModel, config: LoraConfig) -> None:
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model

    settings: Any = PeftLora(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides by it, whatever it says
        lora_dropout=0.0,
        target_modules=list(config.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inject_adapter_in_model(settings, model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(
            f"train.lora.target_modules {list(config.target_modules)} do not fit {type(model).__name__}: {error}"
        ) from error
    if "lora" in type(model.get_output_embeddings()).__module__:
        raise ConfigError("train.lora.target_modules names the output layer, which is not adapted. Leave it out.")
    model.peft_config = {_NAME: settings}
    model.eval()


def _adapted(model: PreTrainedModel) -> dict[str, Any]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _restore(model: PreTrainedModel, state: Path) -> None:
    try:
        trained, frozen = load_file(state / ADAPTER_FILE), load_file(state / BASE_FILE)
    except (OSError, SafetensorError) as error:
        raise DataError(f"The adapter in {state} cannot be read: {error}. Resume from an older checkpoint.") from error
    saved = {name.removeprefix(_PREFIX): value for name, value in trained.items()}
    saved |= {f"{name.removesuffix('.weight')}.base_layer.weight": value for name, value in frozen.items()}
    wanted = {
        name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name or name.endswith(".base_layer.weight")
    }
    for name in sorted(saved.keys() | wanted.keys()):
        ours, theirs = wanted.get(name), saved.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (theirs, ours)]
            raise DataError(
                f"The adapter in {state} does not fit: {name} has shape {shapes[0]} there and {shapes[1]} by train.lora. "
                "Rank and target_modules must stay what they were."
            )
        ours.data.copy_(theirs)
