"""Rollouts and foreign rows of every shape that the formats allow."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from roundhouse.plugins.nemo_gym.exchange.outgoing import OWN, input_items
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn, digest_tokens

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
log_probs = st.floats(-50, 0, width=32)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=4)
leaves = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=3
)
contested = st.sampled_from(
    [OWN, "reward", "response", "metrics", "reward_components", "mask_sample", "agent_ref", "_ng_task_index",
     "_ng_rollout_index", "_ng_failure_class", "question", "task_id"]
)  # fmt: skip
numbers = st.dictionaries(texts, floats, max_size=3)

messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": texts})
replies = st.one_of(
    st.fixed_dictionaries({"type": st.just("message"), "role": st.just("assistant"), "content": texts}),
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": texts, "name": texts, "arguments": texts}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "summary": st.just([])}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": texts, "output": texts}),
    st.fixed_dictionaries({"type": texts, "anything": values}),
)
params = st.fixed_dictionaries({"input": texts | st.lists(messages, max_size=2)}, optional={"temperature": floats})
tasks = st.builds(
    lambda fields, given: {**fields, **({} if given is None else {"responses_create_params": given})},
    st.dictionaries(contested, values, max_size=4),
    params | st.none(),
)


@st.composite
def turn_lists(draw: st.DrawFn) -> list[Turn]:
    """Turns that continue one another, begin anew, or branch; a digest may be wrong, as after a break."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(0, 3))):
        generated = draw(st.lists(st.integers(0, 99), max_size=3))
        turns.append(
            Turn(
                turn=number,
                parent=draw(st.none() | st.integers(0, number - 1)) if number else None,
                prompt_token_ids=draw(token_lists),
                prompt_length=draw(st.integers(0, 99)),
                prompt_digest=digest_tokens(draw(token_lists)),
                generation_token_ids=generated,
                generation_log_probs=draw(st.lists(log_probs, min_size=len(generated), max_size=len(generated))),
                policy_version=draw(st.integers(0, 9)),
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                latency_seconds=draw(floats),
                trained=draw(st.booleans()),
            )
        )
    return turns


@st.composite
def rollouts(draw: st.DrawFn, group: int, sample: int) -> Rollout:
    task = draw(tasks)
    status = draw(st.sampled_from(Status))
    begin = input_items(task) if draw(st.booleans()) else draw(st.lists(replies, max_size=1))
    return Rollout(
        group_id=f"group {group}",
        sample=sample,
        task=task,
        environment=draw(texts),
        status=status,
        attempt=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**31 - 1)),
        reward=draw(floats) if status.rewarded else None,
        reward_components=draw(numbers),
        metrics=draw(numbers),
        items=begin + draw(st.lists(replies, max_size=5)),
        turns=draw(turn_lists()),
        finish_reason=draw(texts),
        failure_kind=draw(st.none() | st.sampled_from(FailureKind)),
        failure_code=draw(texts),
        failure_detail=draw(texts),
        started_at=draw(st.floats(0, 2e9)),
        seconds=draw(floats),
    )


@st.composite
def datasets(draw: st.DrawFn) -> list[Rollout]:
    """Rollouts in the order in which they were finished."""
    made = [draw(rollouts(group, sample)) for group in range(draw(st.integers(1, 2))) for sample in range(2)]
    return draw(st.permutations(made))


token_fields = st.one_of(
    st.fixed_dictionaries(
        {"prompt_token_ids": token_lists, "generation_token_ids": token_lists,
         "generation_log_probs": st.lists(floats, max_size=3)},
        optional={"routed_experts": st.none()},
    ),
    st.fixed_dictionaries({"prompt_token_ids": st.none(), "generation_token_ids": values, "generation_log_probs": values}),
    st.just({}),
)  # fmt: skip
foreign_items = st.builds(lambda item, tokens: {**item, **tokens}, replies, token_fields)
responses = st.fixed_dictionaries(
    {"output": st.lists(foreign_items, max_size=4) | values, "status": st.sampled_from(["completed", "incomplete"])},
    optional={"usage": values, "id": texts},
)
foreign_fields = st.fixed_dictionaries(
    {},
    optional={
        "responses_create_params": params | values,
        "response": responses | values,
        "reward": floats | integers | values,
        "reward_components": values | numbers,
        "metrics": values | numbers,
        "mask_sample": st.booleans(),
        "_ng_failure_class": texts,
        "_ng_failure_terminal": st.booleans(),
        "agent_ref": st.just({"type": "responses_api_agents", "name": "agent"}) | values,
        "_ng_attempt_index": st.integers(0, 3) | values,
        "ng_trajectory": values,
    },
)


@st.composite
def foreign_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Lines of a rollouts file that another program wrote."""
    rows = draw(st.lists(foreign_fields, min_size=1, max_size=4))
    extra = draw(st.dictionaries(texts.filter(lambda name: name != OWN), values, max_size=2))
    stamped = draw(st.booleans())
    stamps = [
        {"_ng_task_index": place // 2, "_ng_rollout_index": place % 2} if stamped else {} for place in range(len(rows))
    ]
    return [{**extra, **row, **stamp} for row, stamp in zip(rows, stamps, strict=True)]
