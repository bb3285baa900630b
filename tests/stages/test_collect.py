"""The collect stage over real HTTP, against a scripted engine whose faults are planted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson
import pytest

from roundhouse.collection import parts
from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError, InfraError
from roundhouse.stages.collect import collect_dataset, collect_iteration, read_rollouts
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.trajectories.records import Status

ROLLOUTS = 12


class ScriptedEngine(ThreadingHTTPServer):
    """Answers every conversation with the same sentence; after `healthy` answers, with 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedAnswer)
        self.answered: list[int] = []
        self.healthy = 10**6
        self.log_prob = -0.5

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class ScriptedAnswer(BaseHTTPRequestHandler):
    server: ScriptedEngine
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(self.server.answered) >= self.server.healthy:
            return self._send(500, {"detail": "out of order"})
        self.server.answered.append(request["seed"])
        message = {
            "role": "assistant",
            "content": "The answer is 7.",
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [self.server.log_prob] * 2,
        }
        return self._send(200, {"choices": [{"message": message, "finish_reason": "stop"}], "policy_version": 0})

    def _send(self, status: int, body: dict) -> None:
        data = orjson.dumps(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    server = ScriptedEngine()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(parts, "FLUSH_SECONDS", 0.0)
    rollout = {
        "prompts_per_iteration": 3,
        "group_size": 4,
        "concurrency": 2,
        "retry": {"attempts": 1, "first_delay_seconds": 0.01},
    }
    return open_run(parse_config({"run_id": "r", "store": store_uri, "rollout": rollout}))


@pytest.fixture
def weights(run: Run) -> Reference:
    return run.begin(run.stage(1, "refit"), policy_version=0).commit()


def test_an_interrupted_collection_keeps_what_finished_and_makes_only_the_rest(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    engine.healthy = 5
    with pytest.raises(InfraError, match=r"of 12 rollouts failed.*engine_failed.*out of order"):
        collect_iteration(run, 1, weights, engine.url)
    assert run.stage(1, "collect").reference() is None
    engine.healthy = 10**6
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == len(set(engine.answered)) == ROLLOUTS, "each rollout was generated once"
    rollouts = read_rollouts(reference)
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == ROLLOUTS
    assert all(rollout.status is Status.COMPLETED for rollout in rollouts)
    assert read_manifest(reference).attempt == 2


def test_a_complete_collection_is_not_done_again(run: Run, weights: Reference, engine: ScriptedEngine) -> None:
    reference = collect_iteration(run, 1, weights, engine.url)
    engine.healthy = 0
    assert collect_iteration(run, 1, weights, engine.url) == reference


def test_failures_within_the_limit_are_recorded_without_a_reward(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    engine.healthy = 10
    reference = collect_iteration(run, 1, weights, engine.url)
    rows = read_table(reference, "rollouts").to_pylist()
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 2
    assert {(row["reward"], row["failure_kind"]) for row in failed} == {(None, "infra")}
    assert (reference.counts["completed"], reference.counts["failed"]) == (10, 2)
    validated = validate_iteration(run, 1, reference, 10)
    assert validated.counts["failed"] == 2
    assert validated.counts["sequences"] == 10


def test_an_iteration_that_is_mostly_refused_stops_with_the_evidence_in_the_store(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    engine.log_prob = 0.5
    rollouts = collect_iteration(run, 1, weights, engine.url)
    with pytest.raises(DataError, match=r"12 of 12 rollouts were refused .*log_prob_value.*quarantine"):
        validate_iteration(run, 1, rollouts, 10)
    assert any(name.startswith("quarantine-") for name in run.stage(1, "validate").location.names())
    assert run.stage(1, "validate").reference() is None


def test_an_offline_dataset_lies_outside_the_run_and_is_collected_once(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    reference = collect_dataset(run, "nightly", TaskDraw(3), weights, engine.url)
    assert reference.uri.endswith("/datasets/nightly/v000000-i000003")
    assert collect_dataset(run, "nightly", TaskDraw(3), weights, engine.url) == reference
    assert len(engine.answered) == ROLLOUTS
