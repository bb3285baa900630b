"""The train stage on a cluster: a Job with pods that run the real training step, with a bucket.

The test has no nodes: its kubelet runs the container's command as a process of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.kubernetes import stage_jobs
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, model_location, read_manifest
from tests.plugins.kubernetes.players import run_container
from tests.plugins.kubernetes.stand import Stand
from tests.stages.test_train import checkpoint_digests, make_run, sequences

pytestmark = pytest.mark.real

Object = dict[str, Any]


def cluster_run(
    stand: Stand,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    service: dict[str, Any] | None = None,
    **trainer: Any,
) -> Run:
    """The run of `make_run`, with its training on the cluster."""
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    monkeypatch.setattr(stage_jobs, "CACHE", str(tmp_path / "pod-cache"))
    stand.kubelet.behave = lambda pod: run_container(stand.kubelet, pod)
    tree = make_run(store, tmp_path, kind="process").config.model_dump(mode="json")
    tree["train"]["service"] = service or tree["train"]["service"]
    tree["infra"] = {
        "kind": "kubernetes",
        "namespace": stand.namespace,
        "state": str(tmp_path / "flow"),
        "trainer": {"memory": "64Mi", "cpu": "100m"} | trainer,
    }
    return open_run(parse_config(tree))


def test_a_job_a_step_writes_what_a_resident_trainer_writes_and_its_retry_finds_it(
    stand: Stand, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = make_run(f"{bucket}/resident", tmp_path)
    start = starting_policy(resident)
    update = train_iteration(resident, 1, sequences(resident, 1), start, tmp_path / "cache")
    expected = checkpoint_digests(publish(resident, update))

    run = cluster_run(stand, f"{bucket}/job", tmp_path, monkeypatch)
    start, batch = starting_policy(run), sequences(run, 1)
    batch = batch.model_copy(update={"counts": {**batch.counts, "omitted": 0}})
    said: list[str] = []
    update = train_iteration(run, 1, batch, start, tmp_path / "cache", said.append)
    assert checkpoint_digests(publish(run, update)) == expected
    metrics = read_manifest(update).metrics
    if stand.state is not None:  # where no node is, there is no log to follow, and it is asked for again and again
        assert metrics["train/kubernetes_calls"] <= 12
    assert any("1 of 1 pods run" in line for line in said)

    run.stage(1, "train").location.delete("manifest.json")
    # as it is when it is read back: on a cluster, a flow that came back did not find its Job for the order of these
    batch = batch.model_copy(update={"counts": dict(reversed([*batch.counts.items(), ("omitted", 0)]))})
    again = train_iteration(run, 1, batch, start, tmp_path / "cache")
    assert again == update.model_copy(update={"digest": again.digest})
    assert len(stand.kubelet.pods) == 1, "the flow died before its commit: the finished Job is found"


@pytest.mark.long
def test_with_a_cache_claim_a_step_does_not_fetch_what_the_one_before_it_wrote(
    fake: Stand, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(stage_jobs, "NODE_CACHE", str(tmp_path / "node"))
    run = cluster_run(fake, bucket, tmp_path, monkeypatch, cache_claim="roundhouse-cache")
    base, fetched = starting_policy(run), []
    for iteration in (1, 2):
        update = train_iteration(run, iteration, sequences(run, iteration), base, tmp_path / "cache")
        fetched.append(read_manifest(update).metrics["train/fetched_bytes"])
        base = publish(run, update)
    size = sum(file.size for file in read_manifest(run.checkpoint(0).reference()).files)
    assert fetched == [size, 0], "version 0 came from the store, and version 1 was left there by the step that made it"


@pytest.mark.long
def test_the_error_of_a_step_reaches_the_stage_as_it_was_raised_in_the_pod(
    fake: Stand, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster_run(fake, bucket, tmp_path, monkeypatch)
    start = starting_policy(run)
    batch: Reference = sequences(run, 1)
    model_location(run.checkpoint(0).location).write("model.safetensors", b"damaged")
    with pytest.raises(StoreError, match="is damaged"):
        train_iteration(run, 1, batch, start, tmp_path / "cache")
    assert len(fake.kubelet.pods) == 1


def test_a_store_that_pods_cannot_see_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match=r"infra.store_claim"):
        parse_config({"run_id": "a", "store": "/data", "infra": {"kind": "kubernetes"}})
    config = parse_config({"run_id": "a", "store": "/data", "infra": {"kind": "kubernetes", "store_claim": "store"}})
    assert config.infra.kind == "kubernetes"
