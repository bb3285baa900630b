"""Whether a person has to agree before a version is promoted."""

from __future__ import annotations

from typing import Literal

from roundhouse.config.section import PositiveFloat, Section


class ApprovalConfig(Section):
    """A person's word on each promotion. The policy that the run starts from needs none: it is what is in use."""

    required: bool = False
    """Ask before a version that is better beyond noise becomes the promoted one."""
    training: Literal["goes_on", "waits"] = "goes_on"
    """While nobody has answered: go on with the next iteration, or wait before it and give the machine back."""
    limit_hours: PositiveFloat | None = 72
    """How long the question stands; null: for ever."""
    at_limit: Literal["refuse", "approve"] = "refuse"
    """What happens when nobody has answered by then."""
