"""Servers other than vLLM's as the engine of a run: one that returns text alone, and SGLang's routes (a stand-in)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.refit import engine_at, engine_service, refit_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import model_location
from roundhouse.trajectories.records import Status
from roundhouse.trajectories.validation import validate
from tests.generation.foreign_servers import PlainServer
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


def run_at(directory: Path, url: str, model: Path, more: dict[str, Any] | None = None, **endpoint: Any) -> Run:
    tree = settings(directory, url, **endpoint) | {"policy": {"kind": "pretrained", "path": str(model)}} | (more or {})
    return open_run(parse_config(tree))


# A server that returns text alone -------------------------------------------------------------------------------------


def test_a_server_of_plain_text_serves_evaluations_and_collections(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = PlainServer(["1 2 3 4 5 6", "no"])
    with serving(server.app) as url:
        run = run_at(tmp_path, url, model, kind="text")
        refuse_unready(run.config, trains=False)
        refit_iteration(run, 1, starting_policy(run))
        evaluated = evaluate_version(run, 0, engine_service(run).url)
        rollouts = read_rollouts(evaluated)
        assert {rollout.status for rollout in rollouts} == {Status.COMPLETED}
        assert [rollout.items[-1]["content"][0]["text"] for rollout in rollouts] == ["1 2 3 4 5 6", "no"]
        assert "serves evaluations and collections, no training" in caplog.text
        asked = server.requests[-1]
        assert asked["prompt"].endswith("<|im_start|>assistant\n")
        assert asked["stop"] == ["<|im_end|>"]
        collection = collect_iteration(run, 1, refit_iteration(run, 1, starting_policy(run)), engine_at(run, 0))
    found = read_rollouts(collection)
    assert {rollout.reward for rollout in found} == {0.0}
    assert {rollout.turns[0].policy_version for rollout in found} == {0}
    checked = validate(found, run.config.validation, vocabulary_size=10**6, policy_version=0)
    assert {row["reason"] for row in checked.quarantine.to_pylist()} == {"log_prob_count"}


def test_a_tool_call_in_its_text_is_carried_out_and_the_conversation_goes_on(model: Path, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1+1"}}\n</tool_call>'
    server = PlainServer([call, "2"])
    with serving(server.app) as url:
        run = run_at(
            tmp_path, url, model, {"environment": {"kind": "calculator"}, "rollout": {"concurrency": 1}}, kind="text"
        )
        refit_iteration(run, 1, starting_policy(run))
        first = read_rollouts(evaluate_version(run, 0, engine_service(run).url))[0]
    assert (first.status, len(first.turns)) == (Status.COMPLETED, 2)
    assert [item["output"] for item in first.items if item["type"] == "function_call_output"] == ["2"]


def test_training_with_it_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with serving(PlainServer(["four"]).app) as url:
        with pytest.raises(ConfigError, match=r"endpoint\.kind is text, .* training does not\. .* tokens or sglang"):
            refuse_unready(run_at(tmp_path / "text", url, model, kind="text").config)
        for kind, update in (("tokens", "vllm"), ("sglang", "sglang")):
            run = run_at(tmp_path / kind, url, model, kind=kind, weight_update=update)
            with pytest.raises(ConfigError, match=rf"without token IDs and log-probabilities .*kind {kind} .*to text"):
                refuse_unready(run.config)


@pytest.mark.parametrize(
    ("endpoint", "more", "message"),
    [
        ({"kind": "text", "weight_update": "vllm"}, {}, r"weight_update is vllm, but endpoint\.kind is text.*tokens"),
        ({"weight_update": "sglang"}, {}, r"weight_update is sglang, but endpoint\.kind is tokens.*sglang"),
        (
            {"kind": "sglang", "weight_update": "sglang"},
            {"validation": {"recompute_tolerance": None}},
            r"recompute_tolerance is None\. Set it: nothing else",
        ),
    ],
    ids=["text", "kind", "unproved"],
)
def test_a_kind_of_server_that_cannot_do_it_is_refused_at_load(
    tmp_path: Path, endpoint: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(settings(tmp_path, NOWHERE, **endpoint) | more)


def test_any_temperature_is_drawn_at_where_no_log_probability_is_wanted(tmp_path: Path) -> None:
    tree = settings(tmp_path, NOWHERE, kind="text")
    tree["generation"]["temperature"] = 0.7
    assert parse_config(tree).generation.sampling.temperature == 0.7
