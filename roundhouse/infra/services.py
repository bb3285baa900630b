"""The services that a run needs on this machine: Prefect, MLflow, Ray, and a resources server if configured.

Invariant: after `up` every named service is healthy; after `down` none of their processes is left, even of a killed
supervisor. Both may be called repeatedly. A service runs as long as it has a holder: a person (`up` without an owner,
ended by `down`), or a process (`owner`): its end releases the service.

    with local_services(".roundhouse/services", keep=("prefect", "mlflow")) as services:
        os.environ.update(services.environment())
        ...                       # Ray ends here; the pages stay. On an exception or Ctrl-C, everything ends.

`services_of` does that for one run: its engine then belongs to this run, and the start of MLflow, a view, is not
awaited.

The engine answers with one run's weights, so only one process at a time has it (`engine_lock`): another waits until
that process returns it or is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from roundhouse.activity import announce
from roundhouse.config.engines import engine_traits
from roundhouse.config.models import RunConfig
from roundhouse.errors import InfraError
from roundhouse.http.ports import LOOPBACK
from roundhouse.infra import lease_client
from roundhouse.infra.lease_client import LeaseRequest, Progress
from roundhouse.infra.service_specs import (
    SERVICE_SPECS,
    prefect_auth_string,
    prefect_client,
    ray_client,
    ray_token,
    with_no_proxy,
)
from roundhouse.infra.state import PREFECT_SIGN_IN_FILE, EngineUse, ServiceHolder, ServiceRecord, StateDirectory
from roundhouse.logs import about, set_up_observability

log = logging.getLogger(__name__)

DEFAULT_STATE_DIRECTORY = Path(".roundhouse/services")
DEFAULT_SERVICES = ("prefect", "mlflow", "ray")
STANDING_SERVICES = ("prefect", "mlflow", "deployments")
"""Services that a person leaves running. Ray is started and ended with the run that needs it and its engine."""
DEFAULT_TIME_LIMIT = 300.0
COMING = ("starting", "restarting", "ready")


def state_directory(config: RunConfig) -> Path:
    """Return the state directory of a run's services."""
    return Path(config.infra.state) / "services"


@dataclass(frozen=True)
class Services:
    """Services of one state directory and how to reach them."""

    state: StateDirectory
    records: Mapping[str, ServiceRecord]

    @property
    def prefect_ui_url(self) -> str:
        return self._ready("prefect").url

    @property
    def prefect_auth_string(self) -> str:
        """Return `user:password` for Prefect's API; its page asks for it as a password."""
        return prefect_auth_string(self.state)

    @property
    def prefect_sign_in_url(self) -> str:
        """A file that signs a person in to Prefect's page: to be opened in a browser of this machine."""
        return (self.state.path / PREFECT_SIGN_IN_FILE).as_uri()

    @property
    def mlflow_url(self) -> str:
        """Return MLflow's address, which is known before it is up."""
        return self.records["mlflow"].url if self.is_coming("mlflow") else self._ready("mlflow").url

    @property
    def ray_dashboard_url(self) -> str:
        """Also the base of Serve's REST API; every request needs `Authorization: Bearer <ray_token>`."""
        return self._ready("ray").url

    @property
    def ray_token(self) -> str:
        return ray_token(self.state)

    @property
    def serve_port(self) -> int:
        """Return the port reserved for Serve's HTTP proxy. It is unused until a Serve configuration names it in its
        `http_options`."""
        return self._ready("ray").ports["serve"]

    @property
    def serve_url(self) -> str:
        return f"http://{LOOPBACK}:{self.serve_port}"

    @property
    def gym_url(self) -> str:
        return self._ready("gym").url

    def environment(self) -> dict[str, str]:
        """Variables that a process needs to use the services."""
        variables = with_no_proxy(os.environ)
        if self.is_ready("prefect"):
            variables |= prefect_client(self.state, self.records["prefect"].ports["http"])
        if self.is_coming("mlflow"):
            variables |= {"MLFLOW_TRACKING_URI": self.mlflow_url, "MLFLOW_DISABLE_TELEMETRY": "true"}
        if self.is_ready("ray"):
            variables |= ray_client(self.state, self.records["ray"].ports["gcs"])
        return variables

    def is_ready(self, name: str) -> bool:
        return name in self.records and self.records[name].status == "ready"

    def is_coming(self, name: str) -> bool:
        """Return whether it is up or starting, at a fixed address."""
        return name in self.records and self.records[name].status in COMING and self.records[name].url != ""

    def _ready(self, name: str) -> ServiceRecord:
        if not self.is_ready(name):
            command = "roundhouse up --ray" if name == "ray" else "roundhouse up"
            raise InfraError(f"{name} is not running in {self.state.path}. Start it with `{command}`.")
        return self.records[name]


