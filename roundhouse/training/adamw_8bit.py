"""AdamW with moments of 8-bit numbers and a scale per block (torchao; Dettmers et al., arXiv:2110.02861).

Invariant: a block lies within a row of its parameter, so a row's numbers do not depend on the number of ranks, and a
checkpoint holds them unchanged:

    exp_avg.codes/<parameter>    uint8, of the parameter's shape
    exp_avg.scale/<parameter>    float32, [rows, blocks of a row]

Small parameters and those without whole blocks in a row keep moments in float32 (`optimizer.in_blocks`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from roundhouse.training.optimizer import BLOCK, in_blocks
from roundhouse.training.parallel import sharded_like


class RowwiseAdamW8bit(AdamW8bit):
    """torchao's, with blocks that lie within rows."""

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        local: Any = p.to_local() if isinstance(p, DTensor) else p
        if in_blocks(p.shape) and len(local):
            buffer = OptimState8bit.zeros(local.shape, signed, BLOCK, local.device, dtype=local.dtype)
        else:
            buffer = torch.zeros_like(local)
        return _spread_as(p, buffer)

    def step(self, closure: Any = None) -> Any:
        """On a CPU without torch.compile, which would need a compiler of C++ and gain nothing."""
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            return super().step(closure)

    def parts(self, parameter: torch.Tensor, moment: str) -> dict[str, torch.Tensor]:
        """A parameter's moment as a checkpoint has it, by the name's ending: codes and scales, laid out as the parameter."""
        value = self.state[parameter][moment]
        local: Any = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, OptimState8bit):
            codes, scale = local.codes, local.scale.view(len(local), -1)
        else:  # a rank without rows
            codes, scale = local.to(torch.uint8), local.new_empty(0, math.prod(parameter.shape[1:]) // BLOCK)
        return {"codes": _spread_as(parameter, codes), "scale": _spread_as(parameter, scale)}

    @torch.no_grad()
    def put(self, parameter: torch.Tensor, moment: str, part: str, saved: torch.Tensor) -> None:
        """Take one of a moment's `parts` from a checkpoint, each rank its rows."""
        state = self.state[parameter]
        if moment not in state:
            state[moment] = self._new_buffer(parameter, moment == "exp_avg")
        own, mine = (
            x.to_local() if isinstance(x, DTensor) else x for x in (state[moment], sharded_like(saved, parameter))
        )
        if len(own):
            target = getattr(own, part)
            target.copy_(mine.view(target.shape))


def _spread_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A rank's rows of a tensor as a part of the whole, which has as many rows as the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
