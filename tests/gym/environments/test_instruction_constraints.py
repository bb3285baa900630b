import pytest

from roundhouse.environments.single_turn import CHECKS, TEXTS, InstructionConstraints, satisfied
from tests.gym.environments.playing import judge, message

BRIEFS = InstructionConstraints(problems=50)


@pytest.mark.parametrize(
    ("kind", "value", "held", "broken"),
    [
        ("count", 3, ["cat dog fox", "cat, dog, fox"], ["cat dog", "", "cat dog fox sun"]),
        ("include", "moon", ["a moon", "MOON"], ["moons", ""]),
        ("forbid", "e", ["sun"], ["tree", "TREE", ""]),
        ("first", "sun", ["sun sky", "Sun"], ["sky sun", ""]),
        ("last", "sun", ["sky sun"], ["sun sky", "sun."]),
        ("order", "", ["cat dog fox"], ["dog cat", "cat", ""]),
        ("upper", "", ["CAT DOG"], ["Cat", ""]),
        ("comma", "", ["cat, dog", "CAT, DOG"], ["cat,dog", "cat dog", "cat, dog,"]),
        (
            "json",
            "words",
            ['{"words": ["cat"]}'],
            ['{"words": "cat"}', '["cat"]', '{"words": ["cat"], "x": 1}', '{"words": [1]}', "{", "[" * 5000],
        ),
    ],
)
def test_each_constraint_is_checked_exactly(kind: str, value: str | int, held: list[str], broken: list[str]) -> None:
    assert all(satisfied(reply, [(kind, value)])[kind] for reply in held)
    assert not any(satisfied(reply, [(kind, value)])[kind] for reply in broken)


def test_every_kind_of_constraint_occurs() -> None:
    assert set(TEXTS) == set(CHECKS) == {kind for brief in BRIEFS.problems["train"] for kind, _ in brief.constraints}


@pytest.mark.parametrize("constraints", range(2, 7))
def test_briefs_are_drawn_when_the_words_leave_no_letter_to_forbid(constraints: int) -> None:
    """With at most two constraints, 4,000 draws met words that use every letter, and `rng.choice` of nothing failed."""
    assert len(InstructionConstraints(constraints, problems=1000).problems["train"]) > 500


async def test_leaving_one_constraint_out_earns_less_than_half() -> None:
    row = {"constraints": [["count", 4], ["include", "moon"], ["order", ""]]}
    assert (await judge(BRIEFS, row, message("cat moon sky tree"))).reward == 1.0
    verdict = await judge(BRIEFS, row, message("moon cat tree sky"))
    assert verdict.reward == pytest.approx(1 / 3)
    assert verdict.reward_components == {"count": 1 / 6, "include": 1 / 6, "order": 0.0, "all": 0.0}


async def test_words_inside_json_are_the_words_that_count() -> None:
    row = {"constraints": [["json", "list"], ["count", 2], ["last", "sun"]]}
    assert (await judge(BRIEFS, row, message('{"list": ["sky", "sun"]}'))).reward == 1.0
    assert (await judge(BRIEFS, row, message("sky sun"))).reward == pytest.approx(1 / 3)
