"""Inputs and counts of `benchmarks/pretrained_trl.py`; the runs themselves need a model of 93 MB and TRL."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pretrained import CONFIG
from roundhouse.config.loading import load_config

ShortQuestions = pytest.importorskip("roundhouse.plugins.example_environments.short_questions").ShortQuestions
from benchmarks.pretrained_trl import compared, message_to_peer, reward_of, seconds_to, tasks_in_order  # noqa: E402

ROOT = Path(__file__).parents[2]
COUNTING = """
import json, subprocess, sys, time
from benchmarks.process_tree import Recording, ProcessTree

burn = "import time\\nwhile time.process_time() < {}: pass"
tree = ProcessTree()
with Recording(tree, lambda command: "burning" if "process_time" in command else "other") as recording:
    began = time.time()
    # the middle process ends at once: what it started is an orphan in a session of its own
    leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", leave, burn.format(0.6)], check=True)
    subprocess.run([sys.executable, "-c", burn.format(0.4)], check=True)
    while not any(process.status() == "zombie" for process in tree.alive()):
        time.sleep(0.05)
print(json.dumps({"total": recording.total, "half": recording.at((began + time.time()) / 2), "own": time.process_time()}))
"""


def test_orphans_in_sessions_of_their_own_are_counted_after_their_end() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTING], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["total"] >= 1.0, "0.4 of a child and 0.6 of an orphan"
    assert 0 < found["half"] < found["total"]


def test_trl_is_given_the_tasks_and_rates_of_the_configuration() -> None:
    config = load_config(CONFIG, ["iterations=3", "train.threads=1"])
    rows = tasks_in_order(config)
    message = message_to_peer(config, rows, Path("model"), Path("scratch"))
    assert len(message["tasks"]) == 3 * 16
    assert len({row["task_id"] for row in rows}) == 48, "no task twice in an epoch"
    assert len(message["rates"]) == 3 * 4
    assert max(message["rates"]) == message["learning_rate"] == 4e-5
    assert all(before > after for before, after in pairwise(message["rates"][2:])), "it falls after the warm-up"
    assert message["max_tokens"] == 16


@pytest.mark.parametrize(
    ("text", "ended", "reward"), [("Paris.", True, 1.0), ("Paris", False, 0.8), ("Rome", True, 0.2)]
)
def test_a_completion_of_trl_is_judged_by_the_environment(text: str, ended: bool, reward: float) -> None:
    environment = ShortQuestions()
    row = next(row for row in environment.tasks("train") if row["answers"] == ["Paris"])
    assert reward_of(environment, row, text, ended) == pytest.approx(reward)


def test_a_reward_is_reached_with_the_mean_of_two_steps() -> None:
    curve = [[10.0, 0.2], [20.0, 0.6], [30.0, 0.3], [40.0, 0.7]]
    assert seconds_to(curve, 0.4) == 20.0
    assert seconds_to(curve, 0.5) == 40.0
    assert seconds_to(curve, 0.6) is None


def test_only_what_both_reached_has_a_ratio() -> None:
    ours = {"name": "Roundhouse", "seed": 0, "cpu_seconds": 40.0, "start_cpu_seconds": 10.0, "ended_early": False}
    theirs = {"name": "TRL", "seed": 0, "cpu_seconds": 100.0, "start_cpu_seconds": 10.0, "ended_early": False}
    runs = [ours | {"curve": [[10.0, 0.3], [20.0, 0.5]]}, theirs | {"curve": [[50.0, 0.3], [100.0, 0.3]]}]
    ratios = {each["case"]: each["ratio"] for each in compared(runs)}
    assert ratios["seed 0: reward 0.3"] == 0.2
    assert ratios["seed 0: reward 0.4"] is None
    assert ratios["seed 0: until the rollouts of step 2"] == 0.2
    assert ratios["seed 0: all steps"] == 0.4
    assert ratios["seed 0: all steps, without the start"] == pytest.approx(0.333)
    assert compared(runs[:1]) == []
    runs[1]["ended_early"] = True
    assert "seed 0: all steps" not in {each["case"] for each in compared(runs)}
