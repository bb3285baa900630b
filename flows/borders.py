"""Between two iterations: where a run looks up from its work.

Invariant: here nothing of an iteration is in flight, so a run may wait, rest or be told something without losing work.
"""

from __future__ import annotations

from roundhouse.stages.cost import refuse_over_budget
from roundhouse.store.run import Run


def at_border(run: Run, k: int) -> None:
    """Before iteration k."""
    refuse_over_budget(run, k)
