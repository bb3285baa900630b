"""A user's program as an environment: started once per rollout, it calls the policy by an SDK, and its result is
judged.

Invariants: a program needs only a base URL, a key and two files. Every call within its rollout's limits becomes a turn
with the generated tokens, in any dialect. Every end of the rollout (its result, a time limit, a kill of the collector)
ends all its processes. A failing program does not get a reward.

    OPENAI_BASE_URL, OPENAI_API_KEY         Chat Completions and Responses
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY   Messages
    ROUNDHOUSE_TASK                         file with the task row, as JSON
    ROUNDHOUSE_RESULT                       file that the program may write: {"reward": 0.5, "metrics": {"steps": 3}, …}

The reward is the result file's, or a verifier's:

    def judge(task, outcome): return float(task["answer"] in outcome.reply)

A reply beyond `rollout.max_turns` or `rollout.max_tokens` is empty, with finish reason `length`, and the rollout is
judged as truncated.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse.environments.base import Restoration, TaskRow, Verdict
from roundhouse.environments.operations import HostedOperations, fields_of, function_operation
from roundhouse.environments.task_files import read_split_rows
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.generation.protocol import BadRequest, ContextOverflow, EngineRejected, read_request
from roundhouse.http.asgi import reply
from roundhouse.http.ports import HttpThread
from roundhouse.imports import load_function
from roundhouse.infra.processes import Child, Children
from roundhouse.infra.regular_files import NotReadable, read_regular, remove_tree
from roundhouse.plugins.programs.model_calls import LlmClient, RolloutLimit
from roundhouse.plugins.programs.model_server.app import build_app
from roundhouse.plugins.programs.model_server.rollout_paths import path_prefix
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.plugins.programs.section import CommandEnvironment
from roundhouse.rollout.agents import RolloutAttempt, checked_verdict, rollout_name
from roundhouse.rollout.hosted import HostedFunctions
from roundhouse.rollout.protocol import BadTaskRow, ClientWithRows, NoTrainableTokens
from roundhouse.strict_json import read_json
from roundhouse.trajectories.records import Status

MODEL = "policy"
LOOK_SECONDS = 0.05
"""Interval at which the end of a program is checked."""
GRACE_SECONDS = 2.0
"""Time from SIGTERM to SIGKILL for processes that a program leaves running."""
MOST_RESULT_BYTES = 16 * 2**20
MOST_OUTPUT_BYTES = 256 * 2**20
"""Of a program's standard output and error: a loop that prints must not fill the disk of all rollouts."""
INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
)
"""Variables of the collector that every program gets."""


class CommandFailed(DataError):
    """The program ended with an error, or without a result that can be judged."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """Results of a program, for a verifier."""

    result: dict[str, Any] | None
    """Its result file, if it wrote one."""
    output: str
    """The end of its output."""
    reply: str
    """Text of the policy's newest reply."""
    truncated: bool
    """A limit of turns or tokens was reached."""
    directory: Path
    """Its working directory; deleted after the verdict."""


VERIFIER = "environment.verifier"


def hosted_verifier(target: str) -> HostedFunctions:
    """Return the verifier, which a separate process calls.

    Raises:
        ConfigError: the function cannot be imported.
    """
    load_function(target, VERIFIER)
    return HostedFunctions(f"{__name__}:verifier_service", target, VERIFIER)


def verifier_service(target: str) -> HostedOperations:
    """Load the verifier in its process; the outcome of a call is an object of its fields."""

    def arguments(task: TaskRow, outcome: dict[str, Any]) -> tuple[TaskRow, CommandOutcome]:
        return task, CommandOutcome(**outcome | {"directory": Path(outcome["directory"])})

    return HostedOperations(
        {VERIFIER: function_operation(load_function(target, VERIFIER), arguments)}, of_row=frozenset({VERIFIER})
    )


class CommandClient(ClientWithRows):
    """The environment of a configuration."""

    restoration: Restoration = "none"

    def __init__(
        self, config: CommandEnvironment, train: Sequence[TaskRow] = (), heldout: Sequence[TaskRow] = ()
    ) -> None:
        """Find the program and its verifier.

        Raises:
            ConfigError: the program, verifier or variable does not exist.
        """
        super().__init__(train, heldout)
        program = shutil.which(config.command[0])
        if program is None:
            raise ConfigError(f"environment.command begins with {config.command[0]!r}, which is not a program on PATH.")
        if missing := [name for name in config.variables if name not in os.environ]:
            raise ConfigError(f"environment.variables names {', '.join(missing)}, which are not set. Set them.")
        self.name = Path(program).name
        words = program, *config.command[1:]
        self.command = tuple(str(Path(word).absolute()) if os.path.isfile(word) else word for word in words)
        self.verifier = None if config.verifier is None else hosted_verifier(config.verifier)
        self.variables = {name: os.environ[name] for name in (*INHERITED, *config.variables) if name in os.environ}
        self.agent = CommandAgent(self)
        self.host = ProgramModelServer("command")

    @classmethod
    def from_config(cls, config: CommandEnvironment) -> Self:
        """The client of a configuration, its task rows read from their files.

        Raises:
            ConfigError: as the class, or a file cannot be read.
        """
        return cls(config, *read_split_rows(config))

    async def __aenter__(self) -> Self:
        if self.verifier is not None:
            await self.verifier.__aenter__()
        return self

    async def close(self) -> None:
        if self.verifier is not None:
            await self.verifier.close()
        await self.host.close()


