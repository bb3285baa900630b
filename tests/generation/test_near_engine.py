"""Trainer and engine on a real Ray cluster of two nodes are at the requested place, as reported by Ray.

The nodes declare GPUs that do not exist; Ray places by the declaration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.util import placement_group_table

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.placement import REPLICA_CPUS, reservation
from roundhouse.errors import InfraError
from roundhouse.generation.deployment import engine_arguments
from roundhouse.generation.serve_app import APPLICATION, DEPLOYMENT, build, placement_options
from roundhouse.training.service.actor import RayTrainService
from roundhouse.weight_sync.replica_state import arguments_of
from tests.generation import tiny
from tests.ray_nodes import two_ray_nodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_ray_nodes(num_cpus=2, num_gpus=2):
        # nobody comes by HTTP, and Serve kills a proxy that needs five seconds to start
        serve.start(proxy_location="Disabled")
        yield
        serve.shutdown()


def asked(nearness: str, engine_gpus: float, trainer_gpus: float) -> RunConfig:
    return parse_config(
        {
            "run_id": "r",
            "generation": {"backend": "transformers", "max_model_len": 64, "gpus_per_replica": engine_gpus},
            "train": {"service": {"kind": "ray", "cpus": 0.2, "gpus": trainer_gpus, "timeout_seconds": 240}},
            "placement": {"colocation": nearness},
        }
    )


class StandIn:
    """Takes a replica's place without an engine, which would ask for the GPU that is not there."""

    def where(self) -> tuple[str, str, list[str]]:
        context = ray.get_runtime_context()
        group = ray.util.get_current_placement_group()
        return group.id.hex(), context.get_node_id(), context.get_accelerator_ids()["GPU"]


def replica_near(config: RunConfig) -> tuple[str, str, list[str]]:
    """Placement group, node and GPUs of a stand-in deployed as the engine's replica would be."""
    reserved = reservation(config)
    assert reserved is not None
    options: dict[str, Any] = {"num_cpus": REPLICA_CPUS, "num_gpus": config.generation.gpus_per_replica}
    deployed = serve.deployment(name="near", ray_actor_options=options, **placement_options(asdict(reserved)))(StandIn)
    handle = serve.run(deployed.bind(), name="near", route_prefix=None)
    return handle.where.remote().result(timeout_s=120)


def trainer_in(config: RunConfig, group: str) -> tuple[RayTrainService, tuple[str, list[str]]]:
    """The train service's actor in the group; its node and GPUs."""
    service = RayTrainService(config.train, config.train.service, placement_group=group)

    def where(_: object) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    return service, ray.get(service.channel.actor.__ray_call__.remote(where), timeout=240)


@pytest.mark.parametrize(
    ("nearness", "engine_gpus", "trainer_gpus", "one_gpu"), [("gpu", 0.5, 0.4, True), ("node", 1, 1, False)]
)
def test_the_trainer_is_on_the_engines_node_and_on_its_gpu_where_that_was_asked(
    cluster: None, nearness: str, engine_gpus: float, trainer_gpus: float, one_gpu: bool
) -> None:
    config = asked(nearness, engine_gpus, trainer_gpus)
    group, node, gpus = replica_near(config)
    service, (trainers_node, trainers_gpus) = trainer_in(config, group)
    try:
        assert trainers_node == node
        assert (trainers_gpus == gpus) == one_gpu
        told = placement_group_table()[group]
        assert told["state"] == "CREATED"
        assert told["bundles_to_node_id"][0] == node
        assert told["bundles_to_node_id"][len(told["bundles"]) - 1] == trainers_node
    finally:
        service.close()
        serve.delete("near")


def test_apart_from_a_real_replica_the_trainer_is_on_the_other_node_and_shares_its_fate(
    cluster: None, tmp_path: Path
) -> None:
    config = asked("spread", 0, 0)
    model, reserved = tiny.make_model(tmp_path / "model", seed=1), reservation(config)
    assert reserved is not None
    serve.run(
        build(arguments_of(engine_arguments(config.generation), str(model), asdict(reserved))),
        name=APPLICATION,
        route_prefix="/",
    )
    replicas = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)
    [status] = replicas.broadcast("status").results(timeout_s=120)
    service, (node, _) = trainer_in(config, status["placement_group"])
    nodes = placement_group_table()[status["placement_group"]]["bundles_to_node_id"]
    assert nodes[0] != nodes[1] == node
    serve.delete(APPLICATION)
    with pytest.raises(InfraError, match="train actor was lost"):
        service.facts()
    with pytest.raises(InfraError, match=r"is (REMOVED|unknown here)\. Is train\.service\.address"):
        trainer_in(config, status["placement_group"])
