"""Promotion: which version of a run to use, and a person's approval.

    <store>/runs/<run>/questions/000010.json            open until it is answered
    <store>/runs/<run>/iterations/000010/approval/      the answer: a stage, with the decision as its input

Approval: a version is asked about once and answered once; of two answers the first wins, and the second caller receives
it. The question is in the store, so it outlives the asking process, the run and the Prefect server. A version that
needs approval is not promoted without it.

Invariant: a version is promoted only if it is better than the promoted one beyond noise, on the same held-out tasks;
the first evaluated version is promoted. The decision with its reason is a stage of the store; `promoted.json` points to
the newest. With `evaluation.approval.required`, a person decides last.

    version    0        10        20          25
    reward     0.23     0.71      0.70        0.92
    decision   first    better    no better   better      against the promoted one each: 0, 10, 10
"""

from __future__ import annotations

import getpass
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.errors import StoreError
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.evaluate import Rewards, paired_difference, rewards_by_task
from roundhouse.store.location import AlreadyExists, NotFound
from roundhouse.store.run import APPROVALS, Run, point_to_promoted, promoted_version
from roundhouse.store.stage import Reference, StageKind, read_manifest

STAGE = "approval"


class PromotionQuestion(BaseModel):
    """A promotion that waits for a person."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    why: str
    """Evidence for it: the difference to the promoted version, with its interval."""
    asked_at: float
    """Seconds since the epoch."""
    until: float | None
    at_limit: Literal["refuse", "approve"]

    def is_expired(self, now: float) -> bool:
        return self.until is not None and now >= self.until


class ApprovalDecision(BaseModel):
    """Answer of a person (or of the time limit)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    approved: bool
    comment: str = ""
    by: str = ""
    at: float

    def __str__(self) -> str:
        comment = f": {self.comment}" if self.comment else ""
        return f"{'approved' if self.approved else 'refused'} by {self.by or 'an unnamed person'}{comment}"


def ask(run: Run, version: int, why: str) -> None:
    """Ask the question, unless it is asked already."""
    config = run.config.evaluation.approval
    now = time.time()
    until = None if config.timeout_hours is None else now + 3600 * config.timeout_hours
    question = PromotionQuestion(version=version, why=why, asked_at=now, until=until, at_limit=config.on_timeout)
    try:
        (run.location / APPROVALS).create(_name(version), (question.model_dump_json(indent=1) + "\n").encode())
    except AlreadyExists:
        return


def open_questions(run: Run) -> list[PromotionQuestion]:
    """Return the open questions, oldest version first."""
    place = run.location / APPROVALS
    questions = []
    for name in place.names():
        try:
            question = PromotionQuestion.model_validate_json(place.read(name))
        except NotFound:  # answered a moment ago, or listed late
            continue
        except ValidationError as error:
            raise StoreError(f"{place.uri}/{name} is damaged: {error}. Delete it; the run asks again.") from error
        if (decision := answer_to(run, question.version)) is None:
            questions.append(question)
        else:
            _carry_out(run, question.version, decision)  # the process that answered ended before this
    return questions


def answer_to(run: Run, version: int) -> ApprovalDecision | None:
    """Return the answer about a version; None while it is open."""
    reference = run.stage(version, STAGE).reference()
    return None if reference is None else ApprovalDecision.model_validate(read_manifest(reference).details["answer"])


def answer(run: Run, version: int, approved: bool, comment: str = "", by: str | None = None) -> ApprovalDecision:
    """Answer the question about a version, promote it if the answer is yes, and return the valid answer.

    Raises:
        StoreError: no question about that version is open.
    """
    decision = run.stage(version, StageKind.PROMOTE).reference()
    if decision is None or not read_manifest(decision).details.get("awaits_approval"):
        waiting = ", ".join(str(question.version) for question in open_questions(run)) or "none"
        raise StoreError(f"Version {version} of run {run.run_id} does not wait for approval. Waiting: {waiting}.")
    if answer_to(run, version) is None:
        new_answer = ApprovalDecision(
            approved=approved, comment=comment, by=getpass.getuser() if by is None else by, at=time.time()
        )
        attempt = run.begin(run.stage(version, STAGE), policy_version=version)
        attempt.commit(inputs={"decision": decision}, details={"answer": new_answer.model_dump(mode="json")})
    earlier = answer_to(run, version)
    assert earlier is not None, "it was committed above, here or by whoever was first"
    _carry_out(run, version, earlier)
    return earlier


