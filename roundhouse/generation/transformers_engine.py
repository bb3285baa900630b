"""Plain Hugging Face transformers behind the `Engine` protocol: slow, simple, and a second opinion on vLLM.

Invariant: requests that wait together are answered in one left-padded batch, and a row's tokens and log-probabilities are those
it would have alone, up to rounding. One thread holds the model; what else it is asked while a batch is running (new weights, a
score) it does between two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import orjson

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.chat_server import token_list
from roundhouse.generation.engine import AsgiApp, Draw, EnginePoisoned, Generated, GenerationAborted
from roundhouse.generation.transformers_batch import (
    Change,
    build_model,
    generate_batch,
    give_back_memory,
    load_into,
    score_tokens,
)
from roundhouse.http.asgi import Receive, Send, read_body, reply_error, reply_json

BATCH = 64
"""Requests answered together at most; `engine_args: {max_num_seqs: 1}` answers each alone, bit for bit the same each time."""


class TransformersEngine:
    """`Engine` over `AutoModelForCausalLM`, in a thread of its own."""

    def __init__(self, config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self._batch = int(config.engine_args.get("max_num_seqs", BATCH))
        self._model_dir = model_dir
        self._codec = codec
        self._app = OpenAIRoutes(codec, served_name)
        self._model: Any = None
        self._waiting: asyncio.Queue[tuple[list[int], Draw, asyncio.Future[Generated]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")
        self._loop: asyncio.Task[None] | None = None
        self._version = 0
        self._broken = False
        """A load failed: nothing more is drawn until one succeeds."""
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    async def start(self) -> None:
        self._model = await self._run(self._build)
        self._loop = asyncio.create_task(self._serve())

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        await self._waiting.put((list(prompt_token_ids), draw, future))
        return await future

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        def load() -> Change:
            self._broken = True
            load_into(self._model, directory)
            self._version, self._broken = version, False
            return Change(version, running, recompute=not keep_prefix_cache)

        await self._between(load)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        scores: list[float] = await self._between(lambda: score_tokens(self._model, token_ids))
        return scores

    async def sleep(self) -> None:
        def forget() -> None:
            self._model = None
            give_back_memory()

        await self._between(forget)

    async def wake(self) -> None:
        def build() -> None:
            self._model = self._build()

        await self._between(build)

    async def _between(self, work: Callable[[], Any]) -> Any:
        """Have the thread do something: between two tokens of the batch that is running, or at once."""
        done: Future[Any] = Future()
        self._asked.put((work, done))
        self._thread.submit(self._do_what_was_asked)
        return await asyncio.wrap_future(done)

    def _do_what_was_asked(self) -> Change | None:
        change = None
        while True:
            try:
                work, done = self._asked.get_nowait()
            except Empty:
                break
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 (border of a piece of work: who asked for it gets the cause)
                done.set_exception(error)
            else:
                change = result if isinstance(result, Change) else change
                done.set_result(result)
        if self._broken:
            raise GenerationAborted("New weights could not be loaded.")
        return change

    async def check_health(self) -> None:
        if self._loop is None or self._loop.done():
            raise EnginePoisoned("The engine's loop has ended.")

    def openai_app(self) -> AsgiApp | None:
        return self._app

    def shutdown(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
        self._thread.shutdown(wait=False)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [item for item in batch if not item[2].done()]
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[tuple[list[int], Draw, asyncio.Future[Generated]]]) -> None:
        prompts, draws = [item[0] for item in batch], [item[1] for item in batch]

        def answered() -> list[Generated]:
            between, stops = self._do_what_was_asked, self._codec.stop_token_ids
            return generate_batch(self._model, prompts, draws, stops, between, lambda: self._version)

        try:
            answers = await self._run(answered)
        except Exception as error:  # noqa: BLE001 (border of a batch: each request gets the cause)
            aborted = isinstance(error, GenerationAborted)
            for *_, future in batch:
                if not future.done():
                    cause = f"The batch failed: {type(error).__name__}: {error}"
                    future.set_exception(GenerationAborted(str(error)) if aborted else EnginePoisoned(cause))
            return
        for (*_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def _build(self) -> Any:
        return build_model(self._model_dir, self.config)


class OpenAIRoutes:
    """/v1/models, /detokenize, and /tokenize of plain text; conversations are tokenised by the chat server."""

    def __init__(self, codec: ChatCodec, model: str) -> None:
        self.codec = codec
        self.model = model

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"])
        if route == ("GET", "/v1/models"):
            model = {
                "id": self.model,
                "object": "model",
                "owned_by": "roundhouse",
                "max_model_len": self.codec.max_model_len,
            }
            await reply_json(send, 200, {"object": "list", "data": [model]})
            return
        if route not in (("POST", "/tokenize"), ("POST", "/detokenize")):
            await reply_error(send, 404, "not_found", f"There is nothing at {scope['path']}.")
            return
        try:
            body = orjson.loads(await read_body(receive))
            if scope["path"] == "/tokenize":
                found = token_list(self.codec.encode(body["prompt"]), self.codec.max_model_len)
            else:
                found = {"prompt": self.codec.tokenizer.decode(body["tokens"])}
            await reply_json(send, 200, found)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            await reply_error(send, 400, "invalid_request", f"{type(error).__name__}: {error}")
