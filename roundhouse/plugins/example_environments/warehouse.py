"""A stateful session with several tools: the final state counts, not the policy's text.

Invariant: the reward of an order is 1 exactly if, at its end, the shelf to be restocked holds the requested number, the
requested goods are shipped, and everything else is unchanged. It is the sum of its components, which judge that state
alone: `restock` (0.4), `ship` (0.4), `tidy` (0.2: every other good is unchanged; only with one of the other two).

    Shelf A must hold 5 nuts. Ship 3 bolts.
      look(shelf=A) = nuts 2, bolts 1, pins 4    move(good=nuts, source=B, target=A, count=3) = moved
      look(shelf=B) = nuts 6, bolts 5, pins 0    ship(good=bolts, shelf=B, count=3) = shipped         ->  Done.

One other shelf always has the missing goods, and one shelf those to be shipped. Goods are neither made nor lost: a tool
refuses missing ones. A wrong demonstration moves too many, ships one too few, or does both.

With several orders, a shipment ends one: the answer is the next order, with other stock on the shelves, and the turn
has the order's part of the reward. The last ends with the rollout. The reward is the mean over all orders; unreached
ones count 0. A right solution takes five turns an order and a last word. A wrong demonstration errs in every order, and
stops when it ships none.

      ship(good=bolts, shelf=B, count=3) = shipped. Shelf C must hold 4 pins. Ship 2 nuts.
      look(shelf=C) = …
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from roundhouse.environments.base import Rewarded, TaskRow, Verdict, tool
from roundhouse.environments.generated import GeneratedEnvironment, Message, calls, distinct, returns, says

WEIGHTS = {"restock": 0.4, "ship": 0.4, "tidy": 0.2}
SHELVES, GOODS = "ABC", ("nuts", "bolts", "pins")
SHIPPED, REFUSED = "shipped", "refused"
SLIPS = (("moves too many",), ("ships too few",), ("moves too many", "ships too few"))
Stock = dict[str, dict[str, int]]
"""Shelf -> good -> count."""


@dataclass(frozen=True, slots=True)
class WarehouseOrder:
    """Bring `shelf` to `level` of `restocked`; ship `count` of `shipped`. `counts` lists the stock, shelf by shelf."""

    counts: tuple[int, ...]
    shelf: str
    restocked: str
    level: int
    shipped: str
    count: int

    @property
    def stock(self) -> Stock:
        cells = iter(self.counts)
        return {shelf: {good: next(cells) for good in GOODS} for shelf in SHELVES}

    @property
    def terms(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("shelf", "restocked", "level", "shipped", "count")}


Day = tuple[WarehouseOrder, ...]
"""The orders of a rollout, in their order."""


@dataclass(slots=True)
class Floor:
    """One rollout's warehouse: the shelves of the present order, and the rewards of earlier ones."""

    orders: list[dict[str, Any]]
    """The order at hand and those to come, each with the `stock` that it finds."""
    stock: Stock = field(init=False)
    shipped: dict[str, int] = field(init=False)
    earned: list[dict[str, bool]] = field(default_factory=list)
    refusals: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.stock = {shelf: dict(goods) for shelf, goods in self.orders[0]["stock"].items()}
        self.shipped = dict.fromkeys(GOODS, 0)

    def finish_order(self) -> str:
        """Judge the present order, start the next one, and return its text."""
        self.earned.append(judge(self))
        del self.orders[0]
        self.begin()
        return asked(**self.orders[0]["order"])


