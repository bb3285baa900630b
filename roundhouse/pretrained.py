"""Load configurations, tokenizers and models of transformers from a model directory.

Invariant: a directory is data. Its own code (`auto_map`) is never executed and never asked about; nothing is downloaded.

    shape = load_pretrained(AutoConfig, directory)
    model = build_model(AutoModelForCausalLM, shape, dtype=torch.float32)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError


def load_pretrained(kind: Any, directory: str | Path, **options: Any) -> Any:
    """Return `kind.from_pretrained` of a model directory; `kind` is an Auto class.

    Raises:
        ConfigError: the directory can only be loaded by its own code.
        OSError, ValueError: as transformers raises them.
    """
    load: Callable[..., Any] = kind.from_pretrained
    with without_progress_bars():
        return _without_own_code(load, str(directory), directory, local_files_only=True, **options)


def build_model(kind: Any, shape: Any, **options: Any) -> Any:
    """Return a model of this shape with arbitrary weights, `kind.from_config`; `kind` is an Auto class.

    Raises:
        ConfigError: the model can only be built by its own code.
    """
    return _without_own_code(kind.from_config, str(getattr(shape, "name_or_path", "")), shape, **options)


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
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"The model directory {name} needs its own code to load (auto_map), which is never executed. Use an "
            "architecture that transformers supports."
        ) from error
