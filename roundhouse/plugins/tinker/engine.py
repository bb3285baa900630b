"""The engine that draws at Tinker's service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import AsgiApp, Draw, Engine, EnginePoisoned, Generated
from roundhouse.generation.trainer_engine import LentEngine
from roundhouse.generation.transformers_engine import OpenAIRoutes
from roundhouse.trajectories.records import SEEDS

if TYPE_CHECKING:
    from roundhouse.plugins.tinker.service import TinkerTrainService


class TinkerEngine(LentEngine):
    """`Engine` over the sampling client of the service that trains, by Tinker's API.

    Invariant: an answer is drawn from a snapshot of exactly the version that it is labelled with, which the service makes of
    the training client's weights at a refit (`TinkerTrainService.sampler`); only tokens and log-probabilities come here.
    Conversations are rendered and tool calls read here, with the tokenizer of `policy.path`.
    """

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        self.max_model_len = config.max_model_len
        self._stops = sorted(codec.stop_token_ids)
        self._app = OpenAIRoutes(codec)
        self._client: Any = None
        self._version = 0

    async def start(self) -> None:
        """Do nothing: no start is needed."""

    async def take(self, service: TinkerTrainService, version: int) -> tuple[str, int]:
        """Generate from the service's present weights from now on; return their checkpoint's digest, and 0 tensors."""
        self._client, self._version = await asyncio.to_thread(service.sampler), version
        return service.pointer_digest(), 0

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        from tinker import types

        params = types.SamplingParams(
            max_tokens=draw.max_tokens,
            seed=None if draw.seed is None else draw.seed % SEEDS,
            stop=self._stops,
            temperature=draw.temperature,
            top_k=draw.top_k or -1,
            top_p=draw.top_p,
        )
        prompt = types.ModelInput.from_ints(list(prompt_token_ids))
        [answer] = (await self._client.sample(prompt, 1, params)).sequences
        ids, log_probs = list(answer.tokens), list(answer.logprobs or [])
        if not ids or len(log_probs) != len(ids):
            raise EnginePoisoned(f"Tinker answered {len(ids)} tokens with {len(log_probs)} log-probabilities.")
        finish = "stop" if ids[-1] in self._stops else "length"
        return Generated(ids, log_probs, finish, [(self._version, len(ids))])

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from tinker import types

        log_probs = await self._client.compute_logprobs(types.ModelInput.from_ints(list(token_ids)))
        return [float(value) for value in log_probs[1:]]

    async def sleep(self) -> None:
        await super().sleep()
        self._client = None

    async def check_health(self) -> None:
        """It fails with the requests, which report it."""

    def openai_app(self) -> AsgiApp | None:
        return self._app

    def shutdown(self) -> None:
        self._client = None


def open_tinker(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Make the engine that draws at Tinker's service."""
    return TinkerEngine(config, codec)
