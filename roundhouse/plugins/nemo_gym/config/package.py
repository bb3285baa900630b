"""NeMo Gym itself, as a search root holds it: a checkout, or a directory of installed packages.

Invariant: version and required Python are read from its own metadata; no file of it is imported or executed.

    <checkout>/pyproject.toml, nemo_gym/package_info.py     -> version 0.7.0, requires >=3.13.14, editable
    <site-packages>/nemo_gym-0.7.0.dist-info/METADATA       -> version 0.7.0, requires >=3.13.14
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

TRIED_VERSIONS = ("0.5.1", "0.6.0", "0.7.0")
"""Releases that were tried with Roundhouse: their servers, collector and files."""


@dataclass(frozen=True, slots=True)
class GymPackage:
    """One NeMo Gym."""

    root: Path
    version: str | None
    requires_python: str | None
    is_checkout: bool
    """Its servers install it from the directory above them, not from a package index."""

    def warning(self) -> str | None:
        """Return a sentence that names the version if it has not been tried."""
        if self.version is None or self.version in TRIED_VERSIONS:
            return None
        return (
            f"{self.root} holds nemo-gym {self.version}, which was not tried with Roundhouse. Tried: "
            f"{', '.join(TRIED_VERSIONS)}. Its contracts may differ."
        )


def gym_package(root: Path) -> GymPackage | None:
    """Return the NeMo Gym of a search root, or None for a root without one."""
    if not (root / "nemo_gym").is_dir():
        return None
    if (root / "pyproject.toml").is_file():
        try:
            project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
        except (OSError, tomllib.TOMLDecodeError):
            project = {}
        return GymPackage(root, _version_in_source(root), _text(project.get("requires-python")), True)
    for metadata in sorted(root.glob("nemo_gym-*.dist-info/METADATA")):
        headers = HeaderParser().parsestr(metadata.read_text(errors="replace"))
        return GymPackage(root, _text(headers["Version"]), _text(headers["Requires-Python"]), False)
    return None


def _version_in_source(root: Path) -> str | None:
    try:
        text = (root / "nemo_gym" / "package_info.py").read_text()
    except OSError:
        return None
    parts = [re.search(rf"^{name} = (\d+)$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


def _text(value: object) -> str | None:
    return str(value) if value else None
