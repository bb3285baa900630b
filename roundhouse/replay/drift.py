"""How far a policy has moved away from the recorded rollouts that it is trained on, and the gate that stops a replay there.

Invariant: the numbers are those of the sequences' trained tokens under the weights that the step began from, before its first
update; they need no more than what the train stage writes down.

    w     importance weight, exp(policy − recorded log-probability)
    Kish  (Σw)² / (n Σw²), the share of n samples that still count
    KL    of the policy that generated from the one that trains, by k3 (Schulman): mean of w − 1 − log w
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.stages.freshness import drift
from roundhouse.store.manifest import Reference
from roundhouse.store.stage import read_manifest, read_table


@dataclass(frozen=True, slots=True)
class Drift:
    """Of one iteration."""

    effective_tokens: float
    """Kish of the tokens' weights, in (0, 1]."""
    effective_rollouts: float
    """Kish of the rollouts' weights, each the product over its tokens."""
    clipped: float
    """Share of the tokens whose weight lies outside of the bounds of `train.algorithm.mismatch_bounds`."""
    kl: float
    """Nats a token."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DriftGate:
    """The bounds beyond which a replay stops; the first three are those of `offline` in a configuration."""

    min_effective_tokens: float = 0.5
    min_effective_rollouts: float = 0.05
    max_clipped: float = 0.3
    max_kl: float = 0.1

    @classmethod
    def parse(cls, bounds: list[str]) -> DriftGate:
        """From `max_kl=0.2` and the like; what is not named keeps its default.

        Raises:
            ConfigError: there is no such bound, or its value is no number.
        """
        given = {}
        for bound in bounds:
            key, _, value = bound.partition("=")
            try:
                if key not in cls.__dataclass_fields__:
                    raise ValueError
                given[key] = float(value)
            except ValueError:
                known = ", ".join(cls.__dataclass_fields__)
                raise ConfigError(f"--gate {bound}: give {known} with a number, such as max_kl=0.2.") from None
        return cls(**given)

    def judge(self, found: Drift) -> list[str]:
        """What lies beyond a bound, one line each; empty when the data still speaks."""
        lines = []
        for key, value, beyond in (
            ("min_effective_tokens", found.effective_tokens, found.effective_tokens < self.min_effective_tokens),
            (
                "min_effective_rollouts",
                found.effective_rollouts,
                found.effective_rollouts < self.min_effective_rollouts,
            ),
            ("max_clipped", found.clipped, found.clipped > self.max_clipped),
            ("max_kl", found.kl, not found.kl <= self.max_kl),  # NaN, too
        ):
            if beyond:
                lines.append(f"{key.split('_', 1)[1]} is {value:.4g} ({key}={getattr(self, key):g})")
        return lines


def drift_of(config: RunConfig, sequences: Reference, train: Reference) -> Drift | None:
    """The drift of a complete train stage; None where it trained on no token."""
    found = drift(config, read_table(sequences, "sequences"), read_table(train, "columns"))
    if found is None:
        return None
    # over the tokens with a weight, as the trainer computes it
    kl = read_manifest(train).metrics.get("train/gen_kl_error", 0.0)
    return Drift(found.effective_tokens, found.effective_rollouts, found.clipped, kl)
