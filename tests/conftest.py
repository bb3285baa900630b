"""Shared fixtures. `OMP_NUM_THREADS=1` keeps two cores useful: more threads make every CPU engine slower here."""

import asyncio
import functools
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of models that tests load themselves

import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis
import pytest
import uvicorn
import uvicorn.server

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.store.directories import CACHE_VARIABLE
from tests import fork_server
from tests.ports import free_port, listens
from tests.waiting import until
from tests.workers import ForkedWorkers

# The suite draws the same examples every time, so that its verdict is about the change; `explore` looks for new ones.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

# A request without a client reads the certificates of all authorities, 0.05 s of CPU, and tests that wait for a server ask it
# twenty times a second. Their servers speak plain HTTP.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

# uvicorn looks ten times a second whether a server shall end, and pauses as long when it does. Hundreds of tests start one.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 5)})  # type: ignore[assignment]

# A shell that starts the suite in the background has it ignore SIGINT, and so would all commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = {
    "served deployments": (
        "flows/test_borders",
        "flows/test_cancel_trainer",
        "flows/test_deployments",
        "flows/test_failures",
        "flows/test_flow_run_page",
        "flows/test_gates",
        "flows/test_other_sites",
        "flows/test_own_stage",
        "flows/test_overlapped_controls",
        "flows/test_prefect_workarounds",
        "flows/test_run_form",
        "flows/test_schedules",
        "flows/test_train_offline",
        "flows/test_work_pool",
    ),
    "MLflow": ("tracking/test_notebook", "tracking/test_tracker"),
    "overlapped runs": (
        "asynchrony/test_finish",
        "asynchrony/test_mixture_run",
        "asynchrony/test_modes_in_runs",
        "asynchrony/test_overlapped_run",
        "asynchrony/test_own_judge_run",
        "asynchrony/test_shards_in_runs",
        "asynchrony/test_trainer_generates_run",
    ),
    "engines": (
        "generation/test_own_backend",
        "generation/test_sleep",
        "generation/test_standalone",
        "plugins/adapter/test_adapter",
        "plugins/test_refits",
        "stages/test_refit_transports",
        "stages/test_turns",
        "store/test_earlier_store",
    ),
    "vLLM on Serve": (
        "generation/test_adapter",
        "generation/test_chat",
        "generation/test_desired_state",
        "generation/test_refit",
        "generation/test_routing",
        "generation/test_start_failures",
    ),
}
"""Files that one worker runs after each other, since they use one costly fixture, by that fixture."""
GROUPS = {f"tests/{file}.py": group for group, files in SHARED.items() for file in files}

SLOWEST = [line for line in (Path(__file__).parent / "slowest.txt").read_text().splitlines() if line[:1] != "#"]
"""Files that are started first: a long file that is started last keeps one worker busy and the others idle."""


APART = {
    "tests/benchmarks/test_commands.py",
    "tests/config/test_every_key.py",
    "tests/plugins/lab/replays/test_bisect.py",
}
"""Files of long tests that share no fixture: as one piece of work they would keep one worker busy when the others are done."""


def group_of(nodeid: str) -> str:
    """Return the group of a test: its file, the service that its file shares with others, or itself."""
    file = nodeid.split("::", 1)[0]
    return nodeid if file in APART else GROUPS.get(file, file)


