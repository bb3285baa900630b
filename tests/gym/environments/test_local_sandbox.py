"""Local sandboxes beyond the contract of all kinds: confinement, processes that are left, the user namespace."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roundhouse.config.sandboxes import SandboxLimits
from roundhouse.environments import check_sandboxes, environment_config
from roundhouse.environments.sandbox import SandboxKilled, SandboxUnavailable
from roundhouse.environments.sandboxed import shown
from roundhouse.environments.sandboxes import CommandResult, FilesRefused, Sandbox, archive, new_sandbox, regular_files
from roundhouse.environments.sandboxes.local import CHILD
from roundhouse.errors import ConfigError
from tests.gym.environments.playing import SANDBOXES
from tests.gym.kinds import needs

CONFIG = SANDBOXES["local"]
CANARY = "canary-8c11d2"


@pytest.fixture
def config() -> SandboxLimits:
    return CONFIG


async def output_of(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command)
    assert not result.timed_out
    assert not result.truncated
    return result.output


async def test_a_link_leads_no_written_file_out_of_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.run(f"ln -s {tmp_path} out; ln -s /usr usr")
    for name in ("out/x", "usr/x"):
        with pytest.raises(FilesRefused):
            await sandbox.write_files({name: CANARY.encode()})
    assert os.listdir(tmp_path) == []


PYTHON = "import ctypes, os, socket; libc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = {
    "a socket of the internet": "socket.socket(socket.AF_INET)",
    "a socket of the machine": "socket.socket(socket.AF_UNIX)",
    "a socket of the virtual machine's host": "socket.socket(socket.AF_VSOCK)",
    "a user namespace": "assert libc.unshare(0x10000000) == 0",
    "a clone in a user namespace": "assert libc.syscall(220 if 'a' in os.uname().machine else 56, 0x10000011, 0, 0, 0, 0) >= 0",
    "a mount": "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "ptrace": "assert libc.ptrace(16, 1, 0, 0) == 0",
    "memory outside of its limits": "os.memfd_create('x')",
    "io_uring": "assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0",
    "another user": "os.setuid(0)",
    "more processes": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))",
    "a file of the machine": "open('/etc/hosts')",
    "a file among the programs": "open('/usr/x', 'w')",
    "a file at the root": "open('/x', 'w')",
    "a device": "os.mknod('memory', 0o20666, os.makedev(1, 1)); open('memory')",
}


async def test_a_listing_names_the_owner_of_files_alike_in_every_sandbox(sandbox: Sandbox) -> None:
    await sandbox.write_files({"notes/a": b"x"})
    listed = (await sandbox.run("ls -l . notes; cat /etc/passwd | cut -d: -f1")).output
    assert listed.count(" sandbox sandbox ") == 2, listed
    assert listed.count("Nov 14  2023") == 2, "the date that files are written with"
    assert listed.splitlines()[-2:] == ["root", "sandbox"], "the users of the machine are not shown"


@pytest.mark.parametrize("attempt", REFUSED.values(), ids=REFUSED)
async def test_a_command_cannot_have(sandbox: Sandbox, attempt: str) -> None:
    await sandbox.write_files({"attempt.py": f"{PYTHON}{attempt}\nprint('escaped')\n".encode()})
    result = await sandbox.run("python3 attempt.py")
    assert result.status != 0
    assert "escaped" not in result.output
    assert "Error" in result.output


async def test_nothing_of_the_machine_is_seen(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", CANARY)
    fresh = new_sandbox(CONFIG)
    await fresh.start()
    seen = await output_of(fresh, "env; ls /")
    await fresh.close()
    assert CANARY not in seen
    assert {"home", "proc", "sys", "var"}.isdisjoint(seen.split())


async def test_the_memory_of_all_processes_of_a_command_together_is_limited(sandbox: Sandbox) -> None:
    await sandbox.write_files({"hold.py": b"import time; block = b'x' * (120 << 20); time.sleep(60)"})
    result = await sandbox.run("for n in 1 2 3; do python3 hold.py & done; wait; echo survived")
    assert shown(result) == "\nkilled: the sandbox held more than 256 MiB of memory\nexit status -9"
    assert await sandbox.run("echo fine") == CommandResult(0, "fine\n")


async def test_processes_that_share_their_memory_are_not_killed_for_it(sandbox: Sandbox) -> None:
    code = (
        b"import os, time\nblock = b'x' * (100 << 20)\nfor n in range(3): os.fork()\ntime.sleep(1)\nprint(len(block))"
    )
    await sandbox.write_files({"share.py": code})
    assert await output_of(sandbox, "python3 share.py") == "104857600\n" * 8


async def test_the_kernel_ends_processes_of_a_sandbox_before_any_other(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run("sleep 2"))
    processes = [each for each in psutil.Process().children(recursive=True) if each.name() == "sleep"]
    while not processes:
        await asyncio.sleep(0.05)
        processes = [each for each in psutil.Process().children(recursive=True) if each.name() == "sleep"]
    assert await asyncio.to_thread(Path(f"/proc/{processes[0].pid}/oom_score_adj").read_text) == "1000\n"
    await running


BOMB = "bomb() { bomb | bomb & }; bomb; while :; do sleep 1000 & done"  # the loop lasts until nothing more can start


async def test_a_fork_bomb_stays_within_its_count_and_nothing_of_it_is_left(sandbox: Sandbox) -> None:
    result = await sandbox.run(BOMB)
    assert "Cannot fork" in result.output
    assert await sandbox.run("echo fine") == CommandResult(0, "fine\n")
    [inside] = processes()[1:]
    assert inside.children() == []


async def test_nothing_outlives_a_command(sandbox: Sandbox) -> None:
    await sandbox.run("setsid sleep 1000 & (trap '' HUP TERM; sleep 1000) & echo hi")
    [inside] = processes()[1:]
    assert inside.children() == []


def processes() -> list[psutil.Process]:
    """The process that stands for the newest sandbox, and the first process inside, as the machine sees them."""
    living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    started = [each for each in living if CHILD.name in " ".join(each.cmdline())]
    process = max(started, key=psutil.Process.create_time)
    return [process, *process.children()]


def wait_for_child(process: psutil.Process) -> psutil.Process:
    while not (children := process.children()):
        time.sleep(0.005)
    return children[0]


async def test_a_closed_sandbox_leaves_no_process_even_in_the_middle_of_a_command(sandbox: Sandbox) -> None:
    found = processes()
    running = asyncio.create_task(sandbox.run("sleep 1000"))
    await asyncio.to_thread(wait_for_child, found[1])
    found += found[1].children()
    found[0].kill()
    with pytest.raises(SandboxKilled, match="lifetime_seconds"):
        await running
    assert psutil.wait_procs(found, timeout=30)[1] == []


OWNER = """
import asyncio, os, signal
from roundhouse.config.sandboxes import LocalSandbox
from roundhouse.environments.sandboxes import new_sandbox

