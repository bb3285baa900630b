"""A sandbox in a container, really run where Docker or Podman works; the image is made of this machine's busybox."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roundhouse.config.sandboxes import ContainerSandbox
from roundhouse.environments import check_sandboxes, environment_config
from roundhouse.environments.sandbox import SandboxKilled, SandboxUnavailable
from roundhouse.environments.sandboxes import CommandResult, Sandbox, new_sandbox
from roundhouse.environments.sandboxes.container import (
    Container,
    find_program,
    is_abandoned,
    owner,
    remove_abandoned,
    run_arguments,
)
from roundhouse.errors import ConfigError

IMAGE = "localhost/roundhouse-sandbox-test:1"
KEYS: dict[str, Any] = {
    "kind": "container",
    "image": IMAGE,
    "command_seconds": 5,
    "memory_mib": 64,
    "processes": 20,
    "disk_mib": 8,
    "output_bytes": 1000,
}
CONFIG = ContainerSandbox(**KEYS)
BUSYBOX = shutil.which("busybox")


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    """The program, with the image."""
    try:
        found = find_program(None)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    if BUSYBOX is None or b"dynamic" in subprocess.run(["ldd", BUSYBOX], capture_output=True).stdout:
        pytest.skip("there is no static busybox to make an image of")
    made = subprocess.run([found, "import", "-", IMAGE], input=image_of(Path(BUSYBOX)), capture_output=True)
    assert made.returncode == 0, made.stderr.decode()
    if (run := subprocess.run([found, "run", "--rm", IMAGE, "true"], capture_output=True)).returncode:
        pytest.skip(f"{found} runs no container here: {run.stderr.decode()}")
    yield found
    subprocess.run([found, "rmi", "--force", IMAGE], capture_output=True)


def image_of(busybox: Path) -> bytes:
    """A root with its programs."""
    made = io.BytesIO()
    programs = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add(busybox.resolve(), "bin/busybox")
        for name in {*programs} - {"busybox"}:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return made.getvalue()


@pytest.fixture
async def sandbox(program: str) -> AsyncIterator[Sandbox]:
    made = new_sandbox(CONFIG)
    await made.start()
    yield made
    await made.close()


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def name_of(sandbox: Sandbox) -> str:
    assert isinstance(sandbox, Container)
    return sandbox._name


def is_there(program: str, name: str) -> bool:
    return output_of(program, "ps", "--all", "--quiet", "--filter", f"name={name}") != ""


async def test_files_go_in_are_changed_by_commands_and_come_out(sandbox: Sandbox) -> None:
    await sandbox.write_files({"notes/a.txt": b"two\none\n", "b": b"\xff\0"})
    assert await sandbox.run("sort notes/a.txt | tee c; exit 3") == CommandResult(3, "one\ntwo\n")
    assert await sandbox.run("mkfifo pipe; ln -s /bin/busybox link") == CommandResult(0, "")
    assert await sandbox.read_files() == {"notes/a.txt": b"two\none\n", "b": b"\xff\0", "c": b"one\ntwo\n"}


async def test_a_command_is_not_root_has_no_network_and_writes_nowhere_else(sandbox: Sandbox) -> None:
    result = await sandbox.run("id -u; ls /sys/class/net; grep CapEff /proc/self/status; touch /x /bin/x")
    assert result.output == (
        "65534\nlo\nCapEff:\t0000000000000000\ntouch: /x: Read-only file system\ntouch: /bin/x: Read-only file system\n"
    )


async def test_a_limit_that_is_reached_is_a_result_and_the_sandbox_goes_on(sandbox: Sandbox) -> None:
    ended = await sandbox.run("yes")
    assert (len(ended.output), ended.truncated, ended.timed_out) == (1000, True, False)
    ended = await sandbox.run("sleep 1000")
    assert (ended.truncated, ended.timed_out) == (False, True)
    assert "No space left on device" in (await sandbox.run("cat /dev/zero > big; rm big")).output
    forked = await sandbox.run("for n in $(seq 40); do sleep 9 & done")
    assert "can't fork" in forked.output
    ended = await sandbox.run("text=x; while :; do text=$text$text; done")
    assert (ended.status, ended.timed_out) == (137, False)
    assert await sandbox.run("echo fine") == CommandResult(0, "fine\n")


async def test_a_fork_bomb_stays_within_its_count_and_nothing_outlives_a_command(sandbox: Sandbox) -> None:
    await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 1")
    await sandbox.run("setsid sleep 1000 & (trap '' HUP TERM; sleep 1000) & echo hi")
    left = (await sandbox.run("ps -o comm,args")).output
    assert "sleep 1000" not in left
    assert "bomb" not in left


async def test_a_container_that_is_gone_is_a_failure_of_the_infrastructure(program: str, sandbox: Sandbox) -> None:
    output_of(program, "kill", name_of(sandbox))
    with pytest.raises(SandboxKilled, match="container of a sandbox is gone"):
        await sandbox.run("true")


async def test_a_container_ends_when_its_lifetime_is_over(program: str) -> None:
    sandbox = new_sandbox(CONFIG.model_copy(update={"lifetime_seconds": 1.0}))
    await sandbox.start()
    output_of(program, "wait", name_of(sandbox))
    with pytest.raises(SandboxKilled, match="lifetime_seconds"):
        await sandbox.run("true")


OWNER = """
import asyncio, os, signal, sys
from roundhouse.config.sandboxes import ContainerSandbox
from roundhouse.environments.sandboxes import new_sandbox

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
