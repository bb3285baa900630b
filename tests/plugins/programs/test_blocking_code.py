"""A verifier that blocks: its rollout ends by its limit, the others are not touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from roundhouse.environments.base import task_row
from roundhouse.plugins.programs.section import CommandEnvironment
from tests.gym.test_blocking_code import ROWS, WORLD, costs_its_rollout_alone

pytestmark = pytest.mark.real


PROGRAM = """
import json, os, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


async def test_a_verifier_of_a_program_that_blocks_costs_its_rollout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "rows.jsonl"
    rows = [{**task_row("x", task_id=row["task_id"]), "how": row["how"]} for row in ROWS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    fields = {"command": [sys.executable, str(program)], "verifier": f"{WORLD}:judge", "train_tasks": str(file)}
    section = CommandEnvironment.model_validate({"kind": "command", **fields})
    await costs_its_rollout_alone(section, monkeypatch, seconds=24.0)  # a program starts in this time too
