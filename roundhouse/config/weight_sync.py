"""How new weights get from a checkpoint into the engine: the weight transport of a run.

Invariant: only this module knows a transport by name. Everything else takes its class from `TRANSPORTS`, or from the
`module:Class` that the configuration names, and asks the class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from roundhouse.config.secrets import Parameters
from roundhouse.config.section import Section, Target
from roundhouse.import_string import load_class

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig

TRANSPORTS = {
    "store": "roundhouse.weight_sync.checkpoint:CheckpointTransport",
    "shared-memory": "roundhouse.weight_sync.shared_memory:SharedMemoryTransport",
    "delta": "roundhouse.weight_sync.delta:DeltaTransport",
    "adapter": "roundhouse.weight_sync.adapter:AdapterTransport",
    "transfer": "roundhouse.weight_sync.transfer:TransferTransport",
}
"""Built-in transports: a `roundhouse.weight_sync.base.WeightTransport` by its name."""
_VLLM_BACKENDS = ("gloo", "nccl")
_REFUSED_BACKENDS = ("ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress")


class CustomWeightSync(Section):
    """A weight transport of your own, imported by name; docs/weights.md has an example."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` of a `roundhouse.weight_sync.base.WeightTransport`; not a file: the engine imports the module too, so it
    has to be installed there."""
    parameters: Parameters = Field(default_factory=dict)
    """The section of its configuration (`Config` of the class)."""


def _known(argument: Any) -> Any:
    if argument in _VLLM_BACKENDS:
        raise ValueError(
            f"{argument} is a weight-transfer engine of vLLM, a backend of the transport transfer. Set it to transfer, and "
            f"generation.transfer_backend to {argument}."
        )
    known_backend(argument)
    if isinstance(argument, str) and argument not in TRANSPORTS:
        raise ValueError(
            f"there is no transport {argument}; there are {', '.join(TRANSPORTS)}, and kind: custom for one of your own."
        )
    return argument


def known_backend(argument: Any) -> Any:
    """Refuse the backends of vLLM that are not connected here.

    Raises:
        ValueError: says why, and what to set.
    """
    if argument in _REFUSED_BACKENDS:
        why = (
            "takes handles of memory on the engine's own GPU, pickled, from a process that holds it there"
            if argument == "ipc"
            else "is not connected here"
        )
        raise ValueError(
            f"{argument} is a weight-transfer engine of vLLM that {why}. Set generation.weight_sync to transfer with "
            "generation.transfer_backend gloo or nccl, or to store, shared-memory, delta or adapter."
        )
    return argument


WeightSync = Annotated[
    Annotated[str, Field(json_schema_extra={"enum": list(TRANSPORTS)})] | CustomWeightSync, BeforeValidator(_known)
]


def check_transport(config: RunConfig) -> None:
    """Refuse a built-in transport that cannot work in this run; a custom one is checked when the run refits, since reading a
    configuration executes no code that it names.

    Raises:
        ValueError: names key, value and remedy.
    """
    chosen = config.generation.weight_sync
    if isinstance(chosen, str):
        transport: Any = load_class(TRANSPORTS[chosen], object, "generation.weight_sync")
        transport(Section(), chosen).check(config)
