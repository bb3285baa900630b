"""AdamW of a model that learns, its learning rate, and its state in a checkpoint.

Invariant: a saved state read back continues bit for bit, over any number of ranks, with moments in float32 and in 8 bits
(`adamw_8bit`).
"""

from __future__ import annotations

import math
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError

from roundhouse.config.models import OptimizerConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.parallel import Ranks, sharded_like
from roundhouse.training.saved_tensors import SavedTensor, SavedTensors, save_tensors, saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roundhouse.training.adamw_8bit import RowwiseAdamW8bit

OPTIMIZER = "optimizer"
"""`optimizer.safetensors`, or several files with an index."""
BLOCK = 128
"""Numbers of an 8-bit moment that share a scale: most models' rows have whole blocks."""
_SMALLEST = 4096
"""Smallest parameter with moments in blocks; smaller ones save nothing, as in bitsandbytes."""


def learning_rate(config: OptimizerConfig, steps_before: int) -> float:
    """Return the learning rate of the update after `steps_before` others.

    Linear from 1/warmup_steps of the full rate, then by the schedule. A falling schedule reaches `final_share` of the
    full rate after `decay_steps` more updates, linearly or by half a cosine (Loshchilov and Hutter, arXiv:1608.03983,
    one period), and stays there.
    """
    if steps_before < config.warmup_steps:
        return config.learning_rate * (steps_before + 1) / config.warmup_steps
    if config.decay_steps is None:
        return config.learning_rate
    progress = min(1.0, (steps_before - config.warmup_steps) / config.decay_steps)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_share + (1 - config.final_share) * left)


def in_blocks(shape: torch.Size) -> bool:
    """Return whether 8-bit moments of a parameter are in blocks: its rows have whole blocks, and it is not small."""
    return len(shape) > 1 and shape.numel() >= _SMALLEST and math.prod(shape[1:]) % BLOCK == 0


def build_optimizer(model: PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over all parameters; weight decay on matrices only, not on norms and biases.

    Raises:
        ConfigError: moments are to be in 8 bits, and torchao is not installed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups = []
    for members, weight_decay in ((matrices, config.weight_decay), (others, 0.0)):
        # a fused step takes tensors that are laid out over the same ranks
        layouts: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in members:
            layouts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{"params": group, "weight_decay": weight_decay} for group in layouts.values()]
    if config.moments == "8-bit":
        try:
            from roundhouse.training.adamw_8bit import RowwiseAdamW8bit
        except ImportError as error:
            raise ConfigError(
                "train.optimizer.moments is 8-bit, which needs torchao: pip install torchao==0.18.0, or set float32 "
                f"({error})."
            ) from error
        eight: torch.optim.Optimizer = RowwiseAdamW8bit(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.eps
        )
        return eight
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao compiles with it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def save_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, directory: Path, ranks: Ranks) -> None:
    """Write every state tensor whole as `<kind>/<parameter name>`; all ranks take part."""
    tensors: SavedTensors = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for kind, value in sorted(state.items(), key=itemgetter(0)):  # whether loaded or made
            if kind != "step" and (blocks := _blocks(optimizer, parameter)) is not None:
                parts = blocks.parts(parameter, kind).items()
                tensors |= {f"{kind}.{part}/{name}": SavedTensor.of(tensor) for part, tensor in parts}
            else:
                tensors[f"{kind}/{name}"] = SavedTensor.of(value)
    save_tensors(tensors, directory, OPTIMIZER, ranks, weights=False)


def _blocks(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> RowwiseAdamW8bit | None:
    """Return the optimizer if it keeps moments of this parameter in blocks."""
    eight = hasattr(optimizer, "parts") and in_blocks(parameter.shape)
    return cast("RowwiseAdamW8bit", optimizer) if eight else None


def load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Put a saved state back, in place, each rank its part; of the file a rank holds one tensor at a time.

    Raises:
        DataError: the file is missing or damaged, or belongs to another architecture.
    """
    parameters = dict(model.named_parameters())
    try:
        for key, value in saved_tensors(directory, OPTIMIZER):
            kind, _, name = key.partition("/")
            moment, _, part = kind.partition(".")
            parameter = parameters.get(name)
            rows = parameter is not None and part == "scale" and value.shape[:1] == parameter.shape[:1]
            if parameter is None or (kind != "step" and value.shape != parameter.shape and not rows):
                present = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise DataError(
                    f"{directory} holds {key} of shape {tuple(value.shape)}; the model has {present}: the state belongs to "
                    "another architecture. Use the trainer state of the model's checkpoint."
                )
            whole = kind == "step"  # one number, the same on every rank
            blocks = None if whole else _blocks(optimizer, parameter)
            if (blocks is None) == bool(part):
                saved, other = ("8-bit", "float32") if part else ("float32", "8-bit")
                raise DataError(
                    f"{directory} holds moments in {saved}, but train.optimizer.moments is {other}. Set it to {saved}, or "
                    "begin from the model without its trainer state."
                )
            if blocks is not None:
                blocks.put(parameter, moment, part, value)
                continue
            optimizer.state[parameter][kind] = (
                value.to(parameter.device, copy=True) if whole else sharded_like(value, parameter)
            )
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"The optimizer state in {directory} cannot be read: {error}. Resume from an older checkpoint."
        ) from error
