"""A small random Qwen 3-VL that has begun to count shapes.

    python examples/count_shapes/policy.py .roundhouse/count-shapes

writes a model directory of 0.2 million parameters. Its vision tower stays random: it tells filled cells from empty ones,
and the language model learns what that means from labelled images, other ones than those of the environment.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from environment import QUESTION, draw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from roundhouse.images import ImageReader

TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
}


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    words = ["<unk>", "system", "user", "assistant", *QUESTION.split(), *map(str, range(10))]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*TOKENS, *words])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    kind: Any = PreTrainedTokenizerFast
    made = kind(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def random_policy(seed: int) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(seed)
    ids = {token: place for place, token in enumerate(TOKENS)}
    text = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 256, "initializer_range": 0.1,
        "tie_word_embeddings": False, "pad_token_id": ids["<pad>"], "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "initializer_range": 0.1,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    kind: Any = Qwen3VLForConditionalGeneration
    return kind(config)


def teach(model: Any, reader: ImageReader, steps: int, most: int, seed: int) -> float:
    """Train the language model on labelled images; return the loss of the last step in nats per answer."""
    words, generator = tokenizer(), random.Random(seed)
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=3e-3)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    prompt = words.apply_chat_template([message], add_generation_prompt=True, tokenize=True, return_dict=False)
    loss: Any = torch.zeros(())
    for _ in range(steps):
        counts = [generator.randint(1, most) for _ in range(16)]
        images = [draw(count, generator) for count in counts]
        rows = [
            reader.expanded(prompt, [image]) + words.convert_tokens_to_ids([str(count), "<|im_end|>"])
            for image, count in zip(images, counts, strict=True)
        ]
        ids = torch.tensor(rows)
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == reader.token_id).int(),
            **reader.pixels(images),
        ).logits
        loss = torch.nn.functional.cross_entropy(logits[:, -3:-1].flatten(0, 1), ids[:, -2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(2 * loss.item())


def main(directory: Path, steps: int = 60, most: int = 6, seed: int = 0) -> None:
    """Write the model directory."""
    model = random_policy(seed)
    loss = teach(model, ImageReader(model.config.to_dict(), PROCESSOR), steps, most, seed)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    print(f"{directory}: {model.num_parameters():,} parameters, {loss:.2f} nats per answer after {steps} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(value) for value in sys.argv[2:]))
