"""Read ATIF: one trajectory a file, as Harbor writes it, or one a line.

Invariants: a trajectory is one rollout, an agent's step with token IDs of prompt and completion is one turn. The prompt of a
step is whole in the file; a turn stores the tokens that it adds. A step of several model calls has no turn, since its tokens
cannot be assigned, and its rollout is masked. A document that Roundhouse wrote becomes the same rollout again.

    jobs/<job>/<trial>/agent/trajectory.json     the trajectory
    jobs/<job>/<trial>/result.json               its task and reward: ATIF itself has neither

Rollouts of one task are a group: of a trial, the task's name; otherwise, equal conversations before the first reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from roundhouse.errors import DataError
from roundhouse.plugins.atif.document import OWN, OWN_VERSION, Step, Trajectory, items_of
from roundhouse.rollout.conversation import TurnChain
from roundhouse.rollout.responses import Item
from roundhouse.trajectories.foreign_files import (
    NO_REWARD,
    ForeignModel,
    ForeignRollouts,
    Head,
    Identities,
    Reader,
    Row,
    checked,
    digest_id,
    documents,
    foreign_table,
)
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn

SCALARS = tuple(
    field.name
    for field in fields(Rollout)
    if field.name not in ("task", "status", "failure_kind", "reward", "reward_components", "metrics", "items", "turns")
)
"""Fields of a rollout that `extra.roundhouse` holds unchanged."""
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TURN_SCALARS = tuple(field.name for field in fields(Turn) if field.name not in TOKENS)
"""The same of a turn."""


HELD = frozenset(
    {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics"}
    | {"prompt_token_ids", "completion_token_ids", "logprobs"}
)
"""Keys of a step and of its metrics that become items and turns."""


class _Verdict(ForeignModel):
    rewards: dict[str, float] | None = None


class _Exception(ForeignModel):
    exception_type: str
    exception_message: str = ""


class Trial(ForeignModel):
    """Harbor's record of a trial."""

    task_name: str
    trial_name: str
    verifier_result: _Verdict | None = None
    exception_info: _Exception | None = None
    reward_valid: bool = True


def read(files: Sequence[Path], options: None, policy_version: int) -> ForeignRollouts:
    """Read trajectories (`reader.atif`).

    Raises:
        DataError: a document is not a trajectory, or has the ID of another one.
    """
    identities = Identities()
    rollouts: list[Rollout] = []
    foreign: list[tuple[str, str, Row]] = []
    subagents = 0
    for file in files:
        trial = _trial_of(file)
        for place, document in documents(file):
            trajectory = checked(Trajectory, document, place)
            _refuse_version(trajectory, place)
            identities.register("trajectory_id", trajectory.trajectory_id, place)
            own = (trajectory.extra or {}).get(OWN)
            try:
                if own is not None:
                    rollout = _own_rollout(trajectory, own, place)
                else:
                    rollout = _foreign_rollout(trajectory, trial, identities, policy_version)
                    foreign.append((rollout.rollout_id, place, _remainder(document, trial)))
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
            rollouts.append(rollout)
            subagents += len(trajectory.subagent_trajectories or [])
    note = f"{subagents} trajectories of subagents are kept in the table foreign, not as rollouts." if subagents else ""
    return ForeignRollouts(rollouts, foreign_table(foreign) if foreign else {}, note)


def _refuse_version(trajectory: Trajectory, place: str) -> None:
    if not trajectory.schema_version.startswith("ATIF-v1."):
        raise DataError(f"{place}: schema_version is {trajectory.schema_version!r:.80}; ATIF-v1.x can be read.")
    if not trajectory.steps:
        raise DataError(f"{place}: steps is empty. Remove the document.")


def _trial_of(file: Path) -> Trial | None:
    for place in _companions(file):
        if place.is_file():
            where, row = next(documents(place), (str(place), None))
            return checked(Trial, row, where)
    return None


def _companions(file: Path) -> list[Path]:
    return [file.parent.parent / "result.json"] if file.parent.name == "agent" else []


def _foreign_rollout(
    trajectory: Trajectory, trial: Trial | None, identities: Identities, policy_version: int
) -> Rollout:
    steps, by_step = trajectory.steps, items_of(trajectory.steps)
    first = next((index for index, step in enumerate(steps) if step.source == "agent"), len(steps))
    task: dict[str, Any] = {"input": [item for items in by_step[:first] for item in items]}
    if trajectory.agent.tool_definitions:
        task["tools"] = [_flat_tool(tool) for tool in trajectory.agent.tool_definitions]
    task_id = trial.task_name if trial is not None else digest_id("task", task)
    chain, several = _turns(steps, policy_version)
    times = [_seconds(step) for step in steps if step.timestamp is not None]
    rollout = Rollout(
        group_id=task_id,
        sample=identities.next_sample(task_id),
        task={"task_id": task_id, "responses_create_params": task},
        environment=trajectory.agent.name,
        status=Status.COMPLETED,
        items=[item for items in by_step for item in items],
        turns=chain.turns,
        finish_reason="stop",
        started_at=min(times, default=0.0),
        seconds=max(times, default=0.0) - min(times, default=0.0),
    )
    _judge(rollout, trajectory, trial)
    if several and rollout.status.counted:
        rollout.status, rollout.failure_code, rollout.failure_detail = Status.MASKED, "malformed_token_fields", several
    return rollout


