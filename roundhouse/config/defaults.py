"""Defaults that follow from other sections: learning rates by the model that is trained, and the defaults of recorded runs.

Invariant: a key that the configuration sets is never replaced. A key that it leaves unset stays out of `model_fields_set`.

    policy: {kind: pretrained, path: …}                     train.optimizer.learning_rate becomes 1e-6
    the same, continued from a store that records 3e-4      it stays 3e-4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roundhouse.config.models import RunConfig
from roundhouse.config.section import Section

POLICY_RATE = "train.optimizer.learning_rate"
CRITIC_RATE = "train.algorithm.critic.optimizer.learning_rate"

FORMER_DEFAULTS = {
    POLICY_RATE: 3e-4,
    CRITIC_RATE: 1e-3,
    "train.algorithm.mismatch_correction": "none",
    "reward.overlong.penalty": 1.0,
    "generation.tool_call_parser": "hermes",
    "train.packing": True,
}
"""Defaults that were one for all policies and rewards, by the end of the key. Recorded runs keep them."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Default learning rates, and the reason for them."""

    policy: float
    critic: float
    reason: str


OWN = Rates(3e-4, 1e-3, "the run makes a small policy itself (policy.kind warm_start)")
FULL = Rates(1e-6, 1e-5, "all weights of a pretrained policy are trained")
ADAPTER = Rates(1e-5, 1e-5, "an adapter of a pretrained policy is trained")
"""An adapter takes about ten times the rate of its model. A critic is trained in full."""


def default_rates(config: RunConfig) -> Rates:
    """Return the default learning rates of a run's policy."""
    if config.policy.origin is None:
        return OWN
    return ADAPTER if config.train.lora is not None or config.train.service.holds_one_adapter else FULL


def with_default_rates(config: RunConfig) -> RunConfig:
    """Return the configuration with the default learning rates of its policy if none is set."""
    for key, rate in _unset_rates(config):
        config = _with_default(config, key, rate)
    return config


def with_recorded_defaults(config: RunConfig, changes: Mapping[str, tuple[Any, Any]]) -> RunConfig:
    """Return the configuration of a run that continues, with the former defaults that the run began with.

    Args:
        config: of this start; the keys that it sets stay.
        changes: values by key, as the run recorded them and of this start.
    """
    for key, (before, _) in changes.items():
        former = next((value for end, value in FORMER_DEFAULTS.items() if key.endswith(end)), None)
        if former is not None and before == former and not _is_set(config, key):
            config = _with_default(config, key, former)
    return config


def rate_notes(config: RunConfig) -> list[str]:
    """Return a line for each learning rate that the configuration leaves unset: its key, its value and the reason."""
    section, notes = default_rates(config), []
    for key, rate in _unset_rates(config):
        value = _value_of(config, key)
        reason = section.reason if value == rate else "the default when the run began"
        notes.append(f"{key} is {value:g}, by default: {reason}")
    return notes


def _unset_rates(config: RunConfig) -> Iterator[tuple[str, float]]:
    """Yield the keys of the learning rates that are not set, with their defaults."""
    rates = default_rates(config)
    keys = {POLICY_RATE: rates.policy}
    if config.train.algorithm.critic_section is not None:
        keys[CRITIC_RATE] = rates.critic
    for key, rate in keys.items():
        if not _is_set(config, key):
            yield key, rate


def _value_of(config: RunConfig, key: str) -> Any:
    section: Any = config
    for part in key.split("."):
        section = section.get(part) if isinstance(section, dict) else getattr(section, part, None)
    return section


def _is_set(config: RunConfig, key: str) -> bool:
    """Return whether the configuration gave this key a value, rather than its section's default."""
    parent, _, leaf = key.rpartition(".")
    return leaf in getattr(_value_of(config, parent), "model_fields_set", ())


def _with_default(config: RunConfig, key: str, value: Any) -> RunConfig:
    changed: RunConfig = _replaced(config, key.split("."), value)
    return changed


def _replaced(section: Any, parts: list[str], value: Any) -> Any:
    """Return a copy with another value at a key, without marking the key as set."""
    head, *rest = parts
    if isinstance(section, dict):
        return section | {head: _replaced(section[head], rest, value)}
    assert isinstance(section, Section)
    copy = section.model_copy(update={head: _replaced(getattr(section, head), rest, value) if rest else value})
    if head not in section.model_fields_set:
        copy.model_fields_set.discard(head)
    return copy
