"""Prefect, MLflow and Ray, started once for all tests here; the last test ends them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from roundhouse.infra import processes, services
from roundhouse.infra.service_specs import HAPROXY_SOCKET_BYTES, NODE_DIRECTORY_BYTES, ray_base_directory
from roundhouse.infra.services import Services
from roundhouse.infra.state import StateDirectory

TIME_LIMIT = 240


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    with tempfile.TemporaryDirectory(prefix="rh-test-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://storage.test")
        patch.setenv("HTTP_PROXY", "http://proxy.test:3128")
        path = Path(directory) / "a state directory" / "services"
        found = services.up(path, time_limit=TIME_LIMIT)
        patch.delenv("HTTP_PROXY")
        yield found
        services.down(path)
        shutil.rmtree((path / "ray").resolve().parent)


def api_url(running: Services) -> str:
    return f"{running.prefect_ui_url}/api"


pytestmark = [pytest.mark.real, pytest.mark.timeout(TIME_LIMIT + 60)]


def test_every_service_answers_and_ray_and_prefect_only_those_who_have_their_secret(running: Services) -> None:
    assert httpx.get(f"{api_url(running)}/health").json() is True
    assert httpx.get(running.prefect_ui_url).status_code == 200
    assert httpx.get(f"{running.prefect_ui_url}/ui-settings").json()["api_url"] == "/api"
    assert httpx.get(f"{running.mlflow_url}/health").text == "OK"
    applications = f"{running.ray_dashboard_url}/api/serve/applications/"
    assert httpx.get(applications).status_code == 401
    assert httpx.get(applications, headers=token(running)).json()["applications"] == {}
    kept = f"{api_url(running)}/flow_runs/filter"
    assert httpx.post(kept, json={}).status_code == 401
    assert httpx.post(kept, json={}, auth=("roundhouse", "guessed")).status_code == 401
    assert httpx.post(kept, json={}, auth=httpx.BasicAuth(*running.prefect_auth_string.split(":"))).json() == []
    for record in running.records.values():
        assert record.ready_seconds is not None
        print(f"{record.name} was ready after {record.ready_seconds} s")


def test_a_second_up_only_looks(running: Services) -> None:
    began = time.monotonic()
    again = services.up(running.state.path)
    assert time.monotonic() - began < 5
    assert {name: record.pid for name, record in again.records.items()} == {
        name: record.pid for name, record in running.records.items()
    }


def test_nothing_listens_beyond_this_machine(running: Services) -> None:
    for process in processes.members(running.state):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), process.cmdline()


def test_all_data_lies_under_the_state_directory(running: Services) -> None:
    assert (running.state.path / "prefect" / "prefect.db").exists()
    assert (running.state.path / "mlflow" / "mlflow.db").exists()
    assert (running.state.path / "ray" / "session_latest" / "logs").exists()
    assert (running.state.path / "ray").resolve().parent.stat().st_mode & 0o077 == 0
    for secret in ("ray_token", "prefect_auth_string", "prefect.html"):
        assert (running.state.path / secret).stat().st_mode & 0o077 == 0


def test_no_secret_of_theirs_is_in_a_log_or_on_a_command_line(running: Services) -> None:
    shown = "".join(path.read_text(errors="replace") for path in (running.state.path / "logs").iterdir())
    assert "server start" in shown
    shown += "".join(" ".join(process.cmdline()) for process in processes.members(running.state))
    for secret in (running.ray_token, running.prefect_auth_string.partition(":")[2]):
        assert len(secret) >= 32
        assert secret not in shown


def test_a_process_with_their_environment_reaches_all_of_them(running: Services, tmp_path: Path) -> None:
    code = """
import mlflow, ray
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(client.api_url, client.api_healthcheck(), client.read_flows())
mlflow.set_experiment("reach")
with mlflow.start_run() as run:
    mlflow.log_metric("reward", 1.0)
    mlflow.log_text("kept", "note.txt")
ray.init(log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0.1)(lambda: "from a worker").remote()))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **running.environment()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert f"{api_url(running)}/ None []" in result.stdout
    assert "from a worker" in result.stdout
    assert list((running.state.path / "mlflow" / "artifacts").rglob("note.txt"))
    assert list(tmp_path.iterdir()) == []


def test_a_serve_application_is_deployed_by_rest_and_answers_where_its_configuration_says(running: Services) -> None:
    configuration = {
        "http_options": {"host": "127.0.0.1", "port": running.serve_port},
        "applications": [{"name": "echo", "route_prefix": "/", "import_path": "tests.infra.echo_app:app"}],
    }
    url = f"{running.ray_dashboard_url}/api/serve/applications/"
    put = httpx.put(url, headers=token(running), json=configuration, timeout=60)
    assert put.status_code == 200, put.text
    seen = answer(running.serve_url, 60)
    assert seen["roundhouse"] == str(Path(services.__file__).parents[1])
    assert seen["endpoint"] == "http://storage.test"
    # Serve works as it is; a proxy of the caller's is not asked for this machine.
    assert "127.0.0.1" in seen["no_proxy"]


def test_down_ends_every_process_also_those_that_ray_started(running: Services) -> None:
    before = {process: told(process) for process in processes.members(running.state)}
    assert {"raylet", "gcs_server"} <= {line.split(" ")[0] for line in before.values()}
    assert any("ServeReplica" in line for line in before.values())
    assert sorted(services.down(running.state.path)) == ["mlflow", "prefect", "ray"]
    assert [before[process] for process in before if told(process)] == []
    assert processes.members(running.state) == []
    assert not StateDirectory(running.state.path).supervised()


def told(process: psutil.Process) -> str:
    """Its name and command; empty once it has ended, as some do by themselves at any time."""
    try:
        return " ".join((process.name(), *process.cmdline())) if process.is_running() else ""
    except psutil.NoSuchProcess:  # zombies too
        return ""


def token(running: Services) -> dict[str, str]:
    return {"Authorization": f"Bearer {running.ray_token}"}


def answer(url: str, seconds: float) -> dict[str, str]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            response = httpx.get(url, timeout=10)
            if response.status_code == 200 or time.monotonic() > deadline:
                return dict(response.json())
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def test_a_temporary_directory_whose_path_is_too_long_for_the_proxys_socket_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = f"/rh-{os.getuid()}-01234567/h/admin.sock"
    longest = HAPROXY_SOCKET_BYTES - NODE_DIRECTORY_BYTES - len(below)
    for length, used in ((longest, True), (longest + 1, False)):
        directory = "/" + "t" * (length - 1)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        assert ray_base_directory() == Path(directory if used else "/tmp")
