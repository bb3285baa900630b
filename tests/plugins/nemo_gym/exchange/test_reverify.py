"""Stored rollouts get the verdicts of the verifier that runs now, by the rules of `gym eval reverify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.environments.base import Environment, TaskRow, Verdict, final_text
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row, read_rows, write_rows
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from tests.gym.counter import Counter
from tests.gym.playground import serving
from tests.ports import free_port

AGENT = {"type": "responses_api_agents", "name": "math"}


class Longer(Environment):
    """The verifier of today: long answers are right."""

    name = "longer"

    def tasks(self, split: str) -> list[TaskRow]:
        return []

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(float(len(final_text(response)) > row["least"]))


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"output": [{"type": "message", "role": "assistant", "content": [part]}], "usage": {"total_tokens": 3}}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A collection of four rollouts: two were judged 0, one's judge failed, one failed otherwise."""
    rows: list[Row] = [
        {
            "responses_create_params": {"input": "x"},
            "agent_ref": AGENT,
            "least": 3,
            "_ng_task_index": task,
            "_ng_rollout_index": 0,
        }
        for task in range(4)
    ]
    write_rows(tmp_path / "run_materialized_inputs.jsonl", rows)
    results = [
        row | {"response": said(text), "reward": 0.0}
        for row, text in zip(rows, ("no", "yes, it is", "maybe", "?"), strict=True)
    ]
    write_rows(tmp_path / "run.jsonl", results[:2])
    failed = [results[2] | {"_ng_failure_class": "judge_failed"}] * 2
    write_rows(tmp_path / "run_failures.jsonl", [*failed, results[3] | {"_ng_failure_class": "agent_failed"}])
    return tmp_path / "run.jsonl"


def reverify(rollouts: Path, output: Path, *options: object, exit_code: int = 0) -> str:
    command = ["gym", "reverify", "--rollouts", rollouts, "-o", output, *options]
    result = CliRunner().invoke(app, [str(one) for one in command], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


def rewards(path: Path) -> dict[int, float]:
    return {row["_ng_task_index"]: row["reward"] for row in read_rows(path)}


def test_the_verdicts_are_those_of_the_verifier_that_runs_now(stored: Path, tmp_path: Path):
    before = stored.read_bytes()
    with serving(build_app(Longer())) as url:
        told = reverify(stored, tmp_path / "new.jsonl", "--resources-url", url)
        with pytest.raises(ConfigError, match=r"new\.jsonl exists. Pass --overwrite"):
            reverify(stored, tmp_path / "new.jsonl", "--resources-url", url)
        again = reverify(stored, tmp_path / "new.jsonl", "--resources-url", url, "--resume")
        limited = reverify(stored, tmp_path / "new.jsonl", "--resources-url", url, "--overwrite", "--limit", 1)
    assert "2 rollouts · mean reward 0.500" in told
    assert "0 rollouts · 2 from before" in again
    assert "1 rollouts" in limited
    assert stored.read_bytes() == before
    [row] = read_rows(tmp_path / "new.jsonl")
    assert (row["agent_ref"], row["response"]["output"]) == (AGENT, said("no")["output"])
    [metrics] = json.loads((tmp_path / "new_aggregate_metrics.json").read_bytes())
    assert metrics["agent_metrics"]["mean/reward"] == 0.0


def test_the_head_server_says_which_resources_server_judges_an_agents_rows(stored: Path, tmp_path: Path):
    head = FastAPI()
    with serving(build_app(Longer())) as url:
        port = int(url.rsplit(":", 1)[1])
        tree = {
            "math": {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "judge"}}}},
            "judge": {"resources_servers": {"longer": {"host": "127.0.0.1", "port": port}}},
            "other": {"resources_servers": {"longer": {"host": "127.0.0.1", "port": free_port()}}},
        }
        head.get("/global_config_dict_yaml")(lambda: yaml.safe_dump(tree))
        with serving(head) as head_url:
            reverify(stored, tmp_path / "new.jsonl", "--head", head_url)
            del tree["math"], tree["other"]
            reverify(stored, tmp_path / "alone.jsonl", "--head", head_url)
    assert rewards(tmp_path / "new.jsonl") == rewards(tmp_path / "alone.jsonl") == {0: 0.0, 1: 1.0}


def test_a_verifier_that_needs_its_session_is_refused_or_its_output_called_unsafe(stored: Path, tmp_path: Path):
    with serving(build_app(Counter())) as url:
        with pytest.raises(ConfigError, match="judges by row and response alone"):
            reverify(stored, tmp_path / "new.jsonl", "--resources-url", url)
        told = reverify(stored, tmp_path / "new.jsonl", "--resources-url", url, "--force", exit_code=1)
    assert "unsafe_new.jsonl" in told
    assert not (tmp_path / "new.jsonl").exists()
    assert len(read_rows(tmp_path / "unsafe_new_failures.jsonl")) == 2, "there is no session to judge by"


def test_rows_whose_judge_failed_are_recovered_once_and_the_others_kept(stored: Path, tmp_path: Path):
    with serving(build_app(Longer())) as url:
        recover = ("--resources-url", url, "--judge-failed-only")
        reverify(stored, tmp_path / "new.jsonl", *recover)
        for _ in range(2):
            reverify(stored, stored, *recover, "--append")
        with pytest.raises(ConfigError, match="needs --judge-failed-only"):
            reverify(stored, stored, "--resources-url", url, "--append")
    assert rewards(tmp_path / "new.jsonl") == rewards(stored) == {0: 0.0, 1: 0.0, 2: 1.0}
    assert len(read_rows(stored)) == 3


@pytest.mark.parametrize(
    ("output", "options", "told"),
    [
        ("run.jsonl", ["--overwrite"], r"--rollouts reads .*run\.jsonl, which --output .*run\.jsonl would write"),
        ("run.jsonl", ["--resume"], "--rollouts reads"),
        ("linked/run_failures.jsonl", ["--judge-failed-only", "--append"], r"--rollouts reads .*run_failures\.jsonl"),
        ("run_materialized_inputs.jsonl", ["--judge-failed-only", "--append"], "--inputs reads"),
        ("old.jsonl", ["--overwrite", "--inputs", "absent.jsonl"], "absent.jsonl cannot be read"),
    ],
)
def test_nothing_that_is_there_is_lost_to_a_verdict_that_cannot_be_given(
    stored: Path, tmp_path: Path, output: str, options: list[str], told: str
):
    write_rows(tmp_path / "old.jsonl", read_rows(stored))
    (tmp_path / "linked").symlink_to(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    with serving(build_app(Longer())) as url, pytest.raises((ConfigError, DataError), match=told):
        reverify(stored, tmp_path / output, "--resources-url", url, *options)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")} == before


def test_a_rollout_without_its_input_is_named(stored: Path, tmp_path: Path):
    write_rows(tmp_path / "other.jsonl", read_rows(tmp_path / "run_materialized_inputs.jsonl")[:1])
    with serving(build_app(Longer())) as url, pytest.raises(DataError, match="rollout 1-0 has no row in"):
        reverify(stored, tmp_path / "new.jsonl", "--resources-url", url, "--inputs", tmp_path / "other.jsonl")
