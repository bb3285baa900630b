"""An engine that computes nothing and takes its time: `soak_engine.py` with an answer's seconds drawn from its seed.

    python benchmarks/timed_engine.py --port 9000 --median 0.4 --sigma 1.0 --token 0.02 --load 0.1

Seconds are log-normal, and the same for the same request seed: two runs under one configuration wait for the same rollouts,
whatever else differs between them. With `--token`, an answer is as long as its seconds say, by words before it. With `--load`,
each other answer in work makes all of them slower by that share. While weights are exchanged nothing goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.soak_engine import InstantEngine
from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.generation import serve_app, standalone
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import Draw, Engine, Generated


class SharedTime:
    """Answers in work, each with the seconds that it has left where it is alone."""

    def __init__(self, load: float) -> None:
        self.left: dict[object, float] = {}
        self._load, self._paused = load, False
        self._changed, self._then = asyncio.Event(), time.monotonic()

    async def work(self, seconds: float) -> None:
        """Take as long as so much work does among the others."""
        own = object()
        self._advance()
        self.left[own] = seconds
        self._wake()
        while self.left[own] > 1e-6:
            with_others = 1 + self._load * (len(self.left) - 1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if self._paused else self.left[own] * with_others)
            self._advance()
        del self.left[own]
        self._wake()

    def pause(self, paused: bool) -> None:
        self._advance()
        self._paused = paused
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _advance(self) -> None:
        now = time.monotonic()
        if not self._paused:
            done = (now - self._then) / (1 + self._load * max(0, len(self.left) - 1))
            self.left = {each: seconds - done for each, seconds in self.left.items()}
        self._then = now


class TimedEngine(InstantEngine):
    """Each answer takes as long as its seed says, and as the others in work make of that."""

    median, sigma, refit, token, load = 0.0, 0.0, 0.0, 0.0, 0.0

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        super().__init__(config, codec)
        self._shared = SharedTime(self.load)

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        answer = await super().generate(prompt_token_ids, draw)
        if self.median:
            seconds = self.median * math.exp(self.sigma * random.Random(f"{draw.seed} seconds").gauss(0, 1))
            if self.token:
                answer = self._lengthened(answer, min(round(seconds / self.token), draw.max_tokens))
                seconds = self.token * len(answer.token_ids)
            await self._shared.work(seconds)
        return answer

    def _lengthened(self, answer: Generated, tokens: int) -> Generated:
        """With words before it, about as many tokens in all, at least the answer's own."""
        filler = self._codec.tokenizer.encode("So " * tokens, add_special_tokens=False)[
            : max(0, tokens - len(answer.token_ids))
        ]
        return Generated([*filler, *answer.token_ids], [-1.0] * len(filler) + answer.log_probs, answer.finish_reason)

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        self._shared.pause(True)
        await asyncio.sleep(self.refit)
        self._shared.pause(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--median", type=float, default=0.4, help="seconds of a model call")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--refit", type=float, default=0.0, help="seconds that new weights take")
    parser.add_argument("--token", type=float, default=0.0, help="seconds of a token; 0: answers stay short")
    parser.add_argument("--load", type=float, default=0.0, help="share by which each other answer slows one")
    options, rest = parser.parse_known_args()
    TimedEngine.median, TimedEngine.sigma, TimedEngine.refit = options.median, options.sigma, options.refit
    TimedEngine.token, TimedEngine.load = options.token, options.load

    def make_engine(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
        return TimedEngine(config, codec)

    serve_app.make_engine = make_engine
    standalone.main(rest)


if __name__ == "__main__":
    main()
