"""A NeMo Gym configuration, resolved: files, `env.yaml` and command line merged, directives applied, servers found and
placed.

Invariant: all problems are reported at once, as a list of sentences; a `Resolution` without problems can be started.
Its configuration keeps interpolations unfilled, so that child processes fill them. Only entries that decide about
servers are read with filled interpolations.

    resolution = resolve(["math.yaml"], ["++policy_model_name=tiny"], SearchRoots.of())
    resolution.raise_problems()
    resolution.yaml()

Replacement of NeMo Gym's servers by ours of the same contract (`roundhouse gym start --ours`).

Invariant: a replaced server keeps its instance name, its place and its fields, so that references to it and its clients
see no difference. Fields that ours does not know are refused, not dropped.

    responses_api_agents: simple_agent, gymnasium_agent   ->  roundhouse_agent
    responses_api_models: vllm_model                      ->  roundhouse_model

Addresses of the servers of a configuration.

Invariant: no two servers that we start get the same port, and none gets a disallowed port or a port that another server
names. A port that the configuration names is kept. The others are free ports of the range, found by binding. Another
process may take a port before the server binds it: this server ends at its start, and the start reports it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roundhouse.config.secrets import masked
from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.config.instances import OWN, Instance, find_instances, unresolved_references
from roundhouse.plugins.nemo_gym.config.merging import (
    MISSING,
    Tree,
    apply_directives,
    filled,
    merge_dummy_models,
    merge_sources,
    unset_values,
)
from roundhouse.plugins.nemo_gym.config.package import gym_package
from roundhouse.plugins.nemo_gym.config.pairings import keys_without_counterpart, pairing_problems
from roundhouse.plugins.nemo_gym.config.relays import add_relays, place_relays, relay_warnings
from roundhouse.plugins.nemo_gym.config.sources import DOTENV, SearchRoots
from roundhouse.plugins.nemo_gym.servers.own_server import capture_problems, limit_problems, own_problems


@dataclass(slots=True)
class Resolution:
    """A resolved configuration and its problems."""

    tree: Tree = field(default_factory=dict)
    """The configuration as plain containers, interpolations as they were written."""
    instances: list[Instance] = field(default_factory=list)
    """The servers that run, here or elsewhere."""
    relays: list[Instance] = field(default_factory=list)
    """Environment servers at the addresses of their agents."""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, servers: Iterable[Instance]) -> None:
        """Set the servers that run and the relays."""
        servers = list(servers)
        self.instances = [one for one in servers if one.kind != "relay"]
        self.relays = [one for one in servers if one.kind == "relay"]

    def config(self) -> DictConfig:
        return OmegaConf.create(self.tree)

    def yaml(self) -> str:
        """For children: secrets in clear."""
        return OmegaConf.to_yaml(self.config())

    def masked_yaml(self) -> str:
        """For people and for clients of the head server."""
        return OmegaConf.to_yaml(OmegaConf.create(masked(self.tree)))

    def fields(self, instance: Instance) -> Tree:
        """A server's fields, interpolations filled."""
        return dict(filled(self.config(), instance.path).value)

    def address(self, instance: Instance) -> Address:
        values = self.fields(instance)
        return str(values["host"]), int(values["port"])

    def base_url(self, instance: Instance) -> str:
        if instance.kind == "external":
            return str(instance.fields.url).rstrip("/")
        host, port = self.address(instance)
        return f"http://{host}:{port}"

    @property
    def dry_run(self) -> bool:
        """The configuration is to be looked at, and nothing started (`dry_run`)."""
        return filled(self.config(), ("dry_run",)).value is True

    def head_address(self) -> Address:
        values = filled(self.config(), ("head_server",)).value
        return str(values["host"]), int(values["port"])

    def raise_problems(self) -> None:
        """
        Raises:
            ConfigError: with all problems.
        """
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ConfigError(f"The configuration has {len(self.problems)} problem(s):{lines}")


