import asyncio
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from roundhouse.environments import load, sandbox_child
from roundhouse.environments.sandbox import (
    CodeFailed,
    Limits,
    LockedPython,
    SandboxKilled,
    SandboxOverloaded,
    SandboxUnavailable,
)
from roundhouse.plugins.example_environments.code import Code, Exercise
from roundhouse.plugins.example_environments.section import CodeEnvironment
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Status
from tests.gym.collecting import collect
from tests.gym.environments.playing import judge, message
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, calls, rollout_config, says, turns_of

CODE = Code(problems=60)
EXERCISE = Exercise(("add 2 to each", "return the sum"), ("xs = [x + 2 for x in xs]", "return sum(xs)"))
ROW = CODE.row(EXERCISE)
BOX = LockedPython(concurrency=2, limits=Limits(cpu_seconds=1, wall_seconds=5))


@pytest.mark.parametrize(
    "reply",
    [
        "def f(xs):\n    return sum(xs) + 2 * len(xs)",
        "f = lambda xs: sum(x + 2 for x in xs)",
        "Here:\n```python\ndef f(xs): return sum(x + 2 for x in xs)\n```\nDone.",
        "import math\ndef f(xs):\n    print('looking')\n    return sum(map(lambda x: x + 2, xs))",
    ],
)
async def test_any_function_that_passes_all_hidden_tests_is_rewarded(reply: str) -> None:
    assert (await judge(CODE, ROW, message(reply))).reward == 1.0


async def test_parts_of_the_tests_earn_parts_of_the_reward() -> None:
    only_empty = await judge(CODE, ROW, message("def f(xs): return 0"))
    assert only_empty.reward_components["runs"] == 0.1
    assert 0 < only_empty.reward_components["passed"] < 0.4
    assert only_empty.reward_components["all"] == 0.0


@pytest.mark.parametrize(
    "reply", ["", "no code", "def g(xs): return 1", "raise SystemExit", "while True: pass", "x" * 30_000]
)
async def test_what_defines_no_function_earns_nothing(reply: str) -> None:
    assert (await judge(CODE, ROW, message(reply))).reward == 0.0


async def test_values_of_another_type_do_not_pass() -> None:
    assert await BOX.call("def f(x): return x", "f", [[1], [1.0], [True], [(1,)], [None]]) == [
        "1",
        "1.0",
        "true",
        "[1]",
        "null",
    ]
    assert await BOX.call("def f(x): return {x}", "f", [[1]]) == [None]
    verdict = await judge(CODE, ROW, message("def f(xs): return float(sum(x + 2 for x in xs))"))
    assert verdict.reward == 0.1


async def test_the_tool_compares_on_two_examples_and_no_more() -> None:
    shown = await CODE.tools()["check"].call(await CODE.seed_session(ROW), "def f(xs): return 1")
    assert len(shown.split("\n")) == 2
    assert shown.startswith(f"f({ROW['tests'][0][0]}) = 1, expected ")
    assert await CODE.tools()["check"].call(await CODE.seed_session(ROW), "def f(xs): return 1/0") != shown
    assert (await CODE.tools()["check"].call(await CODE.seed_session(ROW), "def f(")) == "error: SyntaxError"


ATTEMPT = """
import os, ctypes, resource
libc = ctypes.CDLL(None, use_errno=True)
def denied(result):
    if result == -1 and ctypes.get_errno() == 1:
        raise PermissionError
def f():
    try:
        {}
    except PermissionError:
        return "denied"
    return "escaped"
"""
ESCAPES = {
    "read a file": "open('/etc/passwd').read()",
    "read how it is judged": f"open({sandbox_child.__file__!r}).read()",
    "read its own command line": "open('/proc/self/cmdline').read()",
    "list files": "os.listdir('/')",
    "write a file": "open('/tmp/escaped', 'w')",
    "fork": "os.fork()",
    "start a program": "os.execv('/bin/sh', ['sh'])",
    "spawn a program": "os.posix_spawn('/bin/sh', ['sh'], {})",
    "signal the parent": "os.kill(os.getppid(), 0)",
    "signal its group": "os.killpg(0, 0)",
    "open a socket": "denied(libc.socket(2, 1, 0))",
    "attach to the parent": "denied(libc.ptrace(16, os.getppid(), 0, 0))",
    "raise its limits": "denied(libc.prlimit(0, 0, ctypes.create_string_buffer(16), None))",
    "lift the filter": "denied(libc.prctl(38, 0, 0, 0, 0))",
}


