"""Changes to a transformers model for training: recomputed activations, leaner norms, LoRA adapters.

Invariant: no change alters a value beyond rounding. The model stays in eval mode, so layers are deterministic.

**Norms** (`replace_norms`) keep one tensor for backward instead of four, and take 0.4 of the time on tiny CPU policies. A
norm is replaced only if it equals y = w · x / √(mean(x²) + ε) on random inputs, and only for float32. With r = 1/√(mean(x²) +
ε), n = x · r and upstream gradient g, over the last axis:

    ∂/∂w = Σ g · n        ∂/∂x = r · (g·w − n · mean(g·w·n))

**Low-rank adapters** (`attach`; LoRA, arXiv 2106.09685): the published model is W + (alpha / rank) · B · A in every adapted
matrix, an ordinary Hugging Face directory. The frozen matrices are stored next to the adapter, so training continues bit for
bit:

    model.safetensors                                           merged
    trainer/adapter_model.safetensors, adapter_config.json      the adapter, in the format of peft and vLLM
    trainer/base.safetensors                                    the frozen matrices that have an adapter

A starts from a fixed seed and B from zero, so a fresh adapter changes nothing. Dropout is not used.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from roundhouse.config.training import LoraConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import lean_transformers
from roundhouse.training.expert_adapters import (
    ExpertAdapter,
    adapt_experts,
    adapted_experts,
    expert_adapters,
    fused_matrices,
)
from roundhouse.training.language_model import file_name, frozen_modules, frozen_towers, language_model
from roundhouse.training.parallel import Ranks, gathered, sharded_like
from roundhouse.training.saved_tensors import SavedTensor, SavedTensors, save_tensors, saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

with lean_transformers():
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the language model's repeated blocks, in order.

    Raises:
        ConfigError: the model does not mark them.
    """
    parts = language_model(model).modules()
    layers: list[torch.nn.Module] = [part for part in parts if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its layer class: it can neither be sharded nor recompute activations. "
            "Train on one process with train.activation_checkpointing false."
        )
    return layers


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's input for backward, and recompute the rest.

    transformers recomputes layers with a set `training` flag. Only the layer itself is flagged: its modules stay in eval
    mode, so dropout stays off.
    """
    layers = decoder_layers(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(epsilon).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        normed, inverse, weight = ctx.saved_tensors
        by_weight = (gradient * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight, None
        scaled = gradient * weight
        along = (scaled * normed).mean(-1, keepdim=True)
        return torch.addcmul(scaled, normed, along, value=-1).mul_(inverse), by_weight, None


def replace_norms(model: torch.nn.Module, *, tried: bool = True) -> int:
    """Replace every norm of the model that equals `_RootMeanSquare`, and return their number.

    Args:
        tried: compare on random inputs first; False for a model with empty parameters.
    """
    replaced = 0
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if isinstance(epsilon, float) and isinstance(weight, torch.nn.Parameter):
            if len(inspect.signature(module.forward).parameters) > 1 or (tried and not _agrees(module, epsilon)):
                continue  # a gated norm, or one of another formula
            module.forward = _forward(module, module.forward, epsilon)
            replaced += 1
    return replaced


def _agrees(module: torch.nn.Module, epsilon: float) -> bool:
    draw = torch.Generator().manual_seed(0)
    tried: Any = copy.deepcopy(module).to_empty(device="cpu")  # the model's parameters may be empty yet
    trial, weight = torch.randn(4, tried.weight.shape[-1], generator=draw).split([3, 1])
    with torch.no_grad():
        tried.weight.copy_(weight[0])
        return torch.allclose(tried(trial), _RootMeanSquare.apply(trial, weight[0], epsilon), rtol=1e-5, atol=1e-6)


def _forward(
    module: torch.nn.Module, original: Callable[[torch.Tensor], torch.Tensor], epsilon: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        if hidden_states.dtype != torch.float32 or weight.dtype != torch.float32:
            return original(hidden_states)
        return _RootMeanSquare.apply(hidden_states, weight, epsilon)

    return forward


def put_value_head(model: PreTrainedModel) -> None:
    """Replace the output layer by a value head: hidden states to one value, initially 0."""
    width = model.get_output_embeddings().weight.shape[1]
    head = torch.nn.Linear(width, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)


def restore_value_head(model: PreTrainedModel, directory: Path) -> None:
    """Load the head from the files of a saved critic; each rank loads its part.

    Raises:
        DataError: the files do not contain a head.
    """
    own = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    parameters = {file_name(model, name): p for name, p in model.named_parameters() if id(p) in own}
    try:
        for name, value in saved_tensors(directory, "model"):
            if (parameter := parameters.pop(name, None)) is not None:
                parameter.data.copy_(sharded_like(value, parameter))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(
            f"The critic in {directory} cannot be read: {error}. Resume from an older checkpoint."
        ) from error
    if parameters:
        raise DataError(f"The critic in {directory} has no {', '.join(parameters)}. Resume from an older checkpoint.")


ADAPTER, ADAPTER_CONFIG, BASE = "adapter_model", "adapter_config.json", "base"
"""Names in the trainer's state; files of tensors end in .safetensors, or are several with an index."""
_NAME = "default"
_PREFIX = "base_model.model."
"""Prefix of an adapter's tensor names in peft."""


