"""AdamW of a model that learns, its learning rate, and its state in a checkpoint.

Invariant: a saved state read back continues bit for bit, over any number of ranks.
"""

from __future__ import annotations

import math
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from roundhouse.config.models import OptimizerConfig
from roundhouse.errors import DataError
from roundhouse.training.parallel import Ranks, sharded_like
from roundhouse.training.saved_tensors import SavedTensor, save_tensors, saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER = "optimizer"
"""`optimizer.safetensors`, or several files with an index."""


def learning_rate(config: OptimizerConfig, steps_before: int) -> float:
    """Learning rate of the update after `steps_before` others.

    Linear from 1/warmup_steps of the full rate, then as the schedule says. A falling one has come down to `final_share` of the
    full rate after `decay_steps` more updates: in a straight line, or by half a cosine (Loshchilov and Hutter,
    arXiv:1608.03983, one period), and stays there.
    """
    if steps_before < config.warmup_steps:
        return config.learning_rate * (steps_before + 1) / config.warmup_steps
    if config.decay_steps is None:
        return config.learning_rate
    progress = min(1.0, (steps_before - config.warmup_steps) / config.decay_steps)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_share + (1 - config.final_share) * left)


def build_optimizer(model: PreTrainedModel, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay on matrices only, not on norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups = []
    for kept, weight_decay in ((matrices, config.weight_decay), (others, 0.0)):
        # a fused step takes tensors that are laid out over the same ranks
        layouts: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in kept:
            layouts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{"params": group, "weight_decay": weight_decay} for group in layouts.values()]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def save_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, directory: Path, ranks: Ranks) -> None:
    """Write every state tensor whole as `<kind>/<parameter name>`; all ranks take part."""
    tensors = {
        f"{kind}/{name}": SavedTensor.of(value)
        for name, parameter in model.named_parameters()
        for kind, value in sorted(
            optimizer.state.get(parameter, {}).items(), key=itemgetter(0)
        )  # whether loaded or made
    }
    save_tensors(tensors, directory, OPTIMIZER, ranks)


def load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Put a saved state back, in place, each rank its part; of the file a rank holds one tensor at a time.

    Raises:
        DataError: the file is missing or damaged, or belongs to another architecture.
    """
    parameters = dict(model.named_parameters())
    try:
        for key, value in saved_tensors(directory, OPTIMIZER):
            kind, _, name = key.partition("/")
            parameter = parameters.get(name)
            if parameter is None or (kind != "step" and value.shape != parameter.shape):
                present = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise DataError(
                    f"{directory} holds {key} of shape {tuple(value.shape)}; the model has {present}: the state belongs to "
                    "another architecture. Use the trainer state that lies beside the model."
                )
            whole = kind == "step"  # one number, the same on every rank
            optimizer.state[parameter][kind] = (
                value.to(parameter.device, copy=True) if whole else sharded_like(value, parameter)
            )
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"The optimizer state in {directory} cannot be read: {error}. Resume from an older checkpoint."
        ) from error
