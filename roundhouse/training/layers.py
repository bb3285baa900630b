"""The layers of a model of transformers, and which of their activations are kept.

Invariant: recomputing changes memory and time, never a value: the model stays in eval mode, so nothing random is in a layer.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from roundhouse.errors import ConfigError


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks, in order.

    Raises:
        ConfigError: the model does not mark them.
    """
    layers: list[torch.nn.Module] = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not tell its layers apart: it can neither be sharded nor recompute activations. "
            "Train on one process with train.activation_checkpointing false."
        )
    return layers


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's input for backward, and compute what is inside again.

    transformers recomputes layers whose `training` flag is set. Only the layer itself is flagged: the modules inside stay in
    eval mode, and with them dropout stays off.
    """
    layers = decoder_layers(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
