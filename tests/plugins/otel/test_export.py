"""A run's traces, by the packages of OpenTelemetry: what the store has, at the times that the store has."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError, InfraError, StoreError
from roundhouse.plugins.otel import command
from roundhouse.retry import Backoff
from roundhouse.store.run import Run, open_run
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.plugins.otel.receivers import Collector, facts, parsed, recorded_store, seconds, spans_of
from tests.ports import free_port

CONVENTIONS = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}


def exported(store: Path | str, run_id: str, *options: str) -> bytes:
    output = Path(store) / "spans.jsonl"
    done = CliRunner().invoke(app, ["otel", "export", run_id, "--store", str(store), "-o", str(output), *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return output.read_bytes()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two runs that really ran."""
    return recorded_store(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("run_id", ["earlier", "earlier-async"])
def test_a_recorded_run_has_its_whole_tree_in_the_conventions(recorded: Path, run_id: str) -> None:
    lines = exported(recorded, run_id, "--messages")
    for line in lines.splitlines():
        assert parsed(line).resource_spans[0].scope_spans[0].schema_url in {each.value for each in Schemas}
    spans = {span.span_id: span for span in spans_of(lines)}
    names = [span.name.partition(" ")[0] for span in spans.values()]
    kinds = {"run", "iteration", "collect", "train", "invoke_agent", "chat", "verify"}
    assert kinds <= set(names)
    assert names.count("run") == 1
    for span in spans.values():
        known = {key for key in facts(span) if not key.startswith("roundhouse.")} - {"error.type"}
        assert known <= CONVENTIONS
        assert facts(span).get("gen_ai.operation.name", span.name.partition(" ")[0]) == span.name.partition(" ")[0]
        for link in span.links:
            assert spans[link.span_id].name == facts(span)["roundhouse.stage"]
        if span.parent_span_id:
            parent = spans[span.parent_span_id]
            assert parent.trace_id == span.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_an_export_is_the_same_each_time_and_has_texts_only_on_request(recorded: Path) -> None:
    lines = exported(recorded, "earlier")
    assert exported(recorded, "earlier") == lines
    assert b"messages" not in lines
    assert list(recorded.glob("*.part")) == []
    with_texts = spans_of(exported(recorded, "earlier", "--messages"))
    assert [span.span_id for span in with_texts] == [span.span_id for span in spans_of(lines)]
    agent = next(span for span in with_texts if span.name.startswith("invoke_agent"))
    messages = json.loads(facts(agent)["gen_ai.input.messages"])
    assert messages[-1]["role"] == "user"
    assert messages[-1]["parts"][0]["content"]
    later = spans_of(exported(recorded, "earlier", "--since", "1"))
    assert {span.span_id for span in later} < {span.span_id for span in with_texts}


def turn(number: int, parent: int | None, latency: float) -> Turn:
    return Turn(number, parent, [1, 2], 2 + number, "d", [3, 4, 5], [-0.1] * 3, 7, "stop", latency)


def call(name: str) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "name": name, "arguments": "{}", "call_id": name},
        {"type": "function_call_output", "call_id": name, "output": "secret"},
    ]


def rollout(sample: int, status: Status = Status.COMPLETED, **more: Any) -> Rollout:
    reward = None if status is Status.FAILED else 1.0
    values = {"reward": reward, "started_at": 1000.0, "seconds": 9.0, "finish_reason": "stop", **more}
    return Rollout("g", sample, {"task_id": "t"}, "maze", status, **values)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))


def collected(run: Run, rollouts: Sequence[Rollout], turns_of: Sequence[Rollout] | None = None) -> None:
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_table("turns", turns_table(rollouts if turns_of is None else turns_of))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    attempt.commit(details={"sampling": {"temperature": 0.5, "top_p": 1.0, "max_new_tokens": 8}})


def test_a_model_call_starts_at_the_earliest_possible_time_and_lasts_as_recorded(run: Run, tmp_path: Path) -> None:
    user = {"role": "user", "content": "go"}
    items = [user, *call("look"), *call("walk"), *call("dig"), *call("end")]
    turns = [turn(0, None, 1.0), turn(1, 0, 2.0), turn(2, None, 0.25)]  # the last call has no turn
    collected(run, [rollout(0, items=items, turns=turns, reward_components={"a": 0.75, "b": 0.25})])
    spans = spans_of(exported(tmp_path, "r"))
    rows = [(span.name, *seconds(span), facts(span)["roundhouse.time"]) for span in spans]
    assert [row for row in rows if row[0].partition(" ")[0] not in ("run", "iteration", "collect")] == [
        ("invoke_agent maze", 1000.0, 1009.0, "recorded"),
        ("chat r", 1000.0, 1001.0, "duration"),
        ("execute_tool look", 1001.0, 1001.0, "order"),
        ("chat r", 1001.0, 1003.0, "duration"),
        ("execute_tool walk", 1003.0, 1003.0, "order"),
        ("chat r", 1000.0, 1000.25, "duration"),
        ("execute_tool dig", 1000.25, 1000.25, "order"),
        ("chat r", 1000.25, 1000.25, "order"),
        ("execute_tool end", 1000.25, 1000.25, "order"),
        ("verify maze", 1009.0, 1009.0, "order"),
    ]
    first = facts(next(span for span in spans if span.name == "chat r"))
    assert first["gen_ai.usage.input_tokens"] == 2
    assert first["gen_ai.usage.output_tokens"] == 3
    assert first["gen_ai.response.model"] == "r/7"
    assert first["gen_ai.request.temperature"] == 0.5
    assert first["gen_ai.conversation.id"] == "r/1/collect/g/0"
    assert b"secret" not in exported(tmp_path, "r")
    lines = exported(tmp_path, "r", "--messages")
    assert (b"gen_ai.tool.call.result" in lines, b"secret" in lines) == (True, True)
    verdict = next(span for span in spans if span.name == "verify maze")
    assert [facts(event)["gen_ai.evaluation.score.value"] for event in verdict.events] == [1.0, 0.75, 0.25]


