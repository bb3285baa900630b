"""Ports for the servers of tests: none that the kernel may give to a connection before the server is there."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

_FIRST, _LAST = 20_000, 32_000
"""Ray's workers listen below, connections come from 32,768 on."""


def free_ports(count: int) -> list[int]:
    """Neighbouring ports of 127.0.0.1 that nothing is bound to now; at random, so that tests side by side find others."""
    while True:
        first = _FIRST + secrets.randbelow(_LAST - _FIRST - count)
        ports = list(range(first, first + count))
        with ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return ports


def free_port() -> int:
    return free_ports(1)[0]


def listens(port: int) -> bool:
    """Return whether the port of 127.0.0.1 accepts a connection."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