TIERS = {
    "quick": (
        "not contract and not nightly and not long and (not real or smoke)",
        "make test",
        "pure tests, and one smoke test for each real kind",
    ),
    "real": (
        "real and not smoke and not long and not nightly",
        "make test-real",
        "the other tests on real services and processes",
    ),
    "long": ("long", "make test-long", "stories of whole runs, kills, ranks"),
    "nightly": (
        "nightly",
        "make test-nightly",
        "every benchmark, make target, command and example, every planted cause, every key ignored",
    ),
    "contracts": ("contract", "make contracts", "foreign packages, each in an environment of its own"),
}
"""Marker expression, command and content of each tier; each test is in exactly one."""


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the tiers, with the selected one marked."""
    selected = config.option.markexpr
    lines = [
        f"{'>' if selected == expression else ' '} {command:<15} {content}"
        for expression, command, content in TIERS.values()
    ]
    kind = (
        "all tiers"
        if not selected
        else ""
        if any(selected == tier[0] for tier in TIERS.values())
        else f"-m {selected!r}"
    )
    return ["tiers:", *lines, *([f"> {kind}"] if kind else [])]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the CPU seconds of the run, and one line with everything that a missing service left untested."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(part.ru_utime + part.ru_stime for part in used)
    terminalreporter.write_line(f"CPU: {seconds:.0f} s in this process and the processes that it waited for")
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        texts = [f"{count} x {reason}" for reason, count in reasons.most_common()]
        terminalreporter.write_line(f"not tested here: {'; '.join(texts)}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="run the tests in this number of forked processes (0: in this one)"
    )
    parser.addoption("--minutes", type=float, help="skip the files that would be begun later than this")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers:
        config.pluginmanager.register(ForkedWorkers(config.option.workers, group_of))


BEGAN = time.monotonic()
BEGUN = pytest.StashKey[set[Path]]()
"""Files of which this process has run a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a file that would be begun after the limit. A story that is begun is run to its end."""
    minutes, begun = item.config.option.minutes, item.config.stash.setdefault(BEGUN, set())
    if minutes is not None and item.path not in begun and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip("no time left: make test-long has no limit")
    begun.add(item.path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork the server of the tests' programs before any test runs."""
    if session.config.option.collectonly or not session.items:
        return (yield)
    cache = tempfile.mkdtemp(prefix="rh-cache-")
    os.environ.setdefault(CACHE_VARIABLE, cache)  # a starting policy is made once for the suite
    if session.config.option.workers:
        RunConfig.model_json_schema()  # its explanations are parsed once, before the workers are forked
    try:
        with fork_server.suite_server():
            return (yield)
    finally:
        shutil.rmtree(cache)


COLLECTED = pytest.StashKey[set[str]]()
"""Ids of all collected tests, the deselected ones included."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest files first if workers run side by side. Refuse two smoke tests of one kind. Tests on S3 are real."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if "s3_server" in getattr(item, "fixturenames", ()) or values.get("store_uri") == "s3":
            item.add_marker(pytest.mark.real)
    kinds = Counter(marker.args[0] for item in items if (marker := item.get_closest_marker("smoke")))
    if repeated := [kind for kind, count in kinds.items() if count > 1]:
        raise pytest.UsageError(
            f"one smoke test a kind, so that `make test` stays quick; several: {', '.join(repeated)}"
        )
    if config.option.workers:
        rank = {file: place for place, file in enumerate(SLOWEST)}
        items.sort(key=lambda item: rank.get(item.nodeid.split("::", 1)[0], len(rank)))


def pytest_collection() -> None:
    """Freeze the imported objects: half a million that the garbage collector need not scan."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Neither does any test look through them; a tenth of the tests' own time went into that."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3 server (moto), with its credentials and endpoint in the environment."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        until(lambda: listens(port), f"a server on port {port}", process=process)
        yield settings["AWS_ENDPOINT_URL"]
    finally:
        process.terminate()
        process.wait(10)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@pytest.fixture(params=["file", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path) -> str:
    """An empty store: once on the file system, once in a bucket."""
    if request.param == "file":
        return f"file://{tmp_path}/store"

    return str(request.getfixturevalue("bucket"))


@pytest.fixture
def bucket(s3_server: str) -> str:
    """URI of a store in a separate bucket."""
    import s3fs

    name = f"rh-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=name)
    return f"s3://{name}/store"


@pytest.fixture
def run_config(tmp_path) -> RunConfig:
    """A small run on the file system."""
    return parse_config({"run_id": "test", "store": str(tmp_path / "store")})


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of one node, which this process has joined."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
