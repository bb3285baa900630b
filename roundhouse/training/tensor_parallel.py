"""The matrices of each layer, or its experts, split over neighbouring ranks by transformers' plans for the model.

**Tensor parallelism.** Invariant: the ranks of a group compute the same rows and return the same log-probabilities;
each computes its heads of attention and its columns of the feed-forward layers.

    q, k, v, gate, up     by columns: each rank has some heads, and some of the inner features
    o, down               by rows: each rank's product is a part of the sum, which one all-reduce makes
    all else              whole on each rank: norms, embeddings, the output layer

FSDP2 shards both kinds over the other ranks. Norms of single heads (`q_norm`, `k_norm`) are whole but see only a rank's
heads, so their gradients are partial sums. transformers would add them up in each backward pass, including earlier
passes; `sum_partial_gradients` does it once, before the update.

**Expert parallelism.** Invariant: each rank computes its own rows; an expert computes those of all ranks of its group,
so its gradient is the group's sum. In each layer a rank sends every token to the ranks with its experts and receives
their outputs:

    two ranks, 4 experts      rank 0                    rank 1
    attention, router         its own tokens            its own tokens
    experts                   0, 1 for tokens of both   2, 3 for tokens of both

Ranks with the same experts share them by FSDP2; everything else is sharded over all ranks. The loader of
transformers splits experts only if `ep_size` equals `tp_size`. This module uses its dispatch (`ep_dispatch_experts`),
which does not have this limit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from roundhouse.errors import ConfigError
from roundhouse.training.language_model import is_composite

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_PARTIAL = "replicated_with_grad_allreduce"


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the layers' matrices over the ranks of the mesh's dimension `tp`.

    Raises:
        ConfigError: transformers lacks a plan for the model that this module supports.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    refuse_without_plan(model)
    plan = {name: style for name, style in model.tp_plan.items() if style in ("colwise", "rowwise")}
    apply_tensor_parallelism(model, mesh["tp"], plan)


def refuse_without_plan(model: PreTrainedModel) -> None:
    """Refuse a model that columns and rows alone cannot split: one with towers or experts, or without a plan of
    transformers.

    Raises:
        ConfigError: names the reason and the remedy.
    """
    if is_composite(model):
        raise ConfigError(
            f"train.service.tensor_parallel is set, but {type(model).__name__} has towers beside its language model, which are "
            "not split. Set it to 1."
        )
    styles = {style for name, style in (model.tp_plan or {}).items() if ".layers." in f".{name}"}
    if "colwise" not in styles or styles - {"colwise", "rowwise", _PARTIAL}:
        what = f"splits its layers by {', '.join(sorted(styles))}" if styles else "has no plan to split its layers"
        raise ConfigError(
            f"train.service.tensor_parallel is set, but {type(model).__name__} {what}; only columns and rows are known. Set it "
            "to 1."
        )


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the experts of each layer over the ranks of the mesh's dimension `ep`, which send each other tokens.

    Raises:
        ConfigError: as `refuse_unfit_experts`.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    refuse_unfit_experts(model, mesh["ep"].size())
    apply_expert_parallelism(model, mesh["ep"], None, model.ep_plan)  # type: ignore[arg-type]  # no two have the same tokens


def refuse_unfit_experts(model: PreTrainedModel, size: int) -> None:
    """Refuse a model without experts or with towers, and experts that do not divide over so many ranks.

    Raises:
        ConfigError: names the mismatch and the remedy.
    """
    key, plan = f"train.service.expert_parallel is {size}", model.ep_plan or {}
    if is_composite(model):
        raise ConfigError(
            f"{key}, but {type(model).__name__} has towers beside its language model, with which that is untested. Set it to 1."
        )
    if set(plan.values()) != {"grouped_gemm", "ep_dispatch_experts"}:
        what = (
            f"spreads its experts by {', '.join(sorted({*plan.values()}))}"
            if plan
            else "has no matrix to split over ranks"
        )
        raise ConfigError(
            f"{key}, but {type(model).__name__} {what}; only experts that tokens are sent to are known. Set it to 1."
        )
    for experts in expert_modules(model):
        if (count := len(next(experts.parameters(recurse=False)))) % size:
            fitting = " or ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(f"{key}, which does not divide the policy's {count} experts. Set it to {fitting}.")


def expert_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return each layer's experts, with parameters whose rows are the experts."""
    dispatched = {name for name, style in (model.ep_plan or {}).items() if style == "ep_dispatch_experts"}
    return [module for name, module in model.named_modules() if re.sub(r"\.\d+\.", ".*.", name) in dispatched]


def sum_partial_gradients(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Add up the gradients of norms that have seen a rank's own heads only."""
    import torch.distributed as distributed

    partial = {name for name, style in model.tp_plan.items() if style == _PARTIAL}
    group: Any = mesh["tp"].get_group()
    for name, module in model.named_modules():
        if re.sub(r"\.\d+\.", ".*.", name) in partial:
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad.to_local(), group=group)


def refuse_unfit_shape(model: Any, size: int) -> None:
    """Refuse a model if its heads or inner features do not divide over so many ranks.

    Args:
        model: its configuration, of transformers.

    Raises:
        ConfigError: names the mismatch and the sizes that fit.
    """
    text = model.get_text_config()
    heads = text.num_attention_heads
    counts = {
        "heads": heads,
        "heads of keys and values": getattr(text, "num_key_value_heads", None) or heads,
        "inner features": text.intermediate_size,
    }
    for what, count in counts.items():
        if count % size:
            fitting = [str(n) for n in range(1, heads + 1) if not any(each % n for each in counts.values())]
            raise ConfigError(
                f"train.service.tensor_parallel is {size}, which does not divide the policy's {count} {what}. Set it to "
                f"{' or '.join(fitting)}."
            )
