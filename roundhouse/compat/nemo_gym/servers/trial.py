"""Trying an environment without a policy: what would its verifier say of this answer?

Invariant: the environment sees what it sees in a rollout: a session, tool calls, a Responses object.

    verdict = await attempt(LocalEnvironmentClient(Words()), row, "enigne")
"""

from __future__ import annotations

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.rollout.protocol import ToolEnvironment, checked_verdict
from roundhouse.rollout.responses import assistant_items, response_object


async def attempt(environment: ToolEnvironment, row: TaskRow, text: str) -> Verdict:
    """The verdict on a rollout that says `text` and calls no tool.

    Raises:
        InfraError, DataError: as in a rollout.
    """
    session = await environment.seed_session(row)
    try:
        items = assistant_items({"role": "assistant", "content": text}, "msg_trial")
        response = response_object("resp_trial", items, model="none", created_at=0.0)
        return checked_verdict(await session.verify(response))
    finally:
        if session.needs_close:
            await session.close()
