"""A run's refits by each transport, against a real engine in a separate process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.generation.deployment import EngineGone, ProcessEngine
from roundhouse.stages import refit
from roundhouse.stages.checkpoint import publish_starting_policy
from roundhouse.stages.refit import engine_at, engine_service, ensure_version
from roundhouse.store.run import Run, open_run
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.test_standalone import engine_process

pytestmark = pytest.mark.real


@pytest.mark.parametrize("kind", ["agent", "remote"])
def test_an_engine_that_agent_servers_ask_is_told_which_sampling_the_run_draws_with(tmp_path: Path, kind: str) -> None:
    environment = {"kind": kind, "url": "http://127.0.0.1:1", "train_tasks": "rows.jsonl"}
    keys = {
        "environment": environment,
        "evaluation": {"temperature": 0.0, "sets": {"cut": {"temperature": 0.7, "top_p": 0.5}, "same": {"tasks": 3}}},
        "generation": {"backend": "transformers", "sampling": {"temperature": 0.7}},
        "infra": {"state": str(tmp_path / "state")},
    }
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), **keys}))
    start = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    asked: list[dict[str, Any]] = []

    class FakeEngine(ProcessEngine):
        def ensure(self, *arguments: Any) -> list[ReplicaReport]:
            asked.append(arguments[-1].changed())
            raise EngineGone("it is a fake")

    with pytest.raises(EngineGone):
        ensure_version(run, start, FakeEngine("http://127.0.0.1:1"))
    training = {"temperature": 0.7, "top_p": 1.0, "top_k": None}
    evaluations = [training | {"temperature": 0.0}, training | {"top_p": 0.5}]
    told = [training, *evaluations] if kind == "agent" else None
    assert [one.get("sampling") for one in asked] == [told]


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"keep_prefix_cache": True}, {"running": "continue", "keep_prefix_cache": True}),
        ({"inflight_requests": "restart"}, {"running": "restart"}),
        ({"weights_cache_gib": 7}, {}),
    ],
    ids=["keep_prefix_cache", "inflight_requests", "weights_cache_gib"],
)
def test_a_refit_asks_for_what_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict[str, Any], told: dict[str, Any]
) -> None:
    keys = {
        "asynchrony": {"mode": "batch-async", "staleness": 1},
        "generation": {"backend": "transformers"} | generation,
        "infra": {"state": str(tmp_path / "state")},
    }
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), **keys}))
    start = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    asked: list[dict[str, Any]] = []
    bounds: list[int] = []

    class FakeEngine(ProcessEngine):
        def ensure(self, *arguments: Any) -> list[ReplicaReport]:
            asked.append(arguments[-1].changed())
            raise EngineGone("it is a fake")

    def cache(place: Path, bound: int) -> NodeCache:
        bounds.append(bound)
        return NodeCache(place, bound)

    monkeypatch.setattr(refit, "NodeCache", cache)
    with pytest.raises(EngineGone):
        ensure_version(run, start, FakeEngine("http://127.0.0.1:1"))
    [found] = asked
    assert {key: found.get(key) for key in told} == told
    assert bounds == [generation.get("weights_cache_gib", 32) * 2**30]


def test_an_engine_that_holds_the_same_version_of_another_run_is_brought_to_this_runs(
    tmp_path: Path,
) -> None:
    with engine_process() as url:

        def begun(run_id: str, seed: int) -> Run:
            keys = {"backend": "transformers", "engine_url": url}
            config = {"run_id": run_id, "store": str(tmp_path / "store"), "infra": {"state": str(tmp_path / "state")}}
            run = open_run(parse_config({**config, "generation": keys}))
            if run.checkpoint(0).reference() is None:
                publish_starting_policy(run, tiny.make_model(tmp_path / f"policy{seed}", seed=seed), {})
            return run

        def held(run: Run) -> ReplicaReport:
            """Return the weights after the run was told that the engine answers with its version 0."""
            assert engine_at(run, 0) == url
            (replica,) = engine_service(run).replicas()
            assert (replica.policy_version, replica.weights) == (0, run.checkpoint(0).reference().uri)
            return replica

        mine = begun("mine", seed=1)
        first = held(mine)
        assert held(mine).desired == first.desired, "there is nothing to do"
        other = held(begun("other", seed=2))
        assert other.digest == digest_of(tmp_path / "policy2")
        assert held(mine).digest == first.digest == digest_of(tmp_path / "policy1")

        shutil.rmtree(tmp_path / "store/runs/mine")
        anew = held(begun("mine", seed=3))
        assert anew.weights == first.weights
        assert anew.digest == digest_of(tmp_path / "policy3")