class Warehouse(GeneratedEnvironment[Day]):
    """Three shelves, three goods, at most `most` of a good on a shelf; `orders` of them in a rollout."""

    name = "warehouse"
    restoration = "replay"

    def __init__(self, most: int = 9, orders: int = 1, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        def draw_day(rng: random.Random) -> Day:
            return tuple(draw(most, rng) for _ in range(orders))

        super().__init__(distinct(draw_day, self.key, problems, f"warehouse with at most {most}"), heldout_fraction)

    def key(self, problem: Day) -> str:
        return "+".join(
            f"{'-'.join(map(str, each.counts))}/{each.shelf}-{each.restocked}-{each.level}/{each.shipped}-{each.count}"
            for each in problem
        )

    def row(self, problem: Day) -> TaskRow:
        first, *others = problem
        later = [{"stock": each.stock, "order": each.terms} for each in others]
        return self.task(
            problem,
            asked(**first.terms),
            stock=first.stock,
            order=first.terms,
            **({"later": later} if later else {}),
        )

    async def seed_session(self, row: TaskRow) -> Floor:
        return Floor([{"stock": row["stock"], "order": row["order"]}, *row.get("later", ())])

    @tool("What a shelf holds.", shelf="A, B or C.")
    async def look(self, session: Floor, shelf: str) -> str:
        return shown(session.stock[shelf]) if shelf in session.stock else REFUSED

    @tool(
        "Move goods from one shelf to another.", good="nuts, bolts or pins.", source="A, B or C.", target="A, B or C."
    )
    async def move(self, session: Floor, good: str, source: str, target: str, count: int) -> str:
        if target not in session.stock or not _take(session, good, source, count):
            return REFUSED
        session.stock[target][good] += count
        return "moved"

    @tool("Ship goods from a shelf; they are gone then.", good="nuts, bolts or pins.", shelf="A, B or C.")
    async def ship(self, session: Floor, good: str, shelf: str, count: int) -> str | Rewarded:
        if not _take(session, good, shelf, count):
            return REFUSED
        session.shipped[good] += count
        if len(session.orders) == 1:
            return SHIPPED
        following = session.finish_order()
        whole = math.fsum(WEIGHTS[name] * is_met for name, is_met in session.earned[-1].items())
        return Rewarded(f"{SHIPPED}. {following}", whole / (len(session.earned) + len(session.orders)))

    async def verify(self, session: Floor, row: TaskRow, response: dict[str, Any]) -> Verdict:
        earned = [*session.earned, judge(session)]
        orders = len(session.earned) + len(session.orders)
        parts = {name: weight * (sum(each[name] for each in earned) / orders) for name, weight in WEIGHTS.items()}
        filled = sum(all(each.values()) for each in earned) / orders
        return Verdict(sum(parts.values()), parts, {"refusals": float(session.refusals), "filled": filled})

    def demonstration(self, problem: Day, right: bool, rng: random.Random) -> Iterator[Message]:
        number = 1
        for order, following in itertools.zip_longest(problem, problem[1:]):
            slips = () if right else rng.choice(SLIPS)
            answer = SHIPPED if following is None else f"{SHIPPED}. {asked(**following.terms)}"
            for name, result, arguments in _filled(order, slips, answer):
                yield calls(name, f"call_{number}", **arguments)
                yield returns(f"call_{number}", result)
                number += 1
            if result == REFUSED:  # of the shipment: there was one to ship, and it ships none
                break
        yield says("Done.")


def draw(most: int, rng: random.Random) -> WarehouseOrder:
    """An order that the stock can fill, of two different goods."""
    while True:
        counts = tuple(rng.randint(0, most) for _ in range(9))
        restocked, shipped = rng.sample(GOODS, 2)
        shelf = rng.choice(SHELVES)
        stock = WarehouseOrder(counts, shelf, restocked, 0, shipped, 0).stock
        spare = max(stock[other][restocked] for other in SHELVES if other != shelf)
        offered = max(goods[shipped] for goods in stock.values())
        if spare and offered:
            level = stock[shelf][restocked] + rng.randint(1, spare)
            return WarehouseOrder(counts, shelf, restocked, level, shipped, rng.randint(1, offered))


def judge(floor: Floor) -> dict[str, bool]:
    """Return the earned components of the present order, from its initial stock and the present floor."""
    before, order = floor.orders[0]["stock"], floor.orders[0]["order"]
    restock = floor.stock[order["shelf"]][order["restocked"]] == order["level"]
    ship = floor.shipped[order["shipped"]] == order["count"]
    others = [good for good in GOODS if good not in (order["restocked"], order["shipped"])]
    still = all(floor.stock[each][good] == before[each][good] for each in SHELVES for good in others)
    tidy = still and not any(number for good, number in floor.shipped.items() if good != order["shipped"])
    return {"restock": restock, "ship": ship, "tidy": tidy and (restock or ship)}


def asked(shelf: str, restocked: str, level: int, shipped: str, count: int) -> str:
    return f"Shelf {shelf} must hold {level} {restocked}. Ship {count} {shipped}."


def shown(goods: dict[str, int]) -> str:
    return ", ".join(f"{good} {count}" for good, count in goods.items())


def _take(floor: Floor, good: str, shelf: str, count: int) -> bool:
    """Take goods off a shelf, if they are there."""
    if count < 1 or floor.stock.get(shelf, {}).get(good, 0) < count:
        floor.refusals += 1
        return False
    floor.stock[shelf][good] -= count
    return True


def _filled(order: WarehouseOrder, slips: tuple[str, ...], answer: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The calls of a demonstration for one order: tool, result (`answer` of the shipment), arguments."""
    stock = order.stock
    here = stock[order.shelf][order.restocked]
    missing = order.level - here
    others = [shelf for shelf in SHELVES if shelf != order.shelf]
    for shelf in (order.shelf, *others):
        yield "look", shown(stock[shelf]), {"shelf": shelf}
    source = next(shelf for shelf in others if stock[shelf][order.restocked] >= missing)
    moved = missing + (here or 1) * ("moves too many" in slips)
    result = "moved" if stock[source][order.restocked] >= moved else REFUSED
    yield "move", result, {"good": order.restocked, "source": source, "target": order.shelf, "count": moved}
    place = next(shelf for shelf in SHELVES if stock[shelf][order.shipped] >= order.count)
    count = order.count - ("ships too few" in slips)
    yield "ship", answer if count else REFUSED, {"good": order.shipped, "shelf": place, "count": count}
