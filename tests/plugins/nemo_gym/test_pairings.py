"""`allowed_agents` and `allowed_model_types` of resources servers."""

import pytest

from roundhouse.plugins.nemo_gym.config.pairings import OVERRIDE_VARIABLE
from roundhouse.plugins.nemo_gym.config.resolve import resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots


def configuration(restriction: str, agent: str, model: str) -> str:
    return f"""
weather:
  resources_servers:
    weather: {{entrypoint: app.py, domain: agent, {restriction}}}
player:
  responses_api_agents:
    {agent}:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: weather}}
      model_server: {{type: responses_api_models, name: policy}}
policy:
  responses_api_models:
    {model}: {{entrypoint: app.py}}
"""


def problems(tmp_path, text: str, *overrides: str, ours: bool = False) -> list[str]:
    (tmp_path / "a.yaml").write_text(text)
    roots = SearchRoots.of(cwd=tmp_path, environ={})
    told = resolve(["a.yaml"], overrides, roots, ours=ours).problems
    return [problem for problem in told if "allowed_" in problem]


@pytest.mark.parametrize(
    ("restriction", "place"),
    [
        ("allowed_agents: [harness_agent]", "player.responses_api_agents.simple_agent"),
        ("allowed_agents: harness_agent", "player.responses_api_agents.simple_agent"),
        ("allowed_model_types: [openai_model]", "policy.responses_api_models.vllm_model"),
    ],
)
def test_a_pairing_that_the_resources_server_does_not_accept_is_a_problem(tmp_path, monkeypatch, restriction, place):
    text = configuration(restriction, "simple_agent", "vllm_model")
    (problem,) = problems(tmp_path, text)
    assert f"player plays it with {place}. Name an accepted one" in problem
    assert problems(tmp_path, text, "++allow_unsupported_pairing=true") == []
    monkeypatch.setenv(OVERRIDE_VARIABLE, "1")
    assert problems(tmp_path, text) == []


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("restriction", ["allowed_agents: [simple_agent]", "allowed_model_types: [vllm_model]"])
def test_ours_is_accepted_where_the_server_of_its_contract_is(tmp_path, ours, restriction):
    assert problems(tmp_path, configuration(restriction, "simple_agent", "vllm_model"), ours=ours) == []


def test_a_model_that_is_chosen_later_is_no_pairing(tmp_path):
    assert problems(tmp_path, configuration("allowed_model_types: [openai_model]", "simple_agent", "dummy_model")) == []
