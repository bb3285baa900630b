"""Colocation of trainer and engine: impossible combinations are refused with key, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from roundhouse.config.loading import changes_of_identity, differences, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.placement import Reservation, engine_sleeps, reservation, served_generation
from roundhouse.errors import ConfigError
from roundhouse.store.run import open_run

RAY = {"kind": "ray", "gpus": 0.4}
ON_RAY = {"kind": "process", "launcher": "ray"}
ON_GPU = {"gpus_per_replica": 0.5}
KUBERNETES = {"store": "s3://b/s", "infra": {"kind": "kubernetes", "engine": {"ray_service": "e"}}}
STALE = {"mode": "batch-async", "staleness": 1}


def configured(nearness: str | None = None, sleeps: bool | None = None, **keys: Any) -> RunConfig:
    placement = {"colocation": nearness, "engine_sleeps": sleeps}
    given = {key: value for key, value in placement.items() if value is not None}
    return parse_config({"run_id": "r", "placement": given, **keys})


@pytest.mark.parametrize(
    ("nearness", "sleeps", "keys", "said"),
    [
        ("gpu", False, {"generation": ON_GPU}, "placement.engine_sleeps is false.*gpu.*Set the first to true"),
        ("gpu", None, {"generation": ON_GPU, "asynchrony": STALE}, r"staleness is 1.*Set asynchrony\.staleness to 0"),
        (None, True, {"generation": ON_GPU, "asynchrony": STALE}, "placement.engine_sleeps is true.*staleness is 1"),
        (None, True, {}, "backend is vllm.*frees nothing.*Set generation.gpus_per_replica"),
        ("gpu", None, {"generation": {"backend": "transformers"}}, "gpus_per_replica is 0.*no GPU can be shared"),
        ("gpu", None, {"generation": ON_GPU, "train": {"device": "cpu"}}, "train.device is cpu.*no GPU can be shared"),
        ("gpu", None, {"generation": ON_GPU, "train": {"service": RAY | {"gpus": 0.6}}}, r"0\.5.*0\.6.*at most 1"),
        ("gpu", None, {"generation": ON_GPU, "train": {"service": RAY | {"gpus": 0}}}, r"train\.service\.gpus \(0\)"),
        ("gpu", None, {"generation": ON_GPU, "train": {"service": {"kind": "process", "processes": 2}}}, "processes is 2"),
        ("gpu", None, {"generation": ON_GPU, **KUBERNETES, "train": {"service": {"kind": "process"}}}, "kind kubernetes"),
        ("node", None, {**KUBERNETES, "train": {"service": {"kind": "process"}}}, "kind kubernetes.*node selectors"),
        ("node", None, {"train": {"service": {"kind": "remote", "url": "http://t:1"}}}, "remote.*resident, process or ray"),
        ("spread", None, {}, "spread, but train.service.kind is resident.*Set train.service.kind to ray"),
        ("node", None, {"train": {"service": ON_RAY}}, "node, but.*launcher is ray"),
        (None, True, {"generation": ON_GPU, "train": {"service": ON_RAY}}, "engine_sleeps is true, but.*launcher is ray"),
        ("node", None, {"generation": {"engine_url": "http://far:1"}}, "http://far:1.*another machine"),
        ("node", None, {"generation": {"engine_url": "http://e:1"}, "train": {"service": RAY}}, "Ray does not place that"),
        ("spread", None, {"generation": {"replicas": 2}, "train": {"service": RAY}}, "replicas is 2.*Set generation.rep"),
    ],
)  # fmt: skip
def test_a_placement_that_cannot_be_is_refused(
    nearness: str | None, sleeps: bool | None, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        configured(nearness, sleeps, **keys)


def test_unset_it_changes_nothing() -> None:
    config = configured()
    assert not engine_sleeps(config)
    assert served_generation(config) is config.generation
    assert reservation(config) is None


def test_a_shared_gpu_means_sleep_and_vllm_is_started_able_to() -> None:
    config = configured("gpu", generation=ON_GPU | {"engine_args": {"max_num_seqs": 8}})
    assert engine_sleeps(config)
    assert served_generation(config).engine_args == {"max_num_seqs": 8, "enable_sleep_mode": True}


@pytest.mark.parametrize(
    ("nearness", "bundles", "strategy"),
    [
        ("gpu", [{"CPU": 1.1, "GPU": 0.9}], "STRICT_PACK"),
        ("node", [{"CPU": 0.1, "GPU": 0.5}, {"CPU": 1, "GPU": 0.4}], "STRICT_PACK"),
        ("spread", [{"CPU": 0.1, "GPU": 0.5}, {"CPU": 1, "GPU": 0.4}], "STRICT_SPREAD"),
    ],
)
def test_ray_reserves_trainer_and_engine_together(
    nearness: str, bundles: list[dict[str, float]], strategy: str
) -> None:
    config = configured(nearness, generation=ON_GPU, train={"service": RAY})
    assert reservation(config) == Reservation(bundles, strategy)


def test_a_run_goes_on_under_another_placement(tmp_path: Any) -> None:
    store, generation = str(tmp_path / "store"), {"backend": "transformers"}
    first = configured(store=store, generation=generation)
    then = configured("node", True, store=store, generation=generation)
    assert differences(first, then)
    assert changes_of_identity(first, then) == {}
    uid = open_run(first).uid
    assert open_run(then).uid == uid


def test_a_run_that_was_recorded_with_a_launcher_beside_a_placement_is_read() -> None:
    tree = {"run_id": "r", "train": {"service": ON_RAY}, "placement": {"colocation": "node"}}
    assert parse_config(tree, recorded=True).placement.colocation == "node"
