"""Rollouts drawn at a server that somebody else runs: `generation.backend: openai`, any endpoint of OpenAI's completions API
that takes a prompt of token IDs and returns token IDs with their log-probabilities (vLLM's server does).

Invariant: only token IDs go there, and only token IDs with log-probabilities come back. Conversations are rendered and tool
calls read here, with the tokenizer of the policy, so the next prompt begins with exactly the tokens so far. A server that
returns neither is refused at its start: what it answers could not be trained on, nor proved. (`TextEngine` serves evaluations
and collections by such a server, `sglang_engine` everything by SGLang's own routes.)

    POST /v1/completions   prompt: [ids], return_token_ids, logprobs ──> token_ids, logprobs.token_logprobs

Weights: with `endpoint.weight_update: vllm` a refit has the server read the checkpoint's directory, by the class that runs in
the workers of our own vLLM engines too and proves that the model computes with it (`vllm_worker.RefitExtension`): vLLM's own
`reload_weights` leaves the head of a model with tied embeddings on the old weights on CPU, without an error. Without the key,
the server is taken to hold version 0, and no other is accepted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import httpx

from roundhouse.config.generation import Endpoint, InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.config.secrets import read_secret
from roundhouse.errors import ConfigError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import (
    AsgiApp,
    BadReply,
    Draw,
    EnginePoisoned,
    EngineUnreachable,
    Generated,
    WeightsRefused,
)
from roundhouse.generation.transformers_engine import OpenAIRoutes
from roundhouse.generation.vllm_engine import WORKER_EXTENSION
from roundhouse.trajectories.records import SEEDS

TOKENS = "return_token_ids"


REMEDY = (
    f"Name a server that knows {TOKENS} and logprobs, such as vLLM's; set generation.endpoint.kind to sglang for SGLang's; or "
    "to text, and the server serves evaluations and collections, but no training."
)


def read_tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Token IDs and log-probabilities of a completion's choice.

    Raises:
        BadReply: it has none, or not one log-probability for each.
    """
    ids, log_probs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
    if not ids or len(log_probs) != len(ids):
        raise BadReply(f"It returned {len(ids)} token IDs with {len(log_probs)} log-probabilities.")
    return ids, log_probs


