"""Print the largest distance between log-probabilities of answers to images by vLLM and by plain transformers, after a refit.

python -m tests.contracts.vllm_sees DIRECTORY
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import vllm_engine
from roundhouse.generation.protocol import Draw
from roundhouse.generation.transformers_engine import build_model, generate_batch, load_into
from roundhouse.images import ImageReader

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "count_shapes"))


async def compare(directory: str) -> float:
    import random

    vllm_engine.refuse_broken_extensions(directory)  # before classes of models are imported
    from environment import draw
    from policy import QUESTION, main, tokenizer

    main(Path(directory), steps=5)
    config = GenerationConfig(kv_cache_gib=0.03125, max_model_len=64, dtype="float32", images=True)
    reader = ImageReader.of(Path(directory))
    engine = vllm_engine.VllmEngine(config, directory, "policy", [2, reader.token_id], reader)
    await engine.start()
    try:
        await engine.load_weights(directory, 1)
        peer = build_model(directory, config)
        load_into(peer, directory)
        question = {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": QUESTION}, {"type": "image"}],
        }
        words = tokenizer().apply_chat_template(
            [question], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        farthest = 0.0
        for count in (1, 4, 6):
            images = (draw(count, random.Random(count)), draw(2, random.Random(7)))
            prompt, choice = reader.expanded(words, images), Draw(4, temperature=0.0, images=images)
            ours = await engine.generate(prompt, choice)
            [theirs] = generate_batch(peer, [prompt], [choice], frozenset([2, reader.token_id]), reader=reader)
            assert ours.token_ids == theirs.token_ids, (ours, theirs)
            distances = [abs(a - b) for a, b in zip(ours.log_probs, theirs.log_probs, strict=True)]
            farthest = max(farthest, *distances)
        return farthest
    finally:
        engine.shutdown()


if __name__ == "__main__":
    os.environ.update(vllm_engine.environment(GenerationConfig()) | vllm_engine.without_compiler(GenerationConfig()))
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    print(asyncio.run(compare(sys.argv[1])), file=reply, flush=True)
