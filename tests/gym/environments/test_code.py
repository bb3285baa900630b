import asyncio
import os
import time

import psutil
import pytest
from playing import judge, message

from roundhouse.gym.environments import sandbox_child
from roundhouse.gym.environments.code import Code, Exercise
from roundhouse.gym.environments.sandbox import CodeFailed, Limits, Sandbox, SandboxOverloaded

CODE = Code(problems=60)
EXERCISE = Exercise(("add 2 to each", "return the sum"), ("xs = [x + 2 for x in xs]", "return sum(xs)"))
ROW = CODE.row(EXERCISE)
BOX = Sandbox(concurrency=2, limits=Limits(cpu_seconds=1, wall_seconds=5))


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
    """Modules that the sandbox itself has loaded stay within reach; what they would do does not."""
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


DEADLOCK = "import _thread\ndef f(x):\n  lock = _thread.allocate_lock()\n  lock.acquire()\n  lock.acquire()"


async def test_what_waits_without_using_cpu_is_killed_at_the_wall_limit_and_is_no_verdict() -> None:
    box = Sandbox(limits=Limits(wall_seconds=1.0))
    with pytest.raises(SandboxOverloaded, match=r"environment\.concurrency"):
        await box.call(DEADLOCK, "f", [[1]])
    children = psutil.Process(os.getpid()).children(recursive=True)
    assert not [child for child in children if "sandbox_child" in " ".join(_command(child))]
    assert await BOX.call("import time\ndef f(x): time.sleep(60)", "f", [[1]]) == [None]


async def test_the_event_loop_goes_on_and_no_more_than_the_allowed_processes_run_at_once() -> None:
    box = Sandbox(concurrency=2, limits=Limits(wall_seconds=20))
    calls = [asyncio.create_task(box.call("def f(x): return x + 0 * sum(range(10**6))", "f", [[n]])) for n in range(5)]
    most = 0
    begun = time.thread_time()
    while not all(call.done() for call in calls):
        children = psutil.Process(os.getpid()).children()
        most = max(most, sum("sandbox_child" in " ".join(_command(child)) for child in children))
        await asyncio.sleep(0.02)
    assert [await call for call in calls] == [[str(n)] for n in range(5)]
    assert 1 <= most <= 2
    assert time.thread_time() - begun < 2


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
