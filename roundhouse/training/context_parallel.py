"""Context parallelism: the positions of a packed row spread over ranks (DeepSpeed Ulysses, arXiv:2309.14509).

Invariant: the ranks of a context group have the same microbatch and return the same log-probabilities for all its
tokens. In every layer each computes its part of the row's positions; in attention, its part of the heads over the whole
row:

    two ranks, a row of 8 positions, 4 heads      rank 0              rank 1
    norms, matrices, output layer                 positions 0 … 3     positions 4 … 7         all heads
    attention                                     heads 0, 1          heads 2, 3              all positions

One all-to-all before attention and one after it change between the two. A row with a length that is not a multiple of
the ranks is padded at its end by a separate span that nothing reads. A rank keeps only its part of the row for
backward, so sequences may be longer by the number of ranks. Parameters are sharded over all ranks, and gradients summed
over all, as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from roundhouse.errors import ConfigError
from roundhouse.training.packing import Microbatch, Span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's place in its context group."""

    rank: int
    size: int
    exchange: Callable[[torch.Tensor], torch.Tensor]
    """[size, n] → [size, n]: sends row i to rank i, and returns what each rank sent here."""
    total: Callable[[torch.Tensor], torch.Tensor]
    """The sum over the group, without gradient."""

    @classmethod
    def of(cls, rank: int, group: ProcessGroup) -> Context:
        import torch.distributed as distributed

        def total(values: torch.Tensor) -> torch.Tensor:
            result = values.clone()
            distributed.all_reduce(result, group=group)
            return result

        return cls(rank, group.size(), lambda rows: _Exchange.apply(rows, group), total)

    def part(self, microbatch: Microbatch) -> tuple[Microbatch, torch.Tensor]:
        """This rank's positions of a packed row, with the spans of the whole, and which of its predictions they make.

        `source` stays that of the whole microbatch.
        """
        length, spans = microbatch.input_ids.shape[1], microbatch.spans
        assert spans is not None, "the configuration refuses padded rows"
        own = -(-length // self.size)
        begin, padding = self.rank * own, own * self.size - length
        if padding:
            spans = (*spans, Span(length, length + padding, 1, padding, None, None))
        ids, positions = (
            pad(row, (0, padding))[:, begin : begin + own] for row in (microbatch.input_ids, microbatch.position_ids)
        )
        predict = microbatch.predict - begin
        mine = ((predict >= 0) & (predict < own)).nonzero().squeeze(1)
        chosen, targets = predict[mine], microbatch.targets[mine]
        own_row = replace(
            microbatch, input_ids=ids, position_ids=positions, spans=spans, predict=chosen, targets=targets
        )
        return own_row, mine

    def together(self, values: torch.Tensor, mine: torch.Tensor, count: int) -> torch.Tensor:
        """Return [count] of all ranks' values. The gradient of each rank's values is the loss's, which all ranks
        compute alike.

        Args:
            mine: places of this rank's values among them.
        """
        spread = values.new_zeros(count).index_copy(0, mine, values)
        return self.total(spread.detach()) + (spread - spread.detach())

    def heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Exchange [1, H, positions of a rank, D] for [1, H / size, positions of the row, D], for each tensor.

        With fewer heads than ranks, as keys and values may have, each head goes to the ranks whose queries read it.
        """
        repeated = [
            t if t.shape[1] % self.size == 0 else t.repeat_interleave(self.size // t.shape[1], 1) for t in tensors
        ]
        rows = [tensor.reshape(self.size, -1) for tensor in repeated]
        received = self.exchange(torch.cat(rows, 1)).split([row.shape[1] for row in rows], 1)
        whole = []
        for part, tensor in zip(received, repeated, strict=True):
            _, count, own, width = tensor.shape
            by_rank = part.reshape(self.size, count // self.size, own, width)
            whole.append(by_rank.transpose(0, 1).reshape(1, count // self.size, self.size * own, width))
        return whole

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """[1, positions of the row, H / size, D] → [1, positions of a rank, H, D]."""
        _, length, count, width = tensor.shape
        received = self.exchange(tensor.reshape(self.size, -1)).reshape(self.size, length // self.size, count, width)
        return received.transpose(0, 1).reshape(1, length // self.size, self.size * count, width)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    import torch.distributed as distributed

    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def refuse_unfit_heads(model: Any, size: int, columns: int = 1) -> None:
    """Refuse a model if its heads cannot be split over a context group of this size.

    Args:
        model: its configuration, of transformers.
        columns: ranks over which tensor parallelism has already spread the heads.

    Raises:
        ConfigError: names the sizes that fit.
    """
    text = model.get_text_config()
    heads = text.num_attention_heads // columns
    shared = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // columns

    def fits(ranks: int) -> bool:
        return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)

    if not fits(size):
        raise ConfigError(
            f"train.service.context_parallel is {size}, but the policy's attention has {heads} heads, and {shared} of keys and "
            f"values{', in each part of tensor_parallel' if columns > 1 else ''}, which so many ranks cannot divide. Set it to "
            f"{' or '.join(map(str, filter(fits, range(1, heads + 1))))}."
        )
