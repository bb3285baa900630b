"""When the numbers of a run's iterations are worth waking somebody for.

Invariant: an alert is told at the iteration with which its condition begins to hold, and not again while it holds. It is a
function of the iterations' metrics alone: after a restart at most those of the newest iteration are told again.

    iteration   1    2    3    4    5    6    7
    reward     0.2  0.6  0.8  0.7  0.3  0.2  0.2      over 2 iterations, below half of the best (0.75)
    alert                                 x           0.25 at iteration 6, still below at 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundhouse.config.alerts import AlertsConfig

REWARD, KL, MISMATCH = "reward/mean", "train/kl_penalty", "train/token_mult_prob_error"
WATCHED = (REWARD, KL, MISMATCH)
"""Metrics that alerts are made of."""
REMEMBERED = 100
"""Iterations back in which the best reward is looked for."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that a person should know of."""

    name: str
    """Stable: its event is `roundhouse.alert.<name>`."""
    message: str
    """One sentence with the numbers."""

    @property
    def event(self) -> str:
        return f"roundhouse.alert.{self.name}"


def new_alerts(config: AlertsConfig, history: Sequence[Metrics]) -> list[Alert]:
    """Alerts that begin to hold with the newest iteration of the history (oldest first; only `WATCHED` is read)."""
    before = {alert.name for alert in _alerts(config, history[:-1])}
    return [alert for alert in _alerts(config, history) if alert.name not in before]


def _alerts(config: AlertsConfig, history: Sequence[Metrics]) -> list[Alert]:
    if not history:
        return []
    newest = history[-1]
    found = [
        _collapse(config, [metrics[REWARD] for metrics in history if REWARD in metrics]),
        _above("kl", KL, newest, config.kl_above, "alerts.kl_above: the policy is far from its reference"),
        _above(
            "mismatch", MISMATCH, newest, config.mismatch_above, "alerts.mismatch_above: engine and trainer disagree"
        ),
    ]
    return [alert for alert in found if alert is not None]


def _collapse(config: AlertsConfig, rewards: Sequence[float]) -> Alert | None:
    over = config.reward_window
    means = [sum(rewards[end - over : end]) / over for end in range(over, len(rewards) + 1)][-REMEMBERED:]
    if len(means) < 2:
        return None
    now, best = means[-1], max(means[:-1])
    lost_share = config.reward_below_best is not None and best > 0 and now < config.reward_below_best * best
    lost_much = config.reward_drop is not None and now < best - config.reward_drop
    if not (lost_share or lost_much):
        return None
    key = "reward_below_best" if lost_share else "reward_drop"
    return Alert(
        "reward_collapse", f"The reward's mean over {over} iterations is {now:.3g}; it was {best:.3g} (alerts.{key})."
    )


def _above(name: str, metric: str, newest: Metrics, limit: float | None, said: str) -> Alert | None:
    value = newest.get(metric)
    if limit is None or value is None or value <= limit:  # what is not a number is above any limit
        return None
    return Alert(name, f"{metric} is {value:.4g}, above {limit:g} ({said}).")
