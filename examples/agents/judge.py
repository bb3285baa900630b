"""The verifier of the agents in this directory: `environment.verifier: examples/agents/judge.py:judge`."""

from typing import Any


def judge(task: dict[str, Any], outcome: Any) -> float:
    """Return 1 if the program's last line is the answer."""
    return float(outcome.output.strip().splitlines()[-1:] == [task["answer"]])
