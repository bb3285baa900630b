"""Custom databases for the local services (infra.prefect.database_url, infra.mlflow.backend_store_uri)."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.infra import services
from roundhouse.infra.state import ServiceRecord
from roundhouse_flows._prefect.server import take_database_url
from tests.postgres import database, tables

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).parents[2] / "k8s/components/services/databases.sh"
PASSWORDS = {"POSTGRES_PASSWORD": "p", "PREFECT_DATABASE_PASSWORD": "of-both", "MLFLOW_DATABASE_PASSWORD": "of-both"}


def infra(**sections: Any) -> Any:
    return parse_config({"run_id": "r", "infra": sections}).infra


def test_without_a_database_of_ones_own_the_servers_are_started_as_ever() -> None:
    assert infra().server_arguments() == {"prefect": [], "mlflow": []}
    assert KubernetesInfra().server_arguments() == {"prefect": [], "mlflow": []}


def test_a_database_is_an_argument_of_its_server_and_becomes_prefects_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", raising=False)
    url = "postgresql+asyncpg://prefect@localhost/prefect"
    arguments = infra(prefect={"database_url": url}).server_arguments()
    assert arguments == {"prefect": [f"--database-url={url}"], "mlflow": []}
    assert take_database_url(["server", "start", *arguments["prefect"]]) == ["server", "start"]
    assert os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == url


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"prefect": {"database_url": "postgresql+asyncpg://prefect:pass@h/d"}}, "holds a user and password in a URL"),
        ({"prefect": {"database_url": "postgresql://prefect@h/d"}}, "Prefect takes postgresql\\+asyncpg"),
        ({"mlflow": {"backend_store_uri": "mlflow.db"}}, "backend_store_uri"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_with_the_key(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        infra(**sections)


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="psycopg2-binary"):
        infra(mlflow={"backend_store_uri": "postgresql://mlflow@h/d"}).server_arguments()


def test_pages_that_a_run_left_up_on_its_database_come_up_on_the_next_runs(state_dir: Path, tmp_path: Path) -> None:
    def by_a_run(**sections: Any) -> ServiceRecord:
        arguments = infra(**sections).server_arguments()
        names = ["mlflow"]
        with services.local_services(state_dir, names, keep=names, unawaited=names, arguments=arguments) as running:
            return running.records["mlflow"]

    own = f"sqlite:///{tmp_path}/own.db"
    first, second = by_a_run(mlflow={"backend_store_uri": own}), by_a_run()
    assert (first.arguments, second.arguments) == ([f"--backend-store-uri={own}"], [])
    assert first.pid != second.pid
    assert by_a_run().pid == second.pid


@contextmanager
def postgres(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        place = Path(directory) / "postgres"
        place.mkdir()
        with database(place, PASSWORDS, SCRIPT) as port:
            monkeypatch.setenv("PGPASSWORD", "of-both")
            yield port


@pytest.mark.long
def test_the_local_servers_keep_their_data_in_a_postgresql_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, state_dir: Path
) -> None:
    with postgres(monkeypatch) as port:
        settings = {"prefect": {"database_url": f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"}}
        has_driver = importlib.util.find_spec("psycopg2") is not None
        if has_driver:
            settings["mlflow"] = {"backend_store_uri": f"postgresql://mlflow@127.0.0.1:{port}/mlflow"}
        names = ("prefect", "mlflow") if has_driver else ("prefect",)
        running = services.up(state_dir, names, arguments=infra(**settings).server_arguments())
        auth = httpx.BasicAuth(*running.prefect_auth_string.split(":"))
        made = httpx.post(f"{running.prefect_ui_url}/api/flows/", json={"name": "a-flow"}, auth=auth)
        assert made.status_code == 201
        assert "flow_run" in tables(port, "prefect", "prefect", "of-both")
        assert not list(state_dir.rglob("prefect.db")), "nothing in SQLite"
        services.down(state_dir)
        if not has_driver:
            pytest.skip("Prefect ran on PostgreSQL; MLflow was not run: psycopg2 is not installed")
        assert "runs" in tables(port, "mlflow", "mlflow", "of-both")
        assert not list(state_dir.rglob("mlflow.db")), "nothing in SQLite"
