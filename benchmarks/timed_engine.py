"""An engine that computes nothing and takes its time: `soak_engine.py` with an answer's seconds drawn from its seed.

    python benchmarks/timed_engine.py --port 9000 --median 0.4 --sigma 1.0

Seconds are log-normal, and the same for the same request seed: two runs under one configuration wait for the same rollouts,
whatever else differs between them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.soak_engine import InstantEngine
from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.generation import serve_app, standalone
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import Draw, Engine, Generated


class TimedEngine(InstantEngine):
    """Each answer takes as long as its seed says."""

    median, sigma, refit = 0.0, 0.0, 0.0

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        answer = await super().generate(prompt_token_ids, draw)
        if self.median:
            await asyncio.sleep(self.median * math.exp(self.sigma * random.Random(f"{draw.seed} seconds").gauss(0, 1)))
        return answer

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        await asyncio.sleep(self.refit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--median", type=float, default=0.4, help="seconds of a model call")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--refit", type=float, default=0.0, help="seconds that new weights take")
    options, rest = parser.parse_known_args()
    TimedEngine.median, TimedEngine.sigma, TimedEngine.refit = options.median, options.sigma, options.refit

    def make_engine(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
        return TimedEngine(config, codec)

    serve_app.make_engine = make_engine
    standalone.main(rest)


if __name__ == "__main__":
    main()
