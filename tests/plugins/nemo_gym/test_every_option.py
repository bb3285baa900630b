"""Options of `roundhouse gym` that the tests of their subjects do not show: each changes a result, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row, read_rows, write_rows
from roundhouse.store.location import Location
from roundhouse.store.stage import Stage
from tests.gym.playground import serving
from tests.plugins.nemo_gym.exchange.test_collection import FakeAgent
from tests.plugins.programs.model_server.fake_engine import FakeEngine, call, say
from tests.sql.stores import write_run


def run(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_rows(tmp_path / "tasks.jsonl", [{"responses_create_params": {"input": f"task {k}"}} for k in range(6)])
    return tmp_path / "tasks.jsonl"


# -- collect --------------------------------------------------------------------------------------------------------


def collected(agent: FakeAgent, output: Path, *options: object) -> list[Row]:
    with serving(agent.app()) as url:
        run("gym", "collect", "-o", output, "--agent-url", url, *options)
    return agent.rows


def test_what_rows_ask_for(tmp_path: Path) -> None:
    write_rows(tmp_path / "q.jsonl", [{"question": "2 + 2?"}])
    (tmp_path / "prompt.yaml").write_text('user: "Answer: {question}"')
    options = ["-i", tmp_path / "q.jsonl", "--prompt-config", tmp_path / "prompt.yaml", "--top-p", 0.5]
    [row] = collected(FakeAgent(), tmp_path / "run.jsonl", *options)
    assert row["responses_create_params"] == {"input": [{"role": "user", "content": "Answer: 2 + 2?"}], "top_p": 0.5}


def test_no_more_rollouts_are_in_flight_than_were_asked_for(tasks: Path, tmp_path: Path) -> None:
    one, all_at_once = FakeAgent(), FakeAgent()
    collected(one, tmp_path / "one.jsonl", "-i", tasks, "--concurrency", 1)
    collected(all_at_once, tmp_path / "all.jsonl", "-i", tasks, "--concurrency", 0)
    assert one.most_at_once == 1
    assert all_at_once.most_at_once > 1


def test_a_rollout_ends_at_its_timeout(tasks: Path, tmp_path: Path) -> None:
    hangs = FastAPI()

    @hangs.post("/run")
    async def hang() -> None:
        import asyncio

        await asyncio.sleep(3600)

    with serving(hangs) as url:
        told = run(
            "gym",
            "collect",
            "-i",
            tasks,
            "--limit",
            1,
            "-o",
            tmp_path / "r.jsonl",
            "--agent-url",
            url,
            "--timeout",
            0.05,
            exit_code=1,
        )
    assert "0 rollouts" in told
    assert "failed" in told or "not run" in told


def test_a_head_server_or_a_configuration_that_was_started_names_the_agents(tasks: Path, tmp_path: Path) -> None:
    agent, head = FakeAgent(), FastAPI()
    with serving(agent.app()) as url:
        place = {"host": "127.0.0.1", "port": int(url.rsplit(":", 1)[1])}
        tree = {"math": {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **place}}}}
        head.get("/global_config_dict_yaml")(lambda: yaml.safe_dump(tree))
        with serving(head) as head_url:
            run("gym", "collect", "-i", tasks, "-o", tmp_path / "a.jsonl", "--head", head_url)
            started = {"head_server": {"host": "127.0.0.1", "port": int(head_url.rsplit(":", 1)[1])}}
            (tmp_path / "started.yaml").write_text(yaml.safe_dump(started))
            run("gym", "collect", "-i", tasks, "-o", tmp_path / "b.jsonl", "--config", tmp_path / "started.yaml")
    assert len(agent.rows) == 12


def played(engine: FakeEngine, output: Path, environment: str, *options: object) -> list[Row]:
    with serving(engine) as url:
        run("gym", "collect", "-o", output, "--environment", environment, "--engine-url", url, "--limit", 1, *options)
    return read_rows(output)


def test_what_an_environment_here_is_told(tmp_path: Path) -> None:
    calls = FakeEngine(say(None, tool_calls=[call("calculator", '{"expression": "1+1"}')]))
    played(calls, tmp_path / "turns.jsonl", "calculator", "--max-turns", 3, "--max-output-tokens", 16)
    assert len(calls.requests) == 3
    seeds = []
    for seed in (0, 1):
        engine = FakeEngine()
        played(engine, tmp_path / f"{seed}.jsonl", "sort", "--seed", seed, "--max-tokens", 4000)
        seeds.append(engine.requests[0]["seed"])
        asked = engine.requests[0]
        assert 0 < asked.get("max_completion_tokens", asked.get("max_tokens")) <= 4000
    assert seeds[0] != seeds[1]
    first = []
    for numbers in (3, 5):
        parameters = json.dumps({"numbers": numbers, "problems": 40})
        [row] = played(FakeEngine(), tmp_path / f"of-{numbers}.jsonl", "countdown", "--parameters", parameters)
        first.append(row["responses_create_params"]["input"])
    assert first[0] != first[1]


@pytest.mark.parametrize(
    "option",
    [("--max-turns", 3), ("--max-tokens", 64), ("--seed", 1), ("--parameters", "{}  "), ("--engine-url", "http://e")],
)
def test_what_an_agent_server_decides_is_refused(tmp_path: Path, option: tuple[str, object]) -> None:
    """They were accepted, and did nothing."""
    with pytest.raises(ConfigError, match=f"{option[0]} is for --environment"):
        run("gym", "collect", "-i", "x", "-o", tmp_path / "r", "--agent-url", "http://a", *option)


def test_an_agent_is_not_named_where_the_environment_is_it(tmp_path: Path) -> None:
    options = ["--environment", "sort", "--engine-url", "http://e", "-a", "math"]
    with pytest.raises(ConfigError, match="--agent: an environment that runs here"):
        run("gym", "collect", "-o", tmp_path / "r", *options)


# -- reverify, profile, collate, import, export ------------------------------------------------------------------------


def test_verdicts_by_the_options_about_how_they_are_asked(tasks: Path, tmp_path: Path) -> None:
    collected(FakeAgent(), tmp_path / "run.jsonl", "-i", tasks)
    judge, state = FastAPI(), {"now": 0, "most": 0}

    @judge.post("/verify")
    async def verify() -> dict[str, float]:
        import asyncio

        state["now"] += 1
        state["most"] = max(state["most"], state["now"])
        await asyncio.sleep(0.02)
        state["now"] -= 1
        return {"reward": 0.25}

    def judged(name: str, *options: object, exit_code: int = 0) -> str:
        state["most"] = 0
        base = ["gym", "reverify", "--rollouts", tmp_path / "run.jsonl", "-o", tmp_path / name, "--force"]
        return run(*base, "--resources-url", url, *options, exit_code=exit_code)

    with serving(judge) as url:
        judged("one.jsonl", "--concurrency", 1, "--disable-aggregation")
        assert state["most"] == 1
        judged("all.jsonl", "--concurrency", 0)
        assert state["most"] > 1
        assert "6 failed" in judged("late.jsonl", "--timeout", 0.001, exit_code=1)
    assert not list(tmp_path.glob("*one_aggregate_metrics.json"))
    assert list(tmp_path.glob("*all_aggregate_metrics.json"))


def test_a_profile_takes_its_inputs_from_where_it_is_told(tasks: Path, tmp_path: Path) -> None:
    collected(FakeAgent(), tmp_path / "run.jsonl", "-i", tasks)
    moved = (tmp_path / "run_materialized_inputs.jsonl").rename(tmp_path / "moved.jsonl")
    assert "6 of 6 rollouts" in run("gym", "profile", "--rollouts", tmp_path / "run.jsonl", "--inputs", moved)


def test_collation_by_mode_search_directory_and_overwriting(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data/e.jsonl", [{"responses_create_params": {"input": f"task {k}"}} for k in range(5)])
    entries = [
        {"name": kind, "type": kind, "jsonl_fpath": "e.jsonl", "license": "MIT"} for kind in ("train", "example")
    ]
    tree = {"math": {"responses_api_agents": {"simple_agent": {"url": "http://127.0.0.1:1", "datasets": entries}}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    base = ["gym", "collate", tmp_path / "c.yaml", "--output-dir", tmp_path / "out", "--search-dir", tmp_path / "data"]
    run(*base)
    assert not (tmp_path / "out/example.jsonl").exists()
    run(*base, "--mode", "example_validation")
    assert (tmp_path / "out/example.jsonl").exists()
    write_rows(tmp_path / "data/e.jsonl", [{"responses_create_params": {"input": "a longer task than before"}}] * 7)
    with pytest.raises(DataError, match="--overwrite"):
        run(*base)
    assert "7 rows" in run(*base, "--overwrite")
    with pytest.raises(ConfigError, match="--mode is training"):
        run(*base, "--mode", "training")


def test_an_import_has_the_version_and_the_policy_version_it_was_given(tasks: Path, tmp_path: Path) -> None:
    collected(FakeAgent(), tmp_path / "run.jsonl", "-i", tasks)
    run(
        "import",
        tmp_path / "run.jsonl",
        "--name",
        "m",
        "--version",
        "v7",
        "--policy-version",
        5,
        "--store",
        tmp_path / "s",
    )
    reference = Stage(
        Location(str(tmp_path / "s")) / "datasets/m/v7", kind="collect", run_id="m", iteration=0
    ).reference()
    assert reference is not None
    assert reference.policy_version == 5


def test_an_export_is_of_the_stage_that_was_named_and_by_the_agent(tmp_path: Path) -> None:
    write_run(str(tmp_path / "store"), "r", iterations=2)
    base = ["export", "r", "--format", "nemo_gym", "--store", tmp_path / "store", "--iteration", 2]
    run(*base, "--output", tmp_path / "out", "--agent", "mine")
    rows = read_rows(tmp_path / "out/rollouts.jsonl")
    assert {row["agent_ref"]["name"] for row in rows} == {"mine"}
    with pytest.raises(Exception, match="iterations/000002/evaluate"):
        run(*base, "--output", tmp_path / "no", "--stage", "evaluate")


# -- configurations and servers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["resolve", "validate", "start"])
def test_where_configurations_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    (tmp_path / "configs").mkdir()
    server = {"roundhouse_environment": {"environment": {"kind": "sort"}}}
    (tmp_path / "configs/w.yaml").write_text(yaml.safe_dump({"sorting": {"resources_servers": server}}))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.delenv("NEMO_GYM_ROOT", raising=False)
    words = ["gym", command, "w.yaml", "++dry_run=true"]
    failed = CliRunner().invoke(app, words)
    assert failed.exit_code != 0
    for option in ("--search-dir", "--root"):
        run(*words, option, tmp_path / "configs")


def test_how_servers_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def started(resolution: Any, found: Any, options: Any, ready: Any) -> None:
        asked.append(options)
        ready({"head": "http://h", "servers": []})

    monkeypatch.setattr("roundhouse.plugins.nemo_gym.servers.start.run", started)
    server = {"roundhouse_environment": {"environment": {"kind": "sort"}}}
    (tmp_path / "w.yaml").write_text(yaml.safe_dump({"sorting": {"resources_servers": server}}))
    plain = run("gym", "start", tmp_path / "w.yaml", "--logs", tmp_path / "logs", "--start-seconds", 7, "--no-ray")
    assert "All servers ready!" in plain
    assert json.loads(run("gym", "start", tmp_path / "w.yaml", "--ray", "--json"))["head"] == "http://h"
    first, second = asked
    assert (first.ray, first.start_seconds, second.ray) == (False, 7, True)
    assert (tmp_path / "logs") in first.logs.parents