@pytest.mark.parametrize("attempt", ESCAPES.values(), ids=ESCAPES)
async def test_locked_code_cannot(attempt: str) -> None:
    """Modules that the sandbox itself has loaded are importable, but their system calls are blocked."""
    assert await BOX.call(ATTEMPT.format(attempt), "f", [[]]) == ['"denied"']


async def test_locked_code_starts_no_thread() -> None:
    code = "import _thread\ndef f():\n  try: _thread.start_new_thread(print, ())\n  except RuntimeError as e: return str(e)"
    assert await BOX.call(code, "f", [[]]) == ['"can\'t start new thread"']


async def test_locked_code_sees_an_empty_environment() -> None:
    code = "import os\ndef f(): return [k for k in os.environ if k not in ('LC_CTYPE',)]"
    assert await BOX.call(code, "f", [[]]) == ["[]"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("\n  while True: pass", "time"),
        ("return 'a' * 10**6", "output"),
        ("import os; os._exit(0)", "crash"),
        ("import ctypes; ctypes.string_at(0)", "crash"),
        ("import os; os.write(1, b'[1]'); os._exit(0)", "crash"),
    ],
)
async def test_limits_end_the_process_and_say_which(body: str, why: str) -> None:
    with pytest.raises(CodeFailed, match=f"^{why}$"):
        await BOX.call(f"def f(x): {body}", "f", [[1], [2]])


async def test_memory_beyond_the_limit_is_an_error_of_the_code() -> None:
    assert await BOX.call("def f(x): return len(bytearray(10**9))", "f", [[1]]) == [None]


async def test_code_may_import_what_is_listed_and_no_other_module_of_a_file() -> None:
    code = f"import {', '.join(sandbox_child.IMPORTABLE)}\ndef f(x): return math.floor(x)"
    assert await BOX.call(code, "f", [[1.5]]) == ["1"]
    with pytest.raises(CodeFailed, match=r"^ModuleNotFoundError$"):
        await BOX.call("import csv\ndef f(x): return x", "f", [[1]])


DEADLOCK = "import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()"
EXIT = f"import os\nos._exit({sandbox_child.NO_LOCK})"


@pytest.mark.parametrize("code", [DEADLOCK, EXIT, "import os\nos.write(1, b'L')\nos._exit(71)"])
async def test_code_that_waits_or_exits_with_the_status_of_a_machine_without_a_lock_has_failed_itself(
    code: str,
) -> None:
    with pytest.raises(CodeFailed, match=r"^crash$"):
        await BOX.call(code, "f", [[1]])
    assert await BOX.call("import time\ndef f(x): time.sleep(60)", "f", [[1]]) == [None]


async def test_no_rollout_is_lost_to_code_that_imitates_a_failure_of_the_machine() -> None:
    """Such rollouts had no reward, were retried, and stopped the collection: "the last 8 rollouts all failed"."""

    def script(messages: list[dict[str, Any]], seed: int) -> Reply:
        attempt = EXIT if seed % 2 else DEADLOCK
        return says(attempt) if turns_of(messages) or seed % 4 < 2 else calls(("check", {"code": attempt}))

    policy = ScriptedPolicy(script)
    specs = plan_rollouts(CODE.tasks("train")[:4], 4, seed=1, iteration=0)
    rollouts = await collect(specs, policy, LocalEnvironmentClient(CODE), rollout_config(concurrency=8), SAMPLING)
    assert [(each.status, each.reward, each.failure_code) for each in rollouts] == [(Status.COMPLETED, 0.0, "")] * 16
    assert len({seed % 4 for seed in policy.seeds}) == 4


def test_right_code_earns_its_reward_while_no_file_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/there/is/no/such/directory")
    monkeypatch.setenv("TMPDIR", "/there/is/no/such/directory")
    assert BOX.call_blocking("def f(x): return x", "f", [[1]]) == ["1"]


