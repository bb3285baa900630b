"""The trainer generates: a run's rollouts come from the trainer's weights, which are neither published nor loaded twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig, TrainConfig
from roundhouse.errors import ConfigError
from roundhouse.generation import transformers_engine
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.interface import GenerationDatumSpec, configure_generation_config, create_backend
from roundhouse.generation.protocol import Draw
from roundhouse.generation.trainer_engine import TrainerEngine, TrainerGeneration
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_at, engine_service, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import WEIGHTS_DIGEST, Reference, StageKind, read_manifest, read_table
from roundhouse.training.packed_attention import PACKED
from roundhouse.training.service.engine import TrainEngine

pytestmark = pytest.mark.real

TOKEN_BYTES = 2 * 2 * 1 * 32 * 4
"""Keys and values of a token of `tests.generation.tiny`: two layers, one head of 32 numbers in float32."""


def settings(directory: Path, **keys: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "run_id": "inside",
        "iterations": 2,
        "store": str(directory / "store"),
        "policy": {"kind": "warm_start", "steps": 20, "hidden_size": 32, "intermediate_size": 64, "layers": 2},
        "environment": {"kind": "sort"},
        "generation": {"backend": "trainer", "max_new_tokens": 8, "max_model_len": 256},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4},
        "train": {
            "minibatches": 1,
            "threads": 1,
            "device": "cpu",
            "algorithm": {"kind": "cross_entropy", "include_truncated": True},
        },
        "evaluation": {"tasks": 2},
        "infra": {"state": str(directory / "state")},
    }
    return {name: tree.get(name, {}) | keys[name] if isinstance(keys.get(name), dict) else keys.get(name, value)
            for name, value in tree.items()}  # fmt: skip


def iterate(run: Run, k: int, base: Reference) -> Reference:
    weights = refit_iteration(run, k, base)
    rollouts = collect_iteration(run, k, weights, engine_at(run, k - 1))
    assert (rollouts.counts["requested"], rollouts.counts["failed"]) == (8, 0)
    sequences = validate_iteration(run, k, rollouts, vocabulary_size(run))
    assert sequences.counts["quarantined"] == 0
    return publish(run, train_iteration(run, k, sequences, base, checkpoint_cache(run.config)))


def metrics(run: Run, k: int) -> dict[str, float]:
    reference = run.stage(k, StageKind.TRAIN).reference()
    assert reference is not None
    return read_manifest(reference).metrics


def tokens(run: Run, k: int) -> list[list[int]]:
    reference = run.stage(k, StageKind.COLLECT).reference()
    assert reference is not None
    return sorted(read_table(reference, "turns").column("generation_token_ids").to_pylist())


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories with weights that the trainer loaded; an engine that builds a model itself fails."""
    found: list[Path] = []
    load = TrainEngine.load_checkpoint

    def counted(self: TrainEngine, directory: Path, **keys: Any) -> Any:
        found.append(directory)
        return load(self, directory, **keys)

    def refused(*_: object) -> None:
        raise AssertionError("an engine builds a model")

    monkeypatch.setattr(TrainEngine, "load_checkpoint", counted)
    monkeypatch.setattr(transformers_engine, "build_model", refused)
    return found


