"""The errors of a run as this process saw them, and how bad the last minutes were.

Invariant: the newest `keep` errors are kept, in the order in which they were reported; health is a function of those of the
last `HEALTH_SECONDS` alone. Listeners receive each error once, outside the lock, and cannot stop the run.

Alerts on a run's metrics: an alert is raised at the iteration with which its condition begins to hold, and not again while it
holds. It is a function of the iterations' metrics alone: after a restart at most those of the newest iteration are raised
again.

    iteration   1    2    3    4    5    6    7
    reward     0.2  0.6  0.8  0.7  0.3  0.2  0.2      over 2 iterations, below half of the best (0.75)
    alert                                 x           0.25 at iteration 6, still below at 7
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from roundhouse.config.operations import AlertsConfig

log = logging.getLogger(__name__)

KEPT_ERRORS = 1000
HEALTH_SECONDS = 300.0
"""Errors older than this do not count for the present health."""
TRACEBACK_CHARACTERS = 8000


class Severity(StrEnum):
    """Severity of an error. Compare by `rank`."""

    INFO = "info"
    WARNING = "warning"
    """Something failed and is tried again."""
    ERROR = "error"
    """A stage failed for good."""
    CRITICAL = "critical"
    """Continuing would fail in the same way, or give wrong results."""

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class ErrorInfo(BaseModel):
    """One error."""

    model_config = ConfigDict(frozen=True)

    error_id: str
    timestamp: float
    """Seconds since the epoch."""
    module_name: str
    """The stage."""
    work_context: str
    """Activity at the error, such as `iteration 3`."""
    severity: Severity
    message: str
    details: dict[str, Any]
    """`code` and `kind` of the taxonomy, and further details."""
    exception_type: str | None
    exception_traceback: str | None


class Health(BaseModel):
    """Health of a process."""

    model_config = ConfigDict(frozen=True)

    status: Literal["healthy", "warning", "error"]
    message: str
    recent_error_count: int
    """All of the last five minutes, warnings and infos included."""
    error_level_count: int
    """Errors and criticals among them."""
    warning_level_count: int


Listener = Callable[[ErrorInfo], None]


class ErrorReporter:
    """Keeps errors and passes them on; safe to use from any thread. `clock` gives seconds since the epoch."""

    def __init__(self, keep: int = KEPT_ERRORS, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._errors: deque[ErrorInfo] = deque(maxlen=keep)
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Have every error from now on passed on."""
        self._listeners.append(listener)

    def restore(self, errors: Iterable[ErrorInfo]) -> None:
        """Restore an earlier process's errors, without notifying listeners again."""
        with self._lock:
            self._errors.extendleft(reversed(list(errors)))

    def report_exception(
        self,
        module_name: str,
        work_context: str,
        exception: BaseException,
        severity: Severity = Severity.ERROR,
        details: dict[str, Any] | None = None,
    ) -> str:
        """Report an exception with its traceback; returns the error's id."""
        text = "".join(traceback.format_exception(exception))[-TRACEBACK_CHARACTERS:]
        message = str(exception) or type(exception).__name__
        return self._report(module_name, work_context, severity, message, details, type(exception).__name__, text)

    def report_error(
        self,
        module_name: str,
        work_context: str,
        message: str,
        severity: Severity = Severity.ERROR,
        details: dict[str, Any] | None = None,
    ) -> str:
        """Report something that went wrong without an exception; returns the error's id."""
        return self._report(module_name, work_context, severity, message, details, None, None)

    def errors(self, seconds: float | None = None) -> list[ErrorInfo]:
        """The errors kept, oldest first; with `seconds` only those not older."""
        with self._lock:
            errors = list(self._errors)
        return errors if seconds is None else [error for error in errors if self._clock() - error.timestamp <= seconds]

    def health(self) -> Health:
        """Return the health of the last five minutes."""
        return health_of(self.errors(HEALTH_SECONDS))

    def _report(
        self,
        module_name: str,
        work_context: str,
        severity: Severity,
        message: str,
        details: dict[str, Any] | None,
        exception_type: str | None,
        exception_traceback: str | None,
    ) -> str:
        error = ErrorInfo(
            error_id=uuid.uuid4().hex[:12],
            timestamp=self._clock(),
            module_name=module_name,
            work_context=work_context,
            severity=severity,
            message=message,
            details=details or {},
            exception_type=exception_type,
            exception_traceback=exception_traceback,
        )
        with self._lock:
            self._errors.append(error)
        for listener in self._listeners:
            try:
                listener(error)
            except Exception:  # a run's observer may be gone; the run is not
                log.warning("an error could not be passed on", exc_info=True)
        return error.error_id


def health_of(recent: Iterable[ErrorInfo]) -> Health:
    """The health that these recent errors amount to."""
    severities = [error.severity for error in recent]
    errors = sum(severity.rank >= Severity.ERROR.rank for severity in severities)
    warnings = severities.count(Severity.WARNING)
    status: Literal["healthy", "warning", "error"] = "error" if errors else "warning" if warnings else "healthy"
    minutes = f"{HEALTH_SECONDS / 60:g} minutes"
    reason = f"{errors} errors and {warnings} warnings in the last {minutes}"
    return Health(
        status=status,
        message=reason if errors or warnings else f"no errors in the last {minutes}",
        recent_error_count=len(severities),
        error_level_count=errors,
        warning_level_count=warnings,
    )


