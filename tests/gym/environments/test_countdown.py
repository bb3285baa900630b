from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.environments.single_turn import Countdown, value_of
from tests.gym.environments.playing import judge, message, tool_call

COUNTDOWN = Countdown(problems=50)
ROW = {"numbers": [3, 5, 8], "target": 6}


@pytest.mark.parametrize("text", ["3+(8-5)", "8-5+3", " 3 + 8 - 5 ", "(8-5)+3"])
async def test_any_expression_with_the_target_as_value_is_rewarded(text: str) -> None:
    assert (await judge(COUNTDOWN, ROW, message(text))).reward == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [("8-5", 0.1), ("3", 0.1), ("3+3", 0.0), ("6", 0.0), ("3+(8-5)=6", 0.0), ("3/(8-8)", 0.0), ("-3", 0.0),
     ("3**5", 0.0), ("abs(3)", 0.0), ("3.0+8-5", 0.0), ("", 0.0), ("True", 0.0), ("(" * 150 + "3" + ")" * 150, 0.0),
     ("__import__('os')", 0.0), ("3 8", 0.0), ("'3'", 0.0), ("3+8-5\n", 1.0), ("[3][0]", 0.0), ("3\0", 0.0)],
)  # fmt: skip
async def test_form_alone_and_nothing_at_all_are_told_apart(text: str, reward: float) -> None:
    verdict = await judge(COUNTDOWN, ROW, message(text))
    assert verdict.reward == reward == sum(verdict.reward_components.values())


async def test_an_expression_beside_a_tool_call_is_no_answer() -> None:
    assert (await judge(COUNTDOWN, ROW, message("3+(8-5)"), tool_call())).reward == 0.0


def test_division_is_exact() -> None:
    assert value_of("8/3", [3, 8]) == Fraction(8, 3)
    assert value_of("8/3*3", [3, 8, 3]) == 8


@given(st.text(max_size=300))
def test_no_text_breaks_the_verifier(text: str) -> None:
    assert value_of(text, [3, 5, 8]) is None or set(text) & set("358")
