import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.environments import Calculator
from roundhouse.environments.calculator import evaluate
from tests.gym.environments.playing import judge, message, replay, tool_call

CALCULATOR = Calculator()
ROW = next(row for row in [*CALCULATOR.tasks("train"), *CALCULATOR.tasks("heldout")] if row["answer"] == 17)


async def test_the_right_sentence_alone_is_rewarded() -> None:
    assert (await judge(CALCULATOR, ROW, message("The answer is 17."))).reward == 1.0


@pytest.mark.parametrize(
    "text",
    ["The answer is 18.", "The answer is 17", "The answer is 17.0.", "The answer is 17. ", "the answer is 17.", "17", "",
     "The answer is 117.", "The answer is 17. The answer is 18.", "The answer is 1 7."],
)  # fmt: skip
async def test_near_misses_are_not_rewarded(text: str) -> None:
    assert (await judge(CALCULATOR, ROW, message(text))).reward == 0.0


async def test_an_answer_beside_a_last_tool_call_does_not_count() -> None:
    assert (await judge(CALCULATOR, ROW, message("The answer is 17."), tool_call())).reward == 0.0
    assert (await judge(CALCULATOR, ROW)).reward == 0.0


async def test_only_the_last_message_counts() -> None:
    verdict = await judge(CALCULATOR, ROW, message("The answer is 17."), tool_call(), message("The answer is 3."))
    assert verdict.reward == 0.0


async def test_a_row_without_an_answer_cannot_be_judged() -> None:
    with pytest.raises(KeyError):
        await judge(CALCULATOR, {"task_id": "x"}, message("The answer is 17."))


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_one_operator_is_calculated(left: int, right: int, operator: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
    assert evaluate(f"{left}{operator}{right}") == str(expected)


@pytest.mark.parametrize(
    "expression",
    ["", "3", "3*", "3*4+5", "(3*4)", "3**4", "3 4", "7/2", "7/0", "1e3*2", "0x1*2", "__import__('os')", "3*4;", "3.5*2",
     "9999999999*9999999999", "٣*٤", "3*4\n+1"],
)  # fmt: skip
def test_anything_else_is_an_error(expression: str) -> None:
    assert evaluate(expression) == "error"


@given(st.text())
def test_no_text_breaks_the_tool(expression: str) -> None:
    assert evaluate(expression) == "error" or int(evaluate(expression)) is not None


async def test_the_tool_stops_answering_after_three_calls_and_counts() -> None:
    session = await CALCULATOR.seed_session(ROW)
    tool = CALCULATOR.tools()["calculate"]
    results = [await tool.call(session, expression=text) for text in ("3*4", "nonsense", "12+5", "1+1")]
    assert results == ["12", "error", "17", "error"]
    verdict = await CALCULATOR.verify(session, ROW, {"output": [message("The answer is 17.")]})
    assert verdict.metrics == {"tool_calls": 4.0, "tool_errors": 2.0}


async def test_rollouts_do_not_share_their_tally() -> None:
    first, second = await CALCULATOR.seed_session(ROW), await CALCULATOR.seed_session(ROW)
    await CALCULATOR.tools()["calculate"].call(first, expression="1+1")
    assert (first.calls, second.calls) == (1, 0)


def procedure(conversation: list[dict]) -> str:
    a, rest = conversation[0]["content"].removeprefix("What is ").removesuffix("?").split("*")
    b, c = rest.split("+")
    calls = [
        json.loads(call["function"]["arguments"])["expression"]
        for said in conversation
        for call in said.get("tool_calls", [])
    ]
    product = int(a) * int(b)
    if calls == [f"{a}*{b}", f"{product}+{c}"]:
        return "right"
    if not calls:
        return "guess"
    assert calls == [f"{a}*{b}"]
    return "stop" if conversation[-1]["content"] == f"The answer is {product}." else "head"


def test_demonstrations_mix_the_procedures_as_asked() -> None:
    found = Counter(map(procedure, CALCULATOR.demonstrations("train", 1000, 0.25, seed=3)))
    assert found == {"right": 250, "guess": 340, "stop": 260, "head": 150}
    assert set(map(procedure, CALCULATOR.demonstrations("train", 50, 1.0, seed=3))) == {"right"}
    assert "right" not in set(map(procedure, CALCULATOR.demonstrations("train", 50, 0.0, seed=3)))


def test_demonstrations_never_show_a_held_out_problem() -> None:
    heldout = {row["responses_create_params"]["input"][0]["content"] for row in CALCULATOR.tasks("heldout")}
    shown = {conversation[0]["content"] for conversation in CALCULATOR.demonstrations("train", 4000, 0.25, seed=0)}
    assert not shown & heldout
    assert len(shown) > 650


def test_demonstrations_depend_on_the_seed_alone() -> None:
    assert CALCULATOR.demonstrations("train", 20, 0.25, seed=1) == Calculator().demonstrations(
        "train", 20, 0.25, seed=1
    )
    assert CALCULATOR.demonstrations("train", 20, 0.25, seed=1) != CALCULATOR.demonstrations("train", 20, 0.25, seed=2)


async def test_the_right_procedure_is_always_rewarded_and_shows_what_the_tool_really_answers() -> None:
    rows = {row["responses_create_params"]["input"][0]["content"]: row for row in CALCULATOR.tasks("train")}
    for conversation in CALCULATOR.demonstrations("train", 100, 1.0, seed=5):
        assert (await replay(CALCULATOR, rows[conversation[0]["content"]], conversation)).reward == 1.0


async def test_the_wrong_procedures_are_hardly_ever_rewarded() -> None:
    rows = {row["responses_create_params"]["input"][0]["content"]: row for row in CALCULATOR.tasks("train")}
    demonstrations = CALCULATOR.demonstrations("train", 400, 0.0, seed=5)
    rewards = [(await replay(CALCULATOR, rows[shown[0]["content"]], shown)).reward for shown in demonstrations]
    assert sum(rewards) / len(rewards) < 0.05
