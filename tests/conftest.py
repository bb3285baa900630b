"""Shared fixtures. `OMP_NUM_THREADS=1` keeps two cores useful: more threads make every CPU engine slower here."""

import functools
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from tests.ports import free_port, listens
from tests.waiting import until

# The suite draws the same examples every time, so that its verdict is about the change; `explore` looks for new ones.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

# A request without a client reads the certificates of all authorities, 0.05 s of CPU, and tests that wait for a server ask it
# twenty times a second. Their servers speak plain HTTP.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

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
    "engines of one nursery": (
        "generation/test_own_backend",
        "generation/test_sleep",
        "generation/test_standalone",
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


APART = {"tests/benchmarks/test_commands.py", "tests/replay/test_bisect.py"}
"""Files of long tests that share no fixture: as one piece of work they would keep one worker busy when the others are done."""


class ByService(LoadScopeScheduling):
    """A worker takes a file at a time, or files that share a service, or one test, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if file in APART else GROUPS.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByService:
    config.option.loadscopereorder = False
    return ByService(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers run side by side: the slowest files first."""
    if hasattr(config, "workerinput"):
        rank = {file: place for place, file in enumerate(SLOWEST)}
        items.sort(key=lambda item: rank.get(item.nodeid.split("::", 1)[0], len(rank)))


def pytest_collection() -> None:
    """Nothing of what is imported goes away again: half a million objects that need not be looked through."""
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
    """URI of a store in a bucket of its own."""
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