class ProgramModelServer:
    """Directory, processes and model server of programs that call the policy; the first rollout makes them."""

    def __init__(self, name: str) -> None:
        self.plays: dict[str, Play] = {}
        """Rollouts in flight, by their name in the base URL."""
        self._name = name
        self._opened: tuple[Path, Children, HttpThread] | None = None

    def opened(self) -> tuple[Path, Children, HttpThread]:
        """Return directory, processes and model server."""
        if self._opened is None:
            directory = Path(tempfile.mkdtemp(prefix=f"roundhouse-{self._name}-"))
            config = ModelServerConfig(
                base_url=["http://in.process/v1"],
                model=MODEL,
                return_token_id_information=False,
                uses_reasoning_parser=False,
            )
            app = build_app(config, self._name, Policies(self.plays))
            server = HttpThread(KeyCheck(app, self.plays), "127.0.0.1", 0)
            self._opened = directory, Children(directory / "logs", GRACE_SECONDS), server
        return self._opened

    def url(self, name: str) -> str:
        """Return the base URL of a rollout."""
        return f"http://127.0.0.1:{self.opened()[2].port}/{path_prefix(name, capture=False)}"

    async def close(self) -> None:
        """End all processes and delete the directory."""
        if self._opened is None:
            return
        directory, children, server = self._opened
        self._opened = None
        await children.close()
        await asyncio.to_thread(server.close)
        await asyncio.to_thread(remove_tree, directory)


class Play:
    """One rollout's side of the model server."""

    def __init__(self, attempt: RolloutAttempt) -> None:
        self.key = secrets.token_urlsafe(24)
        self.llm = LlmClient(attempt)
        self.limit = ""
        """The limit that a call ran into."""
        self.failure: InfraError | None = None
        """Engine failure of the newest call."""
        self._loop = asyncio.get_running_loop()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat request; called in the server's thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(body), self._loop))

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            request = read_request(body, MODEL)
            for field, value in (("chat_template_kwargs", request.template_arguments), ("logprobs", request.logprobs)):
                if value:
                    raise EngineRejected(f"{field} is not supported by environment.kind command. Leave it out.")
            completion = await self.llm.ask(
                request.messages,
                request.tools,
                max_tokens=request.draw.max_tokens or None,
                temperature=body.get("temperature"),
                top_p=body.get("top_p"),
            )
        except RolloutLimit as limit:
            self.limit = str(limit)
            raise ContextOverflow(f"The rollout has reached {limit}.") from limit
        except (BadRequest, BadTaskRow) as error:
            raise EngineRejected(str(error)) from error
        except InfraError as error:
            self.failure = error
            raise
        self.failure = None
        message = dict(completion.message)
        if request.only_first_call and message.get("tool_calls"):
            message["tool_calls"] = message["tool_calls"][:1]
        prompt, generated = len(completion.prompt_token_ids), len(completion.generation_token_ids)
        return {
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
            "policy_version": completion.policy_version,
        }


