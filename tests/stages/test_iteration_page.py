"""The page of an iteration agrees with its manifests, and a policy's text cannot break it."""

from __future__ import annotations

from roundhouse.config.loading import parse_config
from roundhouse.stages.report import iteration_manifests, iteration_page
from roundhouse.store.run import Run, open_run
from roundhouse.trajectories.records import Rollout, Status, Turn, as_code, as_markdown
from roundhouse.trajectories.schemas import rollouts_table, turns_table


def collected(run: Run, text: str, count: int = 3) -> None:
    turn = Turn(0, None, [1], 1, "d", [2], [-0.1], 0, "stop", 0.1)
    items = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
    rollouts = [
        Rollout("t", sample, {"task_id": "t"}, "e", Status.COMPLETED, reward=0.5, items=items, turns=[turn])
        for sample in range(count)
    ]
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    for part in (rollouts[:2], rollouts[2:]):
        attempt.write_table("turns", turns_table(part))
        attempt.write_table("rollouts", rollouts_table(part))
    attempt.commit(metrics={"reward/mean": 0.5})


def page(run: Run) -> str:
    return iteration_page(run, 1, iteration_manifests(run, 1))


def run_at(tmp_path) -> Run:
    return open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))


def test_outcomes_stages_reasons_and_samples_are_on_the_page(tmp_path):
    run = run_at(tmp_path)
    collected(run, "four")
    validated = run.begin(run.stage(1, "validate"), policy_version=0)
    validated.commit(
        counts={"requested": 3, "completed": 2, "masked": 1},
        details={"reasons": {"text_mismatch": 1}, "failures": {"engine_timeout": 2}},
    )
    found = page(run)
    assert "reward **0.5**" in found
    assert "| rollouts | 3 | 2 | 0 | 0 | 1 | 0 |" in found
    assert "| `text_mismatch` | 1 |" in found
    assert "| failed: `engine_timeout` | 2 |" in found
    assert "**assistant** `four`" in found
    assert "t/0" in found
    assert "t/2" not in found, "only the first part is read"


HOSTILE = "a | b\n\n# Title <script> ``![x](http://a/)"


def test_text_of_a_policy_can_neither_end_a_cell_nor_be_markdown(tmp_path):
    run = run_at(tmp_path)
    collected(run, HOSTILE)
    (row,) = [line for line in page(run).splitlines() if line.startswith("| `t/0` ")]
    assert "``` a \\| b # Title <script> ``![x](http://a/) ```" in row
    collected(run := run_at(tmp_path / "long"), "x" * 390 + HOSTILE)
    (row,) = [line for line in page(run).splitlines() if line.startswith("| `t/0` ")]
    assert row.endswith("a \\| b` |"), "a cut text is code to its end"


def test_a_conversation_is_shown_as_code_whatever_its_parts_contain():
    items = [{"role": HOSTILE, "content": HOSTILE}, {"type": "function_call_output", "output": HOSTILE}]
    rollout = Rollout("t", 0, {"task_id": "t"}, "e", Status.COMPLETED, reward=0.5, items=items)
    code = as_code(HOSTILE)
    assert code == f"``` {' '.join(HOSTILE.splitlines())} ```"
    assert as_markdown(rollout).splitlines()[1:] == [f"- {code} {code}", f"- **tool** {code}"]


def test_an_iteration_without_any_stage_has_a_page(tmp_path):
    assert "iteration 1" in page(run_at(tmp_path))
