"""The servers of a resolved NeMo Gym configuration, from their start to their end.

Invariants: started servers are ended in order (environment servers, agents, resources servers, models, the head
server), however the start or the run ends, and also if this process is killed. A server that ends by itself ends all
others, and the error shows the end of its log. Every wait has a limit.

    async with GymServers(resolution, commands, options) as servers:
        await servers.start()
        await servers.until(stop)

`run` is the life of `roundhouse gym start`: SIGINT and SIGTERM end it in order, also during the start; a second signal
does not shorten the end. It returns after a signal, and raises InfraError if a server ended by itself.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from roundhouse.errors import InfraError
from roundhouse.http.clients import client_session
from roundhouse.http.ports import HttpThread, describe_owner
from roundhouse.infra.processes import Children
from roundhouse.plugins.nemo_gym.config.instances import ServerType, model_endpoints
from roundhouse.plugins.nemo_gym.config.resolve import LOOPBACK, Resolution, can_bind
from roundhouse.plugins.nemo_gym.servers import head as head_server
from roundhouse.plugins.nemo_gym.servers.commands import Command, install
from roundhouse.plugins.nemo_gym.servers.head import RunningServer, check
from roundhouse.plugins.nemo_gym.servers.own_server import CONFIG_DICT

START_SECONDS = 300.0
"""Time limit from the first process to the last server's first answer."""
LOOK_SECONDS = 0.2

ENDING: tuple[ServerType, ...] = (
    "environment_servers",
    "responses_api_agents",
    "resources_servers",
    "responses_api_models",
)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options of the start."""

    logs: Path
    """Directory of their output."""
    start_seconds: float = START_SECONDS
    head_token: str | None = None
    """Bearer token for the configuration with its secrets."""
    install: bool = False
    """Make foreign servers' virtual environments first."""
    ray: bool = True
    """Give foreign servers one Ray cluster to join. Without it, NeMo Gym's start one each."""
    restarts: int = 0
    """How often each server is started again after it has ended by itself."""
    announce: Callable[[str], None] = field(default=lambda text: None)
    """Called with a short text at every step."""


