"""Where each server of a configuration listens.

Invariant: no two servers that we start get the same port, and none gets one that is disallowed or explicitly another's. A
port that the configuration names is kept; the others are free ones of the range, tried by binding. Between this moment and
the server's own bind somebody else may take one: such a server ends at its start, which is noticed there.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from roundhouse.compat.nemo_gym.config.instances import Instance
from roundhouse.errors import ConfigError

LOOPBACK = "127.0.0.1"
HEAD_PORT = 11_000
PORT_RANGE = (10_001, 20_000)

Address = tuple[str, int]


def default_host(settings: Mapping[str, Any]) -> str:
    """This machine's own address with `use_absolute_ip`, else `default_host`, else the loopback."""
    if settings.get("use_absolute_ip"):
        return socket.gethostbyname(socket.gethostname())
    return str(settings.get("default_host") or LOOPBACK)


def assign(
    instances: Iterable[Instance], host: str, port_range: tuple[int, int], taken: Collection[int] = ()
) -> dict[str, Address]:
    """Host and port of every server, by its name. `taken` are ports that nobody may get.

    Raises:
        ConfigError: two servers name the same port, or the range has no free port left.
    """
    addresses: dict[str, Address] = {}
    pending: list[Instance] = []
    for instance in instances:
        if instance.kind == "external":
            addresses[instance.name] = address_of(instance.fields.url or "")
        elif instance.fields.port:
            addresses[instance.name] = (instance.fields.host or host, instance.fields.port)
        else:
            pending.append(instance)
    _refuse_shared(addresses)
    used = {*taken, *(port for _, port in addresses.values())}
    for instance in pending:
        port = free_port(port_range, used)
        used.add(port)
        addresses[instance.name] = (instance.fields.host or host, port)
    return addresses


def address_of(url: str) -> Address:
    """Host and port of a base URL.

    Raises:
        ConfigError: it has no host, or a port that is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}") from error
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host.")
    return parts.hostname, port or (443 if parts.scheme == "https" else 80)


def free_port(port_range: tuple[int, int], used: Collection[int]) -> int:
    """A port that could be bound a moment ago. The search begins at random: another start on this machine begins elsewhere.

    Raises:
        ConfigError: there is none.
    """
    low, high = port_range
    if not 1 <= low <= high <= 65535:
        raise ConfigError(
            f"port_range_low is {low} and port_range_high {high}; both must be ports, the first not above."
        )
    offset = random.randrange(high - low + 1)
    for step in range(high - low + 1):
        port = low + (offset + step) % (high - low + 1)
        if port not in used and can_bind(port):
            return port
    raise ConfigError(f"No port from port_range_low {low} to port_range_high {high} is free.")


def as_port(value: Any, key: str) -> int:
    """
    Raises:
        ConfigError: it is no port.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"{key} is {value!r}; it must be a port, a whole number up to 65535.")
    return value


def can_bind(port: int) -> bool:
    """On all interfaces at once, since a server may bind any of them."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _refuse_shared(addresses: Mapping[str, Address]) -> None:
    owners: dict[Address, str] = {}
    for name, address in addresses.items():
        other = owners.setdefault(address, name)
        if other != name:
            raise ConfigError(
                f"{other} and {name} both have the address {address[0]}:{address[1]}; give one another port."
            )
