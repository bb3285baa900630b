"""Everything that a run needs, as processes that can be killed one by one and come back: the stand on which chaos is made.

Invariant: the engine is deterministic (each request alone, on CPU), so that two runs of the stand's configuration must end in
the same bytes, whatever was killed in between.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from roundhouse.config.models import CalculatorEnvironment, WarmStartPolicy
from roundhouse.environments import load
from roundhouse.infra import services
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.store.stage import MANIFEST
from tests.chaos.strikes import PLAN_VARIABLE
from tests.fork_server import ForkServer
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")
START_SECONDS = 300.0
_QUIET = {"HF_HUB_OFFLINE": "1", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
STAGES = ("refit", "collect", "validate", "train", "checkpoint", "evaluate", "report")
_STAGE_FILE = re.compile(
    r"(?:iterations/(?P<iteration>\d{6})/(?P<stage>[a-z]+)|checkpoints/(?P<version>\d{6}))/(?P<file>attempt-\d+\.json|manifest\.json)$"
)


@dataclass
class Server:
    """A server process with a fixed port that can be restarted."""

    name: str
    command: list[str]
    log: Path
    health: str
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    fork_server: ForkServer | None = None

    def __post_init__(self) -> None:
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, without waiting."""
        environment = os.environ | self.environment
        if self.fork_server is not None:
            module, *arguments = self.command[1:]
            self.process = self.fork_server.start(module, [*arguments, "--port", str(self.port)], self.log, environment)
            return
        with self.log.open("ab") as log:
            command = [sys.executable, *self.command, "--port", str(self.port)]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}{self.health}", timeout=1)
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} does not answer; see {self.log}")
            time.sleep(0.1)

    def keep(self) -> None:
        """Start it again if it died, as a supervisor would."""
        if self.process is not None and self.process.poll() is not None:
            self.start()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass
