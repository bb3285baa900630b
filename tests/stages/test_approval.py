"""A promotion that needs approval: asked once, answered once; the question survives the process that asked."""

from __future__ import annotations

import time

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.stages.checkpoint import retain
from roundhouse.stages.promotion import answer, answer_to, open_questions, promote, settle_expired
from roundhouse.store.run import Promoted, Run, load_run, open_run, promoted_version
from roundhouse.store.stage import read_manifest
from tests.stages.test_promotion import evaluated

POOR, GOOD = [0.0] * 20, [1.0] * 20


def asking(tmp_path, **approval: object) -> Run:
    """A run with a version 1 that is better than its start, so that approval is requested."""
    tree = {"run_id": "r", "store": str(tmp_path), "evaluation": {"approval": {"required": True} | approval}}
    run = open_run(parse_config(tree | {"checkpoint": {"keep_last": 1}}))
    evaluated(run, 0, POOR)
    evaluated(run, 1, GOOD)
    promote(run, 0)
    promote(run, 1)
    return run


def test_the_starting_policy_needs_no_yes_and_a_better_version_waits_for_one(tmp_path):
    run = asking(tmp_path)
    assert promoted_version(run) == 0
    assert [question.version for question in open_questions(run)] == [1]
    assert "against version 0" in open_questions(run)[0].why


def test_the_question_stands_after_a_restart_and_is_not_put_twice(tmp_path):
    asked = open_questions(asking(tmp_path))
    again = load_run(str(tmp_path), "r")
    promote(again, 1)
    assert open_questions(again) == asked


def test_a_yes_promotes_and_is_kept_with_its_comment(tmp_path):
    run = asking(tmp_path)
    given = answer(run, 1, True, "looks right", "Ada")
    assert (promoted_version(run), open_questions(run)) == (1, [])
    assert Promoted.model_validate_json(run.location.read("promoted.json")).approval == "approved by Ada: looks right"
    manifest = read_manifest(run.stage(1, "approval").reference())
    assert manifest.details["answer"] == given.model_dump(mode="json")
    assert manifest.inputs == {"decision": run.stage(1, "promote").reference()}


def test_of_two_answers_the_first_counts_and_a_no_promotes_nothing(tmp_path):
    run = asking(tmp_path)
    first = answer(run, 1, False, "too soon", "Ada")
    assert answer(run, 1, True, "now", "Grace") == first
    promote(run, 1)
    assert (promoted_version(run), open_questions(run)) == (0, [])


def test_a_crash_between_answer_and_pointer_is_mended_by_whoever_looks_next(tmp_path):
    run = asking(tmp_path)
    question = (run.location / "questions").read("000001.json")
    answer(run, 1, True, by="Ada")
    run.location.write("promoted.json", run.checkpoint(0).reference().model_dump_json().encode())
    (run.location / "questions").write("000001.json", question)
    assert open_questions(run) == []
    assert promoted_version(run) == 1


@pytest.mark.parametrize(("at_limit", "promoted"), [("refuse", 0), ("approve", 1)])
def test_a_time_limit_answers_when_nobody_does_and_not_before(tmp_path, at_limit, promoted):
    run = asking(tmp_path, timeout_hours=2, on_timeout=at_limit)
    [question] = open_questions(run)
    assert settle_expired(run, question, time.time() + 3600) is None
    given = settle_expired(run, question, time.time() + 7201)
    assert "no answer within 2 hours" in str(given)
    assert answer_to(run, 1) == given
    assert promoted_version(run) == promoted


def test_retention_keeps_what_a_person_has_been_asked_about(tmp_path):
    run = asking(tmp_path)
    for version in (2, 3):
        run.begin(run.checkpoint(version), policy_version=version).commit()
    assert retain(run, 3) == [2]
    answer(run, 1, False)
    assert retain(run, 3) == [1]


def test_an_answer_to_a_question_that_nobody_put_is_refused_with_those_that_wait(tmp_path):
    run = asking(tmp_path)
    with pytest.raises(StoreError, match=r"Version 7 of run r does not wait for approval. Waiting: 1"):
        answer(run, 7, True)
