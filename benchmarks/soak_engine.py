"""An engine that answers at once: the standalone engine's process with its inference replaced.

    python benchmarks/soak_engine.py --port 9000

Everything around the model is real: chat template, prefix continuation, tool calls, refit and policy versions. What would be
inference is a draw from the request's seed among three answers to `What is a*b+c?`: the right sum, a wrong one, and a call
of the calculator first. Log-probabilities are drawn too, so whoever uses this turns their recomputation off.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.generation import serve_app, standalone
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import AsgiApp, Draw, Engine, Generated

_QUESTION = re.compile(r"(\d+)\*(\d+)\+(\d+)")


class InstantEngine:
    """`Engine` without a model."""

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        self.max_model_len = config.max_model_len
        self._codec = codec

    async def start(self) -> None:
        pass

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        rng = random.Random(draw.seed)
        prompt = self._codec.tokenizer.decode(list(prompt_token_ids))
        text = _answer(prompt, rng)
        ids = self._codec.tokenizer.encode(text, add_special_tokens=False)[: draw.max_tokens - 1]
        ids.append(self._codec.end_of_turn_id)
        return Generated(ids, [-rng.uniform(0.01, 3.0) for _ in ids], "stop")

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        pass

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def check_health(self) -> None:
        pass

    def openai_app(self) -> AsgiApp | None:
        return None

    def shutdown(self) -> None:
        pass


def _answer(prompt: str, rng: random.Random) -> str:
    if not (questions := _QUESTION.findall(prompt)):
        return "A word."  # to what a run asks before it relies on an engine
    a, b, c = (int(number) for number in questions[-1])
    kind = rng.choice(("right", "wrong", "call"))
    if kind == "call" and "<tool_response>" not in prompt:
        call = {"name": "calculate", "arguments": {"expression": f"{a}*{b}"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"The answer is {a * b + c + (kind == 'wrong')}."


def main() -> None:
    def make_engine(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
        return InstantEngine(config, codec)

    serve_app.make_engine = make_engine
    standalone.main()


if __name__ == "__main__":
    main()
