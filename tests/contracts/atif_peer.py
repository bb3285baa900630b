"""The side of Harbor, in its own interpreter: `atif_peer.py write DIRECTORY` and `atif_peer.py validate DIRECTORY`."""

import json
import sys
from pathlib import Path

from harbor.models.trajectories import (
    Agent,
    ContentPart,
    FinalMetrics,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    ToolCall,
    Trajectory,
)
from harbor.models.trial.result import TrialResult
from harbor.utils.trajectory_validator import TrajectoryValidator

TOOLS = [{"type": "function", "function": {"name": "run", "description": "Run it.", "parameters": {"type": "object"}}}]


def trajectory(number: int, tokens: bool) -> Trajectory:
    """Return a trajectory of two model calls, the first with a tool call."""
    first = Metrics(prompt_tokens=3, completion_tokens=2, cost_usd=0.5)
    second = Metrics(prompt_tokens=7, completion_tokens=1)
    if tokens:
        first = first.model_copy(
            update={"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5 + number], "logprobs": [-0.5, -1.25]}
        )
        second = second.model_copy(
            update={
                "prompt_token_ids": [1, 2, 3, 4, 5 + number, 9, 9],
                "completion_token_ids": [8],
                "logprobs": [-0.0078125],
            }
        )
    calls = [ToolCall(tool_call_id="c1", function_name="run", arguments={"text": "é", "count": 2})]
    seen = Observation(
        results=[
            ObservationResult(source_call_id="c1", content="done"),
            ObservationResult(content=[ContentPart(type="text", text="a warning")]),
        ]
    )
    stamp = f"2026-11-29T10:00:{number:02d}Z"
    return Trajectory(
        session_id=f"session-{number}",
        trajectory_id=f"trajectory-{number}",
        agent=Agent(name="toy", version="1.0", model_name="policy", tool_definitions=TOOLS),
        steps=[
            Step(step_id=1, source="system", message="Use the tool.", timestamp=stamp),
            Step(step_id=2, source="user", message="Do it."),
            Step(
                step_id=3,
                source="agent",
                message="First.",
                reasoning_content="I must run it.",
                tool_calls=calls,
                observation=seen,
                metrics=first,
                llm_call_count=1,
                extra={"note": 1},
            ),
            Step(step_id=4, source="agent", message="Done.", metrics=second, timestamp="2026-11-29T10:01:00Z"),
        ],
        final_metrics=FinalMetrics(total_steps=4),
    )


def trial(number: int, reward: float | None) -> dict:
    """Return Harbor's record of a trial."""
    task = {"path": "/tasks/toy"}
    result = TrialResult.model_validate(
        {
            "task_name": "toy-task",
            "trial_name": f"toy-task__{number}",
            "trial_uri": f"file:///jobs/{number}",
            "task_id": task,
            "task_checksum": "0",
            "config": {"task": task},
            "agent_info": {"name": "toy", "version": "1.0"},
            "verifier_result": None if reward is None else {"rewards": {"reward": reward, "speed": 0.25}},
        }
    )
    return result.model_dump(mode="json")


def write(directory: Path) -> None:
    """Write a job of three trials, one without a verdict, and a file of trajectories without tokens."""
    for number, reward in enumerate((1.0, 0.0, None)):
        place = directory / "job" / f"toy-task__{number}"
        (place / "agent").mkdir(parents=True)
        document = trajectory(number, tokens=True).to_json_dict()
        (place / "agent" / "trajectory.json").write_text(json.dumps(document, indent=2))
        (place / "result.json").write_text(json.dumps(trial(number, reward), indent=2))
    lines = [json.dumps(trajectory(number, tokens=False).to_json_dict()) for number in range(2)]
    (directory / "plain.jsonl").write_text("\n".join(lines) + "\n")


def validate(directory: Path) -> None:
    """Print the errors of Harbor's validator for each trajectory, and the steps that its model reads."""
    validator, errors, steps = TrajectoryValidator(), [], []
    for file in sorted(directory.glob("*/trajectory.json")):
        if not validator.validate(file):
            errors += validator.errors
            continue
        document = json.loads(file.read_text())
        read = Trajectory.model_validate(document)
        steps.append(len(read.steps))
        assert read.to_json_dict(exclude_none=False)["extra"] == document["extra"]
    print(json.dumps({"errors": errors, "steps": steps}))


if __name__ == "__main__":
    {"write": write, "validate": validate}[sys.argv[1]](Path(sys.argv[2]))