class Policies:
    """The engines of the model server: the policy of the rollout that calls."""

    def __init__(self, plays: dict[str, Play]) -> None:
        self._plays = plays

    async def complete(self, session: str, body: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        return None, await self._plays[session].complete(body)

    async def tokenize(self, engine: Any, body: dict[str, Any]) -> list[int]:
        raise EngineRejected("token IDs are recorded with the rollout and not reported to its program")

    def health(self) -> list[dict[str, Any]]:
        return [{"state": "in", "in_flight": len(self._plays)}]

    def open(self) -> None:
        """Nothing is to be opened."""

    async def close(self) -> None:
        """Nothing is held open."""


class KeyCheck:
    """Lets a program reach its own rollout, and no other."""

    def __init__(self, app: ASGIApp, plays: dict[str, Play]) -> None:
        self._app = app
        self._plays = plays

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            api_key = headers.get(b"x-api-key") or headers.get(b"authorization", "").removeprefix("Bearer ")
            parts = scope["path"].split("/")
            play = self._plays.get(parts[2]) if len(parts) > 2 else None
            if play is None or not secrets.compare_digest(api_key.encode(), play.key.encode()):
                text = "No rollout in flight has this base URL and this key (OPENAI_BASE_URL, OPENAI_API_KEY)."
                await reply(send, 401, orjson.dumps({"error": {"message": text, "type": "authentication_error"}}))
                return
        await self._app(scope, receive, send)


class CommandAgent:
    """Starts the program, waits for it, has its result judged."""

    def __init__(self, client: CommandClient) -> None:
        self._client = client

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        rollout, client = attempt.rollout, self._client
        root, children, _ = client.host.opened()
        name, play = rollout_name(rollout.group_id, rollout.sample), Play(attempt)
        directory, start = root / name, time.perf_counter()
        client.host.plays[name] = play
        try:
            directory.mkdir()
            (directory / "task.json").write_bytes(orjson.dumps(rollout.task))
            url = client.host.url(name)
            work = directory / "work"
            work.mkdir()
            variables = {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": play.key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": play.key,
                "NO_PROXY": "127.0.0.1",
                "no_proxy": "127.0.0.1",
                "ROUNDHOUSE_TASK": str(directory / "task.json"),
                "ROUNDHOUSE_RESULT": str(directory / "result.json"),
            }
            try:
                child = children.start(name, client.command, work, client.variables | variables)
            except OSError as error:
                raise CommandFailed(f"{client.command[0]} cannot be started: {error}") from error
            while (code := child.process.poll()) is None:
                await asyncio.sleep(LOOK_SECONDS)
                _verify_output(client.command[0], child)
            await self._judge(attempt, play, code, child, directory)
        finally:
            rollout.environment_seconds = max(0.0, time.perf_counter() - start - rollout.generation_seconds)
            del client.host.plays[name]
            await children.end(name)
            children.log(name).unlink(missing_ok=True)
            await asyncio.to_thread(remove_tree, directory)

    async def _judge(self, attempt: RolloutAttempt, play: Play, code: int, child: Child, directory: Path) -> None:
        rollout, llm = attempt.rollout, play.llm
        limit = play.limit or llm.limit
        if code != 0 and not limit:
            if play.failure is not None:
                raise play.failure
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise CommandFailed(f"{self._client.command[0]} {how}. The end of its output:\n{child.tail()}")
        if attempt.on_policy and not rollout.turns:
            raise NoTrainableTokens(
                f"{self._client.command[0]} made no model call at OPENAI_BASE_URL or ANTHROPIC_BASE_URL."
            )
        last_response = str(llm.infos[-1]["response"]) if llm.infos else ""
        result = await asyncio.to_thread(_result, directory / "result.json")
        outcome = CommandOutcome(result, child.tail(), last_response, bool(limit), directory / "work")
        verdict = checked_verdict(await _verdict(self._client.verifier, rollout.task, outcome))
        rollout.reward, rollout.reward_components = verdict.reward, verdict.reward_components
        rollout.metrics = {"llm_calls": float(len(llm.infos)), **verdict.metrics}
        rollout.finish_reason = limit or "stop"
        rollout.status = Status.TRUNCATED if limit else Status.COMPLETED
        if verdict.mask:
            rollout.status = Status.MASKED
        attempt.response = llm.response(rollout.finish_reason)
        attempt.answer = {**(result or {}), "reward": verdict.reward}


def _verify_output(program: str, child: Child) -> None:
    try:
        size = child.log.stat().st_size
    except OSError:  # the program has deleted it
        return
    if size > MOST_OUTPUT_BYTES:
        raise CommandFailed(
            f"{program} wrote more than {MOST_OUTPUT_BYTES >> 20} MiB to its standard output and error. Let it write less. "
            f"The end of its output:\n{child.tail()}"
        )


def _result(path: Path) -> dict[str, Any] | None:
    try:
        result = read_json(read_regular(path, MOST_RESULT_BYTES))
    except FileNotFoundError:
        return None
    except NotReadable as error:
        raise CommandFailed(
            f"The program's result file cannot be read: {error}. Write one small JSON object into it."
        ) from error
    except ValueError as error:
        raise CommandFailed(f"The program's result file is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise CommandFailed(f"The program's result file holds a {type(result).__name__}; it must be an object.")
    return result


async def _verdict(verifier: HostedFunctions | None, task: TaskRow, outcome: CommandOutcome) -> Verdict:
    if verifier is None:
        if outcome.result is None or "reward" not in outcome.result:
            raise CommandFailed(
                "The program wrote no reward into the file that ROUNDHOUSE_RESULT names. Let it write one, or set "
                "environment.verifier."
            )
        return Verdict(outcome.result["reward"], metrics=outcome.result.get("metrics") or {})
    fields = fields_of(outcome) | {"directory": str(outcome.directory)}
    verdict = await verifier.call(VERIFIER, task, fields, result=Verdict)
    return verdict if isinstance(verdict, Verdict) else Verdict(verdict)
