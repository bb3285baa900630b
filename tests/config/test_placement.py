"""The plan of a run shows the place and the needs of each role."""

from __future__ import annotations

from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.placement import placement


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({}, ["engine:    1 replica, Ray Serve actors on the flow's Ray cluster", "collector: in the flow's process"]),
        ({"generation": {"replicas": 2, "gpus_per_replica": 0.5}}, ["engine:    2 replicas", ", 1 GPU"]),
        ({"generation": {"engine_url": "http://e:1"}}, ["engine:    a separate process at http://e:1"]),
        ({"train": {"service": {"kind": "ray", "gpus": 1}}}, ["trainer:   an actor on", ", 1 GPU"]),
        ({"train": {"service": {"kind": "process", "processes": 2}}}, ["trainer:   2 processes a step"]),
        (
            {
                "generation": {"gpus_per_replica": 0.5},
                "train": {"service": {"kind": "ray", "gpus": 0.5}},
                "placement": {"colocation": "gpu"},
            },
            [
                "Ray cluster, 0.5 GPU; asleep while the trainer works: its weights and cache give their memory back",
                ", 0.5 GPU; on the engine's GPU; holds memory only in its turn",
            ],
        ),
        (
            {"generation": {"backend": "transformers"}, "placement": {"engine_sleeps": True}},
            ["cluster; asleep while", "trainer:   in the flow's process; holds memory only in its turn"],
        ),
        (
            {"train": {"service": {"kind": "ray"}}, "placement": {"colocation": "spread"}},
            ["trainer:   an actor on the flow's Ray cluster, else a local one; on another node than the engine"],
        ),
        (
            {
                "offline": {"datasets": ["d"], "evaluate": False},
                "train": {"service": {"kind": "tinker", "base_model": "b"}, "algorithm": {"kind": "cross_entropy"}},
            },
            ["trainer:   Tinker"],
        ),
        (
            {"train": {"service": {"kind": "resident", "processes": 4, "data_parallel_replicate": 2}}},
            ["trainer:   4 ranks in 2 replicas on the flow's machine"],
        ),
        ({"rollout": {"distribution": {"kind": "process", "shards": 3}}}, ["collector: 3 shards (process)"]),
        (
            {
                "store": "s3://b/s",
                "infra": {"kind": "kubernetes", "engine": {"ray_service": "eng"}, "trainer": {"pods": 2, "gpus": 4}},
                "train": {"service": {"kind": "process", "processes": 4}},
            },
            [
                "engine:    1 replica in RayService eng",
                "a Job a step in namespace roundhouse: 2 pods of 4 processes, 8 GPU",
            ],
        ),
        (
            {
                "store": "s3://b/s",
                "infra": {"kind": "kubernetes", "trainer": {"gpus": 1}},
                "train": {"service": {"kind": "resident", "launcher": "kubernetes"}},
            },
            ["trainer:   a Job kept between iterations in namespace roundhouse: 1 pod of 1 process, 1 GPU"],
        ),
        (
            {
                "infra": {"ray": {"address": "10.0.0.1:6379", "trainer": {"nodes": 2, "gpus": 8}}},
                "train": {"service": {"kind": "resident", "launcher": "ray", "processes": 8}},
            },
            ["trainer:   8 processes kept between iterations on each of 2 nodes of 10.0.0.1:6379, 16 GPU"],
        ),
    ],
)
def test_each_role_stands_where_the_configuration_puts_it(overrides: dict[str, Any], said: list[str]) -> None:
    plan = placement(parse_config({"run_id": "r", **overrides}))
    assert [place.role for place in plan] == ["engine", "collector", "validator", "trainer"]
    text = "\n".join(map(str, plan))
    for part in said:
        assert part in text
