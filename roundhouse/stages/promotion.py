"""Promotion: which version of a run is the one to use.

Invariant: a version is promoted only when it is better than the promoted one beyond noise, on the same held-out tasks; the
first evaluated version is. What was decided and why is a stage of the store; `promoted.json` points to the newest. Where
`evaluation.approval.required`, a person has the last word (`roundhouse.stages.approval`).

    version    0        10        20          25
    reward     0.23     0.71      0.70        0.92
    decision   first    better    no better   better      against the promoted one each: 0, 10, 10
"""

from __future__ import annotations

from typing import Any

from roundhouse.errors import StoreError
from roundhouse.stages.approval import answer_to, ask
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.estimates import Rewards, paired_difference
from roundhouse.stages.evaluate import rewards_by_task
from roundhouse.store.manifest import Reference
from roundhouse.store.promoted import point_to_promoted, promoted_version
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest


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
        verdict = _without_comparison(run, version, rewards, against)
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


def _without_comparison(run: Run, version: int, rewards: Rewards, against: Reference | None) -> dict[str, Any]:
    """It is the first, or rollouts of the evaluations failed. Nothing is promoted unmeasured."""
    if not rewards:
        return _verdict(run, version, "no rollout of its evaluation has a reward", better=False)
    if against is None:
        return _verdict(run, version, "the first evaluated version", better=True)
    why = f"no task has a reward in this evaluation and in that of version {against.policy_version}"
    return _verdict(run, version, why, better=False)


def _verdict(run: Run, version: int, why: str, *, better: bool) -> dict[str, Any]:
    """Details of the decision. What the run starts from is in use already, and needs nobody's agreement."""
    asks = better and run.config.evaluation.approval.required and version != run.first_version
    return {"promoted": better and not asks, "why": why} | ({"awaits_approval": True} if asks else {})


def _rewards(evaluation: Reference) -> Rewards:
    return rewards_by_task(read_rollouts(evaluation))
