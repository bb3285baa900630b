"""The Tinker client by the real SDK, against a server that speaks its API and knows nothing of roundhouse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from roundhouse.config.algorithms import CISPOConfig, CrossEntropyConfig, GRPOConfig
from roundhouse.config.loading import parse_config
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.errors import ConfigError, DataError, RoundhouseError
from roundhouse.plugins.tinker.service import TinkerPointer, TinkerTrainService, facts_of, read_pointer
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_at, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.location import Location
from roundhouse.store.run import open_run
from roundhouse.store.stage import model_location, read_manifest
from roundhouse.training.trainer import Trainer
from tests.plugins.tinker.tinker_server import FakeTinker
from tests.stages.offline_world import collect, make_config, train_to_the_end
from tests.training.service.serving import listening
from tests.training.tiny import sequences

KEY = "tml-test"
OPENED: list[TinkerTrainService] = []
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5)


@pytest.fixture
def server(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeTinker, str]]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    fake = FakeTinker(model_dir, KEY)
    with listening(fake.app) as url:
        yield fake, url
        for opened in OPENED:  # else each goes on saying every ten seconds that the session lives
            with suppress(RoundhouseError):
                opened.close()
        OPENED.clear()


@pytest.fixture
def start(tmp_path: Path, model_dir: Path) -> Path:
    """Make the parts of the base model that are needed here: no weights."""
    directory = tmp_path / "start"
    directory.mkdir()
    (directory / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    return directory


def service(url: str, key: str = KEY, base_model: str = "tiny") -> TinkerTrainService:
    pointer = TinkerPointer(base_model=base_model)
    # pytest's own limit holds: the SDK doubles its pauses after each lost connection, and a busy machine computes slowly
    opened = TinkerTrainService(OPTIMIZER, pointer, run="run-1", base_url=url, api_key=key)
    OPENED.append(opened)
    return opened


def config(algorithm: Any, updates: int = 3) -> TrainConfig:
    return TrainConfig(algorithm=algorithm, optimizer=OPTIMIZER, minibatches=updates, threads=1, device="cpu")


def distance(fake: FakeTinker, local: Trainer, start: dict[str, torch.Tensor]) -> float:
    """Return the relative distance between the two models' changes from the start."""
    ours, theirs = dict(local.model.named_parameters()), dict(fake.model.named_parameters())
    apart = sum(float((ours[name] - theirs[name]).detach().double().square().sum()) for name in ours)
    return (apart / sum(float((ours[name] - start[name]).detach().double().square().sum()) for name in ours)) ** 0.5


@pytest.mark.parametrize(
    ("algorithm", "losses"),
    [
        (GRPOConfig(), ["importance_sampling", "ppo", "ppo"]),
        (CISPOConfig(kind="cispo", mismatch_correction="none"), ["cispo"] * 3),
        (CrossEntropyConfig(kind="cross_entropy"), ["cross_entropy"] * 3),
        (
            GRPOConfig(mismatch_correction="icepop", mismatch_bounds=(0.1, 9.0), max_sequence_error=500.0),
            ["importance_sampling", "ppo", "ppo"],
        ),
    ],
    ids=["grpo", "cispo", "cross_entropy", "correction"],
)
def test_the_driver_trains_on_tinker_as_in_process(
    server: tuple[FakeTinker, str], start: Path, model_dir: Path, algorithm: Any, losses: list[str]
) -> None:
    fake, url = server
    local = Trainer.load(model_dir, config(algorithm), seed=5)
    before = {name: p.detach().clone() for name, p in local.model.named_parameters()}
    trainer = Trainer.over(service(url), start, config(algorithm), seed=5)
    ours, theirs = (each.step(sequences(), 1) for each in (local, trainer))
    assert fake.losses == losses
    assert fake.sequence == sorted(fake.sequence)
    assert distance(fake, local, before) < 2e-3
    for name in ("loss", "grad_norm", "token_mult_prob_error", "reward"):
        expected = ours.metrics[name]
        assert theirs.metrics[name] == pytest.approx(expected, rel=2e-3, abs=2e-5), name
    trainer.close()


def test_a_checkpoint_is_a_pointer_that_continues_with_optimizer_and_cursor(
    server: tuple[FakeTinker, str], start: Path, tmp_path: Path
) -> None:
    fake, url = server
    through = Trainer.over(service(url), start, config(GRPOConfig()), seed=5)
    through.step(sequences(seed=1), 1)
    through.save(tmp_path / "half")
    through.step(sequences(seed=2), 2)
    expected = {name: p.detach().clone() for name, p in fake.model.named_parameters()}
    resumed = Trainer.over(
        service(url), tmp_path / "half", config(GRPOConfig()), trainer_state=tmp_path / "half/trainer", seed=5
    )
    resumed.step(sequences(seed=2), 2)
    assert resumed.cursor.optimizer_steps == 6
    assert all(torch.equal(p, expected[name]) for name, p in fake.model.named_parameters())


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        (GRPOConfig(entropy_coefficient=0.01), "entropy_weights.*entropy_coefficient to 0"),
        (GRPOConfig(importance_ratio="sequence", loss_aggregation="sequence"), "importance_ratio 'sequence'"),
        (GRPOConfig(kl_coefficient=0.1), "kl_coefficient to 0"),
    ],
    ids=["entropy", "loss", "reference"],
)
def test_what_tinker_cannot_compute_is_refused_by_name_before_anything_is_applied(
    server: tuple[FakeTinker, str], start: Path, model_dir: Path, algorithm: GRPOConfig, named: str
) -> None:
    fake, url = server
    with pytest.raises(ConfigError, match=named):
        Trainer.over(service(url), start, config(algorithm), reference_dir=model_dir).step(sequences(), 1)
    assert fake.losses == []