@pytest.mark.parametrize(
    "train",
    [{}, {"lora": {"rank": 4}, "packing": False}, {"activation_checkpointing": True, "logits_chunk_tokens": 64}],
    ids=["packed", "adapter", "recomputed"],
)
def test_two_iterations_are_drawn_from_the_weights_that_are_trained(
    tmp_path: Path, loaded: list[Path], train: dict[str, Any]
) -> None:
    run = open_run(parse_config(settings(tmp_path, train=train)))
    version = start = starting_policy(run)
    try:
        for k in (1, 2):
            version = iterate(run, k, version)
            assert metrics(run, k)["train/num_mismatched_seqs"] == 0
            assert metrics(run, k)["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
            refit = run.stage(k, StageKind.REFIT).reference()
            assert refit is not None
            assert [one["way"] for one in read_manifest(refit).details["replicas"]] == ["trainer"]
            [replica] = engine_service(run).replicas()
            assert replica.asleep is not None, "nothing is drawn from weights that are changing"
            chat = {"model": "policy", "messages": [{"role": "user", "content": "Sort 3 1 2."}]}
            assert httpx.post(f"{engine_service(run).url}/v1/chat/completions", json=chat).status_code == 503
        evaluate_version(run, 2, engine_at(run, 2))
        [replica] = engine_service(run).replicas()
        assert (replica.policy_version, replica.weights) == (2, version.uri)
        assert replica.digest == read_manifest(version).details[WEIGHTS_DIGEST]
        assert replica.digest != read_manifest(start).details[WEIGHTS_DIGEST]
        assert len(loaded) == 1, "version 0, once"
    finally:
        release_trainers()


def test_a_run_that_lost_its_trainer_goes_on_as_the_one_that_kept_it(tmp_path: Path, loaded: list[Path]) -> None:
    drawn = []
    for name, loses in (("kept", False), ("lost", True)):
        run = open_run(parse_config(settings(tmp_path / name)))
        version = starting_policy(run)
        version = iterate(run, 1, version)
        if loses:
            release_trainers()  # all that a kill takes from the process: the store is left
        iterate(run, 2, version)
        release_trainers()
        drawn.append((tokens(run, 1), tokens(run, 2)))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    assert len(loaded) == 3


@pytest.mark.parametrize(
    ("options", "together"),
    [
        (None, [8]),
        ({"max_tokens": 128}, [4, 4]),
        # room for three requests and a half
        ({"buffer_size_gb": 112 * TOKEN_BYTES / 2**30}, [3, 3, 2]),
    ],
    ids=["unset", "max_tokens", "buffer_size_gb"],
)
async def test_options_of_megatron_core_bound_what_is_answered_together(
    policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] | None, together: list[int]
) -> None:
    sizes: list[int] = []
    generate = transformers_engine.generate_batch

    def counted(model: Any, prompts: list[list[int]], *rest: Any) -> Any:
        sizes.append(len(prompts))
        return generate(model, prompts, *rest)

    monkeypatch.setattr(transformers_engine, "generate_batch", counted)
    service = TrainEngine(TrainConfig(device="cpu", threads=1))
    service.load_checkpoint(policies["first"])
    config = GenerationConfig.model_validate(
        {"backend": "trainer", "max_model_len": 48, "mcore_generation_config": options}
    )
    engine = TrainerEngine(config, str(policies["first"]), ChatCodec(str(policies["first"]), 48))
    await engine.start()
    await engine.take(service, 3)
    answers = await asyncio.gather(*(engine.generate([5] * 20, Draw(12, seed=seed)) for seed in range(8)))
    assert sizes == together
    assert {answer.versions[0][0] for answer in answers if answer.versions} == {3}
    engine.shutdown()


@pytest.mark.parametrize("leaves", [True, False], ids=["sleep", "take"])
async def test_the_trainer_has_its_model_back_before_it_goes_on(
    policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    drawn, draw_row = list[int](), transformers_engine.draw_row

    def slow(*arguments: Any) -> tuple[int, float]:
        drawn.append(1)
        time.sleep(0.2)
        return draw_row(*arguments)

    monkeypatch.setattr(transformers_engine, "draw_row", slow)
    service = TrainEngine(TrainConfig(device="cpu", threads=1))
    service.load_checkpoint(policies["first"])
    config = GenerationConfig(backend="trainer", max_model_len=48)
    engine = TrainerEngine(config, str(policies["first"]), ChatCodec(str(policies["first"]), 48))
    await engine.start()
    await engine.take(service, 1)
    caller = asyncio.create_task(engine.generate([5] * 20, Draw(4, seed=0)))
    while not drawn:  # noqa: ASYNC110 (a look into the engine, without a hook for it)
        await asyncio.sleep(0.001)
    if leaves:
        caller.cancel()
        await engine.sleep()
    else:
        await engine.take(service, 2)
    assert service.model.config._attn_implementation == PACKED
    assert len(drawn) == 1 if leaves else (await caller).versions == [(1, len(drawn))]
    engine.shutdown()


def test_the_interface_of_batches_draws_what_an_engine_with_the_same_weights_draws(policies: dict[str, Path]) -> None:
    model = str(policies["first"])
    tokenized = configure_generation_config(
        GenerationConfig(backend="transformers", max_model_len=48), AutoTokenizer.from_pretrained(model)
    )
    service = TrainEngine(TrainConfig(device="cpu", threads=1))
    service.load_checkpoint(policies["first"])
    batch: GenerationDatumSpec = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "seeds": [1, 2],
    }
    inside = TrainerGeneration(tokenized, service)
    with pytest.raises(ConfigError, match="prepare_for_generation first"):
        inside.generate(batch, greedy=False)
    outputs = []
    for backend in (create_backend(tokenized, model), inside):
        backend.prepare_for_generation()
        outputs.append(backend.generate(batch, greedy=False))
        backend.finish_generation()
    assert torch.equal(outputs[0]["output_ids"], outputs[1]["output_ids"])
    assert torch.allclose(outputs[0]["logprobs"], outputs[1]["logprobs"], atol=1e-5)
    assert service.model.config._attn_implementation == PACKED, "it trains as before"


