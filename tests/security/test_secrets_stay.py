"""A real run with secrets in every possible place, and a search of everything that it leaves."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import s3fs

from roundhouse.config.models import CalculatorEnvironment, WarmStartPolicy
from roundhouse.environments import load
from roundhouse.infra import services
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.store.location import Location
from roundhouse.store.run import load_run
from tests.chaos.stand import Stand, stand
from tests.security.test_no_pickle import pickles

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "ROUNDHOUSE_ENGINE_TOKEN",
    "ROUNDHOUSE_TRAIN_TOKEN",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "CANARY_JUDGE",
)
CANARIES = {name: f"canary{index}{uuid.uuid4().hex}" for index, name in enumerate((*VARIABLES, "MLFLOW_TRACKING_URI"))}


class CommandLines(threading.Thread):
    """Looks at every process of this machine, over and over, for a canary in its command line."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen = 0
        self.found: set[str] = set()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.3):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    self.seen += 1
                    self.found |= {name for name, canary in CANARIES.items() if canary in line}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[tuple[Stand, CommandLines]]:
    """A finished run of one iteration on S3, tracked, and its search of command lines."""
    directory = tmp_path_factory.mktemp("secrets")
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket="secrets")
    before = dict(os.environ)
    os.environ.update({name: CANARIES[name] for name in VARIABLES})
    s3fs.S3FileSystem.clear_instance_cache()
    make_starting_policy(WarmStartPolicy(steps=20), load(CalculatorEnvironment()), 0, directory / "policy")
    watch = CommandLines()
    watch.start()
    try:
        with stand(directory, iterations=1, tracked=True, store="s3://secrets/store") as built:
            running = services.status(built.state / "services")
            CANARIES["PREFECT_API_AUTH_STRING"] = running.prefect_auth_string
            mlflow = running.mlflow_url
            os.environ["MLFLOW_TRACKING_URI"] = mlflow.replace("://", f"://me:{CANARIES['MLFLOW_TRACKING_URI']}@")
            judged = {
                "kind": "custom",
                "target": "tests.security.judged:Judged",
                "parameters": {"api_key": {"variable": "CANARY_JUDGE"}},
            }
            root = str(Path(__file__).resolve().parents[2])
            few = {"prompts_per_iteration": 2, "group_size": 2, "max_failed_fraction": 0}
            configuration = built.configuration("played", environment=judged, rollout=few)
            flow = built.train(configuration, {"PYTHONPATH": root})
            assert flow.wait(600) == 0, (directory / "played.log").read_text()[-3000:]
            os.environ["ROUNDHOUSE_ENGINE_TOKEN"] = "wrong"
            refused = built.train(built.configuration("refused", environment=judged), {"PYTHONPATH": root})
            assert refused.wait(300) != 0
            yield built, watch
    finally:
        watch.done.set()
        watch.join(10)
        os.environ.clear()
        os.environ.update(before)
        s3fs.S3FileSystem.clear_instance_cache()


def traces(data: bytes) -> list[str]:
    """Names of the secrets that these bytes hold, plain or in a usual coding."""
    found = []
    for name, canary in CANARIES.items():
        plain = canary.encode()
        codings = {plain, base64.b64encode(plain).rstrip(b"="), urllib.parse.quote(canary).encode(), plain[::-1]}
        if any(each in data for each in codings):
            found.append(name)
    return found


def test_the_run_used_its_secrets_and_left_none_behind(played: tuple[Stand, CommandLines]) -> None:
    built, watch = played
    store = Location("s3://secrets/store")
    names = store.tree()
    assert len(names) > 20
    assert {name: found for name in names if (found := traces(store.read(name)))} == {}
    files = [path for path in built.directory.rglob("*") if path.is_file()]
    kinds = {path.name for path in files}
    assert {"mlflow.db", "prefect.db", "played.log", "engine.log"} <= kinds, kinds
    # What the services ask for lies in files of theirs, readable by their owner; the rest lies nowhere.
    found = {path: traces(path.read_bytes()) for path in files}
    own = {
        built.state / "services" / name: ["PREFECT_API_AUTH_STRING"] for name in ("prefect_auth_string", "prefect.html")
    }
    assert {path: names for path, names in found.items() if names} == own
    assert {path.stat().st_mode & 0o077 for path in own} == {0}
    assert watch.seen > 100
    assert watch.found == set()
    run = load_run("s3://secrets/store", "played")
    assert run.summary() is not None
    assert run.config.environment.model_dump()["parameters"] == {"api_key": {"variable": "CANARY_JUDGE"}}


def test_a_refused_token_is_told_without_either_token(played: tuple[Stand, CommandLines]) -> None:
    log = (played[0].directory / "refused.log").read_text()
    assert "ROUNDHOUSE_ENGINE_TOKEN" in log
    assert "Bearer" not in log


def test_a_link_to_the_tracking_server_is_shown_without_its_password(played: tuple[Stand, CommandLines]) -> None:
    summary = load_run("s3://secrets/store", "played").summary()
    assert summary is not None
    assert "://****@127.0.0.1" in summary["mlflow_url"]


def test_the_run_left_no_pickle(played: tuple[Stand, CommandLines], tmp_path: Path) -> None:
    store = Location("s3://secrets/store")
    for name in store.tree():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.read(name))
    assert pickles(tmp_path) == []
    assert pickles(played[0].directory) == []


def test_the_search_finds_a_planted_secret() -> None:
    canary = CANARIES["CANARY_JUDGE"]
    assert traces(f"a {canary} b".encode()) == ["CANARY_JUDGE"]
    assert traces(base64.b64encode(canary.encode())) == ["CANARY_JUDGE"]
    assert traces(b"nothing") == []
