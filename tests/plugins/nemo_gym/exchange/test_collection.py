"""Collections against a real agent server over HTTP, and against an engine with the environment in this process."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter

from roundhouse.config.models import EnvironmentConfig, GenerationConfig, RolloutConfig, Sampling
from roundhouse.errors import ConfigError, InfraError
from roundhouse.plugins.nemo_gym.exchange import collection
from roundhouse.plugins.nemo_gym.exchange.collection import Summary
from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles, Row, line_of, read_rows, write_rows
from roundhouse.plugins.nemo_gym.exchange.reading import read_collection
from roundhouse.plugins.nemo_gym.exchange.stream import (
    EVERY,
    AgentServers,
    OwnPolicy,
    Remaining,
    RolloutSource,
    agents_of_head,
    max_attempts,
    remaining,
    run_rollouts,
    stream,
)
from roundhouse.plugins.nemo_gym.exchange.task_rows import Materialization, Repeats, expanded
from roundhouse.trajectories.records import Status
from tests.gym.playground import serving
from tests.plugins.programs.model_server.fake_engine import FakeEngine
from tests.ports import free_port

Answer = Callable[[Row], Any]


@dataclass
class FakeAgent:
    """An agent server that answers at once with the result of `answer`: an object, or a status."""

    answer: Answer = lambda row: {"reward": 1.0}
    aggregates: bool = True
    rows: list[Row] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/run")
        async def run(request: Request) -> Response:
            row = orjson.loads(await request.body())
            self.rows.append(row)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            await asyncio.sleep(0.005)
            self._at_once -= 1
            found = self.answer(row)
            if isinstance(found, int):
                return Response('"no"', found)
            usage = {"usage": {"output_tokens": 3}, "output": []}
            told = {"responses_create_params": row["responses_create_params"], "response": usage, **found}
            return Response(orjson.dumps(told), media_type="application/json")

        if self.aggregates:

            @app.post("/aggregate_metrics")
            async def aggregate(request: Request) -> dict[str, Any]:
                rows = (await request.json())["verify_responses"]
                return {"agent_metrics": {"rows": len(rows)}, "key_metrics": {}, "group_level_metrics": []}

        return app


def planned(tasks: int = 3, repeats: int = 2) -> list[Row]:
    lines = [(index + 1, line_of({"responses_create_params": {"input": f"task {index}"}})) for index in range(tasks)]
    return expanded(lines, Materialization(agent="math", repeats=Repeats(repeats)), "tasks")


def files_in(tmp_path: Path) -> CollectionFiles:
    return CollectionFiles(tmp_path / "run.jsonl")


def collect(files: CollectionFiles, left: Remaining, source: RolloutSource, **options: Any) -> Summary:
    async def work() -> Summary:
        async with source:
            return await collection.collect(files, left, source, **{"concurrency": 4} | options)

    return asyncio.run(work())


def start(files: CollectionFiles, agent: FakeAgent, rows: list[Row] | None = None, **options: Any) -> Summary:
    with serving(agent.app()) as url:
        return collect(files, collection.begin(files, rows or planned()), AgentServers({EVERY: url}), **options)


def go_on(files: CollectionFiles, agent: FakeAgent) -> Summary:
    with serving(agent.app()) as url:
        return collect(files, collection.resume(files), AgentServers({EVERY: url}))


def keys(path: Path) -> list[tuple[int, int]]:
    return sorted((row["_ng_task_index"], row["_ng_rollout_index"]) for row in read_rows(path))


def by_task(answers: dict[int, Any]) -> Answer:
    return lambda row: answers.get(row["_ng_task_index"], {"reward": 1.0})


def test_every_row_becomes_a_line_with_its_stamps(tmp_path: Path):
    files = files_in(tmp_path)
    summary = start(files, FakeAgent(lambda row: {"reward": 0.5, "extra": [1]}))
    assert (summary.completed, summary.failed, summary.planned) == (6, 0, 6)
    assert keys(files.rollouts) == [(task, rollout) for task in range(3) for rollout in range(2)]
    row = read_rows(files.rollouts)[0]
    assert (row["reward"], row["extra"], row["agent_ref"]) == (0.5, [1], {"name": "math"})
    assert read_rows(files.materialized_inputs) == planned()
    assert files.failures.read_bytes() == b""


def test_a_failing_row_ends_nothing_and_is_on_record_with_its_kind(tmp_path: Path):
    files = files_in(tmp_path)
    judge = {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "the judge is down"}
    agent = FakeAgent(by_task({0: 500, 1: 422, 2: judge, 3: {"no": "reward"}, 4: 429}))
    summary = start(files, agent, planned(tasks=6, repeats=1))
    assert summary.completed == 1
    assert summary.failures == {"agent_failed": 2, "agent_refused": 1, "judge_failed": 1, "no_reward": 1}
    failures = {row["_ng_task_index"]: row for row in read_rows(files.failures)}
    assert [failures[task].get("_ng_failure_terminal", False) for task in range(5)] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert "answered 500" in failures[0]["_ng_failure_detail"]
    assert failures[2]["_ng_failure_detail"] == "the judge is down"
    assert all(row["_ng_failure_detail"] for row in failures.values()), "the reason stands in one place"
    assert keys(files.rollouts) == [(5, 0)]


def test_a_failure_class_of_null_is_no_failure(tmp_path: Path):
    files, null = files_in(tmp_path), {"_ng_failure_class": None}
    summary = start(files, FakeAgent(by_task({0: null | {"reward": 1.0}, 1: null})), planned(repeats=1))
    assert (summary.completed, summary.failures) == (2, {"no_reward": 1})
    [first] = [row for row in read_rows(files.rollouts) if row["_ng_task_index"] == 0]
    foreign = CollectionFiles(tmp_path / "foreign.jsonl")
    write_rows(foreign.rollouts, [first, first | {"reward": None, "_ng_task_index": 1}])
    found = read_collection(foreign).rollouts
    assert [(each.reward, each.failure_code) for each in found] == [(1.0, ""), (None, "no_reward")]


def test_what_an_agent_does_not_want_kept_is_run_again(tmp_path: Path):
    files = files_in(tmp_path)
    summary = start(files, FakeAgent(by_task({0: {"_ng_no_persist": True}})))
    assert (summary.completed, summary.not_run) == (4, 2)
    assert (len(read_rows(files.rollouts)), read_rows(files.failures)) == (4, [])
    assert go_on(files, FakeAgent()).completed == 2


def test_a_resume_runs_what_is_missing_and_not_for_good_lost(tmp_path: Path):
    files = files_in(tmp_path)
    start(files, FakeAgent(by_task({0: 500, 1: 400})))
    with files.rollouts.open("ab") as file:
        file.write(b'{"torn')
    again = FakeAgent()
    summary = go_on(files, again)
    assert (summary.completed, summary.earlier, summary.given_up, summary.planned) == (2, 2, 2, 6)
    assert [row["_ng_task_index"] for row in again.rows] == [0, 0]
    assert [row["_ng_attempt_index"] for row in read_rows(files.rollouts) if row["_ng_task_index"] == 0] == [1, 1]
    assert keys(files.rollouts) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    metrics = json.loads(files.aggregate_metrics.read_bytes())
    assert metrics[0]["agent_metrics"] == {"rows": 4}


def test_a_row_is_given_up_after_as_many_attempts_as_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", "2")
    files, agent = files_in(tmp_path), FakeAgent(by_task({0: 500}))
    start(files, agent)
    go_on(files, agent)
    assert go_on(files, agent).given_up == 2
    assert Counter(row["_ng_task_index"] for row in agent.rows) == {0: 4, 1: 2, 2: 2}


def test_starting_afresh_forgets_the_attempts_of_an_earlier_collection(tmp_path: Path):
    files = files_in(tmp_path)
    start(files, FakeAgent(by_task({0: 400})))
    assert start(files, FakeAgent()).completed == 6
    assert read_rows(files.failures) == []


def test_nobody_there_costs_no_attempt_and_is_told_once(tmp_path: Path):
    files = files_in(tmp_path)
    source = AgentServers({EVERY: f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(InfraError, match=r"None of 40 rows could be run\. .*--agent-url"):
        collect(files, collection.begin(files, planned(tasks=20)), source)
    assert read_rows(files.failures) == []
    assert len(collection.resume(files).rows) == 40


def test_no_more_than_the_allowed_number_are_in_flight(tmp_path: Path):
    agent = FakeAgent()
    start(files_in(tmp_path), agent, planned(tasks=20), concurrency=3)
    assert agent.most_at_once == 3


def test_an_agent_without_statistics_gets_ours(tmp_path: Path):
    files = files_in(tmp_path)
    start(files, FakeAgent(aggregates=False))
    [entry] = json.loads(files.aggregate_metrics.read_bytes())
    assert entry["agent_ref"] == {"name": "math"}
    assert entry["key_metrics"] == {"mean/reward": 1.0, "mean/output_tokens": 3.0}
    assert [group["num_rollouts"] for group in entry["group_level_metrics"]] == [2, 2, 2]


async def test_outcomes_come_as_they_finish_and_are_put_back_into_order():
    class FakeSource:
        async def run(self, row: Row) -> Row:
            await asyncio.sleep(0.02 * (3 - row["_ng_task_index"]))
            return {"reward": row["_ng_task_index"]}

    rows = planned(repeats=1)
    source: Any = FakeSource()
    assert [outcome.index async for outcome in stream(rows, source, 3)] == [2, 1, 0]
    assert [outcome.index for outcome in await run_rollouts(rows, source, 3)] == [0, 1, 2]


async def test_a_consumer_that_stops_leaves_nothing_running():
    class FakeSource:
        cancelled = 0

        async def run(self, row: Row) -> Row:
            if row["_ng_task_index"] == 0:
                return {"reward": 1.0}
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return {}

    source: Any = FakeSource()
    outcomes = stream(planned(repeats=1), source, 3)
    assert (await anext(outcomes)).index == 0
    await outcomes.aclose()
    assert source.cancelled == 2


async def test_a_head_server_tells_where_the_agents_are():
    app = FastAPI()
    tree = (
        "math: {responses_api_agents: {simple: {host: 127.0.0.1, port: 7}}}\n"
        "env: {resources_servers: {x: {host: h, port: 1}}}"
    )
    app.get("/global_config_dict_yaml")(lambda: tree)
    with serving(app) as url:
        assert await agents_of_head(url) == {"math": "http://127.0.0.1:7"}
        tree = "env: {resources_servers: {x: {host: h, port: 1}}}"
        with pytest.raises(ConfigError, match="knows no agent"):
            await agents_of_head(url)


def test_what_remains_is_the_difference_of_wanted_and_done():
    rows = planned(tasks=2)
    failed = {"_ng_task_index": 1, "_ng_rollout_index": 1}
    left = remaining(rows, [rows[0]], [failed, {**rows[2], "_ng_failure_terminal": True}, {"no": "key"}], 3)
    assert [(row["_ng_task_index"], row["_ng_rollout_index"], row.get("_ng_attempt_index")) for row in left.rows] == [
        (0, 1, None),
        (1, 1, 1),
    ]
    assert (left.done, left.terminal, left.exhausted) == (1, 1, 0)


def test_a_limit_of_attempts_that_is_none_is_refused():
    assert max_attempts({}) == 3
    with pytest.raises(ConfigError, match="NEMO_GYM_MAX_ROLLOUT_ATTEMPTS is 'many'"):
        max_attempts({"NEMO_GYM_MAX_ROLLOUT_ATTEMPTS": "many"})


def test_an_environment_here_and_a_running_engine_give_rollouts_that_import_whole(tmp_path: Path):
    target = "tests.plugins.nemo_gym.exchange.sort_with_rates:SortWithRates"
    environment: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(
        {"kind": "custom", "target": target}
    )
    files = files_in(tmp_path)
    with serving(FakeEngine()) as url:
        generation = GenerationConfig(sampling=Sampling(max_new_tokens=64))
        source = OwnPolicy(url, environment, generation, RolloutConfig(max_tokens=10_000))
        lines = [(number, line_of(row)) for number, row in enumerate(source.tasks("train")[:3], 1)]
        rows = expanded(lines, Materialization(agent=source.agent, repeats=Repeats(2)), "tasks")
        assert collect(files, collection.begin(files, rows), source).completed == 6
    [entry] = json.loads(files.aggregate_metrics.read_bytes())
    assert {"pass@2/accuracy", "mean/reward"} <= entry["agent_metrics"].keys()
    found = read_collection(files).rollouts
    assert {rollout.status for rollout in found} == {Status.COMPLETED}
    assert all(rollout.turns[0].policy_version == 3 and rollout.turns[0].prompt_token_ids for rollout in found)
    assert len({rollout.seed for rollout in found}) == 6


@pytest.mark.parametrize("route", ["/seed_session", "/verify"])
def test_a_5xx_of_a_resources_server_is_tried_again_once_it_is_repaired(tmp_path: Path, route: str):
    """It was terminal: a repaired server was never asked again."""
    broken, app = [True], FastAPI()

    async def answer(request: Request) -> Response:
        if request.url.path == route and broken:
            return Response("\"FileNotFoundError('words.txt')\"", 500)
        verdict = {**orjson.loads(await request.body()), "reward": 1.0, "predicted": ["a"], "failure_kind": None}
        return Response(orjson.dumps(verdict if request.url.path == "/verify" else {}))

    for path in ("/seed_session", "/verify"):
        app.add_route(path, answer, methods=["POST"])
    rows = [
        {
            "responses_create_params": {"input": "q"},
            "agent_ref": {"name": "a"},
            "_ng_task_index": 0,
            "_ng_rollout_index": 0,
        }
    ]
    files = files_in(tmp_path)
    with serving(FakeEngine()) as engine, serving(app) as url:
        config = {"kind": "remote", "url": url}
        environment: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(config)

        def source() -> OwnPolicy:
            return OwnPolicy(engine, environment, GenerationConfig(), RolloutConfig(max_tokens=10_000))

        assert collect(files, collection.begin(files, rows), source()).failures == {"environment_unavailable": 1}
        [failure] = read_rows(files.failures)
        assert (failure["_ng_failure_terminal"], "answered 500" in failure["_ng_failure_detail"]) == (False, True)
        broken.clear()
        assert collect(files, collection.resume(files), source()).completed == 1
    [row] = read_rows(files.rollouts)
    assert (row["predicted"], row["failure_kind"]) == (["a"], None), "the verifier's own fields stay at the top"


def test_a_task_that_does_not_fit_the_context_is_a_row_with_the_verifiers_reward(tmp_path: Path):
    """As in NeMo Gym's servers. When such a row counted as a failure, the mean over the same rows differed."""
    full = {"error": {"code": "context_length_exceeded", "message": "too long", "param": "messages"}}

    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def refuse() -> Response:
        return Response(json.dumps(full), 400)

    files = files_in(tmp_path)
    environment: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python({"kind": "sort"})
    with serving(app) as url:
        source = OwnPolicy(url, environment, GenerationConfig(), RolloutConfig(max_tokens=10_000))
        lines = [(number, line_of(row)) for number, row in enumerate(source.tasks("train")[:2], 1)]
        rows = expanded(lines, Materialization(agent=source.agent), "tasks")
        summary = collect(files, collection.begin(files, rows), source)
    assert (summary.completed, summary.failed) == (2, 0)
    for row in map(json.loads, files.rollouts.read_text().splitlines()):
        assert (row["reward"], row["response"]["incomplete_details"]) == (0.0, {"reason": "max_output_tokens"})
        assert row["response"]["background"] is None, "as in NeMo Gym's rows, unset fields are there"
    assert {rollout.status for rollout in read_collection(files).rollouts} == {Status.TRUNCATED}
