"""The environment: verifiers plays an episode in its own interpreter, with the rollout's endpoint as its model.

Invariant: the reward is that of the one trace that the policy answered. Every call is a turn with its tokens. A failed
episode does not get a reward. One process plays all episodes of a client; the first one starts it, and another one after its
end.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from roundhouse.environments.base import Restoration, Verdict
from roundhouse.errors import ConfigError
from roundhouse.infra.interpreters import installed_python
from roundhouse.infra.processes import Child
from roundhouse.plugins.programs.command import INHERITED, Play, ProgramModelServer
from roundhouse.plugins.verifiers.section import VerifiersSection
from roundhouse.rollout.agents import RolloutAttempt, checked_verdict
from roundhouse.rollout.protocol import (
    AgentFailed,
    AgentGaveUp,
    BadAgentAnswer,
    BadTaskRow,
    ClientWithRows,
    EnvironmentLost,
    NoTrainableTokens,
)
from roundhouse.strict_json import read_json
from roundhouse.trajectories.records import Status

WORKER = Path(__file__).with_name("worker.py")
LOOK_SECONDS = 0.1
MOST_ANSWER_BYTES = 2**20
FAILURES = {"row": BadTaskRow, "seats": AgentGaveUp, "task": AgentGaveUp}
REMEDIES = {"seats": " Give the other seats a client and a model of their own: environment.env.<seat>.client."}


class VerifiersClient(ClientWithRows):
    """Episodes of one environment block."""

    restoration: Restoration = "none"

    def __init__(self, config: VerifiersSection) -> None:
        """Read the tasks.

        Raises:
            ConfigError: the interpreter, a package, the task set or a variable cannot be used.
        """
        self.config = config
        self.name = config.env["taskset"]["id"]
        if missing := [name for name in config.variables if name not in os.environ]:
            raise ConfigError(f"environment.variables names {', '.join(missing)}, which are not set. Set them.")
        self.python = str(Path(config.python or installed_python("verifiers")).expanduser().absolute())
        # No PYTHONPATH: the packages of this interpreter are not those of the other one
        names = [*(name for name in INHERITED if name not in ("PYTHONPATH", "VIRTUAL_ENV")), *config.variables]
        programs = f"{Path(self.python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.variables = {name: os.environ[name] for name in names if name in os.environ} | {"PATH": programs}
        self.settings = json.dumps({"env": config.env, "tasks": config.tasks})
        tasks = list_tasks(
            self.name, self.python, self.settings, tuple(self.variables.items()), config.start_timeout_seconds
        )
        rows = [_row(task) for task in tasks]
        heldout = round(len(rows) * config.heldout_fraction)
        super().__init__(rows[: len(rows) - heldout], rows[len(rows) - heldout :])
        self.agent = VerifiersAgent(self)
        self.host = ProgramModelServer("verifiers")
        self._worker: Child | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def from_config(cls, config: VerifiersSection) -> Self:
        return cls(config)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the worker, which is started if it does not run.

        Raises:
            EnvironmentLost: it ends, or does not answer in time.
        """
        async with self._starting:
            root, children, _ = self.host.opened()
            socket = root / "worker.socket"
            if self._worker is None or self._worker.process.poll() is not None:
                socket.unlink(missing_ok=True)
                command = _command(self.python, self.settings, root, str(socket))
                self._worker = children.start("worker", command, Path.cwd(), self.variables)
            limit = time.monotonic() + self.config.start_timeout_seconds
            while self._worker.process.poll() is None and time.monotonic() < limit:
                try:
                    return await asyncio.open_unix_connection(str(socket), limit=MOST_ANSWER_BYTES)
                except (FileNotFoundError, ConnectionRefusedError):
                    await asyncio.sleep(LOOK_SECONDS)
            raise EnvironmentLost(f"{self.name}: verifiers does not serve. Its output:\n{self._worker.tail()}")

    async def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer to one episode."""
        reader, writer = await self.connect()
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            line = await reader.readline()
        except (OSError, ValueError) as error:
            raise EnvironmentLost(f"{self.name}: the connection to verifiers broke: {error!r}") from error
        finally:
            writer.close()
        if not line:
            assert self._worker is not None
            raise EnvironmentLost(f"{self.name}: verifiers ended in an episode. Its output:\n{self._worker.tail()}")
        return read_json(line)

    async def close(self) -> None:
        await self.host.close()


class VerifiersAgent:
    """Has an episode played and takes over its reward.

    A slot is a base URL with its key. It is used again after an episode that ended, because verifiers keeps an HTTP client for
    each base URL; not after a cancelled episode, because a late call may follow.
    """

    def __init__(self, client: VerifiersClient) -> None:
        self._client = client
        self._slots: list[tuple[int, str | None]] = []
        self._numbers = itertools.count()

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        rollout, client = attempt.rollout, self._client
        start, play = time.perf_counter(), Play(attempt)
        number, key = self._slots.pop() if self._slots else (next(self._numbers), None)
        play.key = key or play.key
        name = f"slot-{number}"
        client.host.opened()
        client.host.plays[name] = play
        task = {field: rollout.task.get(field) for field in ("idx", "hash")}
        url = f"{client.host.url(name)}/v1"
        try:
            answer = await client.exchange({**task, "slot": number, "base_url": url, "api_key": play.key})
            self._slots.append((number, play.key))
        finally:
            rollout.environment_seconds = max(0.0, time.perf_counter() - start - rollout.generation_seconds)
            del client.host.plays[name]
        self._judge(attempt, play, answer)

    def _judge(self, attempt: RolloutAttempt, play: Play, answer: dict[str, Any]) -> None:
        rollout, llm = attempt.rollout, play.llm
        if "error" in answer:
            if play.failure is not None:
                raise play.failure
            kind = answer.get("kind", "")
            raise FAILURES.get(kind, AgentFailed)(f"{self._client.name}: {answer['error']}.{REMEDIES.get(kind, '')}")
        if attempt.on_policy and not rollout.turns:
            raise NoTrainableTokens(f"{self._client.name} did not call the model.")
        if "reward" not in answer or not all(isinstance(answer.get(name), dict) for name in ("components", "metrics")):
            raise BadAgentAnswer(f"{self._client.name}: verifiers answered {str(answer)[:300]}.")
        verdict = checked_verdict(Verdict(answer["reward"], answer["components"], answer["metrics"]))
        rollout.reward, rollout.reward_components = verdict.reward, verdict.reward_components
        rollout.metrics = {"llm_calls": float(len(llm.infos)), **verdict.metrics}
        limit = play.limit or llm.limit or ("length" if answer.get("truncated") else "")
        rollout.finish_reason = limit or "stop"
        rollout.status = Status.TRUNCATED if limit else Status.COMPLETED
        attempt.response = llm.response(rollout.finish_reason)
        attempt.answer = answer


@functools.lru_cache(maxsize=8)
def list_tasks(
    name: str, python: str, settings: str, variables: tuple[tuple[str, str], ...], timeout_seconds: float
) -> Sequence[Mapping[str, Any]]:
    """Return the tasks of a task set. A run asks several times, and each start of verifiers takes seconds.

    Raises:
        ConfigError: the interpreter or the package is missing, or the environment cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="roundhouse-verifiers-") as folder:
        file = Path(folder) / "tasks.json"
        command = _command(python, settings, Path(folder), "--list", str(file))
        try:
            process = subprocess.run(
                command, env=dict(variables), timeout=timeout_seconds, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ConfigError(
                f"environment.python is {python}, which cannot be started: {error}. Make it: uv venv {Path(python).parents[1]}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"environment.env: the tasks of {name} were not read in environment.start_timeout_seconds "
                f"({timeout_seconds:g} s). Raise it, or lower environment.tasks."
            ) from error
        answer = read_json(file.read_bytes()) if file.exists() else {"error": process.stderr[-1000:].strip()}
    if "error" in answer:
        raise ConfigError(
            f"environment.env cannot be loaded by {python}: {answer['error']}. Correct the block, or install the packages: "
            f"uv pip install --python {python} 'verifiers>=0.4,<0.5' and the package of {name}."
        )
    if not answer["tasks"]:
        raise ConfigError(f"environment.env: the task set {name} is empty. Correct its keys.")
    return tuple(answer["tasks"])


def _command(python: str, settings: str, folder: Path, *arguments: str) -> list[str]:
    """Write the worker's settings into a folder, and return its command."""
    (folder / "settings.json").write_text(settings)
    return [python, "-P", str(WORKER), str(folder / "settings.json"), *arguments]


def _row(task: Mapping[str, Any]) -> dict[str, Any]:
    texts = [("system", task["system"]), ("user", task["prompt"])]
    messages = [{"role": role, "content": text} for role, text in texts if text]
    return {
        "task_id": str(task["idx"]),
        "responses_create_params": {"input": messages},
        "idx": task["idx"],
        "hash": task["hash"],
    }
