"""Files that a checkpoint takes over from its predecessor."""

from __future__ import annotations

from pathlib import Path

from roundhouse.training.checkpoint import read_side_files


def test_the_stores_records_of_a_checkpoint_are_not_taken_into_the_next(tmp_path: Path) -> None:
    """They were once: how often version k-1 was attempted then stood among the files of version k."""
    for name in ("config.json", "manifest.json", "attempt-0001.json", "attempt-0012.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
    assert sorted(read_side_files(tmp_path)) == ["chat_template.jinja", "tokenizer.json"]


def test_what_a_write_that_was_cut_off_left_in_the_directory_gets_into_no_checkpoint(tmp_path: Path) -> None:
    """A run killed within a write of version 1 could make no version 2 after that: the store refuses the hidden name."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / ".tokenizer.json.d8c4dcfaa2f34e818dd53b744ba09f89").write_text("{")
    assert sorted(read_side_files(tmp_path)) == ["tokenizer.json"]
