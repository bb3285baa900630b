"""Weights that a trainer sends: the agreement between a weight transport and a train service.

Invariant: a trainer sends only weights with the checkpoint's digest. From `begin_transfer` to `end_transfer` it does nothing
else.

    transport  -> trainer      WeightOffer: the format and the receivers
    trainer                    a WeightSender, made by the transport that the offer names
    trainer    -> transport    TransferBegun: the source that leads replicas to the sender
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, ValidationError

from roundhouse.errors import ConfigError
from roundhouse.weight_sync.base import DirectTransport, Dtype, WeightSource, parse_source, transport_class

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor without its bytes."""

    name: str
    dtype: str
    """torch's name, e.g. bfloat16."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        import torch

        element: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * element.itemsize


class WeightOffer(BaseModel):
    """Format and receivers of sent weights; transports add fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    """The transport: its name, or `module:Class`."""
    dtype: Dtype


class WeightSender(Protocol):
    """Sends weights to replicas."""

    @property
    def seconds(self) -> float:
        """Time limit of a meeting, and of each batch."""
        ...

    def source(self) -> WeightSource:
        """Return the source that leads replicas to the sender."""
        ...

    def begin(self) -> None:
        """Start to send to joining replicas."""
        ...

    def end(self, patience: float) -> bool:
        """Admit no replica any more. Return whether the sending under way ended within so many seconds."""
        ...


class SendingTransport(DirectTransport):
    """A direct transport for which a trainer can send its weights."""

    Offer: ClassVar[type[WeightOffer]]
    """Type of the offer that a trainer receives."""

    @classmethod
    @abstractmethod
    def sender(
        cls,
        described: Sequence[Described],
        tensors: Callable[[], Generator[tuple[str, torch.Tensor]]],
        offer: Any,
    ) -> WeightSender:
        """Return a sender that has not begun.

        Args:
            described: the tensors, in the order in which they are sent.
            tensors: yields them, once for each group of replicas; closed early if a group is lost.
            offer: an `Offer` of this class.

        Raises:
            ConfigError: this process cannot send so.
        """


def sending_transport(kind: str) -> type[SendingTransport]:
    """Return the class of the transport that an offer names.

    Raises:
        ConfigError: it does not exist, or no trainer sends for it.
    """
    transport = transport_class(kind)
    if not issubclass(transport, SendingTransport):
        raise ConfigError(f"No trainer sends weights for the transport {kind}. Set generation.weight_sync to another.")
    return transport


def _parse_offer(tree: Any) -> Any:
    if isinstance(tree, WeightOffer):
        return tree
    try:
        return sending_transport(str(tree.get("kind"))).Offer.model_validate(tree)
    except (ConfigError, ValidationError, AttributeError) as error:
        raise ValueError(f"offer is {tree!r}: {error}") from None


AnyOffer = Annotated[SerializeAsAny[WeightOffer], BeforeValidator(_parse_offer)]
"""The offer of any transport, as a field of a message."""


class TransferBegun(BaseModel):
    """A trainer's report about the weights that it sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    """Digest of the tensors as sent."""
    source: Annotated[
        SerializeAsAny[WeightSource],
        BeforeValidator(lambda tree: tree if isinstance(tree, WeightSource) else parse_source(tree)),
    ]


@runtime_checkable
class WeightHolder(Protocol):
    """A trainer that can send its policy's weights."""

    def begin_transfer(self, offer: WeightOffer, digest: str) -> TransferBegun:
        """Send to the replicas that come, until `end_transfer`. Until then no other verb is called.

        Args:
            digest: `digest_of_tensors` of the checkpoint that the weights have to be.

        Raises:
            DataError: they are not.
            ConfigError: this trainer cannot send so.
            InfraError: as of any verb.
        """
        ...

    def end_transfer(self) -> None:
        """Return when nothing is sent any more. Ending twice is allowed.

        Raises:
            InfraError: as of any verb; or a replica keeps the sender beyond its time limits, and the trainer is lost.
        """
        ...
