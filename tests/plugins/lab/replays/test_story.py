"""The story of docs/replay.md, command by command, on a run that was trained with the bug."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.store.replays import load_replay
from tests.plugins.lab.replays.story import chance_of_right, story_run

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/replay.md").read_text()
STORY = PAGE[PAGE.index("## A worked story") : PAGE.index("## Measured")]
CODES = {"env": 1}
"""Exit codes of commands that find something."""


@pytest.mark.nightly
def test_the_story_goes_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = story_run(tmp_path, "bug", "ComparedAsText", iterations=4)
    said = []
    for command in re.findall(r"^    roundhouse (.+)$", STORY, re.MULTILINE):
        words = shlex.split(command)
        found = CliRunner().invoke(app, [*words, "--store", run.config.store])
        assert found.exit_code == CODES.get(words[0], 0), f"{command}: {found.output} {found.exception!r}"
        assert isinstance(found.exception, SystemExit | None), f"{command}: {found.exception!r}"
        said.append(found.stdout)
    tested, rescored, same, taught, shown = said
    equal, flipped = (int(re.search(rf"(\d+) {word}", tested)[1]) for word in ("equal", "flipped"))  # type: ignore[index]
    assert 0.6 < flipped / (equal + flipped) < 0.9, "three in four"
    assert f"{flipped} flipped" in rescored
    assert "First difference" not in same
    assert "input rollouts: mended was substituted" in taught
    comparison = json.loads(shown)
    assert comparison["first"]["stage"] == "validate"
    replayed = load_replay(run.config.store, "taught")
    start, bug, right = (
        chance_of_right(each.checkpoint(version).reference())  # type: ignore[arg-type]
        for each, version in ((run, 0), (run, 4), (replayed, 4))
    )
    assert bug < start < right
    drift = [stage["drift"] for stage in comparison["stages"] if stage["drift"]]
    assert [place for place, each in enumerate(drift, 1) if each["kl"] > 0.1] == [4], "the default bound of the gate"
