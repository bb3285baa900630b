"""Environment servers (NeMo Gym 0.7): relays have the address of their agent, others are servers like all."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from roundhouse.plugins.nemo_gym.clients.connection import server_url
from roundhouse.plugins.nemo_gym.config.resolve import Resolution, resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots

AGENT = """
weather_simple_agent:
  responses_api_agents:
    simple_agent: {entrypoint: app.py, port: 7777}
"""


def environment(implementation: str, agent: str = "weather_simple_agent", more: str = "") -> str:
    return f"""
front:
  environment_servers:
    {implementation}: {{entrypoint: app.py, agent_server: {{type: responses_api_agents, name: {agent}}}{more}}}
"""


@pytest.fixture
def resolved(tmp_path):
    def resolved(text: str, *overrides: str, **options: Any) -> Resolution:
        (tmp_path / "a.yaml").write_text(text)
        return resolve(["a.yaml"], overrides, SearchRoots.of(cwd=tmp_path, environ={}), **options)

    return resolved


def address(resolution: Resolution, name: str, implementation: str = "legacy_agent") -> tuple[str, int]:
    """The address that a client of the head server reads."""
    fields = OmegaConf.create(resolution.yaml())[name].environment_servers[implementation]
    return fields.host, fields.port


@pytest.mark.parametrize("ours", [False, True])
def test_a_relay_has_the_address_of_its_agent_and_no_process(resolved, ours):
    resolution = resolved(AGENT + environment("legacy_agent"), ours=ours)
    assert [one.name for one in resolution.instances] == ["weather_simple_agent"]
    assert [one.name for one in resolution.relays] == ["front"]
    assert address(resolution, "front") == ("127.0.0.1", 7777)


def test_the_type_of_a_relays_agent_may_be_left_out(resolved):
    text = environment("legacy_agent").replace("type: responses_api_agents, ", "")
    resolution = resolved(AGENT + text)
    assert (resolution.problems, address(resolution, "front")) == ([], ("127.0.0.1", 7777))


@pytest.mark.parametrize(
    ("agent", "implementation", "name"),
    [
        ("weather_simple_agent", "simple_agent", "weather_environment_server"),
        ("weather_agent", "roundhouse_agent", "weather_environment_server"),
        ("simple_agent", "simple_agent", "simple_agent_environment_server"),
    ],
)
def test_an_agent_without_an_environment_server_gets_one_of_nemo_gyms_name(resolved, agent, implementation, name):
    resolution = resolved(f"{agent}: {{responses_api_agents: {{{implementation}: {{url: 'http://127.0.0.1:9'}}}}}}\n")
    assert [one.name for one in resolution.relays] == [name]
    assert address(resolution, name) == ("127.0.0.1", 9)


def test_an_agent_without_an_environment_server_is_refused_where_that_is_asked(resolved):
    strict = "++error_on_agent_without_environment_server=true"
    (problem,) = resolved(AGENT, strict).problems
    assert "these agents lack one: weather_simple_agent" in problem
    assert resolved(AGENT + environment("legacy_agent"), strict).problems == []


def test_a_relay_to_a_missing_agent_is_a_problem_that_names_the_nearest(resolved):
    (problem,) = resolved(AGENT + environment("legacy_agent", "weather_simpl_agent")).problems
    assert "Did you mean weather_simple_agent?" in problem


def test_limits_of_a_relay_are_named_as_without_effect(resolved):
    more = ", max_concurrent_episodes: 4, queue_timeout_seconds: 5, port: 9"
    (warning,) = resolved(AGENT + environment("legacy_agent", more=more)).warnings
    assert (
        "front.environment_servers.legacy_agent: port, max_concurrent_episodes, queue_timeout_seconds has no" in warning
    )


def test_another_kind_of_environment_server_is_started_and_plays_the_rows_of_its_agent(resolved):
    resolution = resolved(AGENT + environment("single_agent_turn_legacy", more=", port: 8888"))
    assert {one.name: one.kind for one in resolution.instances} == {
        "weather_simple_agent": "foreign",
        "front": "foreign",
    }
    assert resolution.relays == []
    tree = OmegaConf.to_container(OmegaConf.create(resolution.masked_yaml()))
    assert server_url(tree, "weather_simple_agent", "http://head") == "http://127.0.0.1:8888"


def test_rows_go_to_the_agent_itself_behind_a_relay(resolved):
    tree = OmegaConf.to_container(OmegaConf.create(resolved(AGENT + environment("legacy_agent")).masked_yaml()))
    assert server_url(tree, "weather_simple_agent", "http://head") == "http://127.0.0.1:7777"
