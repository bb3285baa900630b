"""Promotion: which version of a run is the one to use, and whether a person agrees.

    <store>/runs/<run>/questions/000010.json            open until it is answered
    <store>/runs/<run>/iterations/000010/approval/      the answer: a stage, with the decision it answers as its input

Approval: a version is asked about once and answered once; of two answers the first wins, and the other is handed it. The
question is in the store, so it outlives the process that asked, the run and the Prefect server. Nothing is promoted that
needs an approval and has none.

Invariant: a version is promoted only when it is better than the promoted one beyond noise, on the same held-out tasks; the
first evaluated version is. What was decided and why is a stage of the store; `promoted.json` points to the newest. Where
`evaluation.approval.required`, a person has the last word.

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
    """What speaks for it: the difference to the promoted version, with its interval."""
    asked_at: float
    """Seconds since the epoch."""
    until: float | None
    at_limit: Literal["refuse", "approve"]

    def is_expired(self, now: float) -> bool:
        return self.until is not None and now >= self.until


class ApprovalDecision(BaseModel):
    """What a person (or the time limit) said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    approved: bool
    comment: str = ""
    by: str = ""
    at: float

    def __str__(self) -> str:
        said = f": {self.comment}" if self.comment else ""
        return f"{'approved' if self.approved else 'refused'} by {self.by or 'somebody'}{said}"


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
    """What waits for an answer, oldest version first."""
    place = run.location / APPROVALS
    found = []
    for name in place.names():
        try:
            question = PromotionQuestion.model_validate_json(place.read(name))
        except NotFound:  # answered a moment ago, or listed late
            continue
        except ValidationError as error:
            raise StoreError(f"{place.uri}/{name} is damaged: {error}. Delete it; the run asks again.") from error
        if (given := answer_to(run, question.version)) is None:
            found.append(question)
        else:
            _carry_out(run, question.version, given)  # the process that answered ended before this
    return found


def answer_to(run: Run, version: int) -> ApprovalDecision | None:
    """The answer about a version; None while there is none."""
    reference = run.stage(version, STAGE).reference()
    return None if reference is None else ApprovalDecision.model_validate(read_manifest(reference).details["answer"])


def answer(run: Run, version: int, approved: bool, comment: str = "", by: str | None = None) -> ApprovalDecision:
    """Answer the question about a version, and promote it where the answer is yes; the answer that counts.

    Raises:
        StoreError: there is no question about that version.
    """
    decision = run.stage(version, StageKind.PROMOTE).reference()
    if decision is None or not read_manifest(decision).details.get("awaits_approval"):
        waiting = ", ".join(str(question.version) for question in open_questions(run)) or "none"
        raise StoreError(f"Version {version} of run {run.run_id} waits for no approval. Those that do: {waiting}.")
    if answer_to(run, version) is None:
        given = ApprovalDecision(
            approved=approved, comment=comment, by=getpass.getuser() if by is None else by, at=time.time()
        )
        attempt = run.begin(run.stage(version, STAGE), policy_version=version)
        attempt.commit(inputs={"decision": decision}, details={"answer": given.model_dump(mode="json")})
    found = answer_to(run, version)
    assert found is not None, "it was committed above, here or by whoever was first"
    _carry_out(run, version, found)
    return found


def settle_expired(run: Run, question: PromotionQuestion, now: float) -> ApprovalDecision | None:
    """The answer that the time limit gives, where it is over."""
    if not question.is_expired(now) or question.until is None:
        return None
    hours = (question.until - question.asked_at) / 3600
    comment = f"nobody answered within {hours:g} hours (evaluation.approval.on_timeout={question.at_limit})"
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
        StoreError: the version has no evaluation.
    """
    confidence = run.config.evaluation.promotion_confidence
    if confidence is None:
        return None
    stage = run.stage(version, StageKind.PROMOTE)
    if (done := stage.reference()) is None:
        done = _decide(run, version, confidence)
    details = read_manifest(done).details
    if details["promoted"]:
        point_to_promoted(run, version)
    elif details.get("awaits_approval") and answer_to(run, version) is None:
        ask(run, version, details["why"])
    return done


def _decide(run: Run, version: int, confidence: float) -> Reference:
    evaluation = run.stage(version, StageKind.EVALUATE).reference()
    if evaluation is None:
        raise StoreError(f"Version {version} of run {run.run_id} has no evaluation: nothing says how good it is.")
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
    """Details of the decision. What the run starts from is in use already, and needs no approval."""
    asks = better and run.config.evaluation.approval.required and version != run.first_version
    return {"promoted": better and not asks, "why": why} | ({"awaits_approval": True} if asks else {})


def _rewards(evaluation: Reference) -> Rewards:
    return rewards_by_task(read_rollouts(evaluation))
