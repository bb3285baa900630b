import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playing import message, replay

from roundhouse.environments import GuessNumber
from roundhouse.environments.search import compare

GAME = GuessNumber(upper=7, guesses=3)


def row(hidden: int) -> dict[str, Any]:
    return next(row for row in GAME.tasks("train") if row["hidden"] == hidden)


async def play(hidden: int, *guesses: Any) -> tuple[list[str], float]:
    session = await GAME.seed_session(row(hidden))
    answers = [await GAME.tools()["guess"].call(session, number=number) for number in guesses]
    verdict = await GAME.verify(session, row(hidden), {"output": [message("Done.")]})
    return answers, verdict.reward


async def test_a_hit_within_the_guesses_is_rewarded() -> None:
    assert await play(5, 4, 6, 5) == (["higher", "lower", "correct"], 1.0)


async def test_a_hit_is_not_lost_by_guessing_on() -> None:
    assert await play(5, 5, 1) == (["correct", "higher"], 1.0)


async def test_a_hit_after_the_last_allowed_guess_does_not_count() -> None:
    assert await play(5, 1, 2, 3, 5) == (["higher", "higher", "higher", "no guesses left"], 0.0)


async def test_saying_the_number_without_guessing_it_is_not_rewarded() -> None:
    session = await GAME.seed_session(row(5))
    assert (await GAME.verify(session, row(5), {"output": [message("5")]})).reward == 0.0


@pytest.mark.parametrize("number", ["five", None, 4.5, True, [5], {"number": 5}, "9" * 10_000])
async def test_what_is_no_whole_number_is_an_error_and_costs_a_guess(number: Any) -> None:
    assert await play(5, number, 1, 2, 5) == (["error", "higher", "higher", "no guesses left"], 0.0)


@given(st.integers(), st.integers(1, 64))
def test_the_answer_points_to_the_hidden_number(guess: int, hidden: int) -> None:
    assert compare(guess, hidden) == ("correct" if guess == hidden else "higher" if hidden > guess else "lower")


async def test_halving_always_finds_one_of_seven_in_three() -> None:
    rewards = [await outcome(shown) for shown in GAME.demonstrations("train", 200, 1.0, seed=0)]
    assert rewards == [1.0] * 200


async def test_without_good_ones_demonstrations_are_random_in_range_or_blind_and_never_repeat_a_guess() -> None:
    demonstrations = GAME.demonstrations("train", 2000, 0.0, seed=0)
    rewards = [await outcome(shown) for shown in demonstrations]
    assert abs(sum(rewards) / 2000 - (3 / 7 + 0.678) / 2) < 0.04
    assert all(len(set(numbers(shown))) == len(numbers(shown)) for shown in demonstrations)


def test_without_good_ones_demonstrations_do_not_prefer_the_middle() -> None:
    first = Counter(numbers(shown)[0] for shown in GAME.demonstrations("train", 7000, 0.0, seed=0))
    assert set(first) == set(range(1, 8))
    assert all(abs(count - 1000) < 150 for count in first.values())


def numbers(conversation: list[dict[str, Any]]) -> list[int]:
    calls = [call for said in conversation for call in said.get("tool_calls", [])]
    return [json.loads(call["function"]["arguments"])["number"] for call in calls]


async def outcome(conversation: list[dict[str, Any]]) -> float:
    """Reward of a demonstration, replayed against the only hidden number that its shown answers allow."""
    answers = [said["content"] for said in conversation if said["role"] == "tool"]
    fits = [
        hidden for hidden in range(1, 8) if [compare(number, hidden) for number in numbers(conversation)] == answers
    ]
    return (await replay(GAME, row(fits[0]), conversation)).reward
