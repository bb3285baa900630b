"""Load configurations, tokenizers and models of transformers from a model directory.

Invariant: a directory is data. Its own code (`auto_map`) is never executed and never asked about; nothing is downloaded.

    shape = load_pretrained(AutoConfig, directory)
    model = build_model(shape, dtype=torch.float32)

A composite shape has a configuration for each part (`text_config`, `vision_config`, …). Its model has all parts, because
its published weights have them.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError
from roundhouse.imports import broken_torch_extensions


def load_pretrained(kind: Any, directory: str | Path, **options: Any) -> Any:
    """Return `kind.from_pretrained` of a model directory; `kind` is an Auto class.

    Raises:
        ConfigError: the directory can only be loaded by its own code.
        OSError, ValueError: as transformers raises them.
    """
    broken_torch_extensions()
    load: Callable[..., Any] = kind.from_pretrained
    with without_progress_bars():
        return _without_own_code(load, str(directory), directory, local_files_only=True, **options)


def build_model(shape: Any, **options: Any) -> Any:
    """Return a model of this shape with arbitrary weights, in the class of its published weights.

    Raises:
        ConfigError: the model can only be built by its own code.
        ValueError: transformers does not have a class for it that generates text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    broken_torch_extensions()
    composite = shape.get_text_config() is not shape
    kind: Any = AutoModelForMultimodalLM if composite else AutoModelForCausalLM
    if "attn_implementation" not in options and caps_scores(shape):
        options["attn_implementation"] = "eager"
    return _without_own_code(kind.from_config, str(getattr(shape, "name_or_path", "")), shape, **options)


def is_composite(directory: Path) -> bool:
    """Return whether a model has towers beside its language model."""
    file = directory / "config.json"
    return file.is_file() and isinstance(json.loads(file.read_text(encoding="utf-8")).get("text_config"), dict)


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model: of a composite model one of several."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def keeps_states(directory: Path) -> bool:
    """Return whether a model has layers with a state in place of keys and values: state spaces, linear attention,
    convolutions."""
    return _has_key(directory, ("mamba_", "ssm_", "linear_num_", "conv_L", "hybrid_override"))


def has_linear_attention(directory: Path) -> bool:
    """Return whether a model has layers of linear attention (Qwen 3-Next, 3.5)."""
    return _has_key(directory, ("linear_num_",))


def _has_key(directory: Path, beginnings: tuple[str, ...]) -> bool:
    """Return whether the language model's configuration has a key that begins so."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return any(key.startswith(beginnings) for key in text_part(config))


def is_left_out(model: Any, name: str) -> bool:
    """Return whether published files may have this tensor although the model has not: a layer that predicts further
    tokens (`mtp.*`), which transformers does not load."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def caps_scores(shape: Any) -> bool:
    """Return whether attention scores are capped (Gemma 2), which transformers' fused attention silently leaves out."""
    return getattr(shape.get_text_config(), "attn_logit_softcapping", None) is not None


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the bars that transformers draws for each model that it loads or saves: the product shows its own progress."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _without_own_code(load: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
    try:
        return load(*arguments, trust_remote_code=False, **options)
    except (
        ModuleNotFoundError
    ) as error:  # of transformers, which blames a class of a model; the cause is another package
        if error.__cause__ is None:
            raise
        cause = _first_cause(error)
        raise ConfigError(
            f"transformers cannot import its classes for {name}. The cause: {type(cause).__name__}: {cause}, raised in "
            f"{_file_of(cause)}. Reinstall or uninstall that package."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"The model directory {name} needs its own code to load (auto_map), which is never executed. Use an "
            "architecture that transformers supports."
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _file_of(error: BaseException) -> str:
    """Return the first file of a traceback that is neither transformers' nor Python's import machinery."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    others = (file for file in files if not re.search(r"^<|/transformers/|/importlib/", file))
    return next(others, "transformers")
