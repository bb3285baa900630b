"""Convert a GGUF file into an ordinary Hugging Face directory, once.

Invariants: the weights are the file's, dequantised to float32: quantisation losses remain, so a Q4 file does not give
the published model. A cache entry is stored under the digest of file, code and libraries, is complete or absent, and is
used only while every file in it has its recorded digest.

    <cache>/<digest>/report.json, files/

transformers reads the file but refuses to save it (`GgufConfig` counts as a quantisation), so the state is loaded into
a fresh model of the same configuration. A separate process does this (`python -m roundhouse.policy.gguf FILE
DIRECTORY`): it needs packages that a process with a trainer may have excluded (`roundhouse.imports`), and its memory,
twice the model, is released at its end.

The chat template comes from the file, and may support less than a run needs (`roundhouse.policy.model_directory`).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError
from roundhouse.policy.model_directory import INSTALL_SMOLLM2, ChatTemplate
from roundhouse.pretrained import load_pretrained, without_progress_bars
from roundhouse.store.location import file_digest, file_digests
from roundhouse.store.stage import sha256

MAGIC = b"GGUF"
ARCHITECTURES = frozenset(("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"))
"""Plain decoders that transformers reads from GGUF and vLLM serves. Tried: llama."""
_STRING = 8
"""GGUF's number of the type string."""

OnProgress = Callable[[str], None]
"""Callback with the present activity."""


def gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file of a directory without config.json.

    Raises:
        ConfigError: it has several.
    """
    if not directory.is_dir() or (directory / "config.json").exists():
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(
            f"policy.path is {directory}: it holds {len(files)} GGUF files ({files[0].name}, {files[1].name}, …), but "
            f"exactly one is allowed. Move it to a separate directory."
        )
    return files[0] if files else None


def check_gguf(file: Path) -> None:
    """Refuse what cannot be converted, from the first bytes of the file.

    Raises:
        ConfigError: names file and remedy.
    """
    architecture = architecture_of(file)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file}: its architecture is {architecture}, which cannot be converted. Supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. Or name a Hugging Face directory with safetensors (policy.kind pretrained)."
        )
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{file}: reading a GGUF file needs the package gguf, which is not installed: {INSTALL_SMOLLM2}"
        )


def architecture_of(file: Path) -> str:
    """Return `general.architecture`, which the format places first.

    Raises:
        ConfigError: the file is not a GGUF file of version 2 or 3, or does not begin so.
    """
    with file.open("rb") as stream:
        head = stream.read(4096)
    try:
        if head[:4] != MAGIC or struct.unpack_from("<I", head, 4)[0] not in (2, 3):
            raise ValueError("it does not begin as GGUF version 2 or 3 does")
        key, place = _string(head, 24)
        kind = struct.unpack_from("<I", head, place)[0]
        if key != "general.architecture" or kind != _STRING:
            raise ValueError(f"its first key is {key!r} and not general.architecture")
        return _string(head, place + 4)[0]
    except (ValueError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as GGUF: {error}. Copy or download it again.") from error


def template_of(file: Path) -> ChatTemplate:
    """Return the chat template in the file.

    Raises:
        ConfigError: it does not contain one.
    """
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    if "tokenizer.chat_template" not in fields:
        raise ConfigError(
            f"{file} has no chat template, and conversations need one. Give a chat model, or a Hugging Face directory with the "
            "template of its family."
        )
    names = fields["tokenizer.ggml.tokens"].contents()
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    tokens = {f"{name}_token": names[int(field.contents())] for name, field in ids.items() if field is not None}
    return ChatTemplate(str(file), fields["tokenizer.chat_template"].contents(), tokens)


def tokenizer_of(file: Path) -> bytes:
    """Return the tokenizer.json that `converted` writes for the file."""
    from transformers import AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = load_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    return str(tokenizer.backend_tokenizer.to_str()).encode()


def _string(data: bytes, place: int) -> tuple[str, int]:
    """Read a string of the format (length in 8 bytes, then UTF-8) and return it with its end."""
    [length] = struct.unpack_from("<Q", data, place)
    end = place + 8 + length
    if end > len(data):
        raise ValueError("its first key is longer than a name can be")
    return data[place + 8 : end].decode(), end


def converted(
    file: Path, cache: Path, on_progress: OnProgress = lambda text: None, since: float = math.inf
) -> tuple[Path, dict[str, Any]]:
    """The directory of the converted model, in the cache, and a report: source, its digest, seconds, whether reused.

    Args:
        since: seconds since the epoch; an entry that was made later was made for the caller, and does not count as reused.

    Raises:
        ConfigError: see `check_gguf`; the file is damaged.
    """
    check_gguf(file)
    on_progress(f"checking {file.name}")
    facts = {
        "gguf": file_digest(file),
        "code": sha256(Path(__file__).read_bytes()),
        "libraries": [version(name) for name in ("torch", "transformers", "gguf", "safetensors")],
    }
    entry = cache / sha256(json.dumps(facts, sort_keys=True).encode())[:32]
    report = {"source": file.name, "sha256": facts["gguf"], "architecture": architecture_of(file)}
    if (seconds := _whole(entry)) is not None:
        is_older = (entry / "report.json").stat().st_mtime < since
        return entry / "files", report | {"seconds": seconds, "reused": is_older}
    shutil.rmtree(entry, ignore_errors=True)
    started = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=cache, prefix=".partial-"))
    try:
        _convert(file, partial / "files", on_progress)
        seconds = time.monotonic() - started
        digests = file_digests(partial / "files")
        (partial / "report.json").write_text(json.dumps({**report, "seconds": seconds, "files": digests}))
        try:
            partial.rename(entry)
        except OSError:
            if _whole(entry) is None:  # another run was quicker otherwise
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entry / "files", report | {"seconds": seconds, "reused": False}


def _whole(entry: Path) -> float | None:
    """Return the seconds that a whole entry took to make; None if the entry is missing or damaged."""
    try:
        record = json.loads((entry / "report.json").read_text())
        return float(record["seconds"]) if file_digests(entry / "files") == record["files"] else None
    except (OSError, ValueError, KeyError):
        return None


def _convert(file: Path, directory: Path, on_progress: OnProgress) -> None:
    """Run `main` in a separate process, which ends with this one.

    Raises:
        ConfigError: it failed; the text is its error.
    """
    parent = ["-m", "roundhouse.die_with_parent", str(os.getpid())]
    command = [sys.executable, "-P", *parent, sys.executable, "-P", "-m", __name__, str(file), str(directory)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                on_progress(line.strip())
        errors.seek(0)
        problem = errors.read().strip()
    if process.returncode < 0:
        raise ConfigError(
            f"{file} cannot be converted: the process was ended by signal {-process.returncode}. It needs memory for twice the "
            "model in float32; free some and start again."
        )
    if process.returncode:
        reason = problem.splitlines()[-1] if problem else f"the process ended with {process.returncode}"
        raise ConfigError(
            f"{file} cannot be converted: {reason}. If this names a package, repair the package; else copy the file again."
        )


def main(file: Path, directory: Path) -> None:
    """Convert `file` into the new `directory`; a line on standard output for each step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    print(f"reading {file.name}", flush=True)  # noqa: T201
    with contextlib.redirect_stderr(io.StringIO()):  # another bar, which nothing turns off
        tokenizer = load_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
        read = load_pretrained(
            AutoModelForCausalLM,
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    config = type(read.config).from_dict(
        {key: value for key, value in read.config.to_dict().items() if not key.startswith("_name")}
    )
    model = type(read)(config).float()
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    print(f"writing {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} M parameters", flush=True)  # noqa: T201
    with without_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))
