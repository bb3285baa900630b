"""The commands with real servers and files: their exit codes and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.models import ValidationConfig
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles, Row, read_rows, write_rows
from roundhouse.plugins.nemo_gym.exchange.reading import read_collection
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.location import Location
from roundhouse.store.stage import Stage
from roundhouse.trajectories.validation import validate
from tests.gym.playground import serving
from tests.plugins.nemo_gym.exchange.test_collection import FakeAgent, by_task
from tests.plugins.programs.model_server.fake_engine import FakeEngine

TASKS = [{"responses_create_params": {"input": f"task {index}"}} for index in range(3)]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def answer_with_tokens(row: Row) -> dict[str, Any]:
    index = row["_ng_rollout_index"]
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3 + index], "generation_log_probs": [-0.5]}
    reply = {"type": "message", "role": "assistant", "content": "ok", **tokens}
    return {"reward": float(index), "response": {"status": "completed", "output": [reply]}}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_rows(tmp_path / "tasks.jsonl", TASKS)
    return tmp_path / "tasks.jsonl"


def test_collect_profile_import_validate_and_export(tasks: Path, tmp_path: Path):
    output, store = tmp_path / "run.jsonl", str(tmp_path / "store")
    with serving(FakeAgent(answer_with_tokens).app()) as url:
        told = run("gym", "collect", "-i", tasks, "-o", output, "--agent-url", url, "-a", "math", "--num-repeats", 2)
    assert "6 rollouts · mean reward 0.500" in told
    assert "6 of 6 rollouts, 3 tasks" in run("gym", "profile", "--rollouts", output)
    assert [row["mean/reward"] for row in read_rows(tmp_path / "run_reward_profiling.jsonl")] == [0.5, 0.5, 0.5]

    assert "6 requested, 6 completed" in run("import", output, "--name", "math", "--store", store)
    place = Location(store) / "datasets/math/v000001"
    reference = Stage(place, kind="collect", run_id="math", iteration=0).reference()
    assert reference is not None
    validated = validate(read_rollouts(reference), ValidationConfig(), vocabulary_size=100, policy_version=0)
    assert validated.sequences.num_rows == 6
    assert validated.sequences.column("token_ids").to_pylist()[0] in ([1, 2, 3], [1, 2, 4])

    run("export", "math/v000001", "--format", "nemo_gym", "--output", tmp_path / "back", "--store", store)
    assert read_rows(tmp_path / "back/rollouts.jsonl") == read_rows(output)


def test_failures_are_counted_and_the_command_succeeds(tasks: Path, tmp_path: Path):
    output = tmp_path / "run.jsonl"
    with serving(FakeAgent(by_task({1: 500})).app()) as url:
        told = run("gym", "collect", "-i", tasks, "-o", output, "--agent-url", url)
    assert "2 rollouts · mean reward 1.000 · 1 failed (agent_failed 1)" in told
    with serving(FakeAgent().app()) as url:
        told = run("gym", "collect", "-i", tasks, "-o", output, "--agent-url", url, "--resume")
    assert "1 rollouts · mean reward 1.000 · 2 from before" in told


def test_a_collection_in_which_nothing_was_judged_fails_with_its_reasons(tasks: Path, tmp_path: Path):
    output = tmp_path / "run.jsonl"
    with serving(FakeAgent(lambda row: 500).app()) as url:
        command = ["gym", "collect", "-i", tasks, "-o", output, "--agent-url", url]
        result = CliRunner().invoke(app, [str(argument) for argument in command], catch_exceptions=False)
    assert result.exit_code == 1
    assert "3 × agent_failed: " in result.output
    assert 'run answered 500: "no"' in result.output
    assert (
        f"None of the 3 rollouts has a result. Their reasons are in {tmp_path / 'run_failures.jsonl'}" in result.output
    )


def test_an_incomplete_collection_fails_where_it_must_be_complete(tasks: Path, tmp_path: Path):
    output = tmp_path / "run.jsonl"
    command = ["gym", "collect", "-i", str(tasks), "-o", str(output), "--require-complete"]
    with serving(FakeAgent(by_task({1: 500})).app()) as url:
        partial = CliRunner().invoke(app, [*command, "--agent-url", url], catch_exceptions=False)
    assert (partial.exit_code, "2 of 3 rollouts have a result" in partial.output) == (1, True)
    with serving(FakeAgent().app()) as url:
        run(*command, "--agent-url", url, "--resume")


def test_options_and_overrides_reach_the_rows(tasks: Path, tmp_path: Path):
    agent = FakeAgent()
    options = ["--limit", 1, "--temperature", 0.5, "--max-output-tokens", 7, "--disable-aggregation"]
    with serving(agent.app()) as url:
        extra = ["+responses_create_params.metadata={note: x}", "+num_repeats_add_seed=true"]
        run("gym", "collect", "-i", tasks, "-o", tmp_path / "run.jsonl", "--agent-url", url, *options, *extra)
    [row] = agent.rows
    assert row["responses_create_params"] == {
        "input": "task 0",
        "temperature": 0.5,
        "max_output_tokens": 7,
        "metadata": {"note": "x", "extra_body": '{"seed":0}'},
    }
    assert not (tmp_path / "run_aggregate_metrics.json").exists()


def test_a_policy_and_an_environment_need_no_servers_of_agents(tmp_path: Path):
    with serving(FakeEngine()) as url:
        options = [
            "--environment",
            "sort",
            "--engine-url",
            url,
            "--limit",
            2,
            "--num-repeats",
            2,
            "--max-output-tokens",
            16,
        ]
        told = run("gym", "collect", "-o", tmp_path / "run.jsonl", *options)
    assert "4 rollouts" in told
    run("gym", "profile", "--rollouts", tmp_path / "run.jsonl")
    run("import", tmp_path / "run.jsonl", "--name", "sort", "--store", tmp_path / "store")
    assert not [one for one in read_collection(CollectionFiles(tmp_path / "run.jsonl")).originals if one.row]
    run("export", "sort/v000001", "--format", "nemo_gym", "--output", tmp_path / "back", "--store", tmp_path / "store")
    assert read_rows(tmp_path / "back/rollouts.jsonl") == read_rows(tmp_path / "run.jsonl")


def test_collate_writes_the_datasets_of_a_configuration(tasks: Path, tmp_path: Path):
    dataset = {"name": "train", "type": "train", "jsonl_fpath": str(tasks), "license": "MIT", "num_repeats": 2}
    agent = {"url": "http://127.0.0.1:1", "datasets": [dataset]}
    tree = {"math": {"responses_api_agents": {"simple_agent": agent}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    told = run("gym", "collate", tmp_path / "config.yaml", "--output-dir", tmp_path / "out")
    assert "6 rows" in told
    assert read_rows(tmp_path / "out/train.jsonl")[1]["agent_ref"]["name"] == "math"


@pytest.mark.parametrize("source", ["run_materialized_inputs.jsonl", "run.jsonl", "run_failures.jsonl"])
def test_an_input_that_the_output_would_write_over_is_refused_and_stays(tasks: Path, tmp_path: Path, source: str):
    given = tasks.rename(tmp_path / source)
    before = given.read_bytes()
    with pytest.raises(ConfigError, match=r"--input reads .*, which --output .*run\.jsonl would write over"):
        run(
            "gym",
            "collect",
            "-i",
            given,
            "-o",
            tmp_path / "run.jsonl",
            "--agent-url",
            "http://127.0.0.1:1",
            "--limit",
            "1",
        )
    assert given.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-i", "x", "-o", "y"], "named: none"),
        (["-i", "x", "-o", "y", "--head", "http://h", "--agent-url", "http://a"], "named: --head, --agent-url"),
        (["-o", "y", "--environment", "sort"], "--environment needs --engine-url"),
        (["-o", "y", "--agent-url", "http://127.0.0.1:1"], "--input is missing"),
        (["-o", "y", "--agent-url", "http://a", "+temperature=1"], "is about nothing of a collection"),
        (["-o", "y", "--agent-url", "http://a", "+num_samples_in_parallel=4"], "is the option --concurrency here"),
    ],
)
def test_options_that_cannot_work_are_refused_in_words(arguments: list[str], told: str):
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, ["gym", "collect", *arguments], catch_exceptions=False)
    assert told in str(error.value)


def test_all_keys_of_nemo_gyms_command_are_refused_at_once_each_with_its_option():
    keys = ["+agent_name=a", "+input_jsonl_fpath=x", "+fan_out={a: [b]}", "+resume_from_cache=true"]
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, ["gym", "collect", "-o", "y", "--agent-url", "http://a", *keys], catch_exceptions=False)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for line, option in zip(lines, ("--agent", "--input", "another --output", "--resume"), strict=True):
        assert option in line


def test_an_export_of_what_is_not_there_says_what_to_give(tmp_path: Path):
    (tmp_path / "store").mkdir()
    with pytest.raises(RoundhouseError, match="is not there, or not complete"):
        run(
            "export",
            "gone",
            "--format",
            "nemo_gym",
            "--iteration",
            3,
            "--output",
            tmp_path,
            "--store",
            tmp_path / "store",
        )
