"""Count the shapes of an image: a task whose answer the text does not tell."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image, ImageDraw

from roundhouse.environments.base import Environment, final_text, task_row
from roundhouse.images import image_part

CELL = 28
"""Pixels of a cell's side: what Qwen 3-VL turns into one token of the prompt."""
CELLS = 3
"""Cells of a side."""
COLORS = ("red", "green", "blue", "orange")
QUESTION = "how many shapes ?"


def draw(count: int, generator: random.Random) -> bytes:
    """Return a PNG of a white square with this many shapes, each in a separate cell."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), "white")
    canvas = ImageDraw.Draw(image)
    for cell in generator.sample(range(CELLS * CELLS), count):
        left, top = cell % CELLS * CELL, cell // CELLS * CELL
        box = (left + 4, top + 4, left + CELL - 5, top + CELL - 5)
        shape = canvas.ellipse if generator.random() < 0.5 else canvas.rectangle
        shape(box, fill=generator.choice(COLORS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class CountShapes(Environment):
    """One image and one question; the reward is 1 for the right number."""

    name = "count_shapes"

    def __init__(self, most: int = 6, train: int = 256, heldout: int = 128) -> None:
        """
        Args:
            most: shapes of an image.
            train, heldout: number of tasks.
        """
        self.most, self.sizes = most, {"train": train, "heldout": heldout}

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the tasks of a split; the same numbers give the same images."""
        rows = []
        for number in range(self.sizes[split]):
            generator = random.Random(f"{split} {number}")
            count = generator.randint(1, self.most)
            question = [image_part(draw(count, generator)), {"type": "input_text", "text": QUESTION}]
            row = task_row(QUESTION, task_id=f"{split}-{number}", count=count)
            row["responses_create_params"]["input"] = [{"role": "user", "content": question}]
            rows.append(row)
        return rows

    def verify(self, session: Any, row: dict[str, Any], response: Any) -> Any:
        """Return 1 for the right number, else 0."""
        return float(final_text(response).strip() == str(row["count"]))
