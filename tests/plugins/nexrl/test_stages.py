"""A worker in a run: the collect and validate stages treat its rollouts as any other."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_table
from tests.stages.scripted_engine import ScriptedEngine

WORKSPACE = Path(__file__).parent / "recipe" / "quiz" / "agent_workspace"


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """Engine that gives the fixed answer "The answer is 7." to each request."""
    with ScriptedEngine().serving() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Run:
    truths = ["The answer is 7.", "The answer is 8.", "the ANSWER is 7."]
    items = [{"prompt": "3+4?", "question": "3+4?", "ground_truth": truth} for truth in truths]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    environment = {
        "kind": "worker",
        "worker": "simple",
        "evaluator": "evaluator.py:QuizEvaluator",
        "workspace": str(WORKSPACE),
        "train_data": str(tmp_path / "items.jsonl"),
    }
    tree = {"run_id": "r", "store": str(tmp_path / "store"), "environment": environment}
    return open_run(
        parse_config(
            {
                **tree,
                "policy": {"kind": "pretrained", "path": "m"},
                "rollout": {"prompts_per_iteration": 3, "group_size": 4},
            }
        )
    )


def test_a_workers_rollouts_are_collected_validated_and_become_sequences(run: Run, engine: ScriptedEngine) -> None:
    weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
    collected = collect_iteration(run, 1, weights, engine.url)
    rows = read_table(collected, "rollouts").to_pylist()
    assert [row["reward"] for row in sorted(rows, key=lambda row: row["rollout_id"])] == [1.0] * 4 + [0.0] * 4 + [
        1.0
    ] * 4
    assert {row["environment"] for row in rows} == {"simple"}
    validated = validate_iteration(run, 1, collected, 10)
    assert (validated.counts["sequences"], validated.counts["completed"]) == (12, 12)
    sequence = read_table(validated, "sequences").to_pylist()[0]
    assert (sequence["token_ids"], sequence["loss_mask"]) == ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
