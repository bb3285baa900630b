"""What a checkpoint takes over from the one it was trained from."""

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
