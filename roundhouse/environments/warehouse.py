"""A stateful session with several tools: what counts is the final state, not what the policy says.

Invariant: the reward is 1 exactly when, at the end, the shelf that was to be restocked holds the asked number, the asked goods
are shipped, and nothing else was touched. It is the sum of its components, which judge the final state alone: `restock` (0.4),
`ship` (0.4), `tidy` (0.2: every good that the order does not name is where it was; only with one of the other two).

    Shelf A must hold 5 nuts. Ship 3 bolts.
      look(shelf=A) = nuts 2, bolts 1, pins 4    move(good=nuts, source=B, target=A, count=3) = moved
      look(shelf=B) = nuts 6, bolts 5, pins 0    ship(good=bolts, shelf=B, count=3) = shipped         ->  Done.

One other shelf always has what is missing, and one shelf what is to be shipped. Goods are neither made nor lost: a tool refuses
what is not there. A wrong demonstration moves too many, ships one too few, or does both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, tool
from roundhouse.environments.generated import GeneratedEnvironment, Message, calls, distinct, returns, says

RESTOCK, SHIP, TIDY = 0.4, 0.4, 0.2
SHELVES, GOODS = "ABC", ("nuts", "bolts", "pins")
REFUSED = "refused"
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


@dataclass(slots=True)
class Floor:
    """One rollout's warehouse."""

    stock: Stock
    shipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GOODS, 0))
    refusals: int = 0


class Warehouse(GeneratedEnvironment[WarehouseOrder]):
    """Three shelves, three goods, at most `most` of a good on a shelf."""

    name = "warehouse"
    restoration = "replay"

    def __init__(self, most: int = 9, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        made = distinct(lambda rng: draw(most, rng), self.key, problems, f"warehouse with at most {most}")
        super().__init__(made, heldout_fraction)

    def key(self, problem: WarehouseOrder) -> str:
        stock = "-".join(map(str, problem.counts))
        return f"{stock}/{problem.shelf}-{problem.restocked}-{problem.level}/{problem.shipped}-{problem.count}"

    def row(self, problem: WarehouseOrder) -> TaskRow:
        prompt = f"Shelf {problem.shelf} must hold {problem.level} {problem.restocked}. Ship {problem.count} {problem.shipped}."
        order = {name: getattr(problem, name) for name in ("shelf", "restocked", "level", "shipped", "count")}
        return self.task(problem, prompt, stock=problem.stock, order=order)

    async def seed_session(self, row: TaskRow) -> Floor:
        return Floor({shelf: dict(goods) for shelf, goods in row["stock"].items()})

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
    async def ship(self, session: Floor, good: str, shelf: str, count: int) -> str:
        if not _take(session, good, shelf, count):
            return REFUSED
        session.shipped[good] += count
        return "shipped"

    async def verify(self, session: Floor, row: TaskRow, response: dict[str, Any]) -> Verdict:
        parts = judge(session, row["stock"], **row["order"])
        return Verdict(sum(parts.values()), parts, {"refusals": float(session.refusals)})

    def demonstration(self, problem: WarehouseOrder, right: bool, rng: random.Random) -> Iterator[Message]:
        floor = Floor(problem.stock)
        here = floor.stock[problem.shelf]
        missing = problem.level - here[problem.restocked]
        slips = (
            () if right else rng.choice((("moves too many",), ("ships too few",), ("moves too many", "ships too few")))
        )
        moved = missing + (here[problem.restocked] or 1) * ("moves too many" in slips)
        shipped = problem.count - ("ships too few" in slips)
        yield from _called(1, "look", shown(here), shelf=problem.shelf)
        step = 2
        source = ""
        for shelf in (shelf for shelf in SHELVES if shelf != problem.shelf):
            yield from _called(step, "look", shown(floor.stock[shelf]), shelf=shelf)
            step += 1
            if not source and floor.stock[shelf][problem.restocked] >= missing:
                source = shelf
        ok = floor.stock[source][problem.restocked] >= moved
        move = {"good": problem.restocked, "source": source, "target": problem.shelf, "count": moved}
        yield from _called(step, "move", "moved" if ok else REFUSED, **move)
        place = next(shelf for shelf in SHELVES if floor.stock[shelf][problem.shipped] >= problem.count)
        ship = {"good": problem.shipped, "shelf": place, "count": shipped}
        yield from _called(step + 1, "ship", "shipped" if shipped else REFUSED, **ship)
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


def judge(
    floor: Floor, before: Stock, shelf: str, restocked: str, level: int, shipped: str, count: int
) -> dict[str, float]:
    """The components of the reward, from the stock before and the floor after."""
    restock = floor.stock[shelf][restocked] == level
    ship = floor.shipped[shipped] == count
    others = [good for good in GOODS if good not in (restocked, shipped)]
    still = all(floor.stock[each][good] == before[each][good] for each in SHELVES for good in others)
    tidy = still and not any(number for good, number in floor.shipped.items() if good != shipped)
    return {"restock": RESTOCK * restock, "ship": SHIP * ship, "tidy": TIDY * (tidy and (restock or ship))}


def shown(goods: dict[str, int]) -> str:
    return ", ".join(f"{good} {count}" for good, count in goods.items())


def _take(floor: Floor, good: str, shelf: str, count: int) -> bool:
    """Take goods off a shelf, if they are there."""
    if count < 1 or floor.stock.get(shelf, {}).get(good, 0) < count:
        floor.refusals += 1
        return False
    floor.stock[shelf][good] -= count
    return True


def _called(number: int, name: str, answer: str, **arguments: Any) -> Iterator[Message]:
    yield calls(name, f"call_{number}", **arguments)
    yield returns(f"call_{number}", answer)
