"""Deletion of directories that a program filled."""

from __future__ import annotations

import os
from pathlib import Path

from roundhouse.infra.regular_files import remove_tree


def test_a_closed_tree_is_deleted_and_no_link_is_followed(tmp_path: Path) -> None:
    kept, root = tmp_path / "kept", tmp_path / "root"
    kept.mkdir()
    (kept / "file").touch()
    (root / "a/b/c").mkdir(parents=True)
    (root / "a/link").symlink_to(kept)
    os.mkfifo(root / "a/b/pipe")
    for path in (root / "a/b", root / "a", root):
        path.chmod(0)
    remove_tree(root)
    assert os.listdir(tmp_path) == ["kept"]
    root.symlink_to(kept)
    remove_tree(root)
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(kept) == ["file"]
