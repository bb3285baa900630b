"""Ranks on several nodes of a Ray cluster are one group, and end together."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.launch.base import open_launcher
from roundhouse.launch.resident_ranks import ResidentRanks
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainers import open_service
from roundhouse.store.run import Run, open_run
from tests.launch.test_launchers import of_programs, program
from tests.ray_nodes import two_ray_nodes
from tests.stages.test_train import checkpoint_digests, make_run, sequences
from tests.training.service.test_engine import loss_batch
from tests.training.tiny import make_model
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_ray_nodes(num_cpus=1):
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def run_on_nodes(tmp_path: Path, nodes: int = 2, **service: Any) -> Run:
    """Return the run of `make_run` with a trainer on so many nodes of the cluster."""
    tree = make_run(str(tmp_path / "store"), tmp_path, launcher="ray", **service).config.model_dump(mode="json")
    tree["infra"]["ray"] = {"trainer": {"nodes": nodes, "cpus": 1}}
    return open_run(parse_config(tree))


def test_the_ranks_of_two_nodes_are_numbered_together(cluster: None, tmp_path: Path) -> None:
    said: list[str] = []
    with (
        open_launcher("ray", "a.key", run_on_nodes(tmp_path, kind="process")) as launcher,
        pytest.raises(DataError, match="the data is bad"),
    ):
        launcher.run(program(tmp_path, "refuse"), said.append, threading.Event())
    assert "rank 0 of 2" in said
    until(lambda: of_programs() == [])


def trained(run: Run, cache: Path) -> dict[str, str]:
    """Digests of the checkpoint after two iterations."""
    base = starting_policy(run)
    for iteration in (1, 2):
        base = publish(run, train_iteration(run, iteration, sequences(run, iteration), base, cache))
    trainer_home.release_trainers()
    return checkpoint_digests(base)


@pytest.fixture(scope="module")
def of_one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two ranks of this machine write."""
    place = tmp_path_factory.mktemp("machine")
    return trained(make_run(str(place / "store"), place, kind="resident", processes=2), place / "cache")


@pytest.mark.parametrize("kind", ["resident", "process"])
def test_two_nodes_train_what_two_ranks_of_one_machine_train(
    cluster: None, tmp_path: Path, of_one_machine: dict[str, str], kind: str
) -> None:
    assert trained(run_on_nodes(tmp_path, kind=kind), tmp_path / "cache") == of_one_machine
    until(lambda: of_programs() == [])


def test_ranks_listen_at_their_nodes_address_alone_and_one_that_is_killed_elsewhere_is_named(
    cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    run = run_on_nodes(tmp_path, kind="resident", timeout_seconds=120)
    service = open_service(run.config.train, owner="r", temperature=0.9, at=(run, 1))
    assert isinstance(service, ResidentRanks)
    try:
        address = ray.util.get_node_ip_address()
        assert re.fullmatch(rf"http://{re.escape(address)}:\d+", service.ranks.url)
        port = int(service.ranks.url.rpartition(":")[2])
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert [each.laddr.ip for each in listening if each.laddr.port == port] == [address]
        service.load_checkpoint(model_dir)
        ranks = [each for each in of_programs() if each.environ().get("RANK") == "1"]
        other = next(each for each in ranks if "torch.distributed.run" not in each.cmdline())
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(InfraError, match="rank 1 of 2 was killed by signal 9"):
            service.forward_backward(loss_batch([0, 1, 2]))
    finally:
        service.close()
    until(lambda: of_programs() == [])
    every = sum(node["Resources"].get("CPU", 0) for node in ray.nodes())
    until(lambda: ray.available_resources().get("CPU") == every)  # told a moment later


def test_ranks_elsewhere_belong_to_a_run(cluster: None, tmp_path: Path) -> None:
    run = run_on_nodes(tmp_path, kind="resident")
    with pytest.raises(
        ConfigError, match=r"train.service.launcher is ray, which starts ranks on other machines and needs a run"
    ):
        open_service(run.config.train, owner="r", temperature=0.9)
