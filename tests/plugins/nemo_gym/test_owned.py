"""`environment.kind: nemo_gym`: a run starts its servers, finds their agents, restarts a dead one, and leaves nothing
running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.environments import demonstrating
from roundhouse.environments.base import TaskRow
from roundhouse.environments.calculator import Calculator
from roundhouse.errors import ConfigError, InfraError
from roundhouse.plugins.nemo_gym import owned
from roundhouse.plugins.nemo_gym.owned import SERVERS_VARIABLE, resolved
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.refit import own_gym
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, rollout_config, says, serving
from tests.plugins.nemo_gym.test_start import CALCULATOR, plays_calculator
from tests.plugins.programs.model_server.fake_engine import FakeEngine
from tests.waiting import until

pytestmark = pytest.mark.real

TWO_AGENTS = f"""{CALCULATOR}
other_agent:
  responses_api_agents:
    roundhouse_agent:
      resources_server: {{type: resources_servers, name: calc}}
      model_server: {{type: responses_api_models, name: policy_model}}
"""


def row(index: int, agent: str | None = "calc_agent") -> TaskRow:
    task = dict(Calculator().tasks("train")[index])
    return task if agent is None else task | {"agent_ref": {"type": "responses_api_agents", "name": agent}}


def config(tmp_path: Path, rows: list[TaskRow], engine_url: str = "http://127.0.0.1:1", **keys: Any) -> RunConfig:
    (tmp_path / "gym.yaml").write_text(TWO_AGENTS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    environment = {
        "kind": "nemo_gym",
        "config_paths": [str(tmp_path / "gym.yaml")],
        "train_tasks": str(tmp_path / "rows.jsonl"),
        "start_timeout_seconds": 120,
    } | keys
    return parse_config(
        {
            "run_id": "r",
            "store": str(tmp_path / "store"),
            "infra": {"state": str(tmp_path / "state")},
            "generation": {"engine_url": engine_url},
            "policy": {"kind": "pretrained", "path": str(tmp_path)},
            "evaluation": {"every": None, "before_training": False},
            "environment": environment,
        }
    )


@pytest.fixture
def engine() -> Iterator[str]:
    with serving(FakeEngine(reply=plays_calculator)) as url:
        yield url


async def roll_out(given: RunConfig, rows: list[TaskRow]) -> list[Rollout]:
    async with open_environment(given.environment) as environment:
        specs = plan_rollouts(rows, 1, seed=0, iteration=1)
        settings = rollout_config(timeout_seconds=60, retry={"attempts": 2, "first_delay_seconds": 0.01})
        return await collect(
            specs, ScriptedPolicy(lambda *_: says("unused")), environment, settings, SAMPLING, policy_version=3
        )


def test_the_servers_of_a_run_play_its_rows_survive_a_dead_one_and_end_with_it(tmp_path: Path, engine: str) -> None:
    rows = [row(0, "calc_agent"), row(1, "other_agent")]
    given = config(tmp_path, rows, engine)
    with own_gym(SimpleNamespace(config=given, run_id="r")):  # type: ignore[arg-type]
        head = os.environ[SERVERS_VARIABLE]
        servers = {one["process_name"]: one for one in httpx.get(f"{head}/server_instances").json()}
        assert {one["status"] for one in servers.values()} == {"success"}, "healthy before the first rollout"
        first = asyncio.run(roll_out(given, rows))
        assert [rollout.status for rollout in first] == [Status.COMPLETED] * 2, [each.failure_detail for each in first]
        assert [rollout.environment for rollout in first] == ["calc_agent", "other_agent"]
        assert all(turn.generation_token_ids for rollout in first for turn in rollout.turns)
        os.kill(servers["other_agent"]["pid"], signal.SIGKILL)
        again = asyncio.run(roll_out(given, rows))
        assert [rollout.status for rollout in again] == [Status.COMPLETED] * 2, [each.failure_detail for each in again]
        later = {one["process_name"]: one for one in httpx.get(f"{head}/server_instances").json()}
        assert later["other_agent"]["pid"] != servers["other_agent"]["pid"]
        assert later["calc"]["pid"] == servers["calc"]["pid"], "only the dead one was started again"
    assert SERVERS_VARIABLE not in os.environ
    until(lambda: not any(psutil.pid_exists(one["pid"]) for one in later.values()), "the end of every server")


async def test_without_its_servers_a_rollout_fails_with_the_remedy(tmp_path: Path) -> None:
    given = config(tmp_path, [row(0)])
    async with open_environment(given.environment) as environment:
        settings = rollout_config(retry={"attempts": 1})
        [rollout] = await collect(
            plan_rollouts([row(0)], 1, 0, 1), ScriptedPolicy(lambda *_: says("")), environment, settings, SAMPLING
        )
    assert rollout.failure_code == "environment_unavailable"
    assert SERVERS_VARIABLE in (rollout.failure_detail or "")


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ([row(0), row(1, "stranger")], {}, r"row 2 names the agent 'stranger'.*calc_agent, other_agent"),
        ([row(0, None)], {}, r"row 1 names the agent None"),
        ([row(0)], {"agent": "stranger"}, r"environment\.agent is 'stranger'"),
        ([row(0)], {"config_paths": ["no-such.yaml"]}, r"environment\.config_paths is no-such\.yaml"),
        ([row(0)], {"overrides": ["~calc"]}, r"(?s)environment\.config_paths.*refers to resources_servers/calc"),
        ([row(0)], {"heldout_tasks": "no-such.jsonl"}, r"environment\.heldout_tasks"),
    ],
)
def test_what_cannot_be_played_is_refused_before_any_server_is_started(
    tmp_path: Path, rows: list[TaskRow], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_unready(config(tmp_path, rows, **keys))


def test_rows_without_an_agent_go_to_the_one_that_is_named(tmp_path: Path) -> None:
    environment: Any = open_environment(config(tmp_path, [row(0, None), row(1)], agent="other_agent").environment)
    assert [environment.agent_of(each) for each in environment.tasks("train")] == ["other_agent", "calc_agent"]


SIMPLE_AGENT = """
calc:
  resources_servers:
    roundhouse_environment: {environment: {kind: calculator}}