def test_wrong_credentials_an_unknown_model_and_a_damaged_pointer_are_told_apart(
    server: tuple[FakeTinker, str], start: Path
) -> None:
    _, url = server
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        service(url, key="tml-wrong").load_checkpoint(start)
    with pytest.raises(DataError, match="no base model huge"):
        service(url, base_model="huge").load_checkpoint(start)
    (start / "tinker.json").write_text('{"weights": 3}')
    with pytest.raises(ConfigError, match=r"(?s)tinker\.json cannot be read.*base_model"):
        service(url).load_checkpoint(start)
    (start / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        facts_of(start)


@pytest.mark.real
def test_a_run_on_collected_datasets_trains_at_tinker_and_continues_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("OUR_KEY", KEY)
    base = open_run(make_config(tmp_path))
    first = starting_policy(base)
    collect(base, first, draw=1, groups=8, size=8)
    policy = model_location(Location(first.uri)).local_path
    fake = FakeTinker(policy, KEY)
    with listening(fake.app) as url:
        keys: dict[str, Any] = {
            "policy": {"kind": "pretrained", "path": str(policy)},
            "offline": {"datasets": ["night"], "evaluate": False, "on_stale": "warn", "max_age": None},
            "train": {
                "algorithm": {"kind": "cross_entropy"},
                "minibatches": 1,
                "threads": 1,
                "device": "cpu",
                "service": {"kind": "tinker", "base_model": "tiny", "url": url, "token_variable": "OUR_KEY"},
            },
        }
        run = train_to_the_end(make_config(tmp_path, "at-tinker", **keys))
        assert run.config.iterations == 2
        release_trainers()
        checkpoint = run.checkpoint(2).reference()
        assert checkpoint is not None
        pointer = read_pointer(model_location(Location(checkpoint.uri)).local_path)
        assert (pointer.base_model, pointer.weights is not None) == ("tiny", True)
        assert fake.losses == ["cross_entropy"] * 2
        metrics = read_manifest(run.stage(2, "train").reference()).metrics  # type: ignore[arg-type]
        assert metrics["train/grad_norm"] > 0
        again = make_config(tmp_path, "at-tinker", **(keys | {"offline": keys["offline"] | {"epochs": 2}}))
        assert train_to_the_end(again).config.iterations == 4, "from the pointer of version 2"
        release_trainers()


@pytest.mark.real
def test_grpo_at_tinker_samples_there_what_it_trains_there_and_continues_from_its_pointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("OUR_KEY", KEY)
    policy = model_location(Location(starting_policy(open_run(make_config(tmp_path))).uri)).local_path
    fake = FakeTinker(policy, KEY)
    with listening(fake.app) as url:
        tree: dict[str, Any] = {
            "run_id": "grpo-at-tinker",
            "iterations": 2,
            "store": str(tmp_path / "store"),
            "policy": {"kind": "pretrained", "path": str(policy)},
            "environment": {"kind": "custom", "target": f"{Path(__file__).parent / 'long_answers.py'}:LongAnswers"},
            "generation": {"backend": "tinker", "max_new_tokens": 6, "max_model_len": 256},
            "rollout": {"prompts_per_iteration": 2, "group_size": 4},
            "train": {
                "minibatches": 1,
                "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
                "service": {"kind": "tinker", "base_model": "tiny", "url": url, "token_variable": "OUR_KEY"},
            },
            "evaluation": {"tasks": 2},
            "infra": {"kind": "local", "state": str(tmp_path / "state")},
        }
        run = open_run(parse_config(tree))
        version = starting_policy(run)
        for k in (1, 2):
            weights = refit_iteration(run, k, version)
            rollouts = collect_iteration(run, k, weights, engine_at(run, k - 1))
            assert (rollouts.counts["requested"], rollouts.counts["failed"]) == (8, 0)
            sequences = validate_iteration(run, k, rollouts, vocabulary_size(run))
            update = train_iteration(run, k, sequences, version, checkpoint_cache(run.config))
            metrics = read_manifest(update).metrics
            assert metrics["train/num_mismatched_seqs"] == 0, "log-probabilities of sampling are those of training"
            assert metrics["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
            assert metrics["train/grad_norm"] > 0
            version = publish(run, update)
            release_trainers()  # all that a kill takes from the process; the pointer is left
        assert fake.losses == ["importance_sampling"] * 2
        assert (
            not fake.snapshots["sampler-0"]
            .state_dict()["lm_head.weight"]
            .equal(fake.snapshots["sampler-1"].state_dict()["lm_head.weight"])
        ), "iteration 2 was sampled from version 1"
        evaluated = evaluate_version(run, 2, engine_at(run, 2))
        assert evaluated.counts["failed"] == 0
        release_trainers()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, r"generation\.backend is vllm\. Set generation\.backend to tinker"),
        (
            {"generation": {"backend": "tinker"}, "asynchrony": {"mode": "batch-async", "staleness": 1}},
            "staleness is 1",
        ),
        ({"generation": {"sampling": {"temperature": 0.5}}}, "sampling.temperature is 0.5"),
        ({"checkpoint": {"optimizer_every": 2}}, "optimizer_every is 2"),
        ({"train": {"lora": {}}}, "lora_rank instead"),
    ],
)
def test_what_a_run_cannot_do_at_tinker_is_refused_at_load(keys: dict[str, Any], told: str) -> None:
    train = {"service": {"kind": "tinker", "base_model": "tiny"}, "algorithm": {"kind": "cross_entropy"}}
    offline = {"offline": {"datasets": ["night"], "evaluate": False}} if keys else {}
    with pytest.raises(ConfigError, match=told):
        parse_config({"run_id": "r", **offline, **keys, "train": train | keys.get("train", {})})
