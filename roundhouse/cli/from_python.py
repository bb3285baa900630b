"""Train a configuration that a Python program has resolved: `python -m roundhouse.cli.from_python FILE DESCRIPTOR`.

FILE holds the configuration as JSON. Events of the run go to the descriptor, a JSON object a line; the last one is the error
that ends the process, if there is one. Its exit code is that of the command line (`roundhouse.cli.options`).

    {"event": "iteration", "facts": {"iteration": 3, "metrics": {"reward/mean": 0.5}}}
    {"event": "error", "message": "No space is left …"}
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import IO, Any

from roundhouse.activity import logger
from roundhouse.errors import RoundhouseError


class EventLog(logging.Handler):
    """Writes the events of a run to a stream."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream
        self._writing = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", "")
        if event and event != "rollout":  # one of each model call would be most of the stream
            self.write({"event": event, "facts": getattr(record, "facts", {})})

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, and ignore a reader that is gone."""
        try:
            with self._writing:
                self._stream.write(json.dumps(line, default=str) + "\n")
                self._stream.flush()
        except BrokenPipeError:
            return


def main() -> None:
    from roundhouse.cli import INTERRUPTED
    from roundhouse.cli.options import exit_code
    from roundhouse.cli.training import ready, train_run
    from roundhouse.config.loading import parse_config
    from roundhouse.health.policy import typed

    path, descriptor = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        config = parse_config(json.load(file))
    with open(int(descriptor), "w", encoding="utf-8") as stream:
        events = EventLog(stream)
        logger.addHandler(events)
        try:
            train_run(ready(config, dry_run=False), dry_run=False, hints=[])
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except Exception as error:
            if not isinstance(known := typed(error), RoundhouseError):
                raise
            events.write({"event": "error", "message": str(known)})
            sys.exit(exit_code(known))


if __name__ == "__main__":
    main()
