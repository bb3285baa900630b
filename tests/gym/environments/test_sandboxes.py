"""The contract of a sandbox that runs commands, for each kind."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from pydantic import ValidationError

from roundhouse.config.sandboxes import LocalSandbox, SandboxLimits
from roundhouse.environments.sandbox import SandboxKilled
from roundhouse.environments.sandboxed import shown
from roundhouse.environments.sandboxes import CommandResult, FilesRefused, Sandbox, new_sandbox


async def started(config: SandboxLimits, **changes: Any) -> Sandbox:
    sandbox = new_sandbox(config.model_copy(update=changes))
    await sandbox.start()
    return sandbox


async def test_files_go_in_are_changed_by_commands_and_come_out(sandbox: Sandbox) -> None:
    await sandbox.write_files({"notes/a.txt": b"two\none\n", "b": b"\xff\0"})
    assert await sandbox.run("sort notes/a.txt | tee c; exit 3") == CommandResult(3, "one\ntwo\n")
    assert await sandbox.run("mkfifo pipe; ln -s /bin/sh link") == CommandResult(0, "")
    assert await sandbox.read_files() == {"notes/a.txt": b"two\none\n", "b": b"\xff\0", "c": b"one\ntwo\n"}


async def test_a_path_outside_of_the_working_directory_is_refused(sandbox: Sandbox) -> None:
    for path in ("/etc/x", "../x", "a/../../x", "", "a\0b"):
        with pytest.raises(FilesRefused, match="not a path in the working directory"):
            await sandbox.write_files({path: b""})


async def test_further_directories_are_empty_and_writable_and_others_are_not(config: SandboxLimits) -> None:
    sandbox = await started(config, directories=("/app/part", "/app", "/root/x"))
    command = "ls -A /app/part; cd /app/part && echo x > a && mkdir /app/b /root/x/c && cat /app/part/a; touch /root/y"
    assert (await sandbox.run(command)).output.splitlines()[0] == "x"
    assert (await sandbox.run("ls /app /app/part; touch /root/y /y 2>/dev/null")) == CommandResult(
        1, "/app:\nb\npart\n\n/app/part:\na\n"
    )
    await sandbox.close()


@pytest.mark.parametrize(
    "path", ["/", "app", "/app/", "/app/../usr", "/usr/share/x", "/tmp/x", "/app:exec", "/a,b", "/a b"]
)
def test_a_further_directory_of_the_system_or_with_another_name_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="directories"):
        LocalSandbox(directories=(path,))


async def test_two_sandboxes_share_no_file(config: SandboxLimits, sandbox: Sandbox) -> None:
    other = await started(config)
    await sandbox.run("echo x > file; echo x > /tmp/file")
    assert await other.run("ls . /tmp") == CommandResult(0, ".:\n\n/tmp:\n")
    await other.close()


@pytest.mark.parametrize(
    ("command", "last_shown"),
    [
        ("printf x; yes | tr -d '\\n'", "xy{999}\nkilled: it reached its output limit"),
        ("for n in $(seq 30); do sleep 9 & done", "an't fork.*|Cannot fork\nexit status 2"),
        # Python refuses a value beyond the limit; the shell of a container grows one until it is killed
        (
            "if command -v python3 >/dev/null; then python3 -c 'bytearray(300 << 20)' 2>&1 | tail -1; "
            "else text=x; while :; do text=$text$text; done; fi",
            "MemoryError|exit status 137",
        ),
        ("head -c 20M /dev/zero > big; wc -c < big", "(File too large|No space left on device)\n8388608"),
        ("head -c 8M /dev/zero > big; head -c 9 /dev/zero > more", "No space left on device\nexit status 1"),
    ],
    ids=["output_bytes", "processes", "memory_mib", "disk_mib", "disk_mib of two files"],
)
async def test_a_limit_that_is_reached_is_a_result_and_the_sandbox_goes_on(
    sandbox: Sandbox, command: str, last_shown: str
) -> None:
    assert re.search(f"({last_shown})$", shown(await sandbox.run(command)), re.DOTALL)
    assert await sandbox.run("echo fine") == CommandResult(0, "fine\n")


async def test_a_command_that_waits_is_killed_at_its_time_limit(config: SandboxLimits) -> None:
    sandbox = await started(config, command_seconds=0.3 if isinstance(config, LocalSandbox) else 2)
    waited = await sandbox.run("echo begun; sleep 5")
    assert (waited.output, waited.timed_out, waited.truncated) == ("begun\n", True, False)
    assert shown(await sandbox.run("exec 1>&- 2>&-; sleep 5")) == "killed: it reached its time limit"
    await sandbox.close()


async def test_a_sandbox_ends_when_its_lifetime_is_over(config: SandboxLimits) -> None:
    sandbox = await started(config, lifetime_seconds=1.0)

    async def work() -> None:
        while True:
            await sandbox.run("sleep 0.1")

    with pytest.raises(SandboxKilled, match="lifetime_seconds"):
        await asyncio.wait_for(work(), 30)
    await sandbox.close()
