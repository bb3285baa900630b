"""A `GenerationInterface` as the engine of a run: `generation.backend: module:Class`, three methods are enough.

Invariant: one thread calls the backend, one call after another. Waiting requests with the same sampling make one batch.
A row that exceeds its request's limit is cut and counts as truncated, so the backend need not know the limit of a
request.

    waiting requests ── same sampling ──> generate(batch, greedy) ──> rows, cut at their end of turn or limit
    new weights      ──────────────> load_weights(directory)      (by default: finish, prepare)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.interface import GenerationInterface, configure_generation_config, create_backend
from roundhouse.generation.protocol import AsgiApp, BadRequest, Draw, EnginePoisoned, Generated, WeightsRefused
from roundhouse.generation.transformers_engine import BATCH, BatchingEngine

PROBE_TOKENS = 31


class InterfaceEngine(BatchingEngine):
    """`Engine` over a backend of your own."""

    def __init__(self, config: GenerationConfig, model_dir: str, codec: ChatCodec) -> None:
        super().__init__(config.max_model_len, "backend")
        self._sampling = config.sampling
        self._stops = codec.stop_token_ids
        self._make: Callable[[], GenerationInterface] = lambda: create_backend(
            configure_generation_config(config, codec.tokenizer), model_dir
        )
        self._backend: GenerationInterface | None = None
        self._version = 0

    async def start(self) -> None:
        self._backend = await self._run(self._make)
        self._loop = asyncio.create_task(self._serve())

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """See `Engine.generate`.

        Raises:
            BadRequest: it asks for another distribution than `generation.sampling`, which a backend is made with, or greedy.
        """
        key = (draw.temperature, draw.top_p, draw.top_k)
        own = (self._sampling.temperature, self._sampling.top_p, self._sampling.top_k)
        if draw.temperature != 0 and key != own:
            raise BadRequest(
                f"temperature, top_p and top_k are {key}; this engine draws with generation.sampling, {own}, or greedily "
                "(temperature 0).",
                "temperature",
            )
        return await super().generate(prompt_token_ids, draw)

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Load weights; see `Engine.load_weights`. A running batch is awaited, for any value of `running`.

        Raises:
            WeightsRefused: the directory is missing.
        """
        if not directory:
            raise WeightsRefused("The directory of weights does not exist.")

        def load() -> None:
            self._made().load_weights(directory)
            self._version = version

        await self._run(load)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """A measurement of the weights: of the three methods none scores given tokens, so the log-probabilities of a greedy
        continuation stand for them."""
        prompts = [list(token_ids)[: max(1, self.max_model_len - PROBE_TOKENS)]]
        limit = min(PROBE_TOKENS, self.max_model_len - len(prompts[0]))
        [scored] = await self._run(self._answers, prompts, [Draw(limit, temperature=0.0, seed=0)])
        return scored.log_probs

    async def sleep(self) -> None:
        await self._run(lambda: self._made().finish_generation())

    async def wake(self) -> None:
        """`load_weights` follows, and prepares."""

    def openai_app(self) -> AsgiApp | None:
        return None

    def shutdown(self) -> None:
        if self._backend is not None:
            self._thread.submit(self._backend.finish_generation)
        super().shutdown()

    def _made(self) -> GenerationInterface:
        assert self._backend is not None, "start() came before"
        return self._backend

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            for greedy in (False, True):
                alike = [each for each in batch if (each[1].temperature == 0) == greedy and not each[2].done()]
                if alike:
                    await self._answer(alike)

    def _answers(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        import torch

        backend = self._made()
        longest = max(map(len, prompts))
        pad = backend.tokenized.pad_token_id
        input_ids_BS = torch.tensor([prompt + [pad] * (longest - len(prompt)) for prompt in prompts])
        mask_BS = torch.tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts])
        output = backend.generate(
            {
                "input_ids": input_ids_BS,
                "attention_mask": mask_BS,
                "seeds": [draw.seed or 0 for draw in draws],
                "__extra__": {"max_new_tokens": [draw.max_tokens for draw in draws]},
            },
            greedy=draws[0].temperature == 0,
        )
        answers = []
        for row, (prompt, draw) in enumerate(zip(prompts, draws, strict=True)):
            end = min(int(output["unpadded_sequence_lengths"][row]), len(prompt) + draw.max_tokens)
            ids = output["output_ids"][row, len(prompt) : end].tolist()
            log_probs = output["logprobs"][row, len(prompt) : end].tolist()
            if not ids or not math.isfinite(sum(log_probs)):
                raise EnginePoisoned(f"row {row}: {len(ids)} tokens with log-probabilities {log_probs[:8]}")
            finish = "stop" if ids[-1] in self._stops else "length"
            answers.append(Generated(ids, log_probs, finish, [(self._version, len(ids))]))
        return answers
