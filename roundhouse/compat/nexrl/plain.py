"""Workers as NexRL's guide writes them, of plain functions: played unchanged, each in a thread of its own.

Invariant: whatever such a worker calls is carried out by the collector's event loop, on the rollout's `LlmClient`: a model call
is a turn with its tokens, within the rollout's limits. When the attempt ends, so does the call that the thread waits for, and
every later one.

    thread    step(task) ── completion(…) ──┐          ┌─> answer ── _put_trajectory(…) ──> "success"
    loop                       LlmClient.completion(…)

Where the package nexrl is not installed, a recipe's `from nexrl import …` finds the names of `roundhouse.compat.nexrl`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from roundhouse.rollout.protocol import in_thread

if TYPE_CHECKING:
    from roundhouse.compat.nexrl.base import Evaluator, LlmClient

NEXRL_MODULES = ("nexrl", "nexrl.nexrl_types", "nexrl.rollout_worker", "nexrl.rollout_worker.base_nexau_rollout_worker")


def provide_nexrl() -> None:
    """Let recipes import NexRL's names, unless NexRL itself is installed."""
    if importlib.util.find_spec("nexrl") is None:
        for name in NEXRL_MODULES:
            sys.modules[name] = sys.modules["roundhouse.compat.nexrl"]


class WorkerConfig(dict[str, Any]):
    """`environment.parameters` as the one argument of a constructor `__init__(self, config)`; its keys are attributes too."""

    def __init__(self, parameters: dict[str, Any], llm: LlmClient, evaluator: Evaluator | None) -> None:
        super().__init__(parameters)
        self.made_with = llm, evaluator

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"environment.parameters has no {name}; it has {', '.join(self) or 'none'}.") from None


class PlainClient:
    """The policy, as a plain function asks it: a method returns when there is an answer. An `async` worker awaits the same."""

    _model_tag = "default"

    def __init__(self, llm: LlmClient) -> None:
        self._llm = llm
        self._loop: asyncio.AbstractEventLoop | None = None
        """The collector's, while a plain function plays."""
        self._call: concurrent.futures.Future[Any] | None = None
        """What the thread waits for."""

    def completion(self, prompt: str, **asked: Any) -> Any:
        """As of `LlmClient.completion`."""
        return self.wait(self._llm.completion(prompt, **asked))

    def generate(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **asked: Any
    ) -> Any:
        """As of `LlmClient.generate`."""
        return self.wait(self._llm.generate(messages, tools or (), **asked))

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
        return self._call.result()

    async def play(self, step: Callable[[dict[str, Any]], Any], task: dict[str, Any]) -> str | None:
        """What a plain `step` returns, from its thread."""
        self._loop = asyncio.get_running_loop()
        try:
            return await in_thread(step, task)
        finally:
            self._loop = None
            if self._call is not None:
                self._call.cancel()