def settle_expired(run: Run, question: PromotionQuestion, now: float) -> ApprovalDecision | None:
    """Give the answer of the time limit after it has passed."""
    if not question.is_expired(now) or question.until is None:
        return None
    hours = (question.until - question.asked_at) / 3600
    comment = f"no answer within {hours:g} hours (evaluation.approval.on_timeout={question.at_limit})"
    return answer(run, question.version, question.at_limit == "approve", comment, by="the time limit")


def _carry_out(run: Run, version: int, given: ApprovalDecision) -> None:
    if given.approved:
        point_to_promoted(run, version, approval=str(given))
    (run.location / APPROVALS).delete(_name(version))


def _name(version: int) -> str:
    return f"{version:06d}.json"


def promote(run: Run, version: int) -> Reference | None:
    """Decide about an evaluated version; None when `evaluation.promotion_confidence` is null.

    Raises:
        StoreError: the version was not evaluated.
    """
    confidence = run.config.evaluation.promotion_confidence
    if confidence is None:
        return None
    stage = run.stage(version, StageKind.PROMOTE)
    if (reference := stage.reference()) is None:
        reference = _decide(run, version, confidence)
    details = read_manifest(reference).details
    if details["promoted"]:
        point_to_promoted(run, version)
    elif details.get("awaits_approval") and answer_to(run, version) is None:
        ask(run, version, details["why"])
    return reference


def _decide(run: Run, version: int, confidence: float) -> Reference:
    evaluation = run.stage(version, StageKind.EVALUATE).reference()
    if evaluation is None:
        raise StoreError(f"Version {version} of run {run.run_id} has no evaluation, so that its quality is unknown.")
    attempt = run.begin(run.stage(version, StageKind.PROMOTE), policy_version=version)
    incumbent, rewards = promoted_version(run), _rewards(evaluation)
    against = None if incumbent in (None, version) else run.stage(incumbent, StageKind.EVALUATE).reference()
    before = _rewards(against) if against is not None else {}
    if against is None or not rewards.keys() & before.keys():
        if not rewards:
            verdict = _verdict(run, version, "no rollout of its evaluation has a reward", better=False)
        elif against is None:
            verdict = _verdict(run, version, "the first evaluated version", better=True)
        else:
            reason = f"no task has a reward in this evaluation and in that of version {against.policy_version}"
            verdict = _verdict(run, version, reason, better=False)
        metrics = {"promotion/promoted": float(verdict["promoted"])}
        return attempt.commit(inputs={"evaluation": evaluation}, metrics=metrics, details=verdict)
    difference = paired_difference(rewards, before, confidence)
    why = (
        f"{difference.value:+.3f} against version {against.policy_version}, {confidence:.0%} interval "
        f"{difference.low:+.3f} to {difference.high:+.3f}"
    )
    verdict = _verdict(run, version, why, better=difference.low > 0)
    return attempt.commit(
        inputs={"evaluation": evaluation, "against": against},
        metrics={
            "promotion/promoted": float(verdict["promoted"]),
            "promotion/difference": difference.value,
            "promotion/difference_low": difference.low,
            "promotion/difference_high": difference.high,
        },
        details=verdict,
    )


def _verdict(run: Run, version: int, why: str, *, better: bool) -> dict[str, Any]:
    """Return details of the decision. The run's starting version is in use already and needs no approval."""
    asks = better and run.config.evaluation.approval.required and version != run.first_version
    return {"promoted": better and not asks, "why": why} | ({"awaits_approval": True} if asks else {})


def _rewards(evaluation: Reference) -> Rewards:
    return rewards_by_task(read_rollouts(evaluation))
