"""The Gymnasium loop: the world answers every reply with an observation and a reward, until it says that it is over.

Invariant: the rollout's reward is the sum over the steps that were played; a reply that the world did not see has no part in
it. Of a reply's tool calls the world answers those it likes (`tool_outputs`), then its observation follows as a user message.

    completed   the world said `terminated`
    truncated   the world said `truncated` (finish `environment`), or a limit of turns or tokens ended it
"""

from __future__ import annotations

import math
from typing import Any

from roundhouse.environments.base import Verdict
from roundhouse.environments.gymnasium import Step
from roundhouse.rollout.attempt import Attempt
from roundhouse.rollout.dialogue import Dialogue
from roundhouse.rollout.protocol import EpisodeEnvironment, EpisodeSession
from roundhouse.rollout.verdicts import checked_verdict
from roundhouse.trajectories.records import Status


class GymnasiumLoop:
    """The agent of environments that speak the Gymnasium protocol."""

    def __init__(self, environment: EpisodeEnvironment) -> None:
        self._environment = environment

    async def play(self, attempt: Attempt) -> None:
        """From /reset to the end of the episode."""
        dialogue = Dialogue(attempt)
        session, observation = await attempt.in_environment(attempt.tape.reset(self._environment, attempt.rollout.task))
        attempt.session = session
        if observation:
            dialogue.conversation.add_observation(observation)
        rewards: list[float] = []
        finish, last = await _episode(attempt, dialogue, session, rewards)
        rollout = attempt.rollout
        rollout.reward = math.fsum(rewards)
        rollout.metrics = {"agent_steps": float(len(rewards)), **({} if last is None else last.metrics)}
        rollout.finish_reason = finish
        rollout.status = Status.COMPLETED if finish == "stop" else Status.TRUNCATED
        attempt.response = dialogue.response(finish)
        attempt.answer = _answer(attempt, last)


async def _episode(
    attempt: Attempt, dialogue: Dialogue, session: EpisodeSession, rewards: list[float]
) -> tuple[str, Step | None]:
    """Steps until something ends them: its name, and the last step."""
    step: Step | None = None
    for _ in range(attempt.config.max_turns):
        reply = await dialogue.ask()
        if reply is None:
            return "max_tokens", step
        step = await attempt.in_environment(session.step(dialogue.response_of(reply)))
        rewards.append(checked_verdict(Verdict(step.reward, metrics=step.metrics)).reward)
        if step.done:
            return "stop" if step.terminated else "environment", step
        if reply.limit == "max_tokens":
            return "max_tokens", step
        for call_id, text in step.tool_outputs.items():
            dialogue.conversation.add_tool_output(call_id, text)
        if step.observation:
            dialogue.conversation.add_observation(step.observation)
    return "max_turns", step


def _answer(attempt: Attempt, last: Step | None) -> dict[str, Any]:
    """What an agent server answers to /run."""
    return {
        **attempt.rollout.task,
        "response": attempt.response,
        "reward": attempt.rollout.reward,
        "terminated": attempt.rollout.finish_reason == "stop",
        "truncated": attempt.rollout.finish_reason != "stop",
        "info": {} if last is None else last.wire_info(),
    }
