"""Held-out evaluation: what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.store.run import open_run


def test_without_a_held_out_task_there_is_nothing_to_evaluate_on_and_the_key_is_named(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t", "responses_create_params": {"input": [{"role": "user", "content": "?"}]}}\n')
    environment = {"kind": "remote", "url": "http://127.0.0.1:1", "train_tasks": str(tasks)}
    policy = {"kind": "pretrained", "path": str(tmp_path)}
    given = {"run_id": "r", "store": str(tmp_path / "store"), "environment": environment, "policy": policy}
    run = open_run(parse_config(given))
    with pytest.raises(ConfigError, match=r"no held-out task.*environment\.heldout_tasks"):
        evaluate_version(run, 0, "http://127.0.0.1:1")
    assert run.stage(0, "evaluate").reference() is None
