"""A backend of three methods from outside serves a run: collected with, trained on, refitted, proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.deployment import ProcessEngine
from roundhouse.generation.exchange import problem_of
from roundhouse.generation.interface import configure_generation_config, create_backend
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_at, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest
from tests.generation import tiny
from tests.generation.test_standalone import engine_process

pytestmark = pytest.mark.real

BACKEND = f"{Path(__file__).parent / 'own_backend.py'}:PlainBackend"
CONFIG = GenerationConfig(backend=BACKEND, max_model_len=256)


@pytest.mark.parametrize(
    "backend",
    [BACKEND, pytest.param("roundhouse.generation.interface:TransformersGeneration", marks=pytest.mark.long)],
)
def test_an_iteration_is_collected_and_trained_with_a_backend_of_three_methods(tmp_path: Path, backend: str) -> None:
    with engine_process() as url:
        tree: dict[str, Any] = {
            "run_id": "own",
            "store": str(tmp_path / "store"),
            "policy": {"kind": "warm_start", "steps": 20, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
            "environment": {"kind": "sort"},
            "generation": {"backend": backend, "engine_url": url, "max_new_tokens": 8, "max_model_len": 256},
            "rollout": {"prompts_per_iteration": 2, "group_size": 4},
            "train": {"minibatches": 1, "threads": 1, "device": "cpu"},
            "infra": {"state": str(tmp_path / "state")},
        }
        run = open_run(parse_config(tree))
        start = starting_policy(run)
        weights = refit_iteration(run, 1, start)
        rollouts = collect_iteration(run, 1, weights, engine_at(run, 0))
        assert rollouts.counts["requested"] == 8
        assert rollouts.counts["failed"] == 0
        validated = validate_iteration(run, 1, rollouts, vocabulary_size(run))
        assert validated.counts["quarantined"] == 0
        update = train_iteration(run, 1, validated, start, tmp_path / "cache")
        assert read_manifest(update).metrics["train/num_mismatched_seqs"] == 0, (
            "its log-probabilities are the trainer's"
        )
        version = publish(run, update)
        release_trainers()
        refit_iteration(run, 2, version)
        (replica,) = ProcessEngine(url).replicas()
        assert (replica.policy_version, replica.weights) == (1, version.uri)


def test_it_answers_as_chats_are_answered_and_refuses_another_distribution(policies: dict[str, Path]) -> None:
    model = str(policies["first"])
    with engine_process() as url:
        ProcessEngine(url).ensure(CONFIG, model, model, 1)
        assert problem_of(url, CONFIG, tiny.TOOL_MESSAGES, [tiny.ADD_TOOL]) is None
        body = {"model": "policy", "messages": tiny.TOOL_MESSAGES, "max_tokens": 5, "seed": 3}
        message = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
        expected = tiny.reference_logprobs(
            policies["first"], message["prompt_token_ids"], message["generation_token_ids"]
        )
        assert message["generation_log_probs"] == pytest.approx(expected, abs=1e-4)
        assert len(message["generation_token_ids"]) <= 5
        reply = httpx.post(f"{url}/v1/chat/completions", json=body | {"temperature": 0.5})
        assert (reply.status_code, "generation.sampling" in reply.text) == (400, True)
        assert httpx.post(f"{url}/v1/chat/completions", json=body | {"temperature": 0}).status_code == 200


def test_what_no_backend_can_be_made_of_is_refused(policies: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policies["first"])
    unfinished = CONFIG.model_copy(update={"backend": BACKEND.replace("PlainBackend", "Unfinished")})
    with pytest.raises(ConfigError, match="does not define generate"):
        create_backend(configure_generation_config(unfinished, tokenizer), str(policies["first"]))
    with pytest.raises(ConfigError, match=r"Set evaluation\.temperature to 0\.7, or .*temperature to 0"):
        parse_config({"run_id": "r", "generation": {"backend": BACKEND, "temperature": 0.7}})
    sets = {"evaluation": {"sets": {"cut": {"top_p": 0.5}}}}
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.cut\.top_p is 0\.5, but generation\.backend"):
        parse_config({"run_id": "r", "generation": {"backend": BACKEND}} | sets)
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.cut\.max_new_tokens \(512\) leaves no room"):
        parse_config({"run_id": "r", "evaluation": {"sets": {"cut": {"max_new_tokens": 512}}}})
    for generation, told in (
        ({"backend": "tgi"}, "module:Class for your own class"),
        ({"backend": BACKEND, "tool_call_parser": "llama3_json"}, "reads hermes and openai alone"),
        ({"backend": BACKEND, "engine_args": {"max_num_seqs": 1}}, "a custom engine takes none"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_config({"run_id": "r", "generation": generation})
    config = parse_config({"run_id": "r", "generation": {"backend": BACKEND}})
    assert unnamed_code(config, []) == {"generation.backend": BACKEND}, "a store cannot name it unasked"
