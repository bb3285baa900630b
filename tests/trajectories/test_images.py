"""Images in the datasets between stages: by name, whole again when read, and proved against the tokens."""

import io
import json

import pytest
from PIL import Image

from roundhouse.config.models import ValidationConfig
from roundhouse.images import ImageReader, image_name, image_part
from roundhouse.rollout.conversation import TurnChain
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table
from roundhouse.trajectories.validation import Validated, validate
from tests.trajectories.rollouts import rollout

PLACEHOLDER = 9
READER = ImageReader(
    {"model_type": "qwen3_vl", "image_token_id": PLACEHOLDER, "vision_config": {"spatial_merge_size": 2}},
    {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 784, "longest_edge": 784 * 16}},
)


def picture(width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 28), "red").save(file, "PNG")
    return file.getvalue()


ONE, TWO = picture(28), picture(56)
"""Of one placeholder, and of two."""


def seen(*, sample: int = 0) -> Rollout:
    """Two turns: [1, image, 2] → [3], then [image, 4] → [5]."""
    chain = TurnChain()
    names = [image_name(ONE), image_name(TWO)]
    for prompt, generated, shown in (([1, 9, 2], [3], 1), ([1, 9, 2, 3, 9, 9, 4], [5], 2)):
        chain.add(prompt, generated, [-0.5], policy_version=0, finish_reason="stop", images=names[:shown])
    made = rollout(sample=sample)
    content = [image_part(ONE), {"type": "input_text", "text": "and"}, image_part(TWO)]
    made.items = [{"role": "user", "content": content}]
    made.task = {"task_id": "g", "responses_create_params": {"input": made.items}}
    made.turns = chain.turns
    return made


def check(made: Rollout, reader: ImageReader | None = READER) -> Validated:
    return validate([made], ValidationConfig(min_group_size=1), vocabulary_size=10, policy_version=0, images=reader)


def test_a_turn_names_the_images_that_its_prompt_adds() -> None:
    assert [turn.images for turn in seen().turns] == [[image_name(ONE)], [image_name(TWO)]]


def test_tables_hold_a_file_once_a_rollout_and_its_name_elsewhere() -> None:
    tables = rollouts_table([seen()]), turns_table([seen()])
    [row] = tables[0].to_pylist()
    assert dict(row["images"]) == {image_name(ONE): ONE, image_name(TWO): TWO}
    assert f"data:image/png;sha256,{image_name(ONE)}" in row["messages"]
    assert "base64" not in row["task"] + row["messages"]
    assert rollouts_from_tables(*tables) == [seen()]


def test_rows_without_images_are_as_before() -> None:
    plain = rollout()
    plain.items = [{"role": "user", "content": "what is data:image/png;base64,!?"}]
    [row] = rollouts_table([plain]).to_pylist()
    assert row["images"] is None
    assert json.loads(row["messages"]) == plain.items


def test_a_text_that_spells_the_name_of_an_image_stays_a_text() -> None:
    made = seen()
    made.items.append({"role": "user", "content": f"see data:image/png;sha256,{image_name(ONE)} again"})
    assert rollouts_from_tables(rollouts_table([made]), turns_table([made])) == [made]


def test_a_sequence_has_the_files_of_its_placeholders() -> None:
    result = check(seen())
    assert result.quarantine.to_pylist() == []
    assert TrainingSequences.from_table(result.sequences).images == ((ONE, TWO),)


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        (lambda made: made.turns[0].images.clear(), "runs of [1] placeholders, the images need []"),
        (lambda made: made.turns[1].images.append(image_name(ONE)), "runs of [2] placeholders, the images need [2, 1]"),
        (lambda made: made.items.clear(), f"the image {image_name(ONE)} of the prompt is not recorded"),
        (lambda made: made.turns[1].images.reverse() or made.turns[1].images.__setitem__(0, image_name(ONE)),
         "runs of [2] placeholders, the images need [1]"),
    ],
    ids=["unnamed", "one too many", "lost", "another"],
)  # fmt: skip
def test_images_that_do_not_fit_the_tokens_keep_a_rollout_from_training(change, evidence: str) -> None:
    made = seen()
    change(made)
    [row] = check(made).quarantine.to_pylist()
    assert (row["reason"], row["evidence"]) == ("images", evidence)


def test_a_file_that_cannot_be_read_keeps_its_rollout_alone_from_training() -> None:
    made = seen()
    text = b"no image"
    made.items = [{"role": "user", "content": [image_part(text), image_part(TWO)]}]
    made.turns[0].images = [image_name(text)]
    [row] = check(made).quarantine.to_pylist()
    assert row["evidence"].startswith("An image of 8 bytes is not a file of PNG")


def test_a_policy_of_text_has_no_images() -> None:
    [row] = check(seen(), None).quarantine.to_pylist()
    assert (row["reason"], row["evidence"]) == ("images", "1 images, and the policy sees none")


def test_a_drawn_placeholder_ends_a_rollout_or_spoils_it() -> None:
    chain = TurnChain()
    chain.add([1, 2], [3, PLACEHOLDER], [-0.5, -0.25], policy_version=0, finish_reason="stop")
    made = rollout()
    made.turns = chain.turns
    assert check(made).quarantine.num_rows == 0
    chain.add([1, 2, 3, PLACEHOLDER, 4], [5], [-0.5], policy_version=0, finish_reason="stop")
    [row] = check(made).quarantine.to_pylist()
    assert row["evidence"] == "a reply holds a placeholder without an image"
