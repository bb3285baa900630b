"""Warm starts that were made before, on this machine: one that is the same again is copied, not trained.

Invariant: an entry is stored under the digest of everything that determines its bytes: the recipe, the seed, the demonstrations
as text, this package's code, the libraries, the processor and the number of threads. It is complete or absent (renamed into
place), and a copy is used only if every file has the digest that was written down. So runs may share the directory at the same
time: of two that make the same policy one's stays, and a lost or damaged entry is made again.

    <state>/cache/warm-starts/<digest>/report.json, files/
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from roundhouse.config.models import WarmStartPolicy
from roundhouse.store.manifest import sha256

KEPT = 8
"""Entries; the oldest go. One is some megabytes."""


def digest_of(config: WarmStartPolicy, seed: int, texts: Sequence[str]) -> str:
    """Of all that decides which bytes a warm start writes."""
    import torch

    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    facts = {
        "config": config.model_dump(mode="json") | {"seed": seed},
        "code": sha256(code),
        "libraries": [version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")],
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for text in texts:
        digest.update(sha256(text.encode()).encode())
    return digest.hexdigest()[:32]


def take(entry: Path, directory: Path) -> dict[str, Any] | None:
    """Copy an entry into a new directory; its report, or None where there is none that is whole."""
    partial = directory.with_name(directory.name + ".cached")
    try:
        record = json.loads((entry / "report.json").read_text())
        shutil.copytree(entry / "files", partial)
        if _digests(partial) == record["files"]:
            partial.replace(directory)
            report: dict[str, Any] = record["report"]
            return report
    except (OSError, ValueError, KeyError):
        pass  # not there, or not whole
    shutil.rmtree(partial, ignore_errors=True)
    return None


def keep(directory: Path, report: dict[str, Any], entry: Path) -> None:
    """Add a warm start under its digest, and let the oldest go. A directory that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".partial-"))
        shutil.copytree(directory, partial / "files")
        (partial / "report.json").write_text(json.dumps({"report": report, "files": _digests(partial / "files")}))
        shutil.rmtree(entry, ignore_errors=True)  # a damaged one, or an equal one of another run
        try:
            partial.rename(entry)
        except OSError:  # another run was quicker
            shutil.rmtree(partial, ignore_errors=True)
        entries = sorted(entry.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in entries[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _digests(directory: Path) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()) for file in sorted(directory.iterdir())}
