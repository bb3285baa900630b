"""A dry run makes the first task, measures its prompt and tries the verifier; a bug of user code is shown with its place."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.environments import load
from roundhouse.errors import ConfigError
from roundhouse.rollout.clients import LocalEnvironmentClient, verdict_on
from roundhouse.rollout.protocol import VerifierFailed
from roundhouse.stages.preflight import refuse_unready, verifier_warnings

HEAD = """
from roundhouse.environments.base import Verdict, tool
from roundhouse.environments.calculator import Calculator

class World(Calculator):
    name = "world"

"""
LONG = """def tasks(self, split):
    long = {'responses_create_params': {'input': 'word ' * 900}}
    return [row | long for row in super().tasks(split)[:3]]"""
RAISES = "def tasks(self, split): return [{'task_id': row['id']} for row in [{}]]"


def config(directory: Path, body: str, **keys: Any) -> RunConfig:
    """Return a run with an environment that has this method."""
    (directory / "world.py").write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    environment = {"kind": "custom", "target": f"{directory}/world.py:World"}
    return parse_config({"run_id": "r", "store": str(directory / "store"), "environment": environment, **keys})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a_long_prompt": (
        LONG,
        {"generation": {"max_model_len": 256}},
        r"max_model_len is 256, .*\(calculator/.*\) has \d+ tokens",
    ),
    "tasks_that_raise": (
        RAISES,
        {},
        r"cannot be made: KeyError\('id'\) at .*/world.py, line 8: `def tasks.*row\['id'\]",
    ),
    "no_training_task": ("def tasks(self, split): return []", {}, "has no training task"),
    "a_task_that_is_a_text": (
        "def tasks(self, split): return ['What?']",
        {},
        "first training task is 'What\\?', a str",
    ),
    "a_missing_sink": (
        "",
        {"tracking": {"sinks": ["nowhere.sinks:Mine"]}},
        "tracking.sinks: importing nowhere.sinks failed",
    ),
    "a_sink_without_run": (
        "",
        {"tracking": {"sinks": [f"{__name__}:Sink"]}},
        r"cannot be created: .*__init__\(self, run\)",
    ),
    "a_sink_without_its_package": (
        "",
        {"tracking": {"sinks": [f"{__name__}:Needy"]}},
        "needs the package nowhere_installed. Install it: pip install 'nowhere_installed'",
    ),
}


class Sink:
    def __init__(self) -> None: ...
    def log_iteration(self, iteration: int, metrics: dict[str, float]) -> None: ...


class Needy(Sink):
    package = "nowhere_installed"


@pytest.mark.parametrize("case", REFUSED)
def test_a_first_task_that_cannot_be_played_is_refused_before_a_start(tmp_path: Path, case: str) -> None:
    body, keys, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        refuse_unready(config(tmp_path, body or "pass", **keys), remote=False)


def test_a_dry_run_shows_file_line_and_row_of_a_bug_in_verify(tmp_path: Path) -> None:
    given = config(tmp_path, "async def verify(self, session, row, response):\n    return Verdict(row['anser'])")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dry-run"])
    words = " ".join(done.output.split())
    assert done.exit_code == 0
    assert "verify raised KeyError('anser') at" in words
    assert "line 9: `return Verdict(row['anser'])`. The row has: task_id, responses_create_params, answer" in words


@pytest.mark.parametrize("verdict", ["Verdict(0.5)", "0.5", "__import__('numpy').float32(0.5)"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_verifier_may_be_a_plain_function_and_return_a_number(tmp_path: Path, kind: str, verdict: str) -> None:
    given = config(tmp_path, f"{kind} verify(self, session, row, response): return {verdict}")
    environment = load(given.environment)
    judged = asyncio.run(verdict_on(LocalEnvironmentClient(environment), environment.tasks("train")[0], "7"))
    assert (judged.reward, judged.mask) == (0.5, False)
    assert verifier_warnings(given) == []


@pytest.mark.parametrize("verdict", ["None", "'good'"])
def test_a_verifier_that_returns_neither_is_refused(tmp_path: Path, verdict: str) -> None:
    environment = load(config(tmp_path, f"def verify(self, *_): return {verdict}").environment)
    with pytest.raises(VerifierFailed, match="it must return a Verdict or a number"):
        asyncio.run(verdict_on(LocalEnvironmentClient(environment), environment.tasks("train")[0], "7"))


def test_a_bug_in_a_tool_is_logged_once_with_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "@tool('Fails.')\nasync def fail(self, session): return {}['key']"
    environment = load(config(tmp_path, body).environment)

    async def play() -> list[str]:
        client = LocalEnvironmentClient(environment)
        session = await client.seed_session(environment.tasks("train")[0])
        return [(await session.call_tool("fail", {})).text for _ in range(3)]

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(play()) == ["\"KeyError('key')\""] * 3, "the policy is shown what it was shown before"
    [record] = [record for record in caplog.records if "error of a tool" in record.message]
    assert "fail raised KeyError('key') at" in record.message
    assert "line 9: `async def fail" in record.message
