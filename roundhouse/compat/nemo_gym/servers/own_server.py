"""The process of one of our servers: `python -m roundhouse.compat.nemo_gym.servers.own_server`.

It is described by two environment variables.

Invariant: it either serves, or ends at once with one line that says what to change. On SIGTERM it stops taking requests, gives
those in flight one second, and ends.

A directory of NeMo Gym's with an `app.py` of these two lines starts it as well:

    from roundhouse.compat.nemo_gym.servers.own_server import main
    main()
"""

from __future__ import annotations

import os
import sys

import uvicorn

from roundhouse.compat.nemo_gym.servers.own_servers import own_server
from roundhouse.errors import RoundhouseError
from roundhouse.http.same_origin import SameOrigin

KEEP_ALIVE_SECONDS = 30
"""As NeMo Gym's servers: longer than its clients keep an idle connection (15 s)."""
GRACE_SECONDS = 1


def main() -> None:
    """Serve until interrupted."""
    try:
        server = own_server(os.environ)
    except RoundhouseError as error:
        sys.exit(f"roundhouse server: {error}")
    uvicorn.run(
        SameOrigin(server.app, server.host),
        host=server.host,
        port=server.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=4096,
    )


if __name__ == "__main__":
    main()