async def main():
    sandbox = new_sandbox(LocalSandbox(command_seconds=1000))
    await sandbox.start()
    print("started", flush=True)
    await sandbox.run("sleep 900")

asyncio.run(main())
"""


def test_a_sandbox_ends_with_its_owner_however_that_ended() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "started\n"
    [sandbox] = psutil.Process(owner.pid).children()
    [inside] = sandbox.children()
    found = [sandbox, inside, wait_for_child(inside)]
    owner.kill()
    owner.wait()
    assert psutil.wait_procs(found, timeout=30)[1] == []


@needs("terminal")
async def test_a_machine_that_refuses_namespaces_runs_nothing_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roundhouse.environments.sandboxes.local.CHILD", CHILD.with_name("there_is_none.py"))
    with pytest.raises(SandboxUnavailable, match=r"environment\.sandbox\.kind to container"):
        await new_sandbox(CONFIG).start()
    with pytest.raises(ConfigError, match=r"environment\.sandbox\.kind is local: no sandbox works here"):
        check_sandboxes(environment_config("terminal", json.dumps({"problems": 40})))


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="becomes another user")
def test_without_root_it_is_confined_by_a_user_namespace(tmp_path: Path) -> None:
    """The same script as an ordinary user: it counts its own processes, and is nobody else there."""
    settings = {"memory_bytes": 2**28, "disk_bytes": 2**20, "directories": [], "processes": 10, "lifetime_seconds": 60}
    variables = {"PATH": "/usr/bin:/bin"}
    request = {"stdin": "", "seconds": 10, "output_bytes": 1000}
    command = "id -u; touch /usr/x; for n in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 60 & done"
    for name in ("sandbox_child.py", "sandboxes/local_child.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((CHILD.parents[1] / name).read_bytes())
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    script = str(tmp_path / "sandboxes/local_child.py")
    process = subprocess.Popen(
        ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "/usr/bin/python3", "-IS", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(settings | {"variables": variables}).encode() + b"\n")
    process.stdin.flush()
    if (locked := process.stdout.read(1)) != b"L":
        pytest.skip(f"this machine has no user namespaces for ordinary users ({locked!r})")
    process.stdin.write(json.dumps(request | {"arguments": ["sh", "-c", command]}).encode() + b"\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    output = base64.b64decode(answer["output"]).decode()
    assert output.startswith("1234\n")
    assert "Read-only file system" in output
    assert "Cannot fork" in output
    process.stdin.close()
    assert process.wait(30) == 0


def test_an_archive_that_is_none_has_no_files() -> None:
    assert regular_files(archive({"a": b"1"})) == {"a": b"1"}
    assert regular_files(b"\xff" * 2000) == {}
    assert regular_files(b"") == {}


@needs("terminal")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "firecracker"}, "local"),
        (
            {"kind": "local", "command_seconds": 60, "lifetime_seconds": 60},
            r"lifetime_seconds is 60, but one command may take",
        ),
        ({"kind": "local", "memory_mib": 1}, "greater than or equal to 64"),
        ({"kind": "local", "processes": 0}, "greater than or equal to 4"),
        ({"kind": "custom", "target": "nowhere:Box"}, "environment.sandbox.target: importing nowhere failed"),
        ({"kind": "custom", "target": "pathlib:Path"}, "Path, which is not of type Sandbox"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rollout(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sandboxes(environment_config("terminal", json.dumps({"problems": 40, "sandbox": keys})))
