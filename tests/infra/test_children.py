"""A group of child processes lives and ends together."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from roundhouse.infra.processes import Child, Children
from tests.waiting import until

pytestmark = pytest.mark.real

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
elsewhere, unmarked = subprocess.Popen(sleep, start_new_session=True), subprocess.Popen(sleep, env={})
print(elsewhere.pid, unmarked.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import sys, time
from pathlib import Path
from roundhouse.infra.processes import Children
children = Children(Path(sys.argv[1]))
import os
child = children.start("stubborn", [sys.executable, "-c", sys.argv[2]], Path.cwd(), dict(os.environ))
print(child.process.pid, flush=True)
time.sleep(600)
"""


def python(children: Children, name: str, code: str) -> Child:
    return children.start(name, [sys.executable, "-c", code], Path.cwd(), dict(os.environ))


def numbers(log: Path) -> list[int]:
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    return [int(number) for number in log.read_text().split()]


def gone(pids: list[int]) -> bool:
    until(lambda: not any(alive(pid) for pid in pids))
    return True


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_that_ends_is_told_with_its_exit_code_and_the_end_of_its_log(tmp_path):
    children = Children(tmp_path / "logs")
    python(children, "fails", "import sys; print('the reason'); sys.exit(3)")
    python(children, "lives", "import time; time.sleep(600)")
    until(lambda: children.ended())
    (dead,) = children.ended()
    assert (dead.name, dead.process.returncode, dead.tail()) == ("fails", 3, "the reason")
    assert asyncio.run(children.close()) == []


def test_close_ends_one_that_ignores_sigterm_and_what_it_started(tmp_path):
    children = Children(tmp_path, grace_seconds=0.5)
    child = python(children, "stubborn", STUBBORN)
    grandchildren = numbers(child.log)
    assert asyncio.run(children.close()) == []
    assert gone([child.process.pid, *grandchildren])


def test_close_ends_groups_in_the_given_order(tmp_path):
    says_when = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print(time.monotonic()), sys.exit()))\n"
    )
    children = Children(tmp_path)
    for name in ("first", "second", "third"):
        python(children, name, says_when + "print('up', flush=True)\ntime.sleep(600)")
    until(lambda: all("up" in child.log.read_text() for child in children.all))
    asyncio.run(children.close([["second", "unknown"], ["first"]]))
    ended = {name: float((tmp_path / f"{name}.log").read_text().split()[1]) for name in ("first", "second", "third")}
    assert ended["second"] < ended["first"] < ended["third"]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word on a parent's death")
def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), STUBBORN], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    grandchildren = numbers(tmp_path / "stubborn.log")
    assert alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    assert gone([child, *grandchildren])
