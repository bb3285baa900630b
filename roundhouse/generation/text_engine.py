"""Text drawn at any server of OpenAI's completions API: `generation.endpoint.kind: text`.

Invariant: nothing that is answered here has log-probabilities, so nothing of it is trained on: training is refused before it
starts, and validation quarantines the rollouts. The prompt goes as the text of its tokens; the token IDs of an answer are the
policy's own tokenizer's reading of the text, not what the server drew, and its weights are not proved.

    POST /v1/completions   prompt: "…", stop: ["<|im_end|>"] ──> text, finish_reason
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from roundhouse.generation.openai_engine import SEEDS, OpenAIEngine
from roundhouse.generation.protocol import BadReply, Draw, Generated

logger = logging.getLogger(__name__)


class TextEngine(OpenAIEngine):
    """`Engine` over a server that returns text alone."""

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
