"""ATIF: round trips of our rollouts, and documents that are refused with file, line and key."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from roundhouse.errors import DataError
from roundhouse.plugins.atif.reader import read
from roundhouse.plugins.atif.writer import trajectory
from roundhouse.stages.importing import find_format
from roundhouse.trajectories.records import Rollout, Status
from tests.plugins.nemo_gym.exchange.strategies import datasets

METRICS = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}


def document(**keys: Any) -> dict[str, Any]:
    steps = [
        {"step_id": 1, "source": "user", "message": "2*3?"},
        {"step_id": 2, "source": "agent", "message": "6", "metrics": dict(METRICS)},
    ]
    return {"schema_version": "ATIF-v1.6", "agent": {"name": "a", "version": "1"}, "steps": steps, **keys}


def written(directory: Path, *documents: Any) -> Path:
    file = directory / "runs.jsonl"
    file.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in documents))
    return file


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(datasets())
def test_any_rollout_comes_back_from_its_document(rollouts: list[Rollout]) -> None:
    with TemporaryDirectory() as directory:
        file = written(Path(directory), *map(trajectory, rollouts))
        assert read([file], None, 0).rollouts == rollouts


def test_a_foreign_document_keeps_its_text_and_tokens_and_lacks_a_reward(tmp_path: Path) -> None:
    file = written(tmp_path, document(session_id="s", notes="n"), document())
    assert find_format(file)[0] == "atif"
    foreign = read([file], None, 3)
    first, second = foreign.rollouts
    assert (first.status, first.reward, first.failure_code) == (Status.FAILED, None, "no_reward")
    assert (first.group_id, first.sample, second.sample) == (second.group_id, 0, 1), "equal tasks are a group"
    [turn] = first.turns
    assert (turn.prompt_token_ids, turn.generation_token_ids, turn.generation_log_probs) == ([1, 2], [3], [-0.5])
    assert turn.policy_version == 3
    [kept, _] = foreign.tables["foreign"].to_pylist()
    assert kept["place"] == f"{file}, line 1"
    assert {"session_id": "s", "notes": "n"}.items() <= json.loads(kept["fields"]).items()


def test_a_reward_counts_and_tokens_of_several_calls_mask_the_rollout(tmp_path: Path) -> None:
    several = document(final_metrics={"extra": {"reward": 1}})
    several["steps"][1]["llm_call_count"] = 2
    good = document(final_metrics={"extra": {"reward": 0.5}})
    masked, whole = read([written(tmp_path, several, good)], None, 0).rollouts
    assert (masked.status, masked.reward, masked.turns) == (Status.MASKED, 1.0, [])
    assert masked.failure_detail == "step 2 has the tokens of 2 model calls"
    assert (whole.status, whole.reward) == (Status.COMPLETED, 0.5)


def changed(path: str, value: Any) -> str:
    """Return the document with a value at a path."""
    tree = document(trajectory_id="t")
    *parents, leaf = path.split(".")
    node: Any = tree
    for name in parents:
        node = node[int(name)] if name.isdecimal() else node[name]
    node[leaf] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is a list, not a JSON object"),
        (changed("schema_version", "ATIF-v2.0"), "line 2: schema_version is 'ATIF-v2.0'; ATIF-v1.x can be read"),
        (changed("steps", []), "line 2: steps is empty"),
        (changed("steps.1.source", "robot"), "line 2: steps.1.source: .* and is 'robot'"),
        (changed("steps.1.metrics.prompt_token_ids", ["1"]), "steps.1.metrics.prompt_token_ids.0: .* and is '1'"),
        (changed("steps.1.metrics.prompt_token_ids", [2**31]), "steps.1.metrics: .* outside of int32"),
        (changed("steps.1.metrics.logprobs", [-1, -2]), "steps.1.metrics: .*1 generated tokens and 2 log-prob"),
        (changed("steps.1.metrics.logprobs", [float("nan")]), "line 2 is not JSON"),
        (changed("steps.1.message", [{"type": "image", "source": {"media_type": "image/png", "path": "p"}}]), "step 2"),
        (changed("steps.0.timestamp", "yesterday"), "steps.0.timestamp is 'yesterday', not a time"),
        (changed("final_metrics", {"extra": {"reward": "1"}}), "final_metrics.extra.reward is '1', not a number"),
        (changed("extra", {"roundhouse": {"version": 9}}), "extra.roundhouse is damaged"),
        (json.dumps(document(trajectory_id="first")), "line 2: trajectory_id 'first' is that of .*line 1, too"),
    ],
)
def test_a_bad_document_is_refused_with_its_line_and_key(line: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        read([written(tmp_path, document(trajectory_id="first"), line)], None, 0)
