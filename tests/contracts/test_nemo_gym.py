"""NeMo Gym's package from PyPI: its collector, servers, verifiers and statistics compared with ours."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.environments.calculator import Calculator
from roundhouse.errors import DataError, InfraError
from roundhouse.plugins.nemo_gym.clients.resources import RemoteEnvironmentClient
from roundhouse.plugins.nemo_gym.config.package import gym_package
from roundhouse.plugins.nemo_gym.config.resolve import resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row, read_rows, write_rows
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics, profile
from roundhouse.plugins.nemo_gym.owned import SERVERS_VARIABLE
from roundhouse.plugins.nemo_gym.servers.commands import install_steps
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.refit import own_gym
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.counter import counter_row
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    by_turn,
    calls,
    rollout_config,
    says,
    serving,
    serving_counter,
)
from tests.plugins.nemo_gym.test_owned import roll_out
from tests.plugins.nemo_gym.test_start import CALCULATOR, plays_calculator
from tests.plugins.programs.model_server.fake_engine import FakeEngine, call
from tests.ports import free_port
from tests.waiting import until

pytestmark = [pytest.mark.contract("nemo-gym-0.7.0"), pytest.mark.timeout(900)]

PEER = Path(__file__).parent / "nemo_gym_peer.py"
XLAM = "resources_servers/xlam_fc/configs/xlam_fc.yaml"
VLLM = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
OF_BOTH = [
    "0.7.0",
    pytest.param("0.6.0", marks=pytest.mark.contract("nemo-gym-0.6.0")),
]
# fmt: off
TEXT_SERVERS = [
    "arc_agi", "bunsenbench_chemistry_mcq", "calendar", "citation_if", "equivalence_rule", "format_verification",
    "gpqa_diamond", "graphwalks", "gui_coordinate", "hotpotqa_qa", "imo_gradingbench", "lc_niah", "math_proof_judgement",
    "mcqa", "proof_genselect", "ragtruth", "ruler", "single_step_tool_use_with_argument_comparison", "spartqa",
    "string_match", "swe_pivot", "swerl_llm_judge", "xlam_fc",
]
# fmt: on


def root_of(python: Path) -> Path:
    """The directory of the installed packages, which holds NeMo Gym's servers and configurations."""
    [root] = (python.parent.parent / "lib").glob("python3.*/site-packages")
    return Path(root)


