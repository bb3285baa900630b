"""One malformed value in a reply costs its own rollout: it fails by name, and the others are stored and validated."""

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.collection.collector import Parts
from roundhouse.config.loading import parse_config
from roundhouse.config.models import ValidationConfig
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.client import read_completion
from roundhouse.rollout.conversation import TurnChain, chain_calls
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import BadCompletion
from roundhouse.store.run import open_run
from roundhouse.trajectories.records import Status, Turn
from roundhouse.trajectories.schemas import recorded_rollout
from roundhouse.trajectories.validation import CollectionLimits, validate
from tests.trajectories.rollouts import rollout

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**71), 2**71)
    | st.floats()
    | st.sampled_from([-1e308, -9999.0, 10**400, 2**70, -1, "3", "x", "\ud83d", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["version", "tokens", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
CALL_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "version_spans")
WRONG = {
    "text as a log-probability": ("generation_log_probs", ["x", -0.5]),
    "null as a log-probability": ("generation_log_probs", [None, -0.5]),
    "a list as a log-probability": ("generation_log_probs", [[-0.5], -0.5]),
    "a truth value as a token": ("generation_token_ids", [True, 4]),
    "a token beyond int32": ("generation_token_ids", [2**70, 4]),
    "a token as text": ("prompt_token_ids", ["1"]),
    "spans without counts": ("version_spans", [{"version": 0}]),
    "a span with a huge version": ("version_spans", [{"version": 2**70, "tokens": 2}]),
    "spans that are text": ("version_spans", "0"),
}


def call(**changes: Any) -> dict[str, Any]:
    fields = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -0.5]}
    return fields | changes


def completion(version: Any = 0, **changes: Any) -> bytes:
    fields = call(**changes)
    spans = fields.pop("version_spans", None)
    choice = {"message": {"role": "assistant", "content": "hi", **fields}, "finish_reason": "stop"}
    return orjson.dumps({"choices": [choice], "policy_version": version, "version_spans": spans}, default=str)


def added(**fields: Any) -> list[Turn]:
    chain, call_fields = TurnChain(), call(**fields)
    version, spans = call_fields.pop("policy_version", 0), call_fields.pop("version_spans", None)
    chain.add(*call_fields.values(), policy_version=version, finish_reason="stop", version_spans=spans)
    return chain.turns


def verdicts_on(turns: list[Turn]) -> dict[str, int]:
    """The reasons by which validation refuses a rollout of these turns."""
    own = rollout()
    own.turns = turns
    terms = CollectionLimits(10, 0)
    return validate(
        [own], ValidationConfig(min_group_size=1), vocabulary_size=10, policy_version=0, terms=terms
    ).reasons


@pytest.mark.parametrize(("field", "value"), WRONG.values(), ids=WRONG.keys())
def test_each_reader_names_the_malformed_field(field: str, value: Any):
    with pytest.raises(BadCompletion, match=field):
        added(**{field: value})
    chained = chain_calls([{"call": 0, "policy_version": 0, **call(**{field: value})}])
    assert chained.reason == "malformed_tokens"
    assert field in chained.detail
    if value != [2**70, 4] and field != "version_spans":
        with pytest.raises(InfraError, match=field):
            read_completion(completion(**{field: value}), 0.0, "http://engine")


@pytest.mark.parametrize("version", ["3", None, True, 2**31, -1, 1.0, []])
def test_a_policy_version_that_is_no_number_is_a_bad_reply(version: Any):
    with pytest.raises(InfraError, match="policy_version"):
        read_completion(completion(version), 0.0, "http://engine")


@pytest.mark.parametrize(
    "log_probs", [[-9999.0, -0.5], [-1e308, -1e308], [-1e5, 0.0], [0.5, -0.5], [math.nan, -1.0], [-1.0, -math.inf]]
)
def test_a_log_probability_that_no_sampled_token_has_is_refused_by_name(log_probs: list[float]):
    assert verdicts_on(added(generation_log_probs=log_probs)) == {"log_prob_value": 1}


@given(st.dictionaries(st.sampled_from([*CALL_FIELDS, "policy_version"]), JSON, min_size=1))
def test_any_json_in_a_call_is_recorded_and_judged_or_a_typed_failure(changes: dict[str, Any]):
    try:
        turns = added(**changes)
    except DataError:
        return
    own = rollout()
    own.turns = turns
    assert recorded_rollout(own)[0] is own
    verdicts_on(turns)


def test_a_rollout_that_no_table_holds_is_a_failure_and_the_others_stay(tmp_path: Path):
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    parts = Parts(run.begin(run.stage(1, "collect"), policy_version=0), 0)
    bad = rollout(sample=1)
    bad.task = {"task_id": "g", "when": {1, 2}}
    failed = parts.add(bad)
    assert (failed.status, failed.failure_code, failed.reward) == (Status.FAILED, "unstorable_rollout", None)
    assert "set is not JSON serializable" in failed.failure_detail
    parts.add(rollout(sample=0))
    parts.flush()
    again = Parts(run.begin(run.stage(1, "collect"), policy_version=0), 0)
    assert again.finished([RolloutSpec("g", sample, {}, 0) for sample in (0, 1)]) == {"g/0"}


def test_an_error_in_judging_one_rollout_refuses_that_rollout():
    bad, good = rollout(sample=0), rollout(sample=1)
    bad.turns[0].generation_log_probs = [None, -0.5]  # as a store of an earlier version may hold
    config = ValidationConfig(min_group_size=1)
    result = validate([bad, good], config, vocabulary_size=10, policy_version=0)
    assert result.reasons == {"malformed": 1}
    assert result.sequences["rollout_id"].to_pylist() == ["g/1"]
