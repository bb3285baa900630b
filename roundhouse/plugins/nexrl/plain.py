"""Workers of plain functions, as in NexRL's guide: played unchanged, each in a thread.

Invariant: the collector's event loop runs each call of such a worker, on the rollout's `LlmClient`: a model call is a
turn with its tokens, within the rollout's limits. The end of the attempt also ends the call for which the thread waits,
and every later one.

    thread    step(task) ── completion(…) ──┐          ┌─> answer ── _put_trajectory(…) ──> "success"
    loop                       LlmClient.completion(…)

Without the package nexrl, `from nexrl import …` finds the names of `roundhouse.plugins.nexrl` (`roundhouse.imports`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roundhouse.errors import ConfigError, InfraError
from roundhouse.http.clients import http_client
from roundhouse.http.replies import MALFORMED
from roundhouse.plugins.nexrl.modules import execute
from roundhouse.rollout.protocol import in_thread
from roundhouse.user_code import waiting_here

if TYPE_CHECKING:
    from roundhouse.plugins.nexrl.base import BaseRolloutWorker, Evaluator
    from roundhouse.plugins.programs.model_calls import LlmClient

PAUSE_SECONDS = 0.05
"""Pause of a user's loop before it asks again, without a task or during an exchange of weights."""


class ParameterMapping(dict[str, Any]):
    """`environment.parameters`; its keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"environment.parameters has no {name}; it has {', '.join(self) or 'none'}.") from None


class WorkerConfig(ParameterMapping):
    """The one argument of a worker's constructor `__init__(self, config)`."""

    def __init__(self, parameters: dict[str, Any], llm: LlmClient, evaluator: Evaluator | None) -> None:
        super().__init__(parameters)
        self.made_with = llm, evaluator