ON_A_FILLING_DISK = """
set -e
mkdir -p {directory} && mount -t tmpfs -o size=64k none {directory}
TMPDIR={directory} exec {python} - {directory} <<'END'
import os, sys
from roundhouse.environments.sandbox import LockedPython

box = LockedPython(1)
with open(sys.argv[1] + "/filler", "wb", buffering=0) as filler:
    for pages in (13, 14, 15, 16):
        os.ftruncate(filler.fileno(), 0)
        filler.seek(0)
        try:
            filler.write(b"x" * 4096 * pages)
        except OSError:
            pass
        print(box.call_blocking("def f(x): return x + 1", "f", [[1]]))
END
"""


MAY_MOUNT = subprocess.run(["unshare", "-rm", "true"], stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.skipif(not MAY_MOUNT, reason="a small disk needs user namespaces")
def test_right_code_passes_however_few_pages_the_disk_of_temporary_files_has_left(tmp_path: Path) -> None:
    """With one page left, the request fitted and the answer did not: correct code had reward 0."""
    command = ON_A_FILLING_DISK.format(directory=tmp_path / "small", python=sys.executable)
    run = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True)
    assert (run.stdout.split("\n"), run.stderr) == (["['2']"] * 4 + [""], "")


def test_a_process_that_is_killed_from_outside_gives_no_verdict_on_its_code() -> None:
    """As by the kernel's out-of-memory killer. The code is within its limits and may be right."""
    box = LockedPython(concurrency=1, limits=Limits(cpu_seconds=60))
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(box.call_blocking, "while True: pass", "f", [[1]])
        _locked_child().kill()
        with pytest.raises(SandboxKilled, match="memory"):
            call.result()


def test_a_process_that_gets_no_cpu_time_gives_no_verdict_on_its_code() -> None:
    box = LockedPython(concurrency=1, limits=Limits(cpu_seconds=60, wall_seconds=1.0))
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(box.call_blocking, "while True: pass", "f", [[1]])
        _child().suspend()
        with pytest.raises(SandboxOverloaded, match=r"environment\.concurrency"):
            call.result()
    assert _children() == []


def test_code_that_never_ends_cannot_keep_all_cores_from_the_rest_of_its_sandbox() -> None:
    """A hundred endless programs at once on two cores get 0.3 s of CPU time in 15 s: each would be a failure of the machine."""
    assert LockedPython(concurrency=10_000)._threads._max_workers == os.cpu_count()


@pytest.mark.parametrize("interpreter", ["/bin/false", "/there/is/no/such/program"])
def test_an_interpreter_that_does_not_start_is_a_failure_of_the_machine(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    with pytest.raises(SandboxUnavailable):
        BOX.call_blocking("def f(x): return x", "f", [[1]])


async def test_a_result_whose_keys_are_no_text_equals_none_that_json_can_write() -> None:
    code = "def f(x): return {1: {1: 2, '1': 3}, 2: [{1: 2}], 3: {'1': 2}}[x]"
    assert await BOX.call(code, "f", [[1], [2], [3]]) == [None, None, '{"1": 2}']


def _children() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if "sandbox_child" in " ".join(_command(child))]


def _child() -> psutil.Process:
    while not (found := _children()):
        time.sleep(0.005)
    return found[0]


def _locked_child() -> psutil.Process:
    """The one child, once its filter is on."""
    child = _child()
    while "Seccomp:\t2" not in Path(f"/proc/{child.pid}/status").read_text():
        time.sleep(0.005)
    return child


async def test_the_event_loop_goes_on_and_no_more_than_the_allowed_processes_run_at_once() -> None:
    box = LockedPython(concurrency=2, limits=Limits(wall_seconds=20))
    calls = [asyncio.create_task(box.call("def f(x): return x + 0 * sum(range(10**6))", "f", [[n]])) for n in range(5)]
    most = looks = 0
    while not all(call.done() for call in calls):
        children = psutil.Process(os.getpid()).children()
        most = max(most, sum("sandbox_child" in " ".join(_command(child)) for child in children))
        looks += 1
        await asyncio.sleep(0.02)
    assert [await call for call in calls] == [[str(n)] for n in range(5)]
    assert 1 <= most <= 2
    assert looks > 3, "a call that blocks the loop lets it look before and after all five"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_no_more_processes_run_answers_at_once_than_are_allowed() -> None:
    environment = load(CodeEnvironment(kind="code", problems=40, concurrency=1))
    assert environment._sandbox._threads._max_workers == 1
