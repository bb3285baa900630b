"""Images from a message to the log-probabilities of the trainer, with small random models."""

import base64
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from roundhouse import images
from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import BadRequest, ChatRequest, Draw, read_request
from roundhouse.generation.transformers_engine import build_model, generate_batch, load_into
from roundhouse.images import BadImage, ImageReader, image_name, image_part, opened
from roundhouse.pretrained import build_model as random_model
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.forward import Scorer, recompute_log_probs

EXAMPLE = Path(__file__).parents[2] / "examples" / "count_shapes"


@pytest.fixture(scope="module")
def example() -> Any:
    """The module of the example that makes its policy."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import policy
    finally:
        sys.path.remove(str(EXAMPLE))
    return policy


PARTS = {"text_config": "qwen2_5_vl_text", "vision_config": "qwen2_5_vl"}


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(example: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy that sees."""
    from transformers import AutoConfig

    directory = tmp_path_factory.mktemp(request.param)
    seen = example.random_policy(0)
    if request.param == "qwen2_5_vl":
        tree = seen.config.to_dict()
        ids = {name: tree[name] for name in tree if re.match(r"(image|video|vision)\w*_id$", name)}
        text, vision = ({**tree[part], "model_type": kind} for part, kind in PARTS.items())
        text |= {
            "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        }
        vision |= {"fullatt_block_indexes": [0], "window_size": 56}
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            request.param, text_config=text, vision_config=vision, **ids, tie_word_embeddings=False
        )
        seen = random_model(config, dtype=torch.float32)
    seen.save_pretrained(directory)
    example.tokenizer().save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(example.PROCESSOR))
    return directory


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int, height: int, color: str = "red") -> bytes:
    return encoded(Image.new("RGB", (width, height), color))


URL = image_part(picture(56, 56))["image_url"]
SMALL, WIDE, LARGE = picture(56, 56), picture(112, 56, "blue"), picture(84, 84, "green")


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str)
        else shown("data:image/png;base64," + base64.b64encode(part).decode())
        for part in parts
    ]  # fmt: skip
    return {"role": "user", "content": content}


def asked(*messages: dict[str, Any]) -> ChatRequest:
    return read_request({"messages": list(messages), "max_tokens": 6, "seed": 1}, "policy")


def codec_of(model: Path) -> ChatCodec:
    return ChatCodec(str(model), 64, images=ImageReader.of(model))