class Stand:
    """The servers, the local services, and the configuration that uses them."""

    directory: Path
    engine: Server
    environment: Server
    settings: dict[str, Any]
    tracked: bool
    whole_endpoint: str | None = None
    """Of the bucket, without the faults."""
    fork_server: ForkServer | None = None
    """The server that forks processes; None starts each as a new interpreter."""

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def pid_of(self, target: str) -> int | None:
        """Process number of engine, environment, prefect or mlflow; None while it is not up."""
        if target in ("engine", "environment"):
            return (self.engine if target == "engine" else self.environment).pid
        record = services.status(self.state / "services").records.get(target)
        return record.pid if record is not None and record.status == "ready" else None

    def configuration(self, run_id: str, **keys: Any) -> Path:
        """A configuration file of the stand under another run id."""
        path = self.directory / f"{run_id}.yaml"
        path.write_text(yaml.safe_dump(self.settings | keys | {"run_id": run_id}))
        return path

    def train(
        self,
        configuration: Path,
        environment: dict[str, str] | None = None,
        module: str | None = None,
        fresh: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start `roundhouse train`; with a plan in the environment, the same command with kills planted; else a module that
        runs the command. `fresh` starts an interpreter even if the stand has a fork server."""
        if module is None and PLAN_VARIABLE in (environment or {}):
            module = "tests.chaos.planted"
        path, variables = self.directory / f"{configuration.stem}.log", os.environ | (environment or {})
        # The product's programs leave the working directory out of their path, and planted steps are a module of the tests
        paths = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
        variables |= {"PYTHONPATH": os.pathsep.join(paths)}
        if self.fork_server is not None and not fresh:
            return self.fork_server.start(module or "roundhouse.cli", ["train", str(configuration)], path, variables)
        command = [str(ROUNDHOUSE)] if module is None else [sys.executable, "-m", module]
        with path.open("ab") as log:
            arguments = [*command, "train", str(configuration)]
            return subprocess.Popen(arguments, env=variables, stdout=log, stderr=log)

    def newest_stage(self, store: str, run_id: str) -> str:
        """The newest stage that was begun, such as `000003/collect`, or `after 000003/collect` when it is complete."""
        names = self._names(store, run_id)
        begun: dict[tuple[int, int], bool] = {}
        for name in names:
            if (found := _STAGE_FILE.search(name)) is not None:
                stage = found["stage"] or "checkpoint"
                if stage in STAGES:
                    key = (int(found["iteration"] or found["version"]), STAGES.index(stage))
                    begun[key] = begun.get(key, False) or found["file"] == MANIFEST
        if not begun:
            return "start"
        iteration, stage_number = newest = max(begun)
        return f"{'after ' if begun[newest] else ''}{iteration:06d}/{STAGES[stage_number]}"

    def count_attempts(self, store: str, run_id: str) -> int:
        """Count the started attempts of all existing stages."""
        return sum("/attempt-" in name for name in self._names(store, run_id))

    def _names(self, store: str, run_id: str) -> Iterable[str]:
        return self._bucket_names(store, run_id) if store.startswith("s3://") else _file_names(store, run_id)

    def _bucket_names(self, store: str, run_id: str) -> list[str]:
        """Asked of the whole endpoint: the harness itself shall not stumble over planted faults."""
        import boto3

        bucket, _, prefix = store.removeprefix("s3://").partition("/")
        client = boto3.client("s3", endpoint_url=self.whole_endpoint)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/runs/{run_id}/")
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def keep(self) -> None:
        self.engine.keep()
        self.environment.keep()


def _file_names(store: str, run_id: str) -> Iterator[str]:
    root = f"{store}/runs/{run_id}".removeprefix("file://")
    for folder, _, names in os.walk(root):
        for name in names:
            yield f"{folder}/{name}"


@contextlib.contextmanager
def faulty_bucket(directory: Path, rate: float, seed: int) -> Iterator[tuple[str, str]]:
    """Yield a store on an S3 endpoint that fails this share of the requests, and the URL of the correct endpoint behind it.
    The block has AWS's variables set."""
    import s3fs

    whole = Server("s3", ["-m", "moto.server", "-H", "127.0.0.1"], directory / "s3.log", "/")
    command = ["-m", "tests.chaos.faulty_s3", "--upstream", whole.url, "--rate", str(rate), "--seed", str(seed)]
    faulty = Server("faulty s3", command, directory / "faulty-s3.log", "/rh/faults")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(keys | {"AWS_ENDPOINT_URL": whole.url})
    try:
        for server in (whole, faulty):
            server.start()
            server.wait_until_it_answers()
        s3fs.S3FileSystem().call_s3("create_bucket", Bucket="chaos")
        s3fs.S3FileSystem.clear_instance_cache()
        os.environ["AWS_ENDPOINT_URL"] = faulty.url
        yield "s3://chaos/store", whole.url
        (directory / "faults.json").write_text(httpx.get(f"{faulty.url}/rh/faults").text)
    finally:
        for server in (faulty, whole):
            server.stop()


def _settings(
    directory: Path, engine: Server, environment: Server, *, iterations: int, tracked: bool, store: str | None
) -> dict[str, Any]:
    """A run's configuration, but for its id."""
    return {
        "iterations": iterations,
        "store": store or str(directory / "store"),
        "policy": {"kind": "pretrained", "path": str(directory / "policy")},
        "environment": {
            "kind": "remote",
            "restore": "replay",
            "url": environment.url,
            "train_tasks": str(directory / "tasks.jsonl"),
            "heldout_tasks": str(directory / "tasks.jsonl"),
        },
        "generation": {
            "backend": "transformers",
            "max_model_len": 256,
            "engine_url": engine.url,
            "engine_args": {"max_num_seqs": 1},
        },
        # A failed rollout would change what is learnt, however right it is to go on without it. Here none may be missing.
        "rollout": {"prompts_per_iteration": 4, "group_size": 4, "max_failed_fraction": 0},
        "train": {"minibatches": 2, "optimizer": {"learning_rate": 3e-4}},
        "evaluation": {"every": 0, "tasks": 4},
        "checkpoint": {"keep_last": 2},
        "tracking": {"enabled": tracked},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }


@functools.cache
def _starting_policy() -> tempfile.TemporaryDirectory[str]:
    """A policy that calls its tool, made once a process: the stands of a suite begin with the same one."""
    made = tempfile.TemporaryDirectory(prefix="rh-policy-")
    make_starting_policy(WarmStartPolicy(steps=100), load(CalculatorEnvironment()), 0, Path(made.name) / "policy")
    return made


@contextlib.contextmanager
def stand(
    directory: Path,
    *,
    iterations: int,
    tracked: bool,
    store: str | None = None,
    whole_endpoint: str | None = None,
    fresh: bool = False,
) -> Iterator[Stand]:
    """A stand with everything up; `tracked` adds MLflow. The store lies in the directory unless another is given. `fresh`
    starts every process as a new interpreter, else they are forks (`tests.fork_server`)."""
    directory.mkdir(parents=True, exist_ok=True)
    policy = directory / "policy"
    if not policy.exists():
        shutil.copytree(Path(_starting_policy().name) / "policy", policy)
    rows = load(CalculatorEnvironment()).tasks("train")
    (directory / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = Server("engine", ["-m", "roundhouse.generation.standalone"], directory / "engine.log", "/rh/replicas")
    environment = Server(
        "environment",
        ["-m", "roundhouse.plugins.nemo_gym.servers.resources", "--environment", "calculator"],
        directory / "environment.log",
        "/",
    )
    wanted = ("prefect", "mlflow") if tracked else ("prefect",)
    settings = _settings(directory, engine, environment, iterations=iterations, tracked=tracked, store=store)
    built = Stand(directory, engine, environment, settings, tracked, whole_endpoint)
    try:
        running = services.up(directory / "state" / "services", wanted)
        if not fresh:
            variables = os.environ | running.environment() | _QUIET
            built.fork_server = engine.fork_server = environment.fork_server = ForkServer.spawn(
                directory / "fork_server.log", variables
            )
        for server in (engine, environment):
            server.start()
        for server in (engine, environment):
            server.wait_until_it_answers()
        yield built
    finally:
        services.down(directory / "state" / "services")
        for server in (engine, environment):
            server.stop()
        if built.fork_server is not None:
            built.fork_server.close()
