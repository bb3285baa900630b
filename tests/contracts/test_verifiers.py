"""verifiers' own package: its example task sets run unchanged in their interpreter, with the rewards of its own runner."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.config.models import ValidationConfig
from roundhouse.errors import ConfigError
from roundhouse.plugins.verifiers.environment import list_tasks
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.validation import validate
from tests.contracts.conftest import environments
from tests.contracts.verifiers_peer import REPLIES, completion, message_for
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, rollout_config, says

pytestmark = [pytest.mark.contract("verifiers-0.4.0"), pytest.mark.timeout(3600)]
HERE = Path(__file__).parent
LIGHT = {"harness": {"id": "capitals"}, "runtime": {"type": "subprocess"}}
"""A seat whose harness starts no program."""
CAPITALS = {"taskset": {"id": "capitals"}}


@pytest.fixture(autouse=True)
def folder(foreign_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory with the data that two of the examples load by name, beside the packages of the test."""
    packages = environments.read_packages(environments.PACKAGES.read_text())
    [*examples] = packages["verifiers-examples"].directory.glob("lib/python3.*/site-packages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [HERE / "verifiers_packages", *examples])))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for line in environments._index_options()[0]:
        if line.startswith("/"):
            monkeypatch.setenv("UV_FIND_LINKS", line)
    authors = tmp_path / "kalomaze" / "alphabetic-arxiv-authors-it1"
    authors.mkdir(parents=True)
    names = [
        f"{first}{last}" for last in ("Weil", "Noether", "Gauss", "Abel") for first in ("Ada", "Emmy", "Carl", "Bo")
    ]
    lists = [names[k:] + names[:k] for k in range(8)]
    (authors / "train.jsonl").write_text("".join(json.dumps({"names": each}) + "\n" for each in lists))
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{name} wrote it"}) + "\n" for name in names))
    monkeypatch.chdir(tmp_path)
    list_tasks.cache_clear()
    return tmp_path


@pytest.fixture
def endpoint() -> Iterator[str]:
    """The endpoint of the stored replies: `/<task set>/v1/chat/completions`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kind, data = completion(self.path.split("/")[1], body)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def section(interpreter: Path, env: dict[str, Any], **keys: Any) -> Any:
    variables = [name for name in ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "UV_FIND_LINKS") if name in os.environ]
    tree = {"kind": "verifiers", "python": str(interpreter), "env": env, "variables": variables, "heldout_fraction": 0}
    return parse_config({"run_id": "r", "environment": tree | keys}).environment


async def played(config: Any, script: Any, rows: slice = slice(None), **limits: Any) -> list[Rollout]:
    async with open_environment(config) as environment:
        specs = plan_rollouts(list(environment.tasks("train"))[rows], 1, seed=3, iteration=1)
        settings = rollout_config(timeout_seconds=3000, **limits)
        return await collect(specs, ScriptedPolicy(script), environment, settings, SAMPLING)


def stored(name: str) -> Any:
    def reply(messages: list[dict[str, Any]], seed: int) -> Reply:
        return message_for(name, messages) | {"finish_reason": None}

    return reply


def unproven(rollouts: list[Rollout]) -> dict[str, int]:
    """Return the reasons of the rollouts whose tokens validation refuses."""
    return validate(rollouts, ValidationConfig(min_group_size=1), vocabulary_size=256, policy_version=3).reasons


def blocks(endpoint: str, texts: Path) -> dict[str, dict[str, Any]]:
    client = {"type": "eval", "base_url": f"{endpoint}/kuhn_poker/v1", "api_key_var": "NO_KEY"}
    other = {**LIGHT, "model": "other", "client": client}
    local = {"runtime": {"type": "subprocess"}}
    envs = {
        "reverse_text": ({"taskset": {"id": "reverse-text", "dataset_name": str(texts)}, "agent": LIGHT}, 12),
        "alphabet_sort": ({"taskset": {"id": "alphabet-sort"}, "agent": LIGHT}, 12),
        "kuhn_poker": ({"taskset": {"id": "kuhn-poker"}, "player0": LIGHT, "player1": other}, 8),
        "code_golf": ({"taskset": {"id": "code-golf"}, "golfer": LIGHT, "attempts": 1}, 3),
        "scratchpad": ({"taskset": {"id": "scratchpad"}, "agent": {"harness": {"id": "null"}, **local}}, 2),
    }
    return {
        name: {"env": env, "tasks": tasks, "base_url": f"{endpoint}/{name}/v1"} for name, (env, tasks) in envs.items()
    }


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[float | None]]:
    return {}


@pytest.fixture
def rewards(
    foreign_python: Path, folder: Path, endpoint: str, theirs: dict[str, list[float | None]]
) -> dict[str, list[float | None]]:
    """Rewards of the package's own runner, which runs once for the module."""
    if not theirs:
        file, cases = folder / "rewards.json", json.dumps(blocks(endpoint, folder / "texts"))
        command = [str(foreign_python), str(HERE / "verifiers_peer.py"), cases, str(file)]
        programs = f"{foreign_python.parent}{os.pathsep}{os.environ['PATH']}"  # its harnesses call uv
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": programs})
        theirs |= json.loads(file.read_text())
    return theirs


@pytest.mark.contract("verifiers-0.4.0", "verifiers-examples")
@pytest.mark.parametrize("name", REPLIES)
async def test_an_example_task_set_earns_what_its_own_runner_gives(
    name: str, foreign_python: Path, folder: Path, endpoint: str, rewards: dict[str, list[float | None]]
) -> None:
    case = blocks(endpoint, folder / "texts")[name]
    rollouts = await played(section(foreign_python, case["env"], tasks=case["tasks"]), stored(name))
    assert [each.status for each in rollouts] == [Status.COMPLETED] * case["tasks"], rollouts[0].failure_detail
    assert [each.reward for each in rollouts] == rewards[name]
    assert len(set(rewards[name])) > 1
    assert unproven(rollouts) == {}
    assert all(each.turns and each.turns[0].generation_token_ids for each in rollouts)


async def test_a_failed_reward_and_a_limit_are_outcomes_of_their_rollouts(foreign_python: Path) -> None:
    config = section(foreign_python, CAPITALS)
    rollouts = await played(config, lambda messages, seed: says("It is Paris."))
    france, japan, *_, nowhere = rollouts
    assert (france.status, france.reward, france.reward_components) == (
        Status.COMPLETED,
        0.75,
        {"right": 0.5, "short": 0.25},
    )
    assert (japan.reward, japan.metrics["length"], japan.metrics["llm_calls"]) == (0.25, 12.0, 1.0)
    assert (nowhere.status, nowhere.reward, nowhere.failure_code) == (Status.FAILED, None, "agent_gave_up")
    assert "there is no such country" in nowhere.failure_detail
    [cut] = await played(config, lambda messages, seed: says("It is P", "length"), slice(0, 1))
    assert (cut.status, cut.reward) == (Status.TRUNCATED, 0.25)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"env": {"taskset": {"id": "capitols"}}}, "'capitols' not found"),
        ({"env": {"taskset": {"id": "capitals", "size": 3}}}, "size"),
        ({"env": {"taskset": {"id": "capitals", "endless": True}}}, "set environment.tasks"),
        ({"env": {"taskset": "capitals"}}, "environment.env lacks a task set"),
        ({"python": "/nowhere/bin/python"}, "environment.python is /nowhere/bin/python, which cannot be started"),
        ({"variables": ["NOT_SET_HERE"]}, "environment.variables names NOT_SET_HERE"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_remedy(
    foreign_python: Path, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        open_environment(section(foreign_python, **({"env": CAPITALS} | keys)))
    assert text in str(error.value)


async def test_an_installed_interpreter_plays_a_configuration_that_names_none(
    foreign_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name, value in environments._index_options()[1].items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["plugins", "install", "verifiers"])
    assert done.output.endswith("interpreters/verifiers/bin/python\n"), done.exception
    config = section(foreign_python, CAPITALS, python=None)
    [france] = await played(config, lambda messages, seed: says("It is Paris."), slice(0, 1))
    assert (france.status, france.reward) == (Status.COMPLETED, 0.75)
