"""Low-rank adapters of matrices that transformers fuses over experts, for one process.

Invariant: names and values of the model's own parameters stay. During a forward pass of the experts their fused
parameter is W + (alpha / rank) · B · A, expert by expert, in float32; after it the frozen W is back.

    W [experts, rows, columns]        B [experts, rows, rank], zeros        A [experts, rank, columns], from a fixed seed

The sum is made for all experts in each pass, so it takes the memory of one layer's experts for a moment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from roundhouse.config.training import LoraConfig
from roundhouse.training.language_model import language_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FUSED = {
    "gate_up_proj": frozenset(("gate_up_proj", "gate_proj", "up_proj", "w1", "w3")),
    "down_proj": frozenset(("down_proj", "w2")),
}
"""Fused parameters, and the names in `train.lora.target_modules` that mean them."""

OF_EXPERTS = re.compile(r"\.lora_\w+_proj\.[AB]$")
"""Names of tensors that adapt matrices of experts."""

EXPERTS_OF_ONE = (
    "train.lora adapts experts, and train.service.processes is above 1. Leave gate_proj, up_proj and down_proj out of "
    "train.lora.target_modules, or set processes to 1."
)


class ExpertAdapter(torch.nn.Module):
    """The adapter of one fused parameter."""

    def __init__(self, frozen: torch.nn.Parameter, config: LoraConfig) -> None:
        super().__init__()
        experts, rows, columns = frozen.shape
        bound = 1 / math.sqrt(columns)  # as peft begins: uniform with the variance of a linear layer
        self.A = torch.nn.Parameter(torch.empty(experts, config.rank, columns).uniform_(-bound, bound))
        self.B = torch.nn.Parameter(torch.zeros(experts, rows, config.rank))
        self.scaling = config.alpha / config.rank
        self.is_disabled = False

    def forward(self, frozen: torch.Tensor) -> torch.Tensor:
        """[experts, rows, columns] the adapted matrices."""
        with torch.autocast(frozen.device.type, enabled=False):
            return torch.baddbmm(frozen.to(self.A.dtype), self.B, self.A, alpha=self.scaling)


def fused_matrices(model: PreTrainedModel) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return module and parameter of each matrix that is fused over experts, by the parameter's name in the model."""
    part = language_model(model)
    inside = {id(module) for module in part.modules()}
    return {
        f"{name}.{leaf}": (module, leaf)
        for name, module in model.named_modules()
        for leaf in FUSED
        if id(module) in inside and (found := module._parameters.get(leaf)) is not None and found.ndim == 3
    }


def adapted_experts(model: PreTrainedModel, targets: Iterable[str]) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the fused matrices that `target_modules` names."""
    targets = frozenset(targets)
    return {name: place for name, place in fused_matrices(model).items() if FUSED[place[1]] & targets}


def adapt_experts(model: PreTrainedModel, config: LoraConfig) -> None:
    """Attach an adapter to each fused matrix that `target_modules` names."""
    chosen = adapted_experts(model, config.target_modules)
    for module, leaf in chosen.values():
        frozen: Any = module._parameters[leaf]
        with torch.device("cpu"):
            module.add_module(f"lora_{leaf}", ExpertAdapter(frozen, config))
    for module in {id(module): module for module, _ in chosen.values()}.values():
        module.register_forward_pre_hook(_adapt)
        module.register_forward_hook(_restore, always_call=True)


def expert_adapters(model: PreTrainedModel) -> dict[str, ExpertAdapter]:
    """Return the adapters by the name of their matrix in the model."""
    adapters = {}
    for name, (module, leaf) in fused_matrices(model).items():
        if isinstance(adapter := module._modules.get(f"lora_{leaf}"), ExpertAdapter):
            adapters[name] = adapter
    return adapters


def _adapt(module: torch.nn.Module, arguments: Any) -> None:
    module._frozen = {}  # type: ignore[assignment]
    for leaf in FUSED:
        adapter = module._modules.get(f"lora_{leaf}")
        if isinstance(adapter, ExpertAdapter) and not adapter.is_disabled:
            frozen: Any = module._parameters[leaf]
            module._frozen[leaf] = frozen  # type: ignore[index, operator]
            module._parameters[leaf] = adapter(frozen)


def _restore(module: torch.nn.Module, arguments: Any, output: Any) -> None:
    module._parameters.update(module._frozen)  # type: ignore[arg-type]
    module._frozen = {}  # type: ignore[assignment]