def peer(python: Path, command: str, given: Any) -> str:
    told = subprocess.run(
        [str(python), str(PEER), command],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    return told.stdout.strip().splitlines()[-1]


@contextmanager
def started(directory: Path, *arguments: str) -> Iterator[str]:
    """`roundhouse gym start`, from ready to its end; the URL of its head server."""
    command = [sys.executable, "-c", "from roundhouse.cli import main; main()", "gym", "start", *arguments]
    with (directory / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--head-port", "0", "--json", "--no-ray"],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (directory / "stderr.txt").read_text()[-3000:]
        yield json.loads(line)["head"]
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def collect_theirs(python: Path, head: str, rows: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """NeMo Gym's own command against a head server."""
    host, port = head.removeprefix("http://").split(":")
    options = [f"+head_server.host={host}", f"+head_server.port={port}", "--concurrency", "4"]
    command = [str(python.parent / "gym"), "eval", "run", "--no-serve", "-i", str(rows), "-o", str(output), *options]
    environ = {**os.environ, "WANDB_MODE": "disabled", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        command, cwd=output.parent, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def collect_ours(head: str, rows: Path, output: Path) -> None:
    told = CliRunner().invoke(app, ["gym", "collect", "-i", str(rows), "-o", str(output), "--head", head])
    assert told.exit_code == 0, told.output


def rewards(output: Path) -> list[tuple[int, float]]:
    return sorted((row["_ng_task_index"], row["reward"]) for row in read_rows(output))


def aggregates(output: Path) -> dict[str, Any]:
    [entry] = json.loads(output.with_name(f"{output.stem}_aggregate_metrics.json").read_text())
    return {name: value for name, value in entry["agent_metrics"].items() if name != "num_repeats"}


def xlam_rows(python: Path, directory: Path) -> tuple[Path, FakeEngine]:
    """Shipped task rows, and an engine that calls the expected functions of every second one."""
    rows = read_rows(root_of(python) / "resources_servers/xlam_fc/data/example.jsonl")[:4]
    calls = {}
    for number, row in enumerate(rows):
        row["agent_ref"] = {"type": "responses_api_agents", "name": "xlam_fc_simple_agent"}
        row["task_id"] = f"xlam-{number}"
        expected = row["expected_answers"][: None if number % 2 else 1]
        question = row["responses_create_params"]["input"][-1]["content"]
        calls[question] = [
            call(one["name"], json.dumps(one["arguments"]), f"c{place}") for place, one in enumerate(expected)
        ]

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] != "user":
            return {"role": "assistant", "content": "done"}
        content = messages[-1]["content"]
        question = content if isinstance(content, str) else content[0]["text"]
        return {"role": "assistant", "content": None, "tool_calls": calls[question]}

    write_rows(directory / "rows.jsonl", rows)
    return directory / "rows.jsonl", FakeEngine(reply=reply)


@pytest.mark.parametrize("ours", [True, False], ids=["our agent and model server", "all servers theirs"])
def test_their_collector_and_ours_agree_at_our_head_with_their_configuration(foreign_python, tmp_path, ours) -> None:
    rows, engine = xlam_rows(foreign_python, tmp_path)
    options = ["--root", str(root_of(foreign_python)), "--python", str(foreign_python), *(["--ours"] if ours else [])]
    with serving(engine) as url:
        policy = [f"++policy_base_url={url}/v1", "++policy_api_key=none", "++policy_model_name=m"]
        with started(tmp_path, XLAM, VLLM, *policy, *options) as head:
            told = collect_theirs(foreign_python, head, rows, tmp_path / "theirs.jsonl")
            assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-3000:]
            collect_ours(head, rows, tmp_path / "ours.jsonl")
    assert len({reward for _, reward in rewards(tmp_path / "theirs.jsonl")}) > 1, "right and wrong replies"
    assert rewards(tmp_path / "ours.jsonl") == rewards(tmp_path / "theirs.jsonl")
    assert aggregates(tmp_path / "ours.jsonl") == pytest.approx(aggregates(tmp_path / "theirs.jsonl"))


@pytest.mark.parametrize("ours", [True, False], ids=["our agent and model server", "all servers theirs"])
def test_their_servers_play_an_owned_run_and_one_that_is_killed_comes_back(foreign_python, tmp_path, ours) -> None:
    path, engine = xlam_rows(foreign_python, tmp_path)
    rows = read_rows(path)
    with serving(engine) as url:
        environment = {
            "kind": "nemo_gym",
            "config_paths": [XLAM, VLLM],
            "search_dirs": [str(root_of(foreign_python))],
            "python": str(foreign_python),
            "ours": ours,
            "train_tasks": str(path),
        }
        given = run_config(tmp_path, url, environment)
        with own_gym(SimpleNamespace(config=given, run_id="r")):  # type: ignore[arg-type]
            head = os.environ[SERVERS_VARIABLE]
            first = asyncio.run(roll_out(given, rows))
            servers = {one["process_name"]: one for one in httpx.get(f"{head}/server_instances").json()}
            os.kill(servers["xlam_fc"]["pid"], signal.SIGKILL)
            again = asyncio.run(roll_out(given, rows))
            elsewhere = asyncio.run(roll_out_here(servers["xlam_fc"]["url"], rows))
    assert [one.status for one in first] == [Status.COMPLETED] * 4, [one.failure_detail for one in first]
    earned = [one.reward for one in first]
    assert len(set(earned)) > 1
    assert [one.reward for one in again] == [one.reward for one in elsewhere] == earned


def run_config(directory: Path, engine_url: str, environment: dict[str, Any]) -> RunConfig:
    return parse_config(
        {
            "run_id": "r",
            "store": str(directory / "store"),
            "infra": {"state": str(directory / "state")},
            "generation": {"engine_url": engine_url},
            "policy": {"kind": "pretrained", "path": str(directory)},
            "evaluation": {"every": None, "before_training": False},
            "environment": environment,
        }
    )


async def roll_out_here(url: str, rows: list[Row]) -> list[Rollout]:
    """Our agent loop against their resources server, as `kind: remote` plays it."""
    played = []
    async with RemoteEnvironmentClient(url) as environment:
        for number, row in enumerate(rows):
            expected = row["expected_answers"][: None if number % 2 else 1]
            policy = ScriptedPolicy(
                by_turn(calls(*((one["name"], one["arguments"]) for one in expected)), says("done"))
            )
            [spec] = plan_rollouts([row], 1, seed=0, iteration=1)
            played.append(await run_rollout(spec, policy, environment, rollout_config(), SAMPLING))
    return played


@pytest.mark.parametrize("version", OF_BOTH)
def test_their_collector_plays_rows_with_a_configuration_of_ours(foreign_python, tmp_path, version) -> None:
    """`foreign_python` is of the version that the test's nearest marker names."""
    agent = {"type": "responses_api_agents", "name": "calc_agent"}
    write_rows(tmp_path / "rows.jsonl", [{**row, "agent_ref": agent} for row in Calculator().tasks("train")[:4]])
    (tmp_path / "config.yaml").write_text(CALCULATOR)
    with serving(FakeEngine(reply=plays_calculator)) as url:
        policy = [f"++policy_base_url={url}/v1", "++policy_api_key=none"]
        with started(tmp_path, "config.yaml", *policy) as head:
            told = collect_theirs(foreign_python, head, tmp_path / "rows.jsonl", tmp_path / "theirs.jsonl")
            assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-3000:]
            collect_ours(head, tmp_path / "rows.jsonl", tmp_path / "ours.jsonl")
    assert len(rewards(tmp_path / "theirs.jsonl")) == 4
    assert rewards(tmp_path / "ours.jsonl") == rewards(tmp_path / "theirs.jsonl")
    assert aggregates(tmp_path / "ours.jsonl") == pytest.approx(aggregates(tmp_path / "theirs.jsonl"))


def judged(draw: random.Random) -> tuple[list[Row], list[Row]]:
    """Materialized inputs and rollouts of two agents, some masked, one task as a whole, fields now and then missing."""
    inputs, rollouts = [], []
    for task in range(24):
        for repeat in range(3):
            key = {"_ng_task_index": task, "_ng_rollout_index": repeat}
            inputs.append({**key, "agent_ref": {"name": "abc"[task % 3]}, "responses_create_params": {"input": "q"}})
            usage = {"input_tokens": draw.randint(5, 90), "output_tokens": draw.randint(1, 50)}
            row: Row = {**key, "reward": draw.choice([0.0, 0.25, 1.0]), "right": draw.random() < 0.5}
            row |= {"mask_sample": task == 4 or task % 3 == 2 or draw.random() < 0.2, "failure_kind": None}
            row |= {"words": draw.randint(0, 9)} if draw.random() < 0.7 else {}
            rollouts.append({**row, "response": {"usage": usage}})
    return inputs, rollouts


def test_statistics_are_equal_to_theirs_with_masked_rollouts_and_repeats(foreign_python) -> None:
    inputs, rollouts = judged(random.Random(7))
    one_agent = [row for row in rollouts if row["_ng_task_index"] % 3 == 0]
    answer = json.loads(peer(foreign_python, "statistics", {"rows": one_agent, "inputs": inputs, "rollouts": rollouts}))
    ours, theirs = aggregate_metrics(one_agent), answer["aggregate"]
    assert theirs.pop("perf_summary") is None
    assert theirs["agent_metrics"]["coverage/masked_rollouts"] > 3
    assert "std_across_repeats/mean/reward" in theirs["agent_metrics"]
    for part in ("agent_metrics", "key_metrics"):
        assert ours[part] == pytest.approx(theirs[part]), part
    for part in ("group_level_metrics", "repeat_level_metrics"):
        assert_equal_entries(ours[part], theirs[part])
    found = profile(inputs, rollouts)
    for mine, their in zip((found.tasks, found.agents, found.repeats), answer["profile"], strict=True):
        assert_equal_entries(mine, their)


def assert_equal_entries(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.keys() == their.keys()
        for name, value in their.items():
            assert mine[name] == (pytest.approx(value) if isinstance(value, int | float) else value), name


@pytest.fixture
def verifiers(foreign_python, tmp_path) -> Iterator[Callable[[str], str]]:
    """URL of each of their text servers, all in one process."""
    port = free_port()
    with (tmp_path / "verifiers.log").open("wb") as log:
        command = [str(foreign_python), str(PEER), "verifiers", str(port), *TEXT_SERVERS]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{address}/missing"), "their verifiers", process=process, seconds=120)
        missing = httpx.get(f"{address}/missing").json()
        assert len(missing) <= 3, missing
        yield lambda name: "" if name in missing else f"{address}/{name}"
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def test_golden_rollouts_get_the_reward_that_their_verify_gives(foreign_python, verifiers) -> None:
    golden = 0
    for name in TEXT_SERVERS:
        if not (url := verifiers(name)):
            continue
        data = root_of(foreign_python) / "resources_servers" / name / "data"
        task_fields = {field for task in read_rows(data / "example.jsonl") for field in task}
        for stored in read_rows(data / "example_rollouts.jsonl")[:5]:
            response, reward = stored["response"], stored["reward"]
            row = {field: value for field, value in stored.items() if field in task_fields}
            bare = httpx.post(f"{url}/verify", json={**row, "response": response}, timeout=60)
            verdict = asyncio.run(judge(url, row, response))
            if bare.status_code != 200:
                assert verdict is None, (name, bare.text)
                continue
            assert verdict == bare.json()["reward"], name
            golden += bare.json()["reward"] == reward
    print(f"{golden} golden rollouts of {5 * len(TEXT_SERVERS)}")
    assert golden >= 75, "rollouts whose stored reward their own verifier gives again"


async def judge(url: str, row: Row, response: dict[str, Any]) -> float | None:
    """The reward by our client of a resources server; None where the row is refused."""
    async with RemoteEnvironmentClient(url) as environment:
        try:
            session = await environment.seed_session(row)
            return (await session.verify(response)).reward
        except (DataError, InfraError):
            return None


@pytest.mark.parametrize("keeps_state", [True, False])
def test_their_session_conformance_test_passes_against_our_server(foreign_python, tmp_path, keeps_state) -> None:
    identity = {"episode_id": {"rollout_id": "r", "attempt": 0}, "task_id": {"taskset": "t", "task_id": "1"}}
    seed = {"resources_session_id": "session-1", **identity, "task_data": counter_row()}
    with serving_counter() if keeps_state else serving_stateless() as url:
        assert peer(foreign_python, "conformance", {"url": url, "seed": seed, "keeps_state": keeps_state}) == "conforms"


@contextmanager
def serving_stateless() -> Iterator[str]:
    from roundhouse.environments.single_turn import Sort
    from roundhouse.plugins.nemo_gym.servers.resources import build_app

    with serving(build_app(Sort())) as url:
        yield url


def test_their_shipped_configurations_are_read_with_a_relay_for_every_agent(foreign_python) -> None:
    root = root_of(foreign_python)
    package = gym_package(root)
    assert package is not None
    assert (package.version, package.requires_python, package.is_checkout) == ("0.7.0", ">=3.13.14", False)
    make, fill = install_steps(place := root / "resources_servers/xlam_fc", place / ".venv", {})
    assert make.arguments[-3:-1] == ["--python", ">=3.13.14"]
    assert fill.requirements.splitlines()[0] == "nemo-gym==0.7.0"
    assert "../.." not in fill.requirements
    roots = SearchRoots.of([root], environ={})
    policy = ["++policy_base_url=http://127.0.0.1:1/v1", "++policy_api_key=none", "++policy_model_name=m"]
    for name in TEXT_SERVERS:
        path = f"resources_servers/{name}/configs/{name}.yaml"
        if not (root / path).exists():
            continue
        resolution = resolve([path, VLLM], policy, roots, choose_ports=False)
        fronted = {agent for one in (*resolution.relays, *resolution.instances) for agent in one.agents()}
        agents = {one.name for one in resolution.instances if one.type == "responses_api_agents"}
        assert agents <= fronted, path
