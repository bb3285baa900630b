"""The proof that replicas hold the same weights: by what they loaded, and by what they compute.

Invariant: replicas agree when the digests of their tensors are equal and the log-probabilities of the probe differ by no more
than their number format can explain. A head left on old weights, the failure that this is for, is off by whole nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundhouse.errors import DeploymentFailed
from roundhouse.weight_sync.replica_state import ReplicaReport

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Nats by which replicas of one number format may differ on a token of the probe: batches, kernels and machines round
differently."""


def proof_of(replicas: Sequence[ReplicaReport]) -> dict[str, Any]:
    """What is recorded of a refit: one replica's proof, which all were compared with."""
    first = replicas[0]
    return {"digest": first.digest, "tensors": first.tensors, "probe": first.probe}


def require_agreement(replicas: Sequence[ReplicaReport], dtype: str, recorded: Mapping[str, Any] | None = None) -> None:
    """All against the first, and against what was recorded of this version before.

    Raises:
        DeploymentFailed: names the replica that differs, and in what.
    """
    if not replicas:
        raise DeploymentFailed("No replica answers after the refit. Look at the engine's log.")
    if recorded is not None:
        _require(replicas, recorded, dtype, "what was recorded of this version")
    _require(replicas, proof_of(replicas), dtype, f"replica {replicas[0].replica_id}")


def _require(replicas: Sequence[ReplicaReport], proof: Mapping[str, Any], dtype: str, against: str) -> None:
    for replica in replicas:
        if proof["digest"] is not None and replica.digest is not None and replica.digest != proof["digest"]:
            raise DeploymentFailed(
                f"Replica {replica.replica_id} loaded tensors of digest {replica.digest}, unlike {against}: {proof['digest']}. "
                "Restart it."
            )
        off = difference(replica.probe, proof["probe"])
        if off is not None and not off <= TOLERANCE[dtype]:
            raise DeploymentFailed(
                f"Replica {replica.replica_id} computes the probe's log-probabilities {off:.3g} nats off {against} "
                f"({TOLERANCE[dtype]:g} are allowed in {dtype}). Restart it."
            )


def difference(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    """The largest, in nats; None where there is nothing to compare."""
    if one is None or other is None or len(one) != len(other):
        return None
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
