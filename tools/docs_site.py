"""Hooks of mkdocs.yml: README.md is the first page, and links to files outside of docs/ are resolved.

Pages are written for the forge, where `../flows/train.py` is a link. The site links to that file if `repo_url` of
mkdocs.yml names a forge; else the text of the link stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add README.md as the first page."""
    from mkdocs.structure.files import File

    text = with_links_of_site((ROOT / "README.md").read_text(), "", config.repo_url)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Resolve the links of a page of docs/ that lead out of it."""
    if page.file.src_uri == "index.md":
        return markdown
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    return with_links_of_site(markdown, folder, config.repo_url)


def with_links_of_site(markdown: str, folder: str, forge: str | None) -> str:
    """Return a page of `folder` of the repository with the links that it has in the site."""
    return LINK.sub(lambda link: _moved(link, folder, forge), markdown)


def _moved(link: re.Match[str], folder: str, forge: str | None) -> str:
    """Return a link of a page in `folder` of the repository as the site has it."""
    mark, text, target = link.groups()
    name, hash_sign, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not name:
        return link[0]
    path = posixpath.normpath(posixpath.join(folder, name))
    if path.startswith("docs/") and not (ROOT / path).is_dir():
        return link[0] if folder else f"{mark}[{text}]({path.removeprefix('docs/')}{hash_sign}{anchor})"
    if path == "README.md":
        return f"[{text}]({posixpath.relpath('docs/index.md', folder)}{hash_sign}{anchor})"
    if not (ROOT / path).exists():
        return link[0]  # mkdocs reports it
    return f"[{text}]({forge.rstrip('/')}/blob/main/{path})" if forge else text
