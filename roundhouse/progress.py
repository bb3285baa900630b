"""What a run tells a person while it works, as log records of one logger.

Stages call `announce`; whoever wants to show it adds a handler to the logger `roundhouse.progress` and reads the record's
`event` and `facts`. Nobody listening costs nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from roundhouse.activity import ACTIVITY

logger = logging.getLogger("roundhouse.progress")
logger.setLevel(logging.INFO)


def announce(event: str, **facts: Any) -> None:
    """Publish an event: `warm_start`, `engine`, `collect`, `iteration`, `evaluation`, … with its facts. It is also a sign of
    life of the stage that it comes from."""
    ACTIVITY.advance()
    logger.info(event, extra={"event": event, "facts": facts})