calc_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: calc}
      model_server: {type: responses_api_models, name: policy_model}
policy_model:
  responses_api_models:
    roundhouse_model: {base_url: "${policy_base_url}"}
"""


def test_our_servers_stand_in_unless_that_is_declined(tmp_path: Path) -> None:
    given = config(tmp_path, [row(0)])
    (tmp_path / "gym.yaml").write_text(SIMPLE_AGENT)
    ours, theirs = (
        {one.name: one.kind for one in resolved(each, "http://127.0.0.1:1", choose_ports=False).instances}
        for each in (given.environment, config_of(tmp_path, ours=False))
    )
    assert (ours["calc_agent"], theirs["calc_agent"]) == ("own", "foreign")


def config_of(tmp_path: Path, **keys: Any) -> Any:
    """The environment of a file that is there already."""
    text = (tmp_path / "gym.yaml").read_text()
    environment = config(tmp_path, [row(0)], **keys).environment
    (tmp_path / "gym.yaml").write_text(text)
    return environment


HANGS = "import time\ntime.sleep(600)\n"


def foreign(tmp_path: Path, app: str) -> None:
    """A foreign agent server, next to the configuration."""
    place = tmp_path / "responses_api_agents" / "simple_agent"
    place.mkdir(parents=True)
    (place / "app.py").write_text(app)
    (place / "requirements.txt").write_text("")
    (tmp_path / "gym.yaml").write_text(SIMPLE_AGENT)


def test_a_foreign_server_runs_with_the_interpreter_that_is_named(tmp_path: Path) -> None:
    config(tmp_path, [row(0)])
    foreign(tmp_path, "import pathlib, sys\npathlib.Path('ran').write_text(sys.executable)\n")
    keys = {"ours": False, "python": sys.executable, "search_dirs": [str(tmp_path)], "restarts": 0}
    with pytest.raises(InfraError, match="calc_agent ended"), own_gym(run_of(config_of(tmp_path, **keys), tmp_path)):
        raise AssertionError("nothing may run")
    assert (tmp_path / "responses_api_agents" / "simple_agent" / "ran").read_text() == sys.executable


def test_a_server_that_does_not_answer_in_time_is_named(tmp_path: Path) -> None:
    config(tmp_path, [row(0)])
    foreign(tmp_path, HANGS)
    keys = {"ours": False, "python": sys.executable, "search_dirs": [str(tmp_path)], "start_timeout_seconds": 3}
    begun = time.monotonic()
    with (
        pytest.raises(InfraError, match=r"calc_agent at .*log"),
        own_gym(run_of(config_of(tmp_path, **keys), tmp_path)),
    ):
        raise AssertionError("nothing may run")
    assert time.monotonic() - begun < 100


def test_servers_are_started_with_the_limits_of_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = mock.Mock(side_effect=InfraError("as far as this test goes"))
    monkeypatch.setattr(owned, "GymServers", servers)
    given = config(tmp_path, [row(0)], restarts=7, start_timeout_seconds=77)
    with pytest.raises(InfraError, match="as far as"), own_gym(SimpleNamespace(config=given, run_id="r")):  # type: ignore[arg-type]
        raise AssertionError("nothing may run")
    options = servers.call_args.args[2]
    assert (options.restarts, options.start_seconds) == (7, 77)


def run_of(environment: Any, tmp_path: Path) -> Any:
    given = config(tmp_path, [row(0)])
    (tmp_path / "gym.yaml").write_text(SIMPLE_AGENT)
    return SimpleNamespace(config=given.model_copy(update={"environment": environment}), run_id="r")


def test_relative_paths_are_looked_for_where_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path, [row(0)], config_paths=["gym.yaml"], search_dirs=[str(tmp_path)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert open_environment(given.environment).tasks("train")


def test_two_sets_of_servers_are_refused(tmp_path: Path) -> None:
    one = config(tmp_path, [row(0)]).environment.model_dump(mode="json")
    with pytest.raises(ConfigError, match="one set of servers"):
        parse_config({"run_id": "r", "environment": {"kind": "mixture", "environments": {"a": one, "b": one}}})


def test_it_names_code_and_has_no_demonstrations(tmp_path: Path) -> None:
    given = config(tmp_path, [row(0)], python="/bin/python")
    assert unnamed_code(given, []).keys() >= {"environment.config_paths", "environment.python"}
    with pytest.raises(ConfigError, match="no demonstrations"):
        demonstrating(given.environment)