def resolve(
    paths: Sequence[str] = (),
    overrides: Sequence[str] = (),
    roots: SearchRoots | None = None,
    *,
    initial: Mapping[str, Any] | None = None,
    dotenv: bool = True,
    choose_ports: bool = True,
    ours: bool = False,
) -> Resolution:
    """Resolve a configuration.

    Args:
        paths: configuration files; without any, `config_paths` of the command line or of `env.yaml`.
        overrides: command-line overrides, see `parse_override`.
        initial: values just below the command line.
        dotenv: read `env.yaml` from the search roots.
        choose_ports: False leaves unset ports at -1 and probes nothing.
        ours: put our servers in the place of NeMo Gym's of the same contract, see `replacements`.
    """
    resolution = Resolution()
    roots = roots or SearchRoots.of()
    try:
        sources, resolution.warnings = merge_sources(paths, overrides, roots, initial, dotenv=dotenv)
        tree = apply_directives(sources)
    except (ConfigError, OmegaConfBaseException) as error:
        resolution.problems.append(str(error))
        return resolution
    packages = (gym_package(root) for root in roots.roots)
    resolution.warnings += [text for package in packages if package and (text := package.warning())]
    merge_dummy_models(tree)
    if ours:
        use_own_servers(tree)
    resolution.tree = tree
    unset = unset_values(tree)
    if unset:
        resolution.problems.append(
            f"{len(unset)} required value(s) are unset ({MISSING}): {', '.join(unset)}. Set them on the command line "
            f"(++{unset[0]}=…), in {DOTENV}, or in a configuration file."
        )
    _find_servers(resolution)
    _place(resolution, choose_ports)
    _set_defaults(resolution.tree)
    return resolution


def _find_servers(resolution: Resolution) -> None:
    reading = filled(resolution.config())
    servers, almost = find_instances(reading.value)
    resolution.take(servers)
    names = {one.name for one in servers} | {one.name for one in almost}
    resolution.problems += [
        f"{'.'.join(path)}: {reason}" for path, reason in reading.unfilled.items() if path[0] in names
    ]
    strict = reading.value.get("error_on_almost_servers", True)
    (resolution.problems if strict else resolution.warnings).extend(map(str, almost))
    resolution.problems += unresolved_references(servers)
    _front_agents(resolution, servers, strict=reading.value.get("error_on_agent_without_environment_server") is True)
    unfilled = {path[0] for path in reading.unfilled}
    for instance in resolution.instances:
        if instance.kind == "own" and instance.name not in unfilled:
            name, server_type, implementation = instance.path
            fields = reading.value[name][server_type][implementation]
            resolution.problems += own_problems(instance.type, ".".join(instance.path), fields)
    resolution.problems += pairing_problems(reading.value, resolution.instances)
    resolution.problems += limit_problems(reading.value)
    kinds = {one.kind for one in resolution.instances}
    if "own" in kinds and (unfollowed := keys_without_counterpart(reading.value)) is not None:
        (resolution.warnings if "foreign" in kinds else resolution.problems).append(unfollowed)
    capture = (
        filled(resolution.config(), ("token_id_capture",)).value if "token_id_capture" in resolution.tree else None
    )
    resolution.problems += capture_problems(capture, resolution.instances)
    if (
        isinstance(capture, dict)
        and capture.get("enabled")
        and any(one.kind == "foreign" for one in resolution.instances)
    ):
        resolution.warnings.append(
            "token_id_capture: what NeMo Gym's model server records is put into rows by its own collector and NeMo RL, not "
            "by roundhouse gym collect. For tokens in a run, use our model server and environment.tokens captured."
        )


def _front_agents(resolution: Resolution, servers: Sequence[Instance], *, strict: bool) -> None:
    resolution.warnings += relay_warnings(resolution.relays)
    added = add_relays(resolution.tree, servers)
    resolution.relays += added
    if strict and added:
        agents = ", ".join(agent for relay in added for agent in relay.agents())
        resolution.problems.append(
            f"error_on_agent_without_environment_server is true, and these agents lack one: {agents}. Add an entry with "
            "environment_servers.legacy_agent.agent_server for each, or unset the key: each gets one by itself."
        )


