"""`roundhouse deploy`: the server has the content of prefect.yaml; a second deployment changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.deployments import DeploymentsFile, JobTemplate, read_deployments, read_template
from roundhouse.errors import ConfigError
from tests.flows.served import Served
from tests.ports import free_port

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
NIGHTLY = {
    "slug": "nightly",
    "cron": "0 2 * * *",
    "parameters": {"settings": {"run_id": "mine", "name": "nightly"}},
}


@pytest.fixture
def template() -> JobTemplate:
    return read_template(ROOT / "k8s/components/work-pool/base-job-template.yaml")


def deployments(tmp_path: Path, template: JobTemplate, **changes: Any) -> DeploymentsFile:
    """A file with one deployment, by a name that nobody serves here."""
    pool = {
        "name": "cluster",
        "job_variables": {"image": "registry/flow@sha256:0", "env": {"MLFLOW_TRACKING_URI": "x"}},
    }
    entry = {
        "name": "on-the-cluster",
        "entrypoint": "roundhouse_flows.deployments.collect",
        "work_pool": pool,
        "tags": ["a"],
    }
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry | changes]}))
    return read_deployments(file, template)


def deploy(file: DeploymentsFile, template: JobTemplate, **options: Any) -> list[str]:
    from roundhouse_flows.work_pool import deploy

    return list(deploy(file, template, **options))


def test_pool_deployment_and_schedules_are_as_the_file_says_and_the_second_time_changes_nothing(
    prefect_client: Served, tmp_path: Path, template: JobTemplate
) -> None:
    file = deployments(tmp_path, template, schedules=[NIGHTLY])
    first = deploy(file, template, dry_run=True)
    assert "work pool cluster: created" in first
    assert first == deploy(file, template), "the dry run changed nothing, and told what would be"

    pool = prefect_client.call("GET", "work_pools/cluster")
    assert (pool["type"], pool["base_job_template"]) == ("kubernetes", template.model_dump())
    made = prefect_client.call("GET", "deployments/name/collect/on-the-cluster")
    assert made["work_pool_name"] == "cluster"
    assert made["job_variables"]["image"] == "registry/flow@sha256:0"
    assert made["entrypoint"] == "roundhouse_flows.deployments.collect"
    assert made["parameter_openapi_schema"]["required"] == ["settings"]
    [schedule] = made["schedules"]
    assert (schedule["schedule"]["cron"], schedule["parameters"]["settings"]["name"]) == ("0 2 * * *", "nightly")

    again = deploy(file, template)
    assert again == ["work pool cluster: as it should be", "deployment collect/on-the-cluster: as it should be"]
    assert prefect_client.call("GET", "deployments/name/collect/on-the-cluster")["updated"] == made["updated"]


def test_a_change_of_the_file_is_told_and_made_and_a_schedule_that_a_person_added_stays(
    prefect_client: Served, tmp_path: Path, template: JobTemplate
) -> None:
    deploy(deployments(tmp_path, template, schedules=[NIGHTLY]), template)
    path = "deployments/name/collect/on-the-cluster"
    by_hand = [{"schedule": {"cron": "5 5 * * *"}, "slug": "by-hand", "active": False}]
    deployment = prefect_client.call("GET", path)["id"]
    prefect_client.call("POST", f"deployments/{deployment}/schedules", by_hand)

    hourly = NIGHTLY | {"slug": "hourly", "cron": "0 * * * *", "active": False}
    lines = deploy(deployments(tmp_path, template, schedules=[hourly], tags=["b"]), template)
    assert "deployment collect/on-the-cluster: changed: tags" in lines
    assert "  schedule hourly: created: 0 * * * * (UTC)" in lines
    assert "  schedule nightly: removed" in lines
    there = prefect_client.call("GET", path)
    assert there["tags"] == ["b"]
    assert sorted(each["slug"] for each in there["schedules"]) == ["by-hand", "prefect.yaml: hourly"]

    other = template.model_copy(update={"variables": template.variables | {"description": "changed"}})
    assert "work pool cluster: job template replaced" in deploy(deployments(tmp_path, template), other)


def test_a_limit_of_flow_runs_is_made_once_and_goes_with_its_line_in_the_file(
    prefect_client: Served, tmp_path: Path, template: JobTemplate
) -> None:
    def told(**limit: int) -> str:
        return deploy(deployments(tmp_path, template, name="limited", **limit), template)[1].partition(": ")[2]

    def there() -> int | None:
        limit = prefect_client.call("GET", "deployments/name/collect/limited")["global_concurrency_limit"]
        return limit and limit["limit"]

    assert (told(concurrency_limit=1), there()) == ("created", 1)
    assert (told(concurrency_limit=1), there()) == ("as it should be", 1)
    assert (told(concurrency_limit=2), there()) == ("changed: concurrency_limit", 2)
    assert (told(), there()) == ("changed: concurrency_limit", None)
    assert told() == "as it should be"


def test_a_pool_of_another_type_is_refused(prefect_client: Served, tmp_path: Path, template: JobTemplate) -> None:
    prefect_client.call("POST", "work_pools/", name="of-processes", type="process")
    file = deployments(tmp_path, template, work_pool={"name": "of-processes"})
    with pytest.raises(ConfigError, match="'of-processes' is of type 'process', not 'kubernetes'"):
        deploy(file, template)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"work_pool": {"name": "a", "job_variables": {"imag": "x"}}}, "imag: .* Did you mean image"),
        ({"work_pool": {"name": "a", "job_variables": {"finished_job_ttl": "a day"}}}, "finished_job_ttl is 'a day'"),
        ({"work_pool": {"name": "a b", "job_variables": []}}, "work_pool.job_variables"),
        ({"schedule": []}, "schedule: Extra inputs"),
        ({"schedules": [NIGHTLY, NIGHTLY]}, "two schedules of one slug"),
    ],
)
def test_a_mistake_in_the_file_names_key_and_value(
    changes: dict[str, Any], told: str, tmp_path: Path, template: JobTemplate
) -> None:
    with pytest.raises(ConfigError, match=told):
        deployments(tmp_path, template, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"entrypoint": "roundhouse_flows.deployments.colect"}, "entrypoint 'roundhouse_flows.deployments.colect'"),
        ({"schedules": [NIGHTLY | {"cron": "whenever"}]}, "cron 'whenever'"),
        ({"schedules": [NIGHTLY | {"parameters": {"settings": {"name": "nightly"}}}]}, "run_id"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(
    changes: dict[str, Any], told: str, tmp_path: Path, template: JobTemplate
) -> None:
    file = deployments(tmp_path, template, **({"schedules": [NIGHTLY]} | changes))
    with pytest.raises(ConfigError, match=told):
        deploy(file, template)


def test_the_jobs_of_flow_runs_are_of_the_namespace_that_the_command_names(template: JobTemplate) -> None:
    moved = template.in_namespace("team-a")
    assert moved.variables["properties"]["namespace"]["default"] == "team-a"
    text = yaml.safe_dump(moved.model_dump())
    assert not re.search(r"namespace: roundhouse\b|default: roundhouse$", text, re.MULTILINE)
    with pytest.raises(ConfigError, match="--namespace 'Team A'"):
        template.in_namespace("Team A")


def test_the_command_registers_every_flow_of_the_committed_file_and_nothing_that_a_process_serves(
    served: Served, template: JobTemplate
) -> None:
    """Next to `roundhouse up` it would have moved the local deployments to the cluster's work pool."""
    from roundhouse_flows.deployments import DEPLOYED

    file = read_deployments(ROOT / "prefect.yaml", template)
    assert {entry.flow().name for entry in file.deployments} == {flow.name for flow in DEPLOYED}
    dry = command("--dry-run", "--json", "--state", str(served.directory / "state"))
    assert dry.returncode == 0, dry.stderr
    told = json.loads(dry.stdout)
    assert told["server"] == f"{served.services.prefect_ui_url}/api"
    assert "work pool roundhouse: created" in told["done"]
    assert [line for line in told["done"] if "train/train" in line and "`roundhouse up`" in line]
    real = command("--state", str(served.directory / "state"))
    assert real.returncode == 78
    assert "PREFECT_API_URL" in real.stderr
    assert served.deployment("train")["work_pool_name"] is None
    pools = {pool["name"] for pool in served.call("POST", "work_pools/filter")}
    assert "roundhouse" not in pools, "nothing is made before that is known"


def test_a_server_that_is_named_counts_also_while_another_is_up_here(served: Served) -> None:
    elsewhere = f"http://127.0.0.1:{free_port()}/api"
    done = command("--dry-run", "--state", str(served.directory / "state"), PREFECT_API_URL=elsewhere)
    assert f"Prefect server: {elsewhere}" in done.stdout
    assert done.returncode != 0


def command(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`roundhouse deploy` as a person types it."""
    line = [sys.executable, "-c", "from roundhouse.cli import main; main()", "deploy", *options]
    ours = ("ROUNDHOUSE_PRESETS", "PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
