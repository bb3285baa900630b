"""A replica's desired state, its report, and the proof that all replicas hold the same weights.

Invariant: the desired state alone decides with which weights a replica answers. `request` orders desired states, so a
late older one is ignored. Refit options change how the desired version arrives, never the version: a replica that
cannot follow them (it has just started, it holds another base) loads the checkpoint.

Replicas agree if the digests of their tensors are equal and the probe's log-probabilities differ only within the
rounding of their number format. A head with old weights, the failure that the probe detects, differs by whole nats.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from roundhouse.config.generation import InflightRequests
from roundhouse.errors import DeploymentFailed
from roundhouse.weight_sync.base import parse_source

SAMPLED = ("temperature", "top_p", "top_k")
"""Parameters of the distribution that tokens are sampled from."""


@dataclass(frozen=True, slots=True)
class DesiredPolicy:
    """The deployment's `user_config`, and the body of `POST /rh/desired`."""

    policy_version: int
    weights: str | None = None
    """Hugging Face directory: a path, file:// or s3:// URI. None: weights will come later."""
    digest: str | None = None
    """`digest_of` the wanted weights; replicas refuse anything else."""
    request: int | None = None
    """Grows with each request (nanoseconds since the epoch). A newer request for the same weights retries; a late
    older one is ignored."""
    source: dict[str, Any] | None = None
    """A shortcut to the same weights: a `roundhouse.weight_sync.base.WeightSource` as JSON; None: the files at `weights`."""
    running: InflightRequests = "drain"
    """Treatment of running generations."""
    keep_prefix_cache: bool = False
    sampling: list[dict[str, Any]] | None = None
    """Temperature, top_p and top_k that requests may ask for, each with all of `SAMPLED`; others are refused. None: any."""
    asleep: str | None = None
    """If set, the engine releases its memory until the next desired state; the text has the reason."""

    @classmethod
    def parse(cls, user_config: dict[str, Any]) -> DesiredPolicy:
        unknown = sorted(set(user_config) - set(cls.__slots__))
        if unknown or type(user_config.get("policy_version")) is not int:
            raise ValueError(
                f"user_config is {user_config!r}; it must hold policy_version (a whole number) and may hold "
                f"{', '.join(name for name in cls.__slots__ if name != 'policy_version')}."
            )
        desired = cls(**user_config)
        parse_source(desired.source)
        if desired.running not in get_args(InflightRequests):
            raise ValueError(f"running is {desired.running!r}; it is one of {', '.join(get_args(InflightRequests))}.")
        allowed = desired.sampling
        if allowed is not None and not (isinstance(allowed, list) and all({*one} == {*SAMPLED} for one in allowed)):
            raise ValueError(f"sampling is {allowed!r}; it is a list of objects with {', '.join(SAMPLED)}, or null.")
        if desired.asleep is not None and not (isinstance(desired.asleep, str) and desired.asleep):
            raise ValueError(f"asleep is {desired.asleep!r}; it must be the reason as a text, or null.")
        return desired

    def same_weights(self, other: DesiredPolicy | None) -> bool:
        mine = (self.policy_version, self.weights, self.digest)
        return other is not None and mine == (other.policy_version, other.weights, other.digest)


@dataclass(frozen=True, slots=True)
class RefitOptions:
    """Fields of `DesiredPolicy` apart from the weights; default values are omitted from the desired state."""

    digest: str | None = None
    source: dict[str, Any] | None = None
    running: InflightRequests = "drain"
    keep_prefix_cache: bool = False
    sampling: list[dict[str, Any]] | None = None
    asleep: str | None = None

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}


def desired_state(
    version: int, weights: str | None, options: RefitOptions, before: Iterable[dict[str, Any] | None]
) -> dict[str, Any]:
    """A `DesiredPolicy` as JSON that asks for these weights, newer than every desired state of `before`."""
    return {"policy_version": version, "weights": weights, "request": later_than(before), **options.changed()}


def later_than(states: Iterable[dict[str, Any] | None]) -> int:
    """The number (`request`) of a new desired state, above that of every known one.

    It is new each time: the same weights are tried again, and an older request never overtakes a newer one. It is mostly the
    time, so that requests of several drivers differ; but a clock that was set back must not make a new one old.
    """
    known = (state.get("request") or 0 for state in states if state is not None)
    return max(time.time_ns(), 1 + max(known, default=0))


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's report at `/rh/replicas`."""

    replica_id: str
    pid: int
    application: str
    """`application_digest` of the arguments it was started with."""
    ready: bool
    policy_version: int | None
    weights: str | None
    refit_seconds: float
    refits: int
    error: str | None
    failed_request: int | None
    """`request` of the desired state that `error` is about."""
    desired: dict[str, Any] | None
    digest: str | None
    """Digest of the tensors that the engine received."""
    tensors: int | None
    probe: list[float] | None
    """Log-probabilities of a sequence that is the same for every replica of the model."""
    transport: str | None
    """Transport of the weights."""
    transport_note: str | None
    """Why it was not the transport that was published."""
    asleep: str | None = None
    """Reason for its sleep, without weights."""
    failure_may_pass: bool | None = None
    """Whether `error` is a store or machine error that a retry may avoid."""
    placement_group: str | None = None
    """Id of Ray's, in which a trainer has a place near it."""
    generated_tokens: int | None = None
    """Tokens of its answers, by the counter `token_counter`."""
    token_counter: str | None = None

    @classmethod
    def parse(cls, status: dict[str, Any]) -> ReplicaReport:
        """Return the report in a reply's object; a missing field is None.

        Raises:
            AttributeError, TypeError: it is not an object, or a name or a count has another type.
        """
        present: dict[str, Any] = {key: status.get(key) for key in cls.__slots__}
        for keys, kind in ((("replica_id", "token_counter"), str), (("policy_version", "generated_tokens"), int)):
            for key in keys:
                if not isinstance(present[key], kind | None):
                    raise TypeError(f"{key} is a {type(present[key]).__name__}")
        return cls(**present)


def arguments_of(generation: dict[str, Any], model_dir: str, reserved: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of `build`; without a reservation, those of before there were any."""
    arguments = {"generation": generation, "model_dir": model_dir}
    return arguments if reserved is None else arguments | {"reserved": reserved}


def application_digest(arguments: dict[str, Any]) -> str:
    """Return a digest that distinguishes replicas with the wanted arguments from earlier ones, which Serve replaces
    one by one."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:16]


TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Nats by which replicas of one number format may differ on a token of the probe: batches, kernels and machines round
differently."""


def proof_of(replicas: Sequence[ReplicaReport]) -> dict[str, Any]:
    """Return the recorded proof of a refit: one replica's report, which all others equal."""
    first = replicas[0]
    return {"digest": first.digest, "tensors": first.tensors, "probe": first.probe}


def require_agreement(replicas: Sequence[ReplicaReport], dtype: str, recorded: Mapping[str, Any] | None = None) -> None:
    """Compare all replicas with the first, and with the earlier record of this version.

    Raises:
        DeploymentFailed: names the replica that differs, and the difference.
    """
    if not replicas:
        raise DeploymentFailed("No replica answers after the refit. Look at the engine's log.")
    if recorded is not None:
        _require(replicas, recorded, dtype, "the record of this version")
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
                f"Replica {replica.replica_id} differs in the probe's log-probabilities by {off:.3g} nats from {against} "
                f"({TOLERANCE[dtype]:g} are allowed in {dtype}). Restart it."
            )


def difference(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    """Return the largest difference in nats; None if nothing can be compared."""
    if one is None or other is None or len(one) != len(other):
        return None
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