def _place(resolution: Resolution, choose_ports: bool) -> None:
    """Write host and port into every server, and the values that agents inherit from the top level."""
    tree = resolution.tree
    tree["head_server"] = {"port": HEAD_PORT, **(tree.get("head_server") or {})}
    for key, default in zip(("port_range_low", "port_range_high"), PORT_RANGE, strict=True):
        tree.setdefault(key, default)
    settings = filled(resolution.config()).value
    try:
        host = default_host(settings)
        tree["head_server"].setdefault("host", host)
        low, high = (as_port(settings[key], key) for key in ("port_range_low", "port_range_high"))
        disallowed = [as_port(port, "disallowed_ports") for port in settings.get("disallowed_ports") or []]
        taken = {*disallowed, as_port(settings["head_server"]["port"], "head_server.port")}
        if choose_ports:
            placed = assign(resolution.instances, host, (low, high), taken)
        else:
            placed = {one.name: (one.fields.host or host, one.fields.port or -1) for one in resolution.instances}
    except (ConfigError, OSError) as error:
        resolution.problems.append(str(error))
        return
    for instance in resolution.instances:
        name, server_type, implementation = instance.path
        values = tree[name][server_type][implementation]
        values["host"], values["port"] = placed[instance.name]
        if server_type == "responses_api_agents":
            for key in ("skip_verification", "skip_verification_reward"):
                if tree.get(key) is not None:
                    values.setdefault(key, tree[key])
    place_relays(tree, resolution.relays, resolution.instances)
    tree["disallowed_ports"] = sorted({*taken, *(port for _, port in placed.values() if port > 0)})


def _set_defaults(tree: Tree) -> None:
    """Set the top-level values that NeMo Gym's servers require."""
    for key, value in {
        "use_absolute_ip": False,
        "skip_venv_if_present": False,
        "dry_run": False,
        "model_endpoint_readiness_timeout_seconds": 600,
        "allow_openai_version_skew": False,
        "head_server_deps": [],
    }.items():
        tree.setdefault(key, value)
    for key in ("results_dir", "cache_dir"):
        # Absolute, because each server has another working directory.
        tree[key] = str(Path(tree.get(key) or key.removesuffix("_dir")).expanduser().resolve())
    tree.setdefault("uv_cache_dir", str(Path(tree["cache_dir"]) / "uv"))


_REPLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_agent": ("responses_api_agents", {}),
    "gymnasium_agent": ("responses_api_agents", {"protocol": "gymnasium", "max_steps": 10}),
    "vllm_model": ("responses_api_models", {}),
}
"""From an implementation to its type and to the fields that make ours behave like it."""


def use_own_servers(tree: dict[str, Any]) -> list[str]:
    """Replace in place; the names of the instances that were."""
    replaced = []
    for name, entry in tree.items():
        for implementation, (server_type, defaults) in _REPLACED.items():
            block = entry.get(server_type) if isinstance(entry, dict) else None
            fields = block.pop(implementation, None) if isinstance(block, dict) else None
            if isinstance(fields, dict):
                own = {key: value for key, value in fields.items() if key != "entrypoint"}
                block[OWN[server_type]] = {**defaults, **own}  # type: ignore[index]
                replaced.append(str(name))
    return replaced


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
    """Return host and port of every server, by its name. `taken` lists ports that must not be used.

    Raises:
        ConfigError: two servers name the same port, or the range is exhausted.
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
    owners: dict[Address, str] = {}
    for name, address in addresses.items():
        other = owners.setdefault(address, name)
        if other != name:
            raise ConfigError(
                f"{other} and {name} both have the address {address[0]}:{address[1]}; give one another port."
            )
    used = {*taken, *(port for _, port in addresses.values())}
    for instance in pending:
        port = free_port(port_range, used)
        used.add(port)
        addresses[instance.name] = (instance.fields.host or host, port)
    return addresses


def address_of(url: str) -> Address:
    """Return host and port of a base URL.

    Raises:
        ConfigError: the host is missing, or the port is invalid.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host.")
    return parts.hostname, port or (443 if parts.scheme == "https" else 80)


def free_port(port_range: tuple[int, int], used: Collection[int]) -> int:
    """Return a port that could just be bound. The search begins at random, so that parallel starts differ.

    Raises:
        ConfigError: all ports are in use.
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
    """Return a value as a port.

    Raises:
        ConfigError: it is not a port.
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
