"""Tensor parallelism: the matrices of each layer split over neighbouring ranks, by transformers' plan for the model.

Invariant: the ranks of a group compute the same rows and return the same log-probabilities; of attention each computes its
heads, of the feed-forward layers its columns.

    q, k, v, gate, up     by columns: each rank has some heads, and some of the inner features
    o, down               by rows: each rank's product is a part of the sum, which one all-reduce makes
    all else              whole on each rank: norms, embeddings, the output layer

FSDP2 shards both kinds over the other ranks. Norms of single heads (`q_norm`, `k_norm`) are whole but see a rank's own heads
only, so that their gradients are parts of a sum. transformers adds them up in each backward pass, and with them what earlier
passes have added up already; here this is done once, before the update (`sum_partial_gradients`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_PARTIAL = "replicated_with_grad_allreduce"


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the layers' matrices over the ranks of the mesh's dimension `tp`.

    Raises:
        ConfigError: transformers has no plan for the model that this module knows.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    refuse_without_plan(model)
    plan = {name: style for name, style in model.tp_plan.items() if style in ("colwise", "rowwise")}
    apply_tensor_parallelism(model, mesh["tp"], plan)


def refuse_without_plan(model: PreTrainedModel) -> None:
    """Refuse a model whose layers are not split by columns and rows alone, as those of experts are.

    Raises:
        ConfigError: it is such a model.
    """
    styles = {style for name, style in (model.tp_plan or {}).items() if ".layers." in f".{name}"}
    if "colwise" not in styles or styles - {"colwise", "rowwise", _PARTIAL}:
        what = f"splits its layers by {', '.join(sorted(styles))}" if styles else "has no plan to split its layers"
        raise ConfigError(
            f"train.service.tensor_parallel is set, but {type(model).__name__} {what}; only columns and rows are known. Set it "
            "to 1."
        )


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
    """Refuse a model whose heads or inner features so many ranks cannot divide.

    Args:
        model: its configuration, of transformers.

    Raises:
        ConfigError: names what does not divide, and the sizes that do.
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
