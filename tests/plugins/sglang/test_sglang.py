"""A run on SGLang's routes, served by a stand-in of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import Draw, EnginePoisoned
from roundhouse.generation.served_policy import PolicyUnavailable, ServedPolicy
from roundhouse.plugins.sglang.engine import SGLangEngine
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.refit import engine_at, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, model_location, read_manifest
from roundhouse.weight_sync.replica_state import DesiredPolicy
from tests.generation.foreign_servers import FakeSGLang
from tests.generation.test_openai_engine import settings
from tests.gym.playground import serving

pytestmark = pytest.mark.real

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "a-key")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = open_run(parse_config(settings(tmp_path_factory.mktemp("policy"), NOWHERE)))
    starting_policy(run)
    return model_location(run.checkpoint(0).location).local_path


def run_at(directory: Path, url: str, model: Path, more: dict[str, Any] | None = None) -> Run:
    tree = settings(directory, url, kind="sglang", weight_update="sglang")
    return open_run(parse_config(tree | {"policy": {"kind": "pretrained", "path": str(model)}} | (more or {})))


def iterate(run: Run, iterations: int) -> list[Reference]:
    """Train stages of so many iterations."""
    checkpoint, updates = starting_policy(run), list[Reference]()
    for k in range(1, iterations + 1):
        rollouts = collect_iteration(run, k, refit_iteration(run, k, checkpoint), engine_at(run, k - 1))
        sequences = validate_iteration(run, k, rollouts, vocabulary_size(run))
        updates.append(train_iteration(run, k, sequences, checkpoint, checkpoint_cache(run.config)))
        checkpoint = publish(run, updates[-1])
    release_trainers()
    return updates


def test_a_run_trains_by_sglangs_routes_and_computes_what_the_server_reports(model: Path, tmp_path: Path) -> None:
    server = FakeSGLang(model)
    with serving(server.app) as url:
        run = run_at(tmp_path, url, model)
        refuse_unready(run.config)
        for update in iterate(run, 2):
            assert read_manifest(update).metrics["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    loads = [body for kind, body in server.requests if kind == "update"]
    assert [body["weight_version"].rpartition("-")[0] for body in loads] == ["roundhouse-0", "roundhouse-1"]
    assert loads[0]["model_path"] != loads[1]["model_path"]


def test_weights_that_the_server_only_claims_to_hold_make_no_version(model: Path, tmp_path: Path) -> None:
    """Only the comparison of log-probabilities can detect this."""
    train = settings(tmp_path, NOWHERE)["train"] | {"optimizer": {"learning_rate": 0.03}}
    far = {"train": train, "validation": {"recompute_tolerance": 1e-3}}
    with serving(FakeSGLang(model, obeys=False).app) as url:
        run = run_at(tmp_path, url, model, far)
        with pytest.raises(DataError, match=r"max_mismatched_fraction"):
            iterate(run, 2)


async def test_answers_by_other_weights_than_were_given_are_refused(model: Path, tmp_path: Path) -> None:
    server = FakeSGLang(model)
    with serving(server.app) as url:
        config = run_at(tmp_path, url, model).config.generation
        engine = SGLangEngine(config, ChatCodec(str(model), config.max_model_len))
        await engine.start()
        await engine.load_weights(str(model), 3)
        drawn = await engine.generate([3, 4, 5], Draw(max_tokens=4, seed=1))
        assert drawn == await engine.generate([3, 4, 5], Draw(max_tokens=4, seed=1))
        assert len(await engine.score([3, 4, 5])) == 2
        server.version = "default"  # it was started again
        with pytest.raises(EnginePoisoned, match="answers by the weights 'default'"):
            await engine.generate([3, 4, 5], Draw(max_tokens=4))
        with pytest.raises(EnginePoisoned, match=r"Failed to get weights iterator.* same path"):
            await engine.load_weights(str(tmp_path / "nowhere"), 4)


async def test_weights_that_the_server_lost_are_loaded_by_the_next_desired_state_of_the_same_version(
    model: Path, tmp_path: Path
) -> None:
    server = FakeSGLang(model)
    with serving(server.app) as url:
        config = run_at(tmp_path, url, model).config.generation
        engine = SGLangEngine(config, ChatCodec(str(model), config.max_model_len))
        await engine.start()
        policy = ServedPolicy(engine, str(model), "r1")
        await policy.apply(DesiredPolicy(3, str(model), request=1))
        server.version = "default"  # it was started again
        with pytest.raises(PolicyUnavailable, match="answers by the weights 'default'"):
            await policy.answer([3, 4, 5], Draw(max_tokens=4))
        assert not policy.status()["ready"]
        await policy.apply(DesiredPolicy(3, str(model), request=2))
        assert (await policy.answer([3, 4, 5], Draw(max_tokens=4))).versions == [(3, 4)]