class OpenAIEngine:
    """`Engine` over an endpoint."""

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        assert config.endpoint is not None, "refused at load (config.generation)"
        self.max_model_len = config.max_model_len
        self._endpoint: Endpoint = config.endpoint
        self._codec, self._stops = codec, sorted(codec.stop_token_ids)
        self._app = OpenAIRoutes(codec)
        self._refit_seconds = config.refit_timeout_seconds
        secret = None if (name := config.endpoint.api_key_variable) is None else read_secret(name)
        self._http = httpx.AsyncClient(
            base_url=config.endpoint.url,
            headers={} if secret is None else {"Authorization": f"Bearer {secret}"},
            timeout=config.request_timeout_seconds,
            limits=httpx.Limits(max_connections=None),
        )

    async def start(self) -> None:
        """Find the model, and out of one token what the server returns.

        Raises:
            ConfigError: the model is not served, has less context than `generation.max_model_len`, or comes without tokens.
            EngineUnreachable: the server does not answer.
        """
        name, url = self._endpoint.model, self._endpoint.url
        served = {each["id"]: each for each in (await self._call("GET", "/v1/models"))["data"]}
        if name not in served:
            raise ConfigError(
                f"generation.endpoint.model is {name!r}, but {url} serves {', '.join(sorted(served)) or 'nothing'}."
            )
        context = served[name].get("max_model_len")
        if context is not None and context < self.max_model_len:
            raise ConfigError(
                f"generation.max_model_len is {self.max_model_len}, but {url} serves {name} with {context} tokens. Lower the "
                "first, or start the server with more."
            )
        try:
            await self.generate([0, 1], Draw(max_tokens=1, temperature=0.0))
        except BadReply as error:
            raise ConfigError(
                f"generation.endpoint.url is {url}, whose answers cannot be trained on or checked: {error} {REMEDY}"
            ) from error

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """See `Engine.generate`.

        Raises:
            EngineUnreachable: the server does not answer, or refuses.
            BadReply: its answer has no tokens.
        """
        body = {
            "prompt": list(prompt_token_ids),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k or -1,
            "seed": None if draw.seed is None else draw.seed % SEEDS,
            "stop_token_ids": self._stops,
            "logprobs": 0,
            TOKENS: True,
        }
        choice = await self._complete(body)
        return self._generated(*read_tokens(choice))

    def _generated(self, ids: list[int], log_probs: list[float]) -> Generated:
        if not math.isfinite(sum(log_probs)):
            raise EnginePoisoned(f"{self._endpoint.url} returned the log-probabilities {log_probs[:8]}.")
        return Generated(ids, log_probs, "stop" if ids[-1] in self._stops else "length")

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """See `Engine.load_weights`.

        Raises:
            WeightsRefused: there is no way to give the server another version.
            EnginePoisoned: loading failed, and the server may hold a mixture. The next load is whole and proved again.
        """
        if self._keeps_weights(version):
            return
        load = {"method": "roundhouse_load", "args": [directory], "timeout": self._refit_seconds}
        try:
            proved = (await self._call("POST", "/collective_rpc", load, seconds=self._refit_seconds))["results"]
            await self._call("POST", "/reset_prefix_cache", seconds=self._refit_seconds)
        except EngineUnreachable as error:
            raise EnginePoisoned(
                f"The server did not load {directory}: {error} It needs VLLM_SERVER_DEV_MODE=1, --worker-extension-cls "
                f"{WORKER_EXTENSION}, and to see the directory at the same path."
            ) from error
        if not proved or any(int(layers) < 1 for layers in proved):
            raise EnginePoisoned(f"Of the server's workers, not each has proved that it holds {directory}: {proved}.")

    def _keeps_weights(self, version: int) -> bool:
        """Whether the server keeps what it has, which is version 0.

        Raises:
            WeightsRefused: another version is wanted of such a server.
        """
        if self._endpoint.weight_update is None and version != 0:
            raise WeightsRefused(
                f"{self._endpoint.url} holds version 0, and nothing says how it takes another "
                f"(generation.endpoint.weight_update), so it cannot hold version {version}."
            )
        return self._endpoint.weight_update is None

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = list(token_ids)
        choice = await self._complete({"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
        found = choice.get("prompt_logprobs") or []
        if len(found) != len(ids):
            raise BadReply(f"It returned {len(found)} log-probabilities of a prompt of {len(ids)} tokens.")
        return [float(at[str(token)]["logprob"]) for token, at in zip(ids[1:], found[1:], strict=True)]

    async def sleep(self) -> None:
        """It is refused at load: the server's memory is its own."""

    async def wake(self) -> None:
        """See `sleep`."""

    async def check_health(self) -> None:
        await self._call("GET", "/v1/models")

    def openai_app(self) -> AsgiApp | None:
        return self._app

    def shutdown(self) -> None:
        """Connections end with the process; the server stays."""

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._call("POST", "/v1/completions", {"model": self._endpoint.model} | body)
        try:
            choice: dict[str, Any] = reply["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise BadReply(f"It returned no choice: {str(reply)[:200]}") from error
        return choice

    async def _call(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        timeout: Any = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        try:
            reply = await self._http.request(method, path, json=body, timeout=timeout)
        except (TimeoutError, httpx.HTTPError) as error:
            raise EngineUnreachable(
                f"{self._endpoint.url}{path} does not answer: {type(error).__name__}: {error}. Is it running, and "
                "generation.endpoint.url right?"
            ) from error
        if reply.status_code >= 400:
            raise EngineUnreachable(f"{self._endpoint.url}{path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json() if reply.content else None


logger = logging.getLogger(__name__)


class TextEngine(OpenAIEngine):
    """`Engine` over a server that returns text alone: `generation.endpoint.kind: text`.

    Invariant: nothing that is answered here has log-probabilities, so nothing of it is trained on: training is refused before
    it starts, and validation quarantines the rollouts. The prompt goes as the text of its tokens; the token IDs of an answer
    are the policy's own tokenizer's reading of the text, not what the server drew, and its weights are not proved.

        POST /v1/completions   prompt: "…", stop: ["<|im_end|>"] ──> text, finish_reason
    """

    async def start(self) -> None:
        """As `OpenAIEngine.start`."""
        await super().start()
        logger.warning(
            "%s returns text without log-probabilities (generation.endpoint.kind: text): it serves evaluations and "
            "collections, no training, and which weights it holds is not proved.",
            self._endpoint.url,
        )

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """See `OpenAIEngine.generate`; without log-probabilities."""
        tokenizer = self._codec.tokenizer
        body = {
            "prompt": tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "stop": [tokenizer.convert_ids_to_tokens(stop) for stop in self._stops],
        }
        if draw.top_k is not None:
            body["top_k"] = draw.top_k
        if draw.seed is not None:
            body["seed"] = draw.seed % SEEDS
        choice = await self._complete(body)
        text, ended = choice.get("text"), choice.get("finish_reason") != "length"
        if not isinstance(text, str):
            raise BadReply(f"It returned no text: {str(choice)[:200]}.")
        ids = self._codec.encode(text) + [self._codec.end_of_turn_id] * ended
        if not ids:
            raise BadReply("It returned an empty text that is not at its end.")
        return Generated(ids, [], "stop" if ended else "length")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """None: the server has no log-probabilities."""
        return []
