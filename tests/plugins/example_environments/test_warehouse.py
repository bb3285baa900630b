import pytest

from roundhouse.environments.base import Rewarded
from roundhouse.plugins.example_environments.warehouse import GOODS, Floor, Warehouse
from tests.gym.environments.playing import message

WAREHOUSE = Warehouse(problems=50)
ROW = {
    "stock": {
        "A": {"nuts": 2, "bolts": 1, "pins": 4},
        "B": {"nuts": 6, "bolts": 5, "pins": 0},
        "C": {"nuts": 0, "bolts": 0, "pins": 1},
    },
    "order": {"shelf": "A", "restocked": "nuts", "level": 5, "shipped": "bolts", "count": 3},
}
MOVE = ("move", {"good": "nuts", "source": "B", "target": "A", "count": 3})
SHIP = ("ship", {"good": "bolts", "shelf": "B", "count": 3})


async def play(*steps: tuple[str, dict], row: dict = ROW) -> tuple[list[str | Rewarded], dict[str, float], Floor]:
    floor = await WAREHOUSE.seed_session(row)
    answers = [await WAREHOUSE.tools()[name].call(floor, **arguments) for name, arguments in steps]
    verdict = await WAREHOUSE.verify(floor, row, {"output": [message("Done.")]})
    assert verdict.reward == sum(verdict.reward_components.values())
    return answers, verdict.reward_components, floor


async def test_the_final_state_is_rewarded_whatever_the_way() -> None:
    back = ("move", {"good": "nuts", "source": "A", "target": "C", "count": 1})
    forth = ("move", {"good": "nuts", "source": "C", "target": "A", "count": 1})
    for steps in ((MOVE, SHIP), (SHIP, MOVE), (back, MOVE, SHIP, forth)):
        assert (await play(*steps))[1] == {"restock": 0.4, "ship": 0.4, "tidy": 0.2}


async def test_parts_of_the_order_earn_their_parts_and_idleness_nothing() -> None:
    assert (await play(MOVE))[1] == {"restock": 0.4, "ship": 0.0, "tidy": 0.2}
    assert (await play(SHIP))[1] == {"restock": 0.0, "ship": 0.4, "tidy": 0.2}
    assert sum((await play())[1].values()) == 0.0
    assert (await play(MOVE, SHIP, MOVE))[1]["restock"] == 0.0


async def test_touching_other_goods_is_untidy() -> None:
    pins = ("move", {"good": "pins", "source": "A", "target": "C", "count": 1})
    assert (await play(MOVE, SHIP, pins))[1]["tidy"] == 0.0
    lost = ("ship", {"good": "nuts", "shelf": "B", "count": 1})
    assert (await play(MOVE, SHIP, lost))[1] == {"restock": 0.4, "ship": 0.4, "tidy": 0.0}


@pytest.mark.parametrize(
    "step",
    [("move", MOVE[1] | {"count": 7}), ("move", MOVE[1] | {"count": 0}), ("move", MOVE[1] | {"count": -1}),
     ("move", MOVE[1] | {"target": "D"}), ("move", MOVE[1] | {"source": "D"}), ("move", MOVE[1] | {"good": "gold"}),
     ("ship", SHIP[1] | {"count": 6}), ("ship", SHIP[1] | {"good": "gold"}), ("look", {"shelf": "D"})],
)  # fmt: skip
async def test_what_is_not_there_is_refused_and_changes_nothing(step: tuple[str, dict]) -> None:
    answers, _, floor = await play(step)
    assert answers == ["refused"]
    assert floor.stock == ROW["stock"]


async def test_goods_are_neither_made_nor_lost() -> None:
    _, _, floor = await play(MOVE, SHIP, MOVE)
    for good in GOODS:
        before = sum(shelf[good] for shelf in ROW["stock"].values())
        assert sum(shelf[good] for shelf in floor.stock.values()) + floor.shipped[good] == before


SECOND = {
    "stock": {
        "A": {"nuts": 0, "bolts": 0, "pins": 2},
        "B": {"nuts": 1, "bolts": 0, "pins": 0},
        "C": {"nuts": 0, "bolts": 1, "pins": 0},
    },
    "order": {"shelf": "C", "restocked": "pins", "level": 2, "shipped": "nuts", "count": 1},
}
MOVE_SECOND = ("move", {"good": "pins", "source": "A", "target": "C", "count": 2})
SHIP_SECOND = ("ship", {"good": "nuts", "shelf": "B", "count": 1})
TWO = ROW | {"later": [SECOND]}


async def test_a_shipment_brings_the_next_order_which_finds_other_stock() -> None:
    answers, parts, floor = await play(MOVE, SHIP, ("look", {"shelf": "A"}), MOVE_SECOND, SHIP_SECOND, row=TWO)
    assert answers[1:] == [
        Rewarded("shipped. Shelf C must hold 2 pins. Ship 1 nuts.", pytest.approx(0.5)),
        "nuts 0, bolts 0, pins 2",
        "moved",
        "shipped",
    ]
    assert parts == {"restock": 0.4, "ship": 0.4, "tidy": 0.2}
    assert floor.stock["C"] == {"nuts": 0, "bolts": 1, "pins": 2}


async def test_each_order_is_judged_at_its_shipment_and_one_that_was_not_reached_earns_nothing() -> None:
    refused = ("ship", SHIP[1] | {"count": 6})
    assert (await play(MOVE, refused, row=TWO))[1] == {"restock": 0.2, "ship": 0.0, "tidy": 0.1}
    answers, parts, _ = await play(SHIP, MOVE, row=TWO)
    assert parts == {"restock": 0.0, "ship": 0.2, "tidy": 0.1}
    assert answers[0].reward == pytest.approx(0.3), "the turn that shipped has the order's part"
    assert (await play(MOVE, SHIP, row=TWO))[1] == {"restock": 0.2, "ship": 0.2, "tidy": 0.1}
