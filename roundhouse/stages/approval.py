"""Whether a person agrees to a promotion: the question, and the answer.

    <store>/runs/<run>/questions/000010.json            stands open until it is answered
    <store>/runs/<run>/iterations/000010/approval/      the answer: a stage, with the decision it answers as its input

Invariant: a version is asked about once and answered once; of two answers the first wins, and the other is handed it. The
question stands in the store, so it outlives the process that asked, the run and the Prefect server. Nothing is promoted
that needs an approval and has none.
"""

from __future__ import annotations

import getpass
import time
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.errors import StoreError
from roundhouse.store.location import AlreadyExists, NotFound
from roundhouse.store.promoted import point_to_promoted
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest

PLACE = "questions"
STAGE = "approval"


class Question(BaseModel):
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
    """Put the question, unless it stands already."""
    config = run.config.evaluation.approval
    now = time.time()
    until = None if config.timeout_hours is None else now + 3600 * config.timeout_hours
    question = Question(version=version, why=why, asked_at=now, until=until, at_limit=config.on_timeout)
    try:
        (run.location / PLACE).create(_name(version), (question.model_dump_json(indent=1) + "\n").encode())
    except AlreadyExists:
        return


def open_questions(run: Run) -> list[Question]:
    """What waits for an answer, oldest version first."""
    place = run.location / PLACE
    found = []
    for name in place.names():
        try:
            question = Question.model_validate_json(place.read(name))
        except NotFound:  # answered a moment ago, or listed late
            continue
        except ValidationError as error:
            raise StoreError(f"{place.uri}/{name} is damaged: {error}. Delete it; the run asks again.") from error
        if (given := answer_to(run, question.version)) is None:
            found.append(question)
        else:
            _carry_out(run, question.version, given)  # the process that answered ended before this
    return found


def questioned_versions(run: Run) -> list[int]:
    """Versions that wait for an answer, as far as the store lists them; the bucket is asked only where there may be some."""
    if not run.config.evaluation.approval.required:
        return []
    return [int(name.removesuffix(".json")) for name in (run.location / PLACE).names()]


def answer_to(run: Run, version: int) -> ApprovalDecision | None:
    """The answer about a version; None while there is none."""
    reference = run.stage(version, STAGE).reference()
    return None if reference is None else ApprovalDecision.model_validate(read_manifest(reference).details["answer"])


def answer(run: Run, version: int, approved: bool, comment: str = "", by: str | None = None) -> ApprovalDecision:
    """ApprovalDecision the question about a version, and promote it where the answer is yes; the answer that counts.

    Raises:
        StoreError: nobody asked about that version.
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


def settle_expired(run: Run, question: Question, now: float) -> ApprovalDecision | None:
    """The answer that the time limit gives, where it is over."""
    if not question.is_expired(now) or question.until is None:
        return None
    hours = (question.until - question.asked_at) / 3600
    comment = f"nobody answered within {hours:g} hours (evaluation.approval.on_timeout={question.at_limit})"
    return answer(run, question.version, question.at_limit == "approve", comment, by="the time limit")


def _carry_out(run: Run, version: int, given: ApprovalDecision) -> None:
    if given.approved:
        point_to_promoted(run, version, approval=str(given))
    (run.location / PLACE).delete(_name(version))


def _name(version: int) -> str:
    return f"{version:06d}.json"
