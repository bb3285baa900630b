"""Images in conversations: their names in the store, their placeholders in a prompt, and their pixels for a model.

Invariants: an image is named by the SHA-256 of its file. In a prompt each image is one run of placeholder tokens. Its
length follows from the image's size, and runs and images have the same order. Engine and trainer compute the same
pixels.

    <|vision_start|> <|image_pad|> × n <|vision_end|>        n = height · width of the grid / merge²

The grid counts patches, after the image was resized to a multiple of `patch_size · merge_size` within the processor's
limits (Qwen2-VL, arXiv 2409.12191, section 2.1).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundhouse.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from PIL import Image

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Types of models that are tested with images."""
PROCESSOR_FILE = "preprocessor_config.json"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read; Pillow would start another program for others, as PostScript."""
MOST_PIXELS = 64_000_000
"""Pixels of an image before it is resized."""
KEPT_BYTES = 2**28
"""Pixels that a reader keeps: a group has the same images."""

_WHOLE = re.compile(r"data:(image/[\w.+-]+);base64,([A-Za-z0-9+/]+={0,2})")
_STORED = re.compile(rf'"{_WHOLE.pattern}"')  # a string of JSON, not a part of a text
_NAMED = re.compile(r'"data:(image/[\w.+-]+);sha256,([0-9a-f]{64})"')


class BadImage(DataError):
    """An image that no reader can show to a model."""


def image_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """Return an image file as a content part of a task row."""
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def image_name(data: bytes) -> str:
    """Return the SHA-256 of an image file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_url(url: Any) -> bytes:
    """Return the file in a data URL.

    Raises:
        BadImage: the URL is another one, which is never fetched.
    """
    match = _WHOLE.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        shown = f"{url[:40]}…" if isinstance(url, str) and len(url) > 40 else repr(url)
        raise BadImage(
            f"An image has the URL {shown}. Send its file as data:image/png;base64,… with the media type in lower case and "
            "standard base64 without white space: no URL is fetched."
        )
    try:
        data = base64.b64decode(match[2], validate=True)
    except binascii.Error as error:
        raise BadImage(f"The data of an image is not base64: {error}.") from error
    if base64.b64encode(data).decode() != match[2]:  # its name could not restore it
        raise BadImage("The data of an image is not base64: bits after its last byte are set.")
    return data


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """Return the image files of chat messages, in order.

    Raises:
        BadImage: see `read_url`.
    """
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    urls = (part.get("image_url") for part in parts if part.get("type") == "image_url")
    return [read_url(url.get("url") if isinstance(url, Mapping) else url) for url in urls]