class GymServers:
    """The head server and the processes of one configuration."""

    def __init__(self, resolution: Resolution, commands: Sequence[Command], options: StartOptions) -> None:
        self._resolution = resolution
        self._commands = {command.instance.name: command for command in commands}
        self._options = options
        self._ready: set[str] = set()
        self._all_ready = False
        self._foreign_environment: dict[str, str] = {}
        self._started_at = time.time()
        self._restarted: Counter[str] = Counter()
        self._children: Children | None = None
        self._head: HttpThread | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._children is not None:
            order = [
                [name for name, command in self._commands.items() if command.instance.type == server_type]
                for server_type in ENDING
            ]
            left = await self._children.close(order)
            if left:
                self._options.announce(f"processes {left} cannot be ended")
        if self._head is not None:
            await asyncio.to_thread(self._head.close)

    @property
    def head_url(self) -> str:
        host, _ = self._resolution.head_address()
        reachable = LOOPBACK if host in ("0.0.0.0", "::", "") else host
        return f"http://{reachable}:{self._head.port if self._head else 0}"

    def running(self) -> list[RunningServer]:
        """The answer of /server_instances."""
        children = {child.name: child for child in self._children.all} if self._children else {}
        servers = []
        for instance in (*self._resolution.instances, *self._resolution.relays):
            process = instance.agents()[0] if instance.kind == "relay" else instance.name
            command, child = self._commands.get(process), children.get(process)
            host, port = self._resolution.address(instance)
            alive = child is None or child.process.poll() is None
            servers.append(
                RunningServer(
                    config_path=instance.name,
                    dir_path=None if command is None else str(command.directory),
                    entrypoint=instance.fields.entrypoint
                    or (None if command is None else "-m roundhouse.plugins.nemo_gym.servers.own_server"),
                    host=host,
                    name=instance.implementation,
                    pid=None if child is None else child.process.pid,
                    port=port,
                    process_name=instance.name,
                    server_type=instance.type,
                    start_time=self._started_at if child is None else child.started_at,
                    status=("success" if alive else "connection_error") if process in self._ready else None,
                    url=self._resolution.base_url(instance),
                )
            )
        return servers

    async def start(self) -> None:
        """Start everything; return when every server has answered once.

        Raises:
            InfraError: a port is taken, a process cannot be started or ended, or the time is over: names the server at fault.
        """
        for command in self._commands.values():
            _, own_port = self._resolution.address(command.instance)
            if not can_bind(own_port):
                owner = describe_owner(own_port) or "another process"
                raise InfraError(f"{command.instance.name}: port {own_port} is taken by {owner}.")
        app = head_server.build_app(self._resolution, self.running, self._options.head_token, lambda: self._all_ready)
        self._head = HttpThread(app, *self._resolution.head_address())
        self._options.announce(f"head server at {self.head_url}")
        self._children = Children(self._options.logs)
        foreign = [command for command in self._commands.values() if command.instance.kind == "foreign"]
        tree = self._resolution.tree
        if self._options.ray and foreign and not tree.get("ray_head_node_address"):
            self._options.announce("starting the Ray cluster that foreign servers join")
            first = foreign[0]
            self._foreign_environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            tree["ray_head_node_address"] = await start_cluster(
                self._children,
                first.arguments[0],
                {**first.environment, **self._foreign_environment},
                self._options.logs,
                self._options.start_seconds,
            )
        for command in self._commands.values():
            name = command.instance.name
            log = self._children.log(name)
            log.unlink(missing_ok=True)
            if self._options.install and command.venv is not None:
                self._options.announce(f"{name}: installing into {command.venv}")
                await install(command.directory, command.venv, self._resolution.tree, command.environment, log)
            self._start(self._children, command)
        self._options.announce(f"{len(self._commands)} processes started, logs in {self._options.logs}")
        await self._until_ready()
        await self._until_engines_answer()
        self._all_ready = True

    def _start(self, children: Children, command: Command) -> None:
        environment = {**command.environment, **self._foreign_environment, CONFIG_DICT: self._resolution.yaml()}
        try:
            children.start(command.instance.name, command.arguments, command.directory, environment)
        except OSError as error:
            raise InfraError(
                f"{command.instance.name} cannot be started ({' '.join(command.arguments)}): {error}"
            ) from error

    async def until(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set. A server that ends by itself is started again at its address, as often as allowed.

        Raises:
            InfraError: a server ended by itself once more.
        """
        children = self._children
        assert children is not None, "until follows start"
        while not stop.is_set():
            for child in children.ended():
                command = self._commands.get(child.name)
                if command is None or self._restarted[child.name] >= self._options.restarts:
                    self._raise_ended()
                    break
                self._restarted[child.name] += 1
                self._options.announce(f"{child.name} ended by itself and is started again; log {child.log}")
                await children.end(child.name)  # its remaining children
                self._start(children, command)
            try:
                await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
            except TimeoutError:
                continue

    async def start_unless(self, stop: asyncio.Event) -> bool:
        """Call `start`, but cancel it if `stop` is set; return whether every server has answered.

        Raises:
            InfraError: as `start`.
        """
        starting = asyncio.create_task(self.start())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self._options.start_seconds
        waiting = {one.name: self._resolution.base_url(one) for one in self._resolution.instances}
        async with client_session() as http:
            while waiting:
                self._raise_ended()
                statuses = await asyncio.gather(
                    *(check(url.replace("//0.0.0.0:", f"//{LOOPBACK}:", 1), http) for url in waiting.values())
                )
                for name, status in zip(list(waiting), statuses, strict=True):
                    if status == "success":
                        del waiting[name]
                        self._ready.add(name)
                        self._options.announce(
                            f"{name} is ready ({len(self._ready)}/{len(self._resolution.instances)})"
                        )
                if waiting and time.monotonic() > deadline:
                    lines = [f"Not everything answered within {self._options.start_seconds:g} s (--start-seconds):"]
                    children = {child.name: child for child in self._children.all} if self._children else {}
                    for server, address in waiting.items():
                        child = children.get(server)
                        lines.append(
                            f"{server} at {address}: "
                            + ("runs elsewhere" if child is None else f"log {child.log}\n{child.tail()}")
                        )
                    raise InfraError("\n".join(lines))
                if waiting:
                    await asyncio.sleep(LOOK_SECONDS)
        self._raise_ended()

    async def _until_engines_answer(self) -> None:
        """Wait for the engines of the model servers. Silent engines are reported, and may come later."""
        seconds = float(self._resolution.tree["model_endpoint_readiness_timeout_seconds"])
        silent = model_endpoints(self._resolution.instances) if seconds > 0 else {}
        deadline, announced = time.monotonic() + seconds, False
        async with client_session() as http:
            while silent:
                self._raise_ended()
                statuses = await asyncio.gather(*(check(url, http) for url in silent))
                silent = {
                    url: name
                    for (url, name), status in zip(silent.items(), statuses, strict=True)
                    if status != "success"
                }
                if not silent or time.monotonic() > deadline:
                    break
                if not announced:
                    self._options.announce(f"waiting up to {seconds:g} s for {_named(silent)}")
                    announced = True
                await asyncio.sleep(LOOK_SECONDS)
        if silent:
            self._options.announce(f"no answer from {_named(silent)}; rollouts fail until it answers")

    def _raise_ended(self) -> None:
        texts = []
        for child in self._children.ended() if self._children else []:
            code = child.process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            texts.append(f"{child.name} {how}. The end of {child.log}:\n{child.tail()}")
        if texts:
            raise InfraError("\n".join(texts))


def _named(endpoints: Mapping[str, str]) -> str:
    return ", ".join(f"{url} ({name})" for url, name in endpoints.items())


_RAY_CLUSTER = "ray-cluster"
_RAY_SCRIPT = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
import ray
ray.init(address="local", include_dashboard=False)
place = pathlib.Path(sys.argv[1])
place.with_suffix(".part").write_text(ray.get_runtime_context().gcs_address)
os.replace(place.with_suffix(".part"), place)
while True:
    signal.pause()
"""


async def start_cluster(
    children: Children, python: str, environment: Mapping[str, str], directory: Path, seconds: float
) -> str:
    """Start the Ray cluster that foreign servers share among `children`; return its address.

    Each of NeMo Gym's servers joins a cluster at its start, or starts one. One cluster serves all foreign servers of a
    start, unless the configuration names another (`ray_head_node_address`). It runs in the Python of the first of them,
    because all members of a cluster must have the same version of Ray. Joining it needs the token of this start. Other
    clusters on the machine are not used, although Ray keeps the address of the last one, even of a dead one, and joins
    it by default.

    Raises:
        InfraError: it ended, or its address is missing after the time limit; with the end of its log.
    """
    log = children.log(_RAY_CLUSTER)
    place = log.with_suffix(".address")
    for left in (log, place):
        left.unlink(missing_ok=True)
    child = children.start(_RAY_CLUSTER, [python, "-c", _RAY_SCRIPT, str(place)], directory, environment)
    deadline = time.monotonic() + seconds
    while not place.exists():
        if child.process.poll() is not None:
            raise InfraError(
                f"The Ray cluster of the foreign servers did not start. The end of {child.log}:\n{child.tail()}"
            )
        if time.monotonic() > deadline:
            raise InfraError(
                f"The Ray cluster of the foreign servers has no address after {seconds:g} s. The end of {child.log}:\n"
                f"{child.tail()}"
            )
        await asyncio.sleep(LOOK_SECONDS)
    return place.read_text()


def run(
    resolution: Resolution, commands: Sequence[Command], options: StartOptions, ready: Callable[[dict[str, Any]], None]
) -> None:
    """Start the servers and keep them until a signal.

    Args:
        ready: called once, when every server has answered.

    Raises:
        InfraError: a server could not be started, did not answer in time, or ended by itself.
    """
    asyncio.run(_run(resolution, commands, options, ready))


async def _run(
    resolution: Resolution, commands: Sequence[Command], options: StartOptions, ready: Callable[[dict[str, Any]], None]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, stop.set)
    async with GymServers(resolution, commands, options) as servers:
        if await servers.start_unless(stop):
            running = [
                {"name": one.process_name, "type": one.server_type, "url": one.url, "pid": one.pid}
                for one in servers.running()
            ]
            ready({"status": "ready", "head": servers.head_url, "pid": os.getpid(), "servers": running})
            await servers.until(stop)
        options.announce("ending the servers")
