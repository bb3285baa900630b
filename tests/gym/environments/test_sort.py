import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.environments import Sort
from tests.gym.environments.playing import judge, message, replay

SORT = Sort(digits=6)
ROW = next(row for row in SORT.tasks("train") if row["answer"] == "1 2 3 4 6 9")


async def test_the_digits_in_order_are_rewarded() -> None:
    assert (await judge(SORT, ROW, message("1 2 3 4 6 9"))).reward == 1.0


@pytest.mark.parametrize(
    "text", ["1 2 3 4 9 6", "1 2 3 4 6", "1 2 3 4 6 9 9", "1 2 3 4 6 9.", "123469", "1  2 3 4 6 9", " 1 2 3 4 6 9", ""]
)
async def test_near_misses_are_not_rewarded(text: str) -> None:
    assert (await judge(SORT, ROW, message(text))).reward == 0.0


async def test_no_reply_is_not_rewarded() -> None:
    assert (await judge(SORT, ROW)).reward == 0.0


@given(st.integers(0, 2**31), st.floats(0, 1))
async def test_demonstrations_are_right_in_the_share_asked_for(seed: int, good_fraction: float) -> None:
    demonstrations = SORT.demonstrations("train", 20, good_fraction, seed)
    rows = [{"answer": " ".join(sorted(shown[0]["content"][5:-1].split()))} for shown in demonstrations]
    rewards = [(await replay(SORT, row, shown)).reward for row, shown in zip(rows, demonstrations, strict=True)]
    assert abs(sum(rewards) - good_fraction * 20) <= 0.5 + 1e-6


def test_demonstrations_never_show_a_held_out_problem() -> None:
    environment = Sort(digits=3, heldout_fraction=0.5)
    heldout = {row["responses_create_params"]["input"][0]["content"] for row in environment.tasks("heldout")}
    shown = {conversation[0]["content"] for conversation in environment.demonstrations("train", 2000, 0.2, seed=0)}
    assert not shown & heldout
    assert len(shown) > 200


def test_a_sort_task_offers_no_tools() -> None:
    assert ROW["responses_create_params"]["tools"] == []