def image_names(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the images of chat messages, in order; none of an image that is not sent as data, which engines
    refuse."""
    try:
        return [image_name(data) for data in images_of(messages)]
    except BadImage:
        return []


def by_name(text: str) -> tuple[str, dict[str, bytes]]:
    """Return a JSON text with each image replaced by its name, and the files by name."""
    files: dict[str, bytes] = {}

    def name(match: re.Match[str]) -> str:
        data = base64.b64decode(match[2] + "=" * (-len(match[2]) % 4))
        if base64.b64encode(data).decode() != match[2]:  # another spelling, which the name could not restore
            return match[0]
        files[image_name(data)] = data
        return f'"data:{match[1]};sha256,{image_name(data)}"'

    return (_STORED.sub(name, text) if ";base64," in text else text), files


def whole(text: str, files: Mapping[str, bytes]) -> str:
    """Return a JSON text with each name replaced by the image of that name."""

    def image(match: re.Match[str]) -> str:
        data = files.get(match[2])
        return match[0] if data is None else f'"data:{match[1]};base64,{base64.b64encode(data).decode()}"'

    return _NAMED.sub(image, text) if files else text


class ImageReader:
    """Reads images as one model's processor does."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        """
        Args:
            config: of config.json.
            processor: of preprocessor_config.json.

        Raises:
            ConfigError: images are not supported with this type of model.
        """
        _refuse_other_family(config)
        self.token_id = int(config["image_token_id"])
        self._merged = int(config["vision_config"].get("spatial_merge_size", 2)) ** 2
        self._settings = dict(processor)
        self._processor: Any = None
        self._read: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._kept = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: Path) -> ImageReader:
        """Return the reader of a model directory.

        Raises:
            ConfigError: images are not supported with this model, or its processor is missing.
        """
        config = json.loads((directory / "config.json").read_text())
        _refuse_other_family(config)
        file = directory / PROCESSOR_FILE
        if not file.is_file():
            raise ConfigError(f"{file} is missing. Copy it from the published model: it states the size of images.")
        return cls(config, json.loads(file.read_text()))

    @classmethod
    def of_files(cls, config: Mapping[str, Any], files: Mapping[str, bytes]) -> ImageReader | None:
        """Return the reader of a model's configuration and files by name; None if images are not supported with it."""
        if config.get("model_type") not in FAMILIES or PROCESSOR_FILE not in files:
            return None
        return cls(config, json.loads(files[PROCESSOR_FILE]))

    def pixels(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return `pixel_values` [patches, values of a patch] and `image_grid_thw` [images, 3]; nothing without images.

        Raises:
            BadImage: a file is not an image, or has more than `MOST_PIXELS`.
        """
        import torch

        if not images:
            return {}
        patches, grids = zip(*map(self._pixels_of, images), strict=True)
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.cat(grids)}

    def counts(self, images: Sequence[bytes]) -> list[int]:
        """Return the number of placeholders of each image."""
        return [int(self._pixels_of(data)[1].prod()) // self._merged for data in images]

    def expanded(self, token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return a rendered prompt, in which each image is one placeholder, with as many as its size takes.

        Raises:
            BadImage: the template wrote another number of images.
        """
        counts = self.counts(images)
        if (written := list(token_ids).count(self.token_id)) != len(counts):
            raise BadImage(f"The chat template wrote {written} of the {len(counts)} images of the messages.")
        left = iter(counts)
        repeats = (next(left) if token == self.token_id else 1 for token in token_ids)
        return [token for token, times in zip(token_ids, repeats, strict=True) for _ in range(times)]

    def misfit(self, token_ids: Sequence[int], images: Sequence[bytes]) -> str:
        """Return how the runs of placeholders differ from those that the images need; empty if they do not."""
        runs, needed = [length for _, length in self.runs(token_ids)], self.counts(images)
        return "" if runs == needed else f"runs of {runs} placeholders, the images need {needed}"

    def runs(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return start and length of each run of placeholders."""
        places, start = [], 0
        for token, run in itertools.groupby(token_ids):
            length = sum(1 for _ in run)
            if token == self.token_id:
                places.append((start, length))
            start += length
        return places

    def _pixels_of(self, data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        name = image_name(data)
        with self._lock:  # prompts are rendered while the engine computes
            if name not in self._read:
                self._read[name] = self._process(data)
                self._kept += self._read[name][0].nbytes
            read = self._read[name]
            while self._kept > KEPT_BYTES:
                self._kept -= self._read.popitem(last=False)[1][0].nbytes
        return read

    def _process(self, data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        if self._processor is None:
            # Pillow's, which needs no torchvision
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            self._processor = Qwen2VLImageProcessorPil.from_dict(self._settings)
        image = opened(data)
        try:
            read = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise BadImage(f"An image of {image.width} × {image.height} pixels cannot be shown: {error}.") from error
        return read["pixel_values"], read["image_grid_thw"]


def opened(data: bytes) -> Image.Image:
    """Return an image file in RGB as people see it: upright, on white where it is transparent, the first of its frames.

    Raises:
        BadImage: it is not a file of `FORMATS`, has more than `MOST_PIXELS`, or states no white.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    too_large = f"An image has more than {MOST_PIXELS:,} pixels. Send a smaller one."
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise BadImage(too_large)
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would show all but its darkest values as white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise BadImage(f"An image has 32 bits a pixel (Pillow's mode {image.mode}). Convert it to 8 bits.")
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(too_large) from error
    except UnidentifiedImageError as error:
        raise BadImage(f"An image of {len(data)} bytes is not a file of {', '.join(FORMATS)}.") from error
    except Exception as error:  # a decoder of a foreign file raises anything
        raise BadImage(f"An image cannot be read: {type(error).__name__}: {error}.") from error


def _refuse_other_family(config: Mapping[str, Any]) -> None:
    if (kind := config.get("model_type")) not in FAMILIES:
        raise ConfigError(
            f"generation.images is true, but images are not supported with models of type {kind!r}. Supported: "
            f"{', '.join(FAMILIES)}. Set generation.images to false to train this model on text."
        )