def test_a_failed_rollout_is_an_error_and_one_without_a_start_is_counted(run: Run, tmp_path: Path) -> None:
    failure = {"failure_kind": FailureKind.DATA, "failure_code": "verifier_failed", "failure_detail": "secret text"}
    collected(run, [rollout(0, Status.FAILED, **failure), rollout(1, Status.OMITTED, reward=None, started_at=0.0)])
    output = str(tmp_path / "o.jsonl")
    done = CliRunner().invoke(app, ["otel", "export", "r", "--store", str(tmp_path), "-o", output])
    assert done.output == "4 spans in 1 requests, 1 rollouts without a start left out\n"
    assert b"secret text" not in Path(output).read_bytes()
    [agent] = [span for span in spans_of(exported(tmp_path, "r", "--messages")) if span.name == "invoke_agent maze"]
    assert (agent.status.code, agent.status.message) == (2, "secret text")
    assert facts(agent)["error.type"] == "verifier_failed"


def test_a_request_holds_whole_traces_of_about_the_planned_size(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "REQUEST_BYTES", 20_000)
    text = [{"role": "user", "content": "x" * 5000}]
    collected(run, [rollout(sample, items=text, turns=[turn(0, None, 1.0)]) for sample in range(20)])
    lines = exported(tmp_path, "r", "--messages").splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) < 20_000 + 9000
    traces = [{span.trace_id for span in spans_of(line)} for line in lines]
    assert sum(map(len, traces)) == len(set().union(*traces)) + 1, "only the run's trace is in two requests"


def test_a_store_without_stages_or_with_damaged_rows_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"'r' has no complete stage from iteration 0 on"):
        exported(tmp_path, "r")
    collected(run, [rollout(0, turns=[turn(0, None, 1.0)])], turns_of=[rollout(5, turns=[turn(0, None, 1.0)])])
    with pytest.raises(StoreError, match=r"the turns of g/0 are missing or out of order"):
        exported(tmp_path, "r")
    [part] = tmp_path.glob("runs/r/iterations/000001/collect/rollouts-*")
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(StoreError, match=r"cannot be read.*roundhouse store verify"):
        exported(tmp_path, "r")
    with pytest.raises(ConfigError, match="Name one destination"):
        exported(tmp_path, "r", "--endpoint", "http://localhost")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(command, "PAUSES", Backoff(0.001))
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def sent(store: Path, url: str) -> str:
    done = CliRunner().invoke(app, ["otel", "export", "earlier", "--store", str(store), "--endpoint", url])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_collector_gets_the_lines_of_the_file_with_the_headers_of_the_environment(
    recorded: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-mlflow-experiment-id=7, authorization=Bearer%20a%3Db")
    collector.replies = [(503, b"busy"), (429, b"slow down")]
    assert sent(recorded, f"http://127.0.0.1:{collector.server_port}/") == "156 spans in 1 requests\n"
    assert b"".join(line + b"\n" for line in collector.taken) == exported(recorded, "earlier")
    assert len(collector.headers) == 3
    got = collector.headers[-1]
    assert (got["path"], got["x-mlflow-experiment-id"], got["authorization"]) == ("/v1/traces", "7", "Bearer a=b")


def test_a_collector_that_takes_no_spans_is_named_with_its_answer(recorded: Path, collector: Collector) -> None:
    url = f"http://127.0.0.1:{collector.server_port}"
    collector.replies = [(401, b"who are you")]
    with pytest.raises(ConfigError, match=r"answered 401: who are you. Correct --endpoint, or the headers in OTEL_"):
        sent(recorded, url)
    collector.replies = [(200, b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}')]
    with pytest.raises(DataError, match=r"refused spans: .*too old"):
        sent(recorded, url)
    collector.replies = [(503, b"busy")] * command.ATTEMPTS
    with pytest.raises(InfraError, match=r"did not take the spans in 6 attempts. The last one: answered 503: busy"):
        sent(recorded, url)
    with pytest.raises(InfraError, match="ConnectError"):
        sent(recorded, f"http://127.0.0.1:{free_port()}")