def test_a_buffer_without_room_for_one_request_is_refused(policies: dict[str, Path]) -> None:
    small = {"buffer_size_gb": 47 * TOKEN_BYTES / 2**30}
    config = GenerationConfig.model_validate(
        {"backend": "trainer", "max_model_len": 48, "mcore_generation_config": small}
    )
    with pytest.raises(ConfigError, match=r"buffer_size_gb is .* room for the keys and values of 47 tokens"):
        TrainerEngine(config, str(policies["first"]), ChatCodec(str(policies["first"]), 48))


GIVEN = {"max_tokens": 4096, "buffer_size_gb": 1}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"generation": {"backend": "megatron"}}, r"needs megatron-core and CUDA\..*backend: trainer"),
        ({"train": {"service": {"kind": "process"}}}, r"train\.service\.kind is process. Set it to resident"),
        ({"train": {"service": {"kind": "resident", "processes": 2}}}, r"processes is 2. Set it to 1"),
        ({"asynchrony": {"mode": "batch-async", "staleness": 1}}, r"asynchrony\.staleness is 1. Set it to 0"),
        ({"generation": {"engine_url": "http://127.0.0.1:1"}}, r"generation\.engine_url is .*Leave it out"),
        ({"generation": {"weight_sync": "store"}}, r"generation\.weight_sync is store. Leave it out"),
        ({"generation": {"dtype": "bfloat16"}}, r"generation\.dtype is bfloat16. Set it to train\.dtype, float32"),
        ({"generation": {"replicas": 2}}, r"generation\.replicas is 2"),
        ({"generation": {"threads": 2}}, r"Leave it out, and set train\.threads"),
        ({"placement": {"colocation": "node"}}, r"placement\.colocation is node. Leave it out"),
        ({"generation": {"backend": "vllm", "weight_sync": "trainer"}}, r"generation\.weight_sync is trainer, but"),
        ({"generation": {"backend": "vllm", "mcore_generation_config": {}}}, "mcore_generation_config is given, but"),
        ({"generation": {"mcore_generation_config": GIVEN | {"num_cuda_graphs": 16}}}, "num_cuda_graphs is 16, which"),
        (
            {"generation": {"mcore_generation_config": {"buffer_guaranteed_fraction": 0.1}}},
            "is 0.1, which needs megatron",
        ),
        ({"generation": {"mcore_generation_config": {"buffer_guaranteed_fraction": 2}}}, "less than or equal to 1"),
        ({"generation": {"mcore_generation_config": {"max_tokens": 100}}}, r"max_tokens is 100, less than one request"),
        ({"generation": {"mcore_generation_config": {"buffer_size_gb": 0}}}, "greater than 0"),
    ],
)
def test_what_a_trainer_that_generates_cannot_do_is_refused_at_load(
    tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config(settings(tmp_path) | {name: settings(tmp_path).get(name, {}) | own for name, own in keys.items()})


def test_the_defaults_of_the_options_are_nemo_rls(tmp_path: Path) -> None:
    options = parse_config(settings(tmp_path, generation={"mcore_generation_config": {}})).generation
    assert options.mcore_generation_config is not None
    assert (options.mcore_generation_config.buffer_size_gb, options.mcore_generation_config.max_tokens) == (20, 16384)
