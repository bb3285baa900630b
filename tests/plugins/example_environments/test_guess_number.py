import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.environments import load
from roundhouse.plugins.example_environments.search import GuessNumber, compare
from roundhouse.plugins.example_environments.section import GuessNumberEnvironment
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient
from tests.gym.environments.playing import message, replay
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, calls, rollout_config, says, spec_of

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


TWO = GuessNumber(upper=7, guesses=3, games=2)


async def test_games_follow_each_other_and_the_turn_that_ends_one_is_rewarded() -> None:
    row = {**next(iter(TWO.tasks("train"))), "hidden": [5, 2]}
    client = LocalEnvironmentClient(TWO)
    guesses = [calls(("guess", {"number": number})) for number in (4, 5, 7, 6, 1, 2)]
    policy = ScriptedPolicy(by_turn(*guesses, says("Done.")))
    rollout = await run_rollout(spec_of(row), policy, client, rollout_config(max_turns=8), SAMPLING)
    outputs = [item["output"] for item in rollout.items if item["type"] == "function_call_output"]
    assert outputs == ["higher", "correct", "lower", "lower", "higher", "no guesses left"]
    assert [turn.reward for turn in rollout.turns] == [None, 0.5, None, None, 0.0, None, None]
    assert rollout.status.rewarded
    assert rollout.reward == 0.5
    assert rollout.metrics["guesses"] == 5


def test_games_of_a_rollout_have_numbers_of_their_own_and_the_demonstrations_play_all() -> None:
    rows = list(TWO.tasks("train"))
    assert {len(row["hidden"]) for row in rows} == {2}
    assert Counter(row["hidden"][0] for row in rows) == Counter(dict.fromkeys(range(1, 8), 20))
    assert len({row["hidden"][1] for row in rows}) == 7
    for shown in TWO.demonstrations("train", 50, 0.5, seed=1):
        answers = [said["content"] for said in shown if said["role"] == "tool"]
        ends = answers.count("correct")
        assert ends <= 2
        assert len(answers) <= 6
        assert ends == 2 or len(answers) >= 4, "a game that is not won has three guesses"


def test_both_splits_draw_from_the_same_numbers_evenly_and_the_documentation_says_so() -> None:
    environment = load(GuessNumberEnvironment(upper=7))
    counts = [Counter(row["hidden"] for row in environment.tasks(split)) for split in ("train", "heldout")]
    assert counts[0] == counts[1] == dict.fromkeys(range(1, 8), 20)
    assert "draw from the same" in (GuessNumber.__doc__ or "")
    ids = [row["task_id"] for split in ("train", "heldout") for row in environment.tasks(split)]
    assert len(set(ids)) == len(ids)


async def test_a_game_ends_after_the_allowed_guesses() -> None:
    game = load(GuessNumberEnvironment(guesses=1))
    session = await game.seed_session(row(5))
    assert [await game.tools()["guess"].call(session, number=1) for _ in range(2)] == ["higher", "no guesses left"]
