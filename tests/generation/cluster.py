"""A private Ray head for the tests, on free ports, ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from roundhouse.generation.deployment import ServeEndpoint
from roundhouse.infra.service_specs import REPLICA_PORTS, head_environment
from tests.ports import free_ports
from tests.waiting import until


@contextlib.contextmanager
def ray_head() -> Iterator[ServeEndpoint]:
    """Start a head with dashboard; yields where its Serve is (not started before the first deployment)."""
    directory = Path(tempfile.mkdtemp(prefix="rhg", dir="/tmp"))
    token = secrets.token_hex(16)
    gcs, dashboard, serve, client, agent, agent_grpc, env_agent, metrics, *others = free_ports(12 + REPLICA_PORTS)
    stats, proxy_metrics, fallback, grpc_fallback, *replica_ports = others
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    options = {
        "port": gcs,
        "node-ip-address": "127.0.0.1",
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": agent,
        "dashboard-agent-grpc-port": agent_grpc,
        "runtime-env-agent-port": env_agent,
        "metrics-export-port": metrics,
        "ray-client-server-port": client,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "num-cpus": 4,
        "object-store-memory": 100_000_000,
        "include-log-monitor": "false",
        "temp-dir": directory,
    }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    # vLLM sets LD_PRELOAD in a process that it has run in, which may be this one.
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment = inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "OMP_NUM_THREADS": "1",
        **head_environment(
            directory / "hap",
            stats_port=stats,
            metrics_port=proxy_metrics,
            fallback_port=fallback,
            grpc_fallback_port=grpc_fallback,
            first_replica_port=replica_ports[0],
        ),
    }
    with (directory / "head.log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    endpoint = ServeEndpoint(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{serve}", token)
    try:
        log = directory / "head.log"
        until(lambda: _is_up(endpoint), "Ray's head", process=head, evidence=lambda: log.read_text()[-2000:])
        yield endpoint
    finally:
        _end(head)
        shutil.rmtree(directory, ignore_errors=True)


def _is_up(endpoint: ServeEndpoint) -> bool:
    url, headers = f"{endpoint.dashboard_url}/api/serve/applications/", {"Authorization": f"Bearer {endpoint.token}"}
    try:
        return httpx.get(url, headers=headers, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _end(head: subprocess.Popen[bytes]) -> None:
    """End the head and everything below it: Ray titles its processes anew, so they are known by descent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(head.pid).children(recursive=True)
        # SIGTERM would let Ray take half a minute for an orderly end of something that keeps nothing.
        head.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
    head.wait(10)
