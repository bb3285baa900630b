"""Guarantees of the supervision, on the quickest real service and its real supervisor."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from roundhouse.errors import InfraError
from roundhouse.infra import lease_client, services
from roundhouse.infra.services import Services, local_services
from roundhouse.infra.state import RunningServices, ServiceRecord, StateDirectory, WantedServices
from roundhouse.store import process_identity

pytestmark = pytest.mark.real

GYM = {"gym": ["--environment", "calculator"]}
Remaining = Callable[[Path], list[psutil.Process]]


def up(path: Path, **options: object) -> Services:
    return services.up(path, ["gym"], arguments=GYM, **options)  # type: ignore[arg-type]


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code < 500
    except httpx.HTTPError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


@contextmanager
def another_process(path: Path, *, keep_alive: str = "time.sleep(600)") -> Iterator[subprocess.Popen[str]]:
    """A process that owns the services of `path`, as a run does."""
    code = (
        "import time\nfrom roundhouse.infra.services import local_services\n"
        f"with local_services({str(path)!r}, ['gym'], arguments={GYM!r}, keep=['gym']) as s:\n"
        f"    print('up', flush=True)\n    {keep_alive}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_second_up_returns_the_same_process_and_down_leaves_none(state_dir: Path, remaining: Remaining) -> None:
    first = up(state_dir)
    second = up(state_dir)
    assert answers(first.gym_url)
    assert second.records["gym"].pid == first.records["gym"].pid
    assert services.down(state_dir) == ["gym"]
    assert remaining(state_dir) == []
    assert not StateDirectory(state_dir).supervised()
    assert services.down(state_dir) == []


def test_a_service_keeps_its_address_from_start_to_start(state_dir: Path) -> None:
    address = up(state_dir).gym_url
    services.down(state_dir)
    assert up(state_dir).gym_url == address


def test_a_crashed_service_comes_back_at_the_same_address(state_dir: Path) -> None:
    before = up(state_dir)
    os.kill(before.records["gym"].pid, signal.SIGKILL)
    assert eventually(lambda: services.status(state_dir).records["gym"].restarts == 1)
    assert eventually(lambda: services.status(state_dir).is_ready("gym"))
    after = services.status(state_dir)
    assert after.gym_url == before.gym_url
    assert after.records["gym"].pid != before.records["gym"].pid
    assert answers(after.gym_url)
    assert "exit code -9" in after.records["gym"].detail


def test_an_owner_killed_outright_takes_its_services_with_it(state_dir: Path, remaining: Remaining) -> None:
    with another_process(state_dir) as owner:
        assert answers(services.status(state_dir).gym_url)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert eventually(lambda: not StateDirectory(state_dir).supervised(), seconds=15)
        assert remaining(state_dir) == []


def test_an_interrupted_owner_ends_its_services_and_a_finished_one_keeps_the_pages(
    state_dir: Path, remaining: Remaining
) -> None:
    with another_process(state_dir, keep_alive="pass") as finished:
        assert finished.wait(timeout=30) == 0
    kept = services.status(state_dir)
    assert answers(kept.gym_url)
    with another_process(state_dir) as interrupted:
        assert services.status(state_dir).records["gym"].pid == kept.records["gym"].pid
        interrupted.send_signal(signal.SIGINT)
        interrupted.wait(timeout=90)
    assert remaining(state_dir) == []
    assert not StateDirectory(state_dir).supervised()


def test_a_run_ends_only_what_nobody_else_holds(state_dir: Path) -> None:
    by_a_person = up(state_dir)
    with pytest.raises(ZeroDivisionError), local_services(state_dir, ["gym"], arguments=GYM):
        raise ZeroDivisionError
    assert services.status(state_dir).records["gym"].pid == by_a_person.records["gym"].pid
    assert answers(by_a_person.gym_url)


def test_a_killed_supervisor_leaves_nothing_that_the_next_up_cannot_clear(
    state_dir: Path, remaining: Remaining
) -> None:
    before = up(state_dir)
    os.kill(before.state.running().supervisor_pid, signal.SIGKILL)
    assert eventually(lambda: not before.state.supervised())
    assert not services.status(state_dir).is_ready("gym")
    after = up(state_dir)
    assert answers(after.gym_url)
    assert len({process.pid for process in remaining(state_dir)} & {before.records["gym"].pid}) == 0


def test_down_finds_the_orphans_of_a_killed_supervisor(state_dir: Path, remaining: Remaining) -> None:
    running = up(state_dir)
    orphan = running.records["gym"].pid
    os.kill(orphan, signal.SIGSTOP)  # it cannot follow the signal of its supervisor's death
    os.kill(running.state.running().supervisor_pid, signal.SIGKILL)
    assert eventually(lambda: not running.state.supervised())
    assert [process.pid for process in remaining(state_dir)] == [orphan]
    services.down(state_dir)
    assert remaining(state_dir) == []


def test_two_that_start_at_once_share_one_service(state_dir: Path, remaining: Remaining) -> None:
    with another_process(state_dir), another_process(state_dir):
        assert len(remaining(state_dir)) == 1


@pytest.mark.parametrize("ending", ["gym", "mlflow"])
def test_who_waits_for_the_end_of_a_service_leaves_what_others_want(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """`gym` was leased again meanwhile; `mlflow` is ended by no supervisor, since that one hangs."""
    monkeypatch.setattr(lease_client, "STOP_SECONDS", 0.3)
    running = up(state_dir)
    known = running.state.running()
    os.kill(known.supervisor_pid, signal.SIGSTOP)
    known.services["mlflow"] = ServiceRecord("mlflow", "ready")
    running.state.write_running(known)
    try:
        lease_client.await_ended(running.state, [ending])
    finally:
        os.kill(known.supervisor_pid, signal.SIGCONT)
    assert answers(running.gym_url)
    assert up(state_dir).records["gym"].pid == running.records["gym"].pid


def test_who_wants_other_arguments_does_not_get_a_service_that_is_about_to_end(state_dir: Path) -> None:
    before = up(state_dir)
    supervisor = before.state.running().supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)  # it does not see that nobody wants the service before the next asks
    with before.state.lock():
        before.state.write_wanted(WantedServices(before.state.wanted().revision))
    threading.Timer(0.5, os.kill, (supervisor, signal.SIGCONT)).start()
    after = services.up(state_dir, ["gym"], arguments={"gym": ["--environment", "sort"]}).records["gym"]
    assert after.pid != before.records["gym"].pid
    assert psutil.Process(after.pid).cmdline()[-1] == "sort"


def test_a_port_in_use_is_refused_with_its_owner_and_a_remedy(state_dir: Path, remaining: Remaining) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InfraError, match=rf"Port {port}.*gym, is in use by process {os.getpid()} .*choose another"):
            up(state_dir, ports={"gym": port})
    assert remaining(state_dir) == []
    assert up(state_dir, ports={"gym": port}).gym_url == f"http://127.0.0.1:{port}"
    with pytest.raises(InfraError, match=r"already runs .*roundhouse down"):
        up(state_dir, ports={"gym": port + 1})


@pytest.mark.parametrize("arguments", [[], ["--environment", "echo"]])
def test_who_wants_other_arguments_than_a_run_that_uses_the_service_is_refused(
    state_dir: Path, arguments: list[str]
) -> None:
    with another_process(state_dir):
        with pytest.raises(
            InfraError, match=rf"already runs with .*, not {re.escape(str(arguments))}.*roundhouse down"
        ):
            services.up(state_dir, ["gym"], arguments={"gym": arguments}, owner=os.getpid())
        assert services.up(state_dir, ["gym"]).records["gym"].arguments == GYM["gym"], "it joins what runs"


def test_who_asks_for_no_arguments_joins_what_a_person_started(state_dir: Path) -> None:
    by_a_person = up(state_dir)
    with local_services(state_dir, ["gym"], arguments={"gym": []}) as joined:
        assert joined.records["gym"].pid == by_a_person.records["gym"].pid
    os.kill(by_a_person.state.running().supervisor_pid, signal.SIGKILL)
    assert services.up(state_dir, ["gym"], arguments={"gym": []}).records["gym"].arguments == GYM["gym"]


def test_a_service_that_cannot_start_says_why_and_is_not_wanted_any_more(state_dir: Path, remaining: Remaining) -> None:
    with pytest.raises(InfraError) as caught:
        services.up(state_dir, ["gym"], arguments={"gym": ["--environment", "nonesuch"]})
    assert "gym did not start" in str(caught.value)
    assert "nonesuch" in str(caught.value)
    assert str(state_dir / "logs" / "gym.log") in str(caught.value)
    assert remaining(state_dir) == []
    assert StateDirectory(state_dir).wanted().services == {}
    assert answers(up(state_dir).gym_url)


def test_a_state_of_another_machine_harms_nobody(state_dir: Path) -> None:
    """Its process numbers belong to others here: to this very test, for one."""
    state = StateDirectory(state_dir)
    state.create()
    me = ServiceRecord(
        "gym", "ready", os.getpid(), os.getsid(0), process_identity.birth(os.getpid()) or 0, ports={"http": 1}
    )
    state.write_running(RunningServices(os.getpid(), "another boot", {"gym": me}))
    assert not services.status(state_dir).is_ready("gym")
    assert answers(up(state_dir).gym_url)
    services.down(state_dir)


def test_damaged_state_counts_as_none(state_dir: Path) -> None:
    state = StateDirectory(state_dir)
    state.create()
    (state_dir / "services.json").write_text('{"services": {"gym"')
    (state_dir / "wanted.json").write_text("")
    assert answers(up(state_dir).gym_url)


def test_what_runs_is_on_record_and_the_environment_is_not(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-caller")
    running = up(state_dir)
    record = json.loads((state_dir / "services.json").read_text())["services"]["gym"]
    assert record["pid"] == record["process_group"] == running.records["gym"].pid
    assert record["status"] == "ready"
    assert record["url"] == running.gym_url == f"http://127.0.0.1:{record['ports']['http']}"
    assert Path(record["log"]).read_text().count("--- started") == 1
    assert psutil.Process(record["pid"]).environ()["AWS_SECRET_ACCESS_KEY"] == "a-secret-of-the-caller"
    up(state_dir)  # one that starts nothing
    texts = [path.read_text() for path in state_dir.rglob("*") if path.is_file()]
    assert not any("a-secret-of-the-caller" in text for text in texts)


def test_up_does_not_take_a_service_that_hangs_for_a_running_one(state_dir: Path) -> None:
    running = up(state_dir)
    os.kill(running.records["gym"].pid, signal.SIGSTOP)
    with pytest.raises(InfraError, match=r"Not ready within 2 s \(infra.start_timeout_seconds\): gym"):
        up(state_dir, time_limit=2)
    os.kill(running.records["gym"].pid, signal.SIGCONT)
    assert up(state_dir).records["gym"].pid == running.records["gym"].pid


def test_nobody_waits_for_a_service_that_is_only_a_view(state_dir: Path) -> None:
    running = services.up(state_dir, ["mlflow"], unawaited=["mlflow"])
    assert not running.is_ready("mlflow"), "it takes seconds to start"
    assert running.environment()["MLFLOW_TRACKING_URI"] == running.mlflow_url
    assert running.mlflow_url == f"http://127.0.0.1:{running.records['mlflow'].ports['http']}"


def test_a_view_that_cannot_start_fails_nothing(state_dir: Path) -> None:
    broken = {**GYM, "mlflow": ["--no-such-option"]}
    running = services.up(state_dir, ["gym", "mlflow"], unawaited=["mlflow"], arguments=broken)
    assert answers(running.gym_url)
    assert eventually(lambda: services.status(state_dir).records["mlflow"].status == "failed", 120)
    again = services.up(state_dir, ["gym", "mlflow"], unawaited=["mlflow"], arguments=broken)
    assert answers(again.gym_url)


def test_an_unknown_service_or_port_is_refused(state_dir: Path) -> None:
    with pytest.raises(InfraError, match=r"No service is called 'mlfow'.*mlflow"):
        services.up(state_dir, ["mlfow"])
    with pytest.raises(InfraError, match=r"ray has no port 'dashbord'.*dashboard"):
        services.up(state_dir, ["ray"], ports={"ray.dashbord": 1})
