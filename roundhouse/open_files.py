"""How many sockets and files this process may hold open at once."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """Raise the soft limit to the hard one: each model call in flight is a socket, and the usual soft limit of 1024 would bound
    `rollout.concurrency` by errors that name the engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