def attach(model: PreTrainedModel, config: LoraConfig | None, trainer_state: Path | None, directory: Path) -> None:
    """Freeze the model and attach fresh adapters; do nothing without `config`. Parameters may be empty.

    Args:
        trainer_state: state from which `restore_adapter` will load adapters.
        directory: source of the model, for messages.

    Raises:
        ConfigError: a target matches nothing, or the output layer.
        DataError: the state lacks an adapter, or has an adapter that contradicts the configuration.
    """
    has_adapter = trainer_state is not None and (trainer_state / ADAPTER_CONFIG).is_file()
    if config is None:
        if has_adapter:
            raise DataError(
                f"{trainer_state} holds an adapter, but train.lora is not set. Set it as it was, or begin from {directory} "
                "without its trainer state."
            )
        return
    if trainer_state is not None and not has_adapter:
        raise DataError(
            f"{trainer_state} was trained without an adapter, but train.lora is set. Remove it, or begin from {directory} "
            "without its trainer state."
        )
    _inject(model, config)


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model computes like the frozen one."""
    adapted, experts = _adapted(model).values(), expert_adapters(model).values()
    try:
        for layer in adapted:
            layer._disable_adapters = True  # its own method also takes requires_grad away, which FSDP2 reads once
        for adapter in experts:
            adapter.is_disabled = True
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False
        for adapter in experts:
            adapter.is_disabled = False


def hold_in_bfloat16(model: PreTrainedModel, *, sharded: bool) -> None:
    """Convert frozen matrices that bfloat16 passes use only in bfloat16. The results are equal bit for bit. The model must have
    empty parameters."""
    for parameter in used_in_bfloat16(model, sharded=sharded):
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def used_in_bfloat16(model: PreTrainedModel, *, sharded: bool) -> list[torch.nn.Parameter]:
    """Return the matrices that bfloat16 passes use only in this type: those of linear layers with autocast, all with FSDP2.
    Embeddings and matrices tied to them are excluded, because autocast reads them unconverted; so are those of towers,
    which keep the type of their files."""

    def of(kind: type[torch.nn.Module]) -> set[int]:
        modules = (module for module in model.modules() if isinstance(module, kind))
        return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}

    looked_up, multiplied = of(torch.nn.Embedding), of(torch.nn.Module if sharded else torch.nn.Linear)
    towers = {id(parameter) for parameter in frozen_towers(model).values()}
    return [p for p in model.parameters() if p.ndim > 1 and id(p) in multiplied - looked_up - towers]


def merged(model: PreTrainedModel) -> SavedTensors:
    """Return every weight under its name in a model without adapters; of tied weights the first."""
    adapted, state = _adapted(model), model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, value in state.items():
        first.setdefault(id(value), name)
    weights = {}
    for name in first.values():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner not in adapted:
            if ".lora_" not in name:
                weights[name] = SavedTensor.of(state[name])
        elif leaf == "weight":
            weights[f"{owner}.{leaf}"] = _merged_weight(state[name], adapted[owner])
        else:
            weights[f"{owner}.{leaf}"] = SavedTensor.of(state[name])
    for name, adapter in expert_adapters(model).items():
        weights[name] = _merged_experts(state[name], adapter)
    return weights


def _merged_experts(frozen: torch.Tensor, adapter: ExpertAdapter) -> SavedTensor:
    def whole(ranks: Ranks, owner: int) -> torch.Tensor | None:
        with torch.no_grad():
            return adapter(frozen) if ranks.rank == owner else None

    return SavedTensor.by_whole(frozen.shape, adapter.A.dtype, whole)


def _merged_weight(frozen: torch.Tensor, layer: Any) -> SavedTensor:
    def whole(ranks: Ranks, owner: int) -> torch.Tensor | None:
        low, high = (gathered(part[_NAME].weight, ranks, owner) for part in (layer.lora_A, layer.lora_B))
        weight = gathered(frozen, ranks, owner)
        if weight is None or low is None or high is None:
            return None
        return weight.to(low.dtype) + layer.scaling[_NAME] * (high @ low)

    return SavedTensor.by_whole(frozen.shape, layer.lora_A[_NAME].weight.dtype, whole)


def save_adapter(model: PreTrainedModel, state: Path, ranks: Ranks) -> None:
    """Write adapter and frozen matrices to the trainer's state. All ranks must call it."""
    if not _has_adapter(model):
        return
    frozen: SavedTensors = {}
    experts = expert_adapters(model)
    trained: SavedTensors = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            trained[_PREFIX + name.replace(f".{_NAME}.", ".")] = SavedTensor.of(parameter)
        elif name.endswith(".base_layer.weight"):
            frozen[name.replace(".base_layer.", ".")] = SavedTensor.of(parameter)
        elif name in experts:
            frozen[name] = SavedTensor.of(parameter)
    save_tensors(trained, state, ADAPTER, ranks, weights=False)
    save_tensors(frozen, state, BASE, ranks, weights=False)
    if ranks.leads:
        settings: Any = model.peft_config
        config = {key: sorted(v) if isinstance(v, set) else v for key, v in settings[_NAME].to_dict().items()}
        (state / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _inject(model: PreTrainedModel, config: LoraConfig) -> None:
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model

    targets = list(config.target_modules)
    if fused_matrices(model):  # whole names, which peft does not turn into those of experts
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        targets = [name for name in linear if name.rpartition(".")[2] in config.target_modules]
    settings: Any = PeftLora(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides by it, whatever it says
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=_inside_towers(model),
        bias="none",
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    try:
        with torch.random.fork_rng(), _stand_ins(model):
            torch.manual_seed(0)
            if targets or not adapted_experts(model, config.target_modules):
                inject_adapter_in_model(settings, model, adapter_name=_NAME)  # freezes all else
            adapt_experts(model, config)
    except ValueError as error:
        raise ConfigError(
            f"train.lora.target_modules {list(config.target_modules)} do not fit {type(model).__name__}: {error}"
        ) from error
    if "lora" in type(model.get_output_embeddings()).__module__:
        raise ConfigError("train.lora.target_modules names the output layer, which cannot be adapted. Remove it.")
    model.peft_config = {_NAME: settings}
    model.eval()


def _inside_towers(model: PreTrainedModel) -> str | None:
    """Return a pattern of the modules that get no adapter; None for a text model."""
    names = "|".join(map(re.escape, frozen_modules(model)))
    return rf"({names})(\..*)?" if names else None


@contextmanager
def _stand_ins(model: PreTrainedModel) -> Iterator[None]:
    """Replace empty parameters by small stand-ins, because peft places an adapter on the device of its layer's
    parameters."""
    originals = {
        module: {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        for module in model.modules()
    }
    for module, parameters in originals.items():
        for name, p in parameters.items():
            stand_in = torch.zeros((), dtype=p.dtype).expand(p.shape)
            module._parameters[name] = torch.nn.Parameter(stand_in, requires_grad=False)
    try:
        yield
    finally:
        for module, parameters in originals.items():
            module._parameters.update(parameters)


def under_adapter(name: str, adapted: Collection[str], parameter: str | None = None) -> str:
    """Return the name of a weight in a model in which these layers are adapted.

    Args:
        parameter: the weight's name in the model, if it is another in its file.
    """
    owner, _, leaf = name.rpartition(".")
    layer = (parameter or name).rpartition(".")[0]
    return f"{owner}.base_layer.{leaf}" if layer in adapted else name


def _adapted(model: PreTrainedModel) -> dict[str, Any]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _has_adapter(model: PreTrainedModel) -> bool:
    return bool(_adapted(model) or expert_adapters(model))


def restore_adapter(model: PreTrainedModel, state: Path) -> None:
    """Load the adapters of `save_adapter` in place of fresh ones, each rank its rows; do nothing without adapters.

    Raises:
        DataError: the files are damaged or have other shapes.
    """
    if not _has_adapter(model):
        return
    try:
        trained, frozen = (dict(saved_tensors(state, stem)) for stem in (ADAPTER, BASE))
    except (OSError, SafetensorError) as error:
        raise DataError(f"The adapter in {state} cannot be read: {error}. Resume from an older checkpoint.") from error
    experts = expert_adapters(model)
    saved = {name.removeprefix(_PREFIX): value for name, value in trained.items()}
    saved |= {under_adapter(name, _adapted(model)): value for name, value in frozen.items()}
    parameters = {
        name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name or name.endswith(".base_layer.weight") or name in experts
    }
    for name in sorted(saved.keys() | parameters.keys()):
        ours, theirs = parameters.get(name), saved.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (theirs, ours)]
            raise DataError(
                f"The adapter in {state} does not fit: {name} has shape {shapes[0]} there and {shapes[1]} by train.lora. "
                "Rank and target_modules must stay what they were."
            )
        ours.data.copy_(sharded_like(theirs, ours))