def up(
    state_dir: str | Path = DEFAULT_STATE_DIRECTORY,
    services: Iterable[str] = DEFAULT_SERVICES,
    *,
    owner: int | None = None,
    ports: Mapping[str, int] | None = None,
    arguments: Mapping[str, Sequence[str]] | None = None,
    unawaited: Collection[str] = (),
    time_limit: float = DEFAULT_TIME_LIMIT,
    on_progress: Progress | None = None,
) -> Services:
    """Start the services and wait until they are healthy; running ones are only checked.

    Args:
        owner: number of the owning process. None: they stay until `down`.
        ports: fixed ports, by service (`prefect`) or service and port name (`ray.serve`).
        arguments: more arguments of a service's command, by service. Others run as they are.
        unawaited: services that are not awaited; they may start later, or never.
        time_limit: seconds until all are healthy on an idle machine; a busy one gets more (`roundhouse.cpu.slowness`).
        on_progress: called with a service's record at each change of its status.

    Raises:
        InfraError: a port is in use, a service did not start (with the end of its log), or the time is over. Services
            that this call started have then been ended again.
    """
    holder = ServiceHolder("user") if owner is None else ServiceHolder.of_process(owner)
    # {"prefect": 4200, "ray.serve": 8000} -> {"prefect": {"http": 4200}, "ray": {"serve": 8000}}
    fixed_ports: dict[str, dict[str, int]] = {}
    for key, port in (ports or {}).items():
        name, _, port_name = key.partition(".")
        (name,) = lease_client.known([name])
        port_name = port_name or SERVICE_SPECS[name].ports[0]
        if port_name not in SERVICE_SPECS[name].ports:
            raise InfraError(f"{name} has no port {port_name!r}. It has: {', '.join(SERVICE_SPECS[name].ports)}.")
        fixed_ports.setdefault(name, {})[port_name] = port
    wish = LeaseRequest(
        StateDirectory(state_dir),
        holder,
        lease_client.known(tuple(services)),
        fixed_ports,
        arguments or {},
        unawaited,
    )
    lease_client.known(tuple(arguments or {}))
    return Services(wish.state, lease_client.request(wish, time_limit, on_progress))


def down(state_dir: str | Path = DEFAULT_STATE_DIRECTORY, services: Iterable[str] | None = None) -> list[str]:
    """End the services (None: all), whatever their holders, and everything they started. Return the services that ran.

    Raises:
        InfraError: a process could not be ended.
    """
    return lease_client.withdraw(
        StateDirectory(state_dir), None if services is None else lease_client.known(tuple(services))
    )


def status(state_dir: str | Path = DEFAULT_STATE_DIRECTORY) -> Services:
    """Return running services from the supervisor's record; without a live supervisor, none."""
    state = StateDirectory(state_dir)
    records = state.running().services if state.path.exists() else {}
    if records and not state.supervised():
        records = {name: replace(record, status="stopped", pid=0) for name, record in records.items()}
    return Services(state, records)


@contextmanager
def local_services(
    state_dir: str | Path = DEFAULT_STATE_DIRECTORY,
    services: Iterable[str] = DEFAULT_SERVICES,
    *,
    keep: Collection[str] = (),
    unawaited: Collection[str] = (),
    ports: Mapping[str, int] | None = None,
    arguments: Mapping[str, Sequence[str]] | None = None,
    time_limit: float = DEFAULT_TIME_LIMIT,
    on_progress: Progress | None = None,
) -> Iterator[Services]:
    """Run the services during a block, owned by this process.

    At a normal end the services of `keep` stay up until `down` or the next run; the others end. On an exception (Ctrl-C
    too) all end, except those with another holder. If this process is killed, the supervisor ends them.
    """
    names = tuple(services)
    if not names:
        yield Services(StateDirectory(state_dir), {})
        return
    running = up(
        state_dir,
        names,
        owner=os.getpid(),
        ports=ports,
        arguments=arguments,
        unawaited=unawaited,
        time_limit=time_limit,
        on_progress=on_progress,
    )
    holder = ServiceHolder.this_process()
    try:
        yield running
    except BaseException:
        lease_client.release(running.state, holder, names)
        raise
    lease_client.release(running.state, holder, names, keep=keep)