def _judge(rollout: Rollout, trajectory: Trajectory, trial: Trial | None) -> None:
    """Set the outcome: of a trial, its verdict; otherwise a number `reward` in `final_metrics.extra`."""
    failure = None if trial is None else trial.exception_info
    rewards: dict[str, Any] = {}
    if trial is not None and trial.reward_valid and trial.verifier_result is not None:
        rewards = dict(trial.verifier_result.rewards or {})
    elif trial is None and trajectory.final_metrics is not None:
        value = (trajectory.final_metrics.extra or {}).get("reward")
        rewards = {} if value is None else {"reward": value}
    reward = rewards.pop("reward", None) if len(rewards) != 1 else rewards.popitem()[1]
    if reward is None:
        rollout.status, rollout.failure_kind, rollout.finish_reason = Status.FAILED, FailureKind.DATA, ""
        rollout.failure_code = NO_REWARD if failure is None else failure.exception_type
        rollout.failure_detail = "the file has no reward" if failure is None else failure.exception_message
        return
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise DataError(f"final_metrics.extra.reward is {reward!r:.80}, not a number. Correct or remove it.")
    rollout.reward = float(reward)
    rollout.metrics = {name: float(value) for name, value in rewards.items()}
    if failure is not None:  # judged although it ended early
        rollout.status, rollout.finish_reason = Status.TRUNCATED, "environment"


def _turns(steps: Sequence[Step], policy_version: int) -> tuple[TurnChain, str]:
    """Return the turns of the steps with tokens, and the reason if the tokens of a step cannot be assigned to one call."""
    chain, several = TurnChain(), ""
    for step in steps:
        metrics = step.metrics
        if metrics is None or metrics.prompt_token_ids is None or not metrics.completion_token_ids:
            continue
        if (step.llm_call_count or 1) > 1:
            several = f"step {step.step_id} has the tokens of {step.llm_call_count} model calls"
            continue
        try:
            turn = chain.add(
                metrics.prompt_token_ids,
                metrics.completion_token_ids,
                metrics.logprobs or [],
                policy_version=policy_version,
                finish_reason="tool_calls" if step.tool_calls else "stop",
            )
        except DataError as error:
            raise DataError(f"steps.{step.step_id - 1}.metrics: {error}") from None
        turn.trained = not step.is_copied_context
    return chain, several


def _flat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return {"type": "function", **(function if isinstance(function, dict) else tool)}


def _seconds(step: Step) -> float:
    assert step.timestamp is not None, "asked of steps with one"
    try:
        return datetime.fromisoformat(step.timestamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise DataError(
            f"steps.{step.step_id - 1}.timestamp is {step.timestamp!r:.80}, not a time of ISO 8601. Correct or remove it."
        ) from None


def _remainder(document: Row, trial: Trial | None) -> Row:
    """Return the fields of a document, its steps and their metrics that the rollout does not hold."""
    rest = {name: value for name, value in document.items() if name not in ("steps", "schema_version")}
    steps = []
    for step in document["steps"]:
        own = {name: value for name, value in step.items() if name not in HELD}
        if metrics := {name: value for name, value in (step.get("metrics") or {}).items() if name not in HELD}:
            own["metrics"] = metrics
        steps.append(own)
    if any(steps):
        rest["steps"] = steps
    if trial is not None:
        rest["trial_name"] = trial.trial_name
    return rest


def _own_rollout(trajectory: Trajectory, own: Any, place: str) -> Rollout:
    """Return the rollout of a document that the writer made.

    Raises:
        DataError: `extra.roundhouse` does not describe a rollout.
    """
    try:
        if own["version"] != OWN_VERSION:
            raise ValueError(f"version {own['version']!r}")
        verdict = (None if trajectory.final_metrics is None else trajectory.final_metrics.extra) or {}
        return Rollout(
            **{name: own[name] for name in SCALARS},
            task=own["task"],
            status=Status(own["status"]),
            failure_kind=FailureKind(own["failure_kind"]) if own["failure_kind"] else None,
            reward=verdict.get("reward"),
            reward_components=verdict.get("reward_components", {}),
            metrics=verdict.get("metrics", {}),
            items=_own_items(trajectory.steps, own["items"]),
            turns=_own_turns(trajectory.steps, own["turns"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"extra.{OWN} is damaged: {error!r}. Remove the key to read a foreign trajectory.") from None


def _own_items(steps: Sequence[Step], changes: Any) -> list[Item]:
    if isinstance(changes, list):
        return changes
    items = [item for own in items_of(steps) for item in own]
    for index, change in changes.items():
        item = items[int(index)]
        items[int(index)] = {name: value for name, value in item.items() if name not in change["drop"]} | change["set"]
    return items


def _own_turns(steps: Sequence[Step], records: list[Row]) -> list[Turn]:
    turns: list[Turn] = []
    prompts: list[list[int]] = []
    for record in records:
        if record["step"] is None:
            prompt, generated, log_probs = (record[name] for name in TOKENS)
        else:
            metrics = steps[record["step"]].metrics
            assert metrics is not None, "the writer puts the tokens there"
            prompt, generated, log_probs = (
                metrics.prompt_token_ids,
                metrics.completion_token_ids,
                metrics.logprobs or [],
            )
        parent = record["parent"]
        known = 0 if parent is None else len(prompts[parent]) + len(turns[parent].generation_token_ids)
        prompts.append(prompt)
        tokens = dict(zip(TOKENS, (prompt[known:], generated, log_probs), strict=True))
        turns.append(Turn(**{name: record[name] for name in TURN_SCALARS}, **tokens))
    return turns


def _is_trajectory(head: Head) -> bool:
    return str(head.row.get("schema_version", "")).startswith("ATIF-v")


READER = Reader(_is_trajectory, "**/trajectory.json", _companions)