class PlainClient:
    """The policy, as a plain function asks it: a method returns when there is an answer. An `async` worker awaits the same."""

    _model_tag = "default"

    def __init__(self, llm: LlmClient) -> None:
        self._llm = llm
        self._loop: asyncio.AbstractEventLoop | None = None
        """The collector's, while a plain function plays."""
        self._call: concurrent.futures.Future[Any] | None = None
        """The call for which the thread waits."""

    def completion(self, prompt: str, **asked: Any) -> Any:
        """Call `LlmClient.completion` and wait for its result."""
        return self.wait(self._llm.completion(prompt, **asked))

    def generate(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **asked: Any
    ) -> Any:
        """Call `LlmClient.generate` and wait for its result."""
        return self.wait(self._llm.generate(messages, tools or (), **asked))

    def set_weight_sync_controller(self, controller: Any) -> None:
        """Do nothing: a run's calls wait by themselves while the engine takes new weights."""

    def wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call; in the event loop's own thread the call itself, to be awaited.

        Raises:
            CancelledError: the attempt has ended.
        """
        with contextlib.suppress(RuntimeError):  # raised in the thread of a plain function
            asyncio.get_running_loop()
            return call
        if self._loop is None:
            call.close()
            raise concurrent.futures.CancelledError
        self._call = asyncio.run_coroutine_threadsafe(call, self._loop)
        with waiting_here():
            return self._call.result()

    async def play(self, step: Callable[[dict[str, Any]], Any], task: dict[str, Any]) -> str | None:
        """Run the plain `step` in its thread and return its result."""
        self._loop = asyncio.get_running_loop()
        try:
            return await in_thread(step, task)
        finally:
            self._loop = None
            if self._call is not None:
                self._call.cancel()


class LLMServiceClient:
    """A server with OpenAI's API, as a worker in a loop of your own calls it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: NexRL's section `service.inference_service`, or a configuration that holds it: `url` (with or without /v1),
                `model_tag`, and if needed `model`, `api_key`, `max_retries`, `timeout` and `freeze_for_weight_sync`.
        """
        section: Any = config.get("service") or config
        self._section: Mapping[str, Any] = section.get("inference_service") or section
        self._model_tag = str(self._section.get("model_tag", "default"))
        self._controller: Any = None

    def set_weight_sync_controller(self, controller: Any) -> None:
        """Have calls wait while this controller answers "block"."""
        self._controller = controller

    def completion(self, prompt: str, **asked: Any) -> dict[str, Any]:
        """Answer a single prompt.

        Raises:
            InfraError: the server failed `max_retries` + 1 times.
            ConfigError: the server refused the request, or its address is missing.
        """
        choice = self._post("completions", {"prompt": prompt, **asked})
        answer = {"response": choice.get("text") or "", "finish_reason": choice.get("finish_reason")}
        return {**asked, "prompt": prompt, **answer}

    def generate(self, messages: Sequence[dict[str, Any]], **asked: Any) -> dict[str, Any]:
        """Answer a conversation; errors as of `completion`."""
        choice = self._post("chat/completions", {"messages": list(messages), **asked})
        message = choice["message"]
        answer = {"response": message.get("content") or "", "tool_calls": message.get("tool_calls") or []}
        finish = choice.get("finish_reason")
        return {**asked, "messages": list(messages), **answer, "finish_reason": finish, "message": message}

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the first choice of the answer."""
        import httpx

        url = str(self._section.get("url") or "").rstrip("/").removesuffix("/v1")
        if not url:
            raise ConfigError("service.inference_service.url is unset: name a server with OpenAI's API.")
        while self._section.get("freeze_for_weight_sync", True) and self._is_blocked():
            time.sleep(PAUSE_SECONDS)
        key = self._section.get("api_key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self._section.get("model") or self._model_tag, **body}
        failure = ""
        for attempt in range(int(self._section.get("max_retries") or 0) + 1):
            time.sleep(attempt * PAUSE_SECONDS)
            try:
                with http_client(url, foreign=True, timeout=self._section.get("timeout", 600)) as http:
                    reply = http.post(f"/v1/{route}", json=body, headers=headers)
            except httpx.HTTPError as error:
                failure = repr(error)
                continue
            if reply.is_success:
                try:
                    choice: dict[str, Any] = dict(reply.json()["choices"][0])
                except MALFORMED as error:
                    raise InfraError(f"{url} answered without a choice: {reply.text[:200]}") from error
                return choice
            failure = f"status {reply.status_code}: {reply.text[:200]}"
            if reply.status_code < 500 and reply.status_code not in (408, 429):
                raise ConfigError(f"{url} refused the request: {failure}")
        raise InfraError(f"{url} did not answer: {failure}")

    def _is_blocked(self) -> bool:
        controller = self._controller
        return controller is not None and execute(controller.check_rollout_service_status, self._model_tag) == "block"


class WorkerThread:
    """The thread of a worker in a loop of your own."""

    def __init__(self, worker: BaseRolloutWorker) -> None:
        self._worker = worker
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start it; errors as of `BaseRolloutWorker.run`."""
        worker = self._worker
        step = worker.run_agent if type(worker).step.__module__ == "roundhouse.plugins.nexrl.base" else worker.step
        if inspect.iscoroutinefunction(step):
            raise ConfigError(
                f"{type(worker).__name__}.run: its step is async, which only a run plays. Write step as a plain function."
            )
        if worker.trajectory_pool is None or not hasattr(worker.dataloader, "get_next_item"):
            raise ConfigError(
                f"{type(worker).__name__}.run: call set_module_references with a trajectory_pool and a dataloader first."
            )
        self._thread = threading.Thread(target=self._play, args=(step,), name=worker.get_module_name(), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def next_task(self) -> dict[str, Any] | None:
        """Return an item of this mode's loader; None, after a pause, if it is empty now."""
        worker = self._worker
        loader = worker.validate_dataloader if worker.is_validate else worker.dataloader
        item: dict[str, Any] | None = execute(loader.get_next_item) if execute(loader.can_return_item) else None
        if item is None:
            self._ended.wait(PAUSE_SECONDS)
        return item

    def _play(self, step: Callable[[dict[str, Any]], Any]) -> None:
        worker = self._worker
        while not self._ended.is_set():
            if (task := worker._get_rollout_task()) is None:
                continue
            worker._task = task
            with contextlib.suppress(Exception), worker._activity_tracker.track(worker.get_module_name(), "rollout"):
                if step(task) == "re-rollout":
                    worker._put_rollout_task(task)
