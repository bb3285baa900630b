"""Files of rollouts as other systems write them, read into a store; and ours, as their packages read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.plugins.atif.writer import trajectory, write
from roundhouse.plugins.parquet.writer import write as write_parquet
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.stages.importing import Imported, import_files
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_table
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn, digest_tokens
from roundhouse.trajectories.schemas import rebuild_prompts, rollouts_from_tables, rollouts_table, turns_table

pytestmark = pytest.mark.timeout(1800)
HERE = Path(__file__).parent
HARBOR = pytest.mark.contract("harbor-0.26.0")
USER = {"type": "message", "role": "user", "content": "2*3?"}


def rollouts_of(imported: Imported) -> list[Rollout]:
    tables = (read_table(imported.reference, name) for name in ("rollouts", "turns"))
    return rollouts_from_tables(*tables)


def harbor(python: Path, word: str, directory: Path) -> str:
    command = [str(python), str(HERE / "atif_peer.py"), word, str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@HARBOR
def test_trials_of_harbor_keep_tokens_and_get_the_rewards_of_their_verifier(
    foreign_python: Path, tmp_path: Path
) -> None:
    harbor(foreign_python, "write", tmp_path)
    imported = import_files(str(tmp_path / "store"), "trials", tmp_path / "job")
    assert (imported.format, imported.with_tokens) == ("atif", 3)
    right, wrong, unjudged = rollouts_of(imported)
    assert [each.rollout_id for each in (right, wrong, unjudged)] == [f"toy-task/{number}" for number in range(3)]
    assert (right.reward, right.metrics, wrong.reward) == (1.0, {"speed": 0.25}, 0.0)
    assert (unjudged.status, unjudged.failure_code) == (Status.FAILED, "no_reward")
    assert rebuild_prompts(right.turns) == [[1, 2, 3], [1, 2, 3, 4, 5, 9, 9]]
    assert [turn.generation_log_probs for turn in right.turns] == [[-0.5, -1.25], [-0.0078125]]
    kinds = [item.get("role") or item["type"] for item in right.items]
    assert kinds == [
        "system",
        "user",
        "reasoning",
        "assistant",
        "function_call",
        "function_call_output",
        "user",
        "assistant",
    ]
    assert json.loads(right.items[4]["arguments"]) == {"text": "é", "count": 2}
    assert right.task["responses_create_params"]["tools"][0]["name"] == "run"
    kept = [json.loads(row) for row in read_table(imported.reference, "foreign")["fields"].to_pylist()]
    metrics = {"prompt_tokens": 3, "completion_tokens": 2, "cost_usd": 0.5}
    assert kept[0]["steps"][2] == {"llm_call_count": 1, "extra": {"note": 1}, "metrics": metrics}
    plain = import_files(str(tmp_path / "store"), "plain", tmp_path / "plain.jsonl")
    assert (plain.with_tokens, plain.reference.counts["failed"]) == (0, 2)


@HARBOR
def test_harbor_validates_our_trajectories_and_an_import_gives_the_same_rows(
    foreign_python: Path, tmp_path: Path
) -> None:
    harbor(foreign_python, "write", tmp_path)
    theirs = import_files(str(tmp_path / "store"), "trials", tmp_path / "job")
    write(theirs.reference, tmp_path / "out", None)
    for number, rollout in enumerate(odd_rollouts()):
        (tmp_path / "out" / f"odd-{number}").mkdir()
        (tmp_path / "out" / f"odd-{number}" / "trajectory.json").write_text(json.dumps(trajectory(rollout)))
    verdict = json.loads(harbor(foreign_python, "validate", tmp_path / "out"))
    assert verdict == {"errors": [], "steps": [5, 5, 5, 1, 3, 2]}
    back = rollouts_of(import_files(str(tmp_path / "store"), "back", tmp_path / "out"))
    assert back == rollouts_of(theirs) + odd_rollouts()


def odd_rollouts() -> list[Rollout]:
    """Return rollouts that ATIF alone cannot hold: without a message, with broken arguments, with a stray output."""
    call = {
        "type": "function_call",
        "id": "c",
        "call_id": "c",
        "name": "f",
        "arguments": '{"a": ',
        "status": "completed",
    }
    stray = {"type": "function_call_output", "call_id": "other", "output": "x"}
    task = {"task_id": "t", "responses_create_params": {"input": [USER]}}
    return [
        Rollout(
            "t",
            0,
            {"task_id": "t"},
            "toy",
            Status.FAILED,
            failure_kind=FailureKind.INFRA,
            failure_code="engine_timeout",
        ),
        Rollout("t", 1, task, "toy", Status.COMPLETED, reward=0.5, items=[USER, call, {**stray, "call_id": "c"}, USER]),
        Rollout("t", 2, task, "toy", Status.MASKED, reward=1.0, items=[USER, stray, call]),
    ]


@pytest.mark.contract("nemo-gym-0.7.0", "harbor-0.26.0")
def test_nemo_gym_reads_our_trajectories_and_refuses_token_ids_in_its_verifier(
    foreign_python: Path, tmp_path: Path
) -> None:
    reply = {"type": "message", "role": "assistant", "content": "6"}
    task = {"task_id": "t", "responses_create_params": {"input": [USER]}}
    rollout = Rollout("t", 0, task, "toy", Status.COMPLETED, reward=1.0, items=[USER, reply], finish_reason="stop")
    plain, tokens = trajectory(rollout), trajectory(rollout)
    tokens["steps"][1]["metrics"] = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-0.5]}
    for name, document in (("plain", plain), ("tokens", tokens)):
        (tmp_path / name).write_text(json.dumps(document))
    code = (
        "import json, pathlib, sys\n"
        "from nemo_gym.atif_reverification import AtifProjectionError, atif_trajectory_to_response, load_atif_trajectory\n"
        "from nemo_gym.atif_v1_7 import AtifTrajectoryV1_7\n"
        "plain, tokens = map(pathlib.Path, sys.argv[1:])\n"
        "AtifTrajectoryV1_7.model_validate(json.loads(tokens.read_text()))\n"
        "print(atif_trajectory_to_response(load_atif_trajectory(plain).trajectory).output[0].content[0].text)\n"
        "try:\n    load_atif_trajectory(tokens)\n"
        "except AtifProjectionError as error:\n    print(error)\n"
    )
    command = [str(foreign_python), "-c", code, str(tmp_path / "plain"), str(tmp_path / "tokens")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, refusal, *_ = done.stdout.splitlines()
    assert answer == "6"
    assert "token" in refusal


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An endpoint of chat completions that answers Paris."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            choice = {"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "r", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
            data = json.dumps(answer | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.mark.contract("verifiers-0.4.0")
def test_saved_traces_of_verifiers_have_the_rewards_of_its_runner(
    foreign_python: Path, endpoint: str, tmp_path: Path
) -> None:
    variables = {**os.environ, "PYTHONPATH": str(HERE / "verifiers_packages")}
    command = [str(foreign_python), str(HERE / "traces_peer.py"), endpoint, str(tmp_path)]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rewards = json.loads((tmp_path / "rewards.json").read_text())
    assert None in rewards, "one task of the package fails"
    [saved] = (tmp_path / "run").rglob("traces.jsonl")
    plain = import_files(str(tmp_path / "store"), "plain", saved)
    tokens = import_files(str(tmp_path / "store"), "tokens", tmp_path / "tokens")
    assert (plain.format, plain.with_tokens, tokens.with_tokens) == ("verifiers", 0, len(rewards))
    own = rollouts_of(tokens)
    assert [each.reward for each in own] == [None if reward is None else pytest.approx(reward) for reward in rewards]
    assert sorted(each.reward or 0 for each in rollouts_of(plain)) == sorted(reward or 0 for reward in rewards)
    paris = next(each for each in own if each.reward)
    [turn] = paris.turns
    assert turn.generation_token_ids == [20 + len(paris.items) - 1, 30 + len(paris.items) - 1]
    assert turn.generation_log_probs == pytest.approx([-0.1235, -0.5]), "four decimals, as verifiers writes them"
    assert paris.items[-1]["content"][0]["text"] == "Paris"


@pytest.mark.contract("trl-1.16.0")
def test_completions_that_trl_logs_have_the_sum_of_its_rewards(foreign_python: Path, tmp_path: Path) -> None:
    site = next(foreign_python.parents[1].glob("lib/python*/site-packages"))
    variables = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_completions.py"), str(tmp_path)],
        env=variables,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    imported = import_files(str(tmp_path / "store"), "trl", tmp_path / "completions")
    assert (imported.format, imported.with_tokens, imported.reference.counts["completed"]) == ("trl", 0, 8)
    own = rollouts_of(imported)
    assert len({each.group_id for each in own}) == 2, "a group of four in each step"
    for each in own:
        text = each.items[-1]["content"][0]["text"]
        parts = {"length": len(text)} | ({"ones": text.count("one")} if "two" in text else {})
        assert each.reward_components == parts
        assert each.reward == sum(parts.values())


@pytest.mark.contract("trl-1.16.0")
def test_datasets_loads_exported_rollouts_with_typed_columns(foreign_python: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = open_run(parse_config({"run_id": "r", "store": store}))
    components = {"right": 0.5, "short": 0.25}
    task = {"task_id": "t", "responses_create_params": {"input": [USER]}}
    turn = Turn(0, None, [1, 2], 2, digest_tokens([1, 2]), [3], [-0.5], 0, "stop", 0.1)
    made = [
        Rollout("t", 0, task, "toy", Status.COMPLETED, reward=0.75, reward_components=components, turns=[turn]),
        Rollout("t", 1, task, "toy", Status.FAILED, failure_kind=FailureKind.INFRA, failure_code="engine_timeout"),
    ]
    attempt = run.begin(dataset_stage(run, "d", "v1", TaskDraw(0)), policy_version=0)
    attempt.write_table("rollouts", rollouts_table(made))
    attempt.write_table("turns", turns_table(made))
    write_parquet(attempt.commit(), tmp_path / "out", None)
    code = (
        "import json, sys\nfrom datasets import load_dataset\n"
        "for name in ('rollouts', 'turns'):\n"
        "    table = load_dataset('parquet', data_files=f'{sys.argv[1]}/{name}.parquet', cache_dir=sys.argv[2])['train']\n"
        "    print(json.dumps([{key: str(value) for key, value in table.features.items()}, table.to_list()]))\n"
    )
    site = next(foreign_python.parents[1].glob("lib/python*/site-packages"))
    variables = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / "cache")]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (types, rows), (turn_types, turns) = map(json.loads, done.stdout.splitlines())
    assert types["reward"] == "Value('float64')"
    assert turn_types["generation_token_ids"] == "List(Value('int32'))"
    assert [row["reward"] for row in rows] == [0.75, None]
    assert rows[0]["reward_components"] == [{"name": name, "value": value} for name, value in components.items()]
    assert turns[0]["generation_log_probs"] == [-0.5]
