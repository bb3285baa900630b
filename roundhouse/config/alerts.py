"""When a run's numbers are worth waking somebody for. Who is woken, and how, is a matter of Prefect's automations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roundhouse.config.section import PositiveFloat, PositiveInt, ProperFraction, Section


class AlertsConfig(Section):
    """Thresholds. Each alert is told once, when the number crosses; null switches it off."""

    reward_below_best: ProperFraction | None = 0.5
    """The reward has collapsed when its mean over the last `reward_window` iterations is below this share of the best such mean
    of the 100 iterations before. For a best above 0 only."""
    reward_drop: PositiveFloat | None = None
    """The same by an absolute distance from the best, for rewards that may be negative."""
    reward_window: PositiveInt = 3
    """Iterations of that mean: the more, the less a lucky draw of tasks counts."""
    kl_above: PositiveFloat | None = 0.5
    """Of `train/kl_penalty`, the divergence from the reference policy; it is measured where `kl_coefficient` is above 0."""
    mismatch_above: Annotated[float, Field(gt=1)] | None = 1.05
    """Of `train/token_mult_prob_error`, by which factor engine and trainer differ on a token's probability. Not judged where
    rollouts may be of older weights (`asynchrony.staleness` above 0, `offline`)."""
