"""Sandboxes in containers beyond the contract of all kinds: arguments of the program, and containers that are abandoned."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.config.sandboxes import SandboxLimits
from roundhouse.environments import check_sandboxes, environment_config
from roundhouse.environments.sandbox import SandboxKilled
from roundhouse.environments.sandboxes import Sandbox, new_sandbox
from roundhouse.errors import ConfigError
from roundhouse.plugins.container_sandbox.sandbox import (
    Container,
    find_program,
    is_abandoned,
    owner,
    remove_abandoned,
    run_arguments,
)
from roundhouse.plugins.container_sandbox.section import ContainerSandbox
from tests.gym.environments.playing import IMAGE, SANDBOXES

CONFIG = SANDBOXES["container"]
KEYS = CONFIG.model_dump()


@pytest.fixture
def config(program: str) -> SandboxLimits:
    return CONFIG


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def name_of(sandbox: Sandbox) -> str:
    assert isinstance(sandbox, Container)
    return sandbox._name


def is_there(program: str, name: str) -> bool:
    return output_of(program, "ps", "--all", "--quiet", "--filter", f"name={name}") != ""


async def test_a_command_is_not_root_has_no_network_and_writes_nowhere_else(sandbox: Sandbox) -> None:
    result = await sandbox.run("id -u; ls /sys/class/net; grep CapEff /proc/self/status; touch /x /bin/x")
    assert result.output == (
        "65534\nlo\nCapEff:\t0000000000000000\ntouch: /x: Read-only file system\ntouch: /bin/x: Read-only file system\n"
    )


async def test_a_fork_bomb_stays_within_its_count_and_nothing_outlives_a_command(sandbox: Sandbox) -> None:
    await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 1")
    await sandbox.run("setsid sleep 1000 & (trap '' HUP TERM; sleep 1000) & echo hi")
    left = (await sandbox.run("ps -o comm,args")).output
    assert "sleep 1000" not in left
    assert "bomb" not in left


async def test_a_container_that_is_gone_is_a_failure_of_the_infrastructure(program: str, sandbox: Sandbox) -> None:
    output_of(program, "kill", name_of(sandbox))
    with pytest.raises(SandboxKilled, match="container of a sandbox has ended"):
        await sandbox.run("true")


OWNER = """
import asyncio, os, signal, sys
from roundhouse.environments.sandboxes import new_sandbox
from roundhouse.plugins.container_sandbox.section import ContainerSandbox

async def main():
    sandbox = new_sandbox(ContainerSandbox.model_validate_json(sys.argv[1]))
    await sandbox.start()
    print(sandbox._name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_killed_owners_container_is_removed_at_the_next_start_and_no_others(
    program: str, sandbox: Sandbox
) -> None:
    name = output_of(sys.executable, "-c", OWNER, json.dumps(KEYS))
    assert is_there(program, name)
    remove_abandoned.cache_clear()
    next_one = new_sandbox(CONFIG)
    await next_one.start()
    assert not is_there(program, name)
    assert is_there(program, name_of(sandbox))
    await next_one.close()
    assert not is_there(program, name_of(next_one))


def test_what_is_abandoned_is_known_by_its_owner_here_and_by_its_deadline_elsewhere() -> None:
    mine = owner()
    host, pid, _ = mine.split("/")
    assert not is_abandoned(mine, "0", 1e9)
    assert is_abandoned(f"{host}/{pid}/1.00", "2000000000", 1e9)
    assert not is_abandoned("elsewhere/1/1.00", "1000000000", 1e9)
    assert is_abandoned("elsewhere/1/1.00", "999999000", 1e9)


ARGUMENTS = {
    "image": ("python:3.11-slim", "python:3.11-slim"),
    "runtime": ("runsc", "--runtime runsc"),
    "network": ("bridge", "--network bridge"),
    "cpus": (0.5, "--cpus 0.5"),
    "read_only": (False, "--read-only"),
    "user": (1000, "--user 1000:1000"),
    "memory_mib": (128, "--memory 128m --memory-swap 128m"),
    "processes": (30, "--pids-limit 30"),
    "disk_mib": (4, "size=4m"),
    "directories": (("/app",), "--tmpfs /app:rw,exec"),
    "lifetime_seconds": (77, "roundhouse.deadline=1077"),
}


@pytest.mark.parametrize("key", ARGUMENTS)
def test_every_key_is_an_argument_of_the_program(key: str) -> None:
    value, argument = ARGUMENTS[key]
    plain, changed = (
        " ".join(run_arguments(ContainerSandbox(**KEYS | keys), "name", "owner", 1000.0)) for keys in ({}, {key: value})
    )
    assert (argument in plain, argument in changed) == ((True, False) if key == "read_only" else (False, True))


def test_a_program_that_is_not_there_is_named_before_any_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    find_program.cache_clear()
    for program, message in ((None, "docker is not installed; podman is"), ("podman", "but podman is not installed")):
        config = environment_config(
            "terminal",
            json.dumps({"problems": 40, "sandbox": {"kind": "container", "image": IMAGE, "program": program}}),
        )
        with pytest.raises(ConfigError, match=message):
            check_sandboxes(config)


def test_an_image_that_is_not_there_is_named_before_any_rollout(program: str) -> None:
    section = {"kind": "container", "image": "localhost/there-is-none:1"}
    with pytest.raises(ConfigError, match=f"do `{program} pull localhost/there-is-none:1` on each machine"):
        check_sandboxes(environment_config("terminal", json.dumps({"problems": 40, "sandbox": section})))


@pytest.mark.parametrize(
    "keys",
    [{"user": 0}, {"user": "root"}, {"disk_mib": 64}, {"cpus": 0}, {"network": "--privileged"}, {"network": "host"}],
)
def test_what_would_not_confine_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ContainerSandbox(**KEYS | keys)


def test_every_part_of_a_container_counts_as_code() -> None:
    own = {"image": "a:1", "program": "podman", "runtime": "/a", "network": "bridge"}
    environment = {"kind": "terminal", "sandbox": {"kind": "container"} | own}
    config = parse_config({"run_id": "r", "environment": environment})
    assert unnamed_code(config, []) == {f"environment.sandbox.{key}": value for key, value in own.items()}
