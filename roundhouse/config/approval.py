"""Whether a person has to agree before a version is promoted."""

from __future__ import annotations

from typing import Literal

from roundhouse.config.section import PositiveFloat, Section


class ApprovalConfig(Section):
    """A person's word on each promotion. The policy that the run starts from needs none: it is what is in use."""

    required: bool = False
    """Ask before a version that is better beyond noise becomes the promoted one."""
    while_pending: Literal["continue", "block"] = "continue"
    """Until the answer comes: continue with the next iteration, or block before it and release the machine."""
    timeout_hours: PositiveFloat | None = 72
    """How long the question stays open; null: without limit."""
    on_timeout: Literal["refuse", "approve"] = "refuse"
    """The answer when none has come by then."""
