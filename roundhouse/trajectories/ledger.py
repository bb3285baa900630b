"""What became of every requested rollout, in numbers.

Invariant, checked whenever a ledger is made: `requested = completed + truncated + failed + masked + omitted`, and the
failures by code add up to `failed`. A ledger that does not balance cannot exist.

    >>> Ledger.from_outcomes([Status.COMPLETED, Status.FAILED], ["", "tool_timeout"]).counts()["failed"]
    1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from roundhouse.errors import RoundhouseError
from roundhouse.trajectories.records import Rollout, Status


class LedgerError(RoundhouseError):
    """Rollouts were lost or counted twice."""


class Ledger(BaseModel):
    """Counts of rollouts by outcome."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requested: NonNegativeInt
    completed: NonNegativeInt = 0
    truncated: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    masked: NonNegativeInt = 0
    omitted: NonNegativeInt = 0
    failures: dict[str, NonNegativeInt] = {}
    """Failed rollouts by failure code."""

    def model_post_init(self, _context: object) -> None:
        self.balanced()

    def balanced(self) -> Ledger:
        """This ledger.

        Raises:
            LedgerError: the numbers do not add up; the text names them.
        """
        outcomes = {status.value: getattr(self, status.value) for status in Status}
        if self.requested != sum(outcomes.values()):
            parts = " + ".join(f"{name} {count}" for name, count in outcomes.items())
            raise LedgerError(
                f"The ledger does not balance: requested {self.requested}, but {parts} = {sum(outcomes.values())}. "
                "Rollouts were lost or counted twice; do not train on this dataset, collect it again."
            )
        if self.failed != sum(self.failures.values()):
            raise LedgerError(
                f"The ledger does not balance: failed {self.failed}, but its failures by code are {self.failures}, "
                f"together {sum(self.failures.values())}."
            )
        return self

    @classmethod
    def from_outcomes(
        cls, outcomes: Sequence[Status], failure_codes: Sequence[str], requested: int | None = None
    ) -> Ledger:
        """The ledger of `outcomes`; `failure_codes` stand beside them and count where the outcome is failed.

        Raises:
            LedgerError: `requested` (by default as many as there are outcomes) is not the number of outcomes.
        """
        counts = Counter(status.value for status in outcomes)
        pairs = zip(outcomes, failure_codes, strict=True)
        failures = Counter(code for status, code in pairs if status is Status.FAILED)
        asked = len(outcomes) if requested is None else requested
        return cls(requested=asked, failures=dict(sorted(failures.items())), **counts)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], requested: int | None = None) -> Ledger:
        """The ledger of finished rollouts; give `requested` to have it proved that none is missing."""
        codes = [rollout.failure_code for rollout in rollouts]
        return cls.from_outcomes([rollout.status for rollout in rollouts], codes, requested)

    def counts(self) -> dict[str, int]:
        """`requested` and the outcomes, without the failure codes."""
        return {name: getattr(self, name) for name in ("requested", *(status.value for status in Status))}
