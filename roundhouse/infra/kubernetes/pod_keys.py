"""By which keys of the configuration a stage's pods get what they lack: what an error about one of them names.

Invariant: an error names keys of the pod's own section, never another stage's.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundhouse.errors import ConfigError, InfraError


@dataclass(frozen=True)
class PodKeys:
    """Of one kind of pods."""

    section: str
    """`<section>.image`, `.memory`, `.pending_seconds`, …"""
    timeout: str
    """The time limit of the work itself."""
    secret: str
    environment: str
    less_memory: str
    """What else to do when memory runs out, as the end of a sentence."""
    out_of_memory: type[ConfigError | InfraError]
    """Whether the same work needs the same memory again, or goes on from what it had written down."""

    @property
    def remedy_for_start(self) -> str:
        """Where to look when a container cannot be made."""
        return f"Check {self.secret}, infra.store_claim and {self.environment}."


TRAINER = PodKeys(
    section="infra.trainer",
    timeout="train.service.timeout_seconds",
    secret="infra.secret",
    environment="infra.environment",
    less_memory="lower train.tokens_per_microbatch or infra.trainer.shared_memory, which counts as memory",
    out_of_memory=ConfigError,
)
COLLECTOR = PodKeys(
    section="infra.collector",
    timeout="rollout.distribution.timeout_seconds",
    secret="infra.collector.secret",
    environment="infra.collector.environment",
    less_memory="raise rollout.distribution.shards, so that each has fewer rollouts in flight",
    out_of_memory=InfraError,
)