def needed_services(config: RunConfig) -> tuple[str, ...]:
    """Return the local services of a run: without Ray if its engine is named, is its trainer or runs already, without
    MLflow if it tracks elsewhere or nothing, and in a cluster without Prefect if a server exists."""
    elsewhere = config.tracking.uri is not None or "MLFLOW_TRACKING_URI" in os.environ
    unused = config.infra.superfluous_services()
    if config.generation.engine_url is not None or engine_traits(config.generation.backend).in_flow:
        unused.add("ray")
    if elsewhere or not config.tracking.in_mlflow:
        unused.add("mlflow")
    return tuple(name for name in DEFAULT_SERVICES if name not in unused)


def has_engine_here(config: RunConfig) -> bool:
    """Return whether the engine of the run's local services serves its policy. Offline training without evaluation
    needs none."""
    answers = config.offline is None or config.offline.evaluate
    return answers and "ray" in needed_services(config)


@contextmanager
def services_of(config: RunConfig) -> Iterator[Services]:
    """Start the run's missing services, and set the environment of this process for them."""
    set_up_observability()
    states: dict[str, str] = {}

    def on_progress(record: ServiceRecord) -> None:
        states[record.name] = record.status
        announce("services", text=", ".join(f"{name} {status}" for name, status in states.items()))

    needed = needed_services(config)
    standing = ("prefect", "mlflow")
    with (
        about(run=config.run_id),
        local_services(
            state_directory(config),
            needed,
            keep=standing,
            unawaited=("mlflow",),
            arguments={name: each for name, each in config.infra.server_arguments().items() if name in needed},
            time_limit=getattr(config.infra, "start_timeout_seconds", DEFAULT_TIME_LIMIT),
            on_progress=on_progress,
        ) as services,
        engine_lock(services.state, config.run_id) if has_engine_here(config) else nullcontext(),
        ExitStack() as resources,
    ):
        if "mlflow" in needed and "KUBERNETES_SERVICE_HOST" in os.environ:
            log.warning(
                "MLflow runs in this pod and is lost with it. Set tracking.uri or MLFLOW_TRACKING_URI to a server that stays; "
                "`roundhouse runs track %s` writes a run to another one later.",
                config.run_id,
            )
        own_tracking = {"MLFLOW_TRACKING_URI": uri} if (uri := os.environ.get("MLFLOW_TRACKING_URI")) else {}
        resources.enter_context(_environment(QUIET | os.environ | services.environment() | own_tracking))
        pages: dict[str, str] = {}
        if "prefect" in needed:
            pages = {"prefect": services.prefect_ui_url, "prefect_sign_in": services.prefect_sign_in_url}
        pages |= {"mlflow": services.mlflow_url} if services.is_coming("mlflow") else {}
        announce("pages", **pages)
        yield services


QUIET = {
    # The logs go to Prefect and to files; the terminal shows the run.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment of a run, if the user has not set it."""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment for the block, so that no later run meets the services of this one."""
    before = {name: os.environ.get(name) for name, value in variables.items() if os.environ.get(name) != value}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


LOOK_SECONDS = 0.5


@contextmanager
def engine_lock(state: StateDirectory, run_id: str) -> Iterator[None]:
    """Hold the engine for the block, once no other process holds it. Nested blocks of this process are allowed."""
    mine, announced = EngineUse(run_id, ServiceHolder.this_process()), None
    while True:
        with state.lock():
            use = state.engine_use()
            if use is not None and use.holder == mine.holder:
                had_already = True
                break
            if use is None or not use.holder.alive():
                had_already = False
                state.write_engine_use(mine)
                break
        if use != announced:
            announced = use
            text = (
                f"run {use.run_id} (process {use.holder.pid}) uses the engine of the services in {state.path}; run "
                f"{mine.run_id} waits for it. To run both at once, give one of them another state directory (infra.state)."
            )
            announce("waiting", text=text)
            log.info("Waiting: %s", text)
        time.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        if not had_already:
            with contextlib.suppress(FileNotFoundError), state.lock():  # a missing directory cannot hold an engine
                state.write_engine_use(None)