def test_a_turn_after_images_continues_the_recorded_tokens_and_may_show_another(model: Path) -> None:
    codec = codec_of(model)
    assert codec.images is not None
    first = codec.prompt(asked(user(LARGE, "how many", SMALL)))
    assert [length for _, length in codec.images.runs(first.token_ids)] == [9, 4]
    assert first.draw.images == (LARGE, SMALL)
    reply = {
        "role": "assistant",
        "content": "3",
        "prompt_token_ids": first.token_ids,
        "generation_token_ids": codec.encode("3 <|im_end|>"),
        "generation_log_probs": [-0.5, -0.5],
    }
    second = codec.prompt(asked(user(LARGE, "how many", SMALL), reply, user(WIDE)))
    recorded = first.token_ids + reply["generation_token_ids"]
    assert second.token_ids[: len(recorded)] == recorded
    assert [length for _, length in codec.images.runs(second.token_ids)] == [9, 4, 8]
    assert second.draw.images == (LARGE, SMALL, WIDE)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (user("how many", b"no image"), "An image of 8 bytes is not a file of PNG"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]},
            "no URL is fetched",
        ),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]: an image has the shape"),
        ({"role": "user", "content": [shown(5)]}, "An image has the URL 5"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": URL}]}, "an image has the shape"),
        ({"role": "user", "content": [shown(URL.replace("image/", "IMAGE/"))]}, "media type in lower case"),
        ({"role": "user", "content": [shown(URL[:40] + "\n" + URL[40:])]}, "without white space"),
        ({"role": "user", "content": [shown("data:image/png;base64,")]}, "has the URL 'data:image/png;base64,'"),
        ({"role": "user", "content": [shown("data:image/png;base64,QUJ=")]}, "bits after its last byte"),
        (user(picture(1, 300)), "1 × 300 pixels cannot be shown: absolute aspect ratio"),
        (user(LARGE[:70]), "An image cannot be read"),
        (user(picture(8001, 8000)), "more than 64,000,000 pixels"),
        (user(encoded(Image.new("F", (56, 56)), "TIFF")), "32 bits a pixel"),
        (user(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "is not a file of PNG"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused(model: Path, message: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        codec_of(model).prompt(asked(message))


@pytest.mark.parametrize("drawn", ["3 <|image_pad|>", "3 <|im_end|>"])
def test_recorded_tokens_of_other_images_are_not_continued(model: Path, drawn: str) -> None:
    """They would take another image's pixels, or fail the batch."""
    codec = codec_of(model)
    prompt = codec.prompt(asked(user(SMALL))).token_ids
    reply = {
        "role": "assistant",
        "content": "3",
        "prompt_token_ids": prompt,
        "generation_token_ids": codec.encode(drawn),
        "generation_log_probs": [-0.5, -0.5],
    }
    first = [user(SMALL)] if "pad" in drawn else [user(LARGE)]
    for after in (user("how many"), user(SMALL)):
        with pytest.raises(BadRequest, match=r"messages\[1\]: the recorded tokens have runs of"):
            codec.prompt(asked(*first, reply, after))
    if "pad" not in drawn:
        with pytest.raises(BadRequest, match=r"have runs of \[4\] placeholders, the images need \[\]"):
            codec.prompt(asked(user("how many"), reply, user("how many")))


def pixel(data: bytes, place: tuple[int, int] = (0, 0)) -> Any:
    return opened(data).getpixel(place)


def test_a_file_is_seen_as_people_see_it() -> None:
    half = Image.new("RGB", (40, 20), "white")
    half.paste((255, 0, 0), (0, 0, 20, 20))
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned: the left half is on top
    upright = opened(encoded(half, exif=turned))
    assert upright.size == (20, 40)
    assert [upright.getpixel((10, y)) for y in (5, 35)] == [(255, 0, 0), (255, 255, 255)]
    assert pixel(encoded(Image.fromarray(np.full((4, 4), 0x8000, np.uint16)))) == (128, 128, 128)
    for clear in (Image.new("RGBA", (4, 4), (0, 0, 0, 0)), Image.new("LA", (4, 4), (0, 0))):
        assert pixel(encoded(clear)) == (255, 255, 255)
    palette = Image.new("P", (4, 4))
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert pixel(encoded(palette)) == (0, 0, 0)
    assert pixel(encoded(palette, transparency=0)) == (255, 255, 255)
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    assert pixel(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])) == (255, 0, 0)
    assert pixel(encoded(frames[0].convert("CMYK"), "JPEG"))[0] > 250


def test_a_reader_keeps_pixels_within_its_limit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader.of(model)
    size = reader.pixels([SMALL])["pixel_values"].nbytes
    monkeypatch.setattr(images, "KEPT_BYTES", 2 * size)
    files = [picture(56, 56, color) for color in ("red", "blue", "green", "black")]
    for _ in range(2):
        assert reader.counts([*files, LARGE]) == [4, 4, 4, 4, 9]  # LARGE alone is above the limit
        assert reader._kept <= 2 * size


def test_a_message_that_spells_placeholders_shows_no_image(model: Path) -> None:
    codec = codec_of(model)
    assert codec.images is not None
    prompt = codec.prompt(asked(user("<|vision_start|><|image_pad|><|vision_end|>", SMALL)))
    assert [length for _, length in codec.images.runs(prompt.token_ids)] == [4]


def test_an_engine_of_text_says_what_it_needs(model: Path) -> None:
    with pytest.raises(BadRequest, match="reads text alone"):
        ChatCodec(str(model), 64).prompt(asked(user(SMALL)))


@pytest.mark.parametrize("role", ["assistant", "tool", "system"])
def test_only_users_send_images(role: str) -> None:
    with pytest.raises(BadRequest, match="image_url parts in messages of the user"):
        asked({"role": role, "content": [shown("data:image/png;base64,AA==")]})


def test_engine_and_trainer_see_the_same(model: Path) -> None:
    """Rows of one batch have two images, one, and none; each answer equals that of the row alone, and the trainer's
    log-probabilities, also of a second turn, equal the engine's."""
    codec, config = codec_of(model), GenerationConfig(dtype="float32", images=True)
    engine = build_model(str(model), config)
    load_into(engine, str(model))
    requests = [asked(user(LARGE, "how many", SMALL)), asked(user("how many ?", WIDE)), asked(user("how many ?"))]
    prompts = [codec.prompt(request) for request in requests]

    def answers(chosen: list[Any]) -> list[Any]:
        draws = [prompt.draw for prompt in chosen]
        return generate_batch(engine, [p.token_ids for p in chosen], draws, codec.stop_token_ids, reader=codec.images)

    together = answers(prompts)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = answers([prompt])
        assert answer.token_ids == alone.token_ids
        np.testing.assert_allclose(answer.log_probs, alone.log_probs, atol=2e-5)
    without = answers([replace(prompts[1], draw=replace(prompts[1].draw, images=(SMALL_AS_WIDE,)))])
    assert without[0].log_probs != together[1].log_probs

    sequences = TrainingSequences.from_records(
        [
            {
                "sequence_id": str(place), "rollout_id": str(place), "group_id": "g", "policy_version": 0, "reward": 0.0,
                "token_ids": [*prompt.token_ids, *answer.token_ids],
                "loss_mask": [0] * len(prompt.token_ids) + [1] * len(answer.token_ids),
                "gen_logprobs": [0.0] * len(prompt.token_ids) + answer.log_probs,
                "images": [{"sha256": image_name(image), "data": image} for image in prompt.draw.images] or None,
            }
            for place, (prompt, answer) in enumerate(zip(prompts, together, strict=True))
        ]
    )  # fmt: skip
    scorer = Scorer(engine)
    scorer.images = codec.images
    for chunk in (0, 3):
        scorer.logits_chunk = chunk
        found = recompute_log_probs(scorer, sequences, trained=sequences.loss_mask)
        np.testing.assert_allclose(found, sequences.gen_logprobs, atol=2e-5)


SMALL_AS_WIDE = picture(112, 56, "yellow")
"""As many placeholders as `WIDE`."""


def test_a_file_is_read_as_the_processor_of_the_model_says(model: Path) -> None:
    reader = ImageReader.of(model)
    pixels = reader.pixels([SMALL, WIDE])
    assert pixels["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8]]
    assert pixels["pixel_values"].shape == (48, 3 * 2 * 14 * 14)
    assert reader.counts([picture(57, 30)]) == [2]  # resized to 56 × 28
    with pytest.raises(BadImage, match="wrote 1 of the 2 images"):
        reader.expanded([reader.token_id], [SMALL, WIDE])


def test_a_part_of_a_row_is_the_file() -> None:
    assert image_part(SMALL)["image_url"] == "data:image/png;base64," + base64.b64encode(SMALL).decode()


def test_greedy_answers_are_the_same_with_new_keys_and_values(model: Path) -> None:
    """After a refit within an answer the whole row is computed again, with its image."""
    from roundhouse.generation.transformers_engine import Change

    codec = codec_of(model)
    engine = build_model(str(model), GenerationConfig(dtype="float32", images=True))
    load_into(engine, str(model))
    prompt = codec.prompt(asked(user(LARGE, "how many")))
    draw = Draw(5, temperature=0.0, images=prompt.draw.images)
    calls = iter([None, None, Change(1), None, None])
    answers = [
        generate_batch(engine, [prompt.token_ids], [draw], frozenset(), between, reader=codec.images)[0]
        for between in (lambda: None, lambda: next(calls))
    ]
    assert answers[0].token_ids == answers[1].token_ids
    np.testing.assert_allclose(answers[0].log_probs, answers[1].log_probs, atol=2e-5)