REWARD, KL, MISMATCH = "reward/mean", "train/kl_penalty", "train/token_mult_prob_error"
AUDITED, REFUSED = "audit/rollouts", "audit/refused"
FAILED_BY_DATA, ABOVE_LOWEST = "failures/data", "reward/above_lowest"
UNEVEN = tuple(f"uneven_failures/{feature}" for feature in ("task", "successful_calls", "turns", "tokens"))
WATCHED = (REWARD, KL, MISMATCH, AUDITED, REFUSED, FAILED_BY_DATA, ABOVE_LOWEST, *UNEVEN)
"""Metrics that alerts are made of."""
DOUBT = 1e-3
"""Probability of the same by chance, below which refusals of an audit, or unevenly spread failures, are taken for a fact."""
FEW_FAILURES = 5
"""Fewest failures that raise an alert."""
TOGETHER = 3
"""Number of iterations that are judged together, if one has too few failures."""
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
    alerts = [
        _collapse(config, [metrics[REWARD] for metrics in history if REWARD in metrics]),
        _above("kl", KL, newest, config.kl_above, "alerts.kl_above: the policy is far from its reference"),
        _above(
            "mismatch", MISMATCH, newest, config.mismatch_above, "alerts.mismatch_above: engine and trainer disagree"
        ),
        _hacked(config, history),
        _uneven(history) or _all_successes_may_have_failed(history),
    ]
    return [alert for alert in alerts if alert is not None]


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


def _hacked(config: AlertsConfig, history: Sequence[Metrics]) -> Alert | None:
    """Judge the newest iteration alone, because an exploit spreads fast; or the last two, if one has too few
    rollouts."""
    limit = config.audit_refused_above
    if limit is None or not history[-1].get(REFUSED):
        return None
    for over in (1, 2):
        audited, refused = (
            round(sum(metrics.get(name, 0.0) for metrics in history[-over:])) for name in (AUDITED, REFUSED)
        )
        if tail(audited, refused, limit) < DOUBT:
            return Alert(
                "reward_hacking",
                f"The audit refused {refused} of {audited} rewarded rollouts: with 99.9 % confidence more than {limit:.0%} of "
                "all (alerts.audit_refused_above), so the policy may be rewarded without doing the task.",
            )
    return None


def _uneven(history: Sequence[Metrics]) -> Alert | None:
    """Judge the newest iteration alone, or the last `TOGETHER`."""
    for over in (1, TOGETHER):
        chances = {name: joint_chance([each[name] for each in history[-over:] if name in each]) for name in UNEVEN}
        name = min(chances, key=chances.__getitem__)
        if chances[name] < DOUBT:
            feature = name.partition("/")[2].replace("_", " ")
            return Alert(
                "uneven_failures",
                f"The failures of rollouts depend on {feature}: chance alone spreads them so with a probability of "
                f"{chances[name]:.1g}. The other rollouts are a biased sample; correct the cause (failures/code/*).",
            )
    return None


def _all_successes_may_have_failed(history: Sequence[Metrics]) -> Alert | None:
    """Return whether as many rollouts failed by their data as the others have rewards above the lowest one."""
    for over in (1, TOGETHER):
        failed, above = (
            round(sum(each.get(name, 0.0) for each in history[-over:])) for name in (FAILED_BY_DATA, ABOVE_LOWEST)
        )
        if failed >= max(FEW_FAILURES, above):
            return Alert(
                "uneven_failures",
                f"{failed} rollouts failed by their data, and {above} of the others have more than the lowest reward: if "
                "right answers fail, most of them are lost. Correct the cause (failures/code/*).",
            )
    return None


def joint_chance(chances: Sequence[float]) -> float:
    """Return the probability of independent results that are each as unlikely as these (Fisher 1932); 1 without any."""
    half = -math.fsum(math.log(max(chance, 1e-300)) for chance in chances)
    terms = [half**k / math.factorial(k) for k in range(len(chances))]
    return math.exp(-half) * math.fsum(terms) if chances else 1.0


def tail(trials: int, hits: int, probability: float) -> float:
    """P(X >= hits) of a binomial X, the exact one-sided test of a share."""
    if not 0 < probability < 1:
        return float(hits <= trials * probability)
    odds = math.log(probability), math.log1p(-probability)
    ways = (math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(hits, trials + 1))
    return math.fsum(math.exp(w + k * odds[0] + (trials - k) * odds[1]) for k, w in enumerate(ways, hits))


def _above(name: str, metric: str, newest: Metrics, limit: float | None, said: str) -> Alert | None:
    value = newest.get(metric)
    if limit is None or value is None or value <= limit:  # NaN counts as above any limit
        return None
    return Alert(name, f"{metric} is {value:.4g}, above {limit:g} ({said}).")
