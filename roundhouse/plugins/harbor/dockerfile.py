"""Dockerfiles that copies of files can replace: FROM, WORKDIR and plain COPY.

    FROM ubuntu:24.04
    WORKDIR /app                ->  /app/a.txt, /data/b.csv
    COPY a.txt .
    COPY tables/ /data/

Anything else, such as RUN, needs an image of the Dockerfile. `Dockerfile.image` is then the reason.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

Files = dict[str, tuple[bytes, bool]]
"""Content, and whether it is a program, by path."""
PLAIN = re.compile(r"(?!--)[\w./@+-]+(\s+(?!--)[\w./@+-]+)*")


class Dockerfile(NamedTuple):
    """The lines of the last stage."""

    workdir: str | None
    copies: list[tuple[list[str], str, str]]
    """Sources, target and working directory of each COPY."""
    image: str
    """The first line that copies cannot replace; empty without one."""


def read_dockerfile(text: str) -> Dockerfile:
    """Return the lines of a Dockerfile. One with another escape character needs an image."""
    workdir: str | None = None
    copies: list[tuple[list[str], str, str]] = []
    stages = 0
    image = "another escape character" if re.search(r"(?im)^#\s*escape\s*=", text) else ""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        name, _, value = line.strip().partition(" ")
        name, value = name.upper(), value.strip()
        if name == "FROM":
            workdir, copies, stages = None, [], stages + 1
        elif name == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir or "/", value.strip("\"'")))
        elif name == "COPY" and len(parts := value.split()) > 1:
            copies.append((parts[:-1], parts[-1], workdir or "/"))
        is_plain = name in ("WORKDIR", "COPY") and PLAIN.fullmatch(value)
        if stages > 1 or not (is_plain or name == "FROM"):
            image = image or line.strip()[:80]
    return Dockerfile(workdir, copies, image)


def copied_files(copies: list[tuple[list[str], str, str]], context: Files) -> Files:
    """Return the files that a build copies, by absolute path.

    Args:
        context: the files next to the Dockerfile, by path.

    Raises:
        ValueError: a source is missing.
    """
    files: Files = {}
    for sources, name, workdir in copies:
        target = posixpath.normpath(posixpath.join(workdir, name))
        folders = f"{workdir}/", *files
        is_folder = name.endswith("/") or len(sources) > 1 or any(path.startswith(f"{target}/") for path in folders)
        for source in (posixpath.normpath(each.lstrip("/") or ".") for each in sources):
            if source in context:
                files[posixpath.join(target, posixpath.basename(source)) if is_folder else target] = context[source]
                continue
            prefix = "" if source == "." else f"{source}/"
            inside = {
                posixpath.join(target, each.removeprefix(prefix)): context[each]
                for each in context
                if each.startswith(prefix)
            }
            if not inside:
                raise ValueError(f"its Dockerfile copies {source}, which is missing in environment/. Write it.")
            files |= inside
    return files
