"""The controller's events and state in the store.

    events-00000001.jsonl events-00000002.jsonl …   what happened, a segment each time it is written down
    state-00000002.json                              the state after segment 2, so that a start need not replay everything

Invariants: a segment is created once and never changed, so of two controllers of one run that both write, one wins and the
other learns of it; a state is only a shorter way to what the segments say; what was appended before a crash is there after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from roundhouse.asynchrony.controller import Controller
from roundhouse.asynchrony.events import Event, event_from_json, event_to_json
from roundhouse.asynchrony.state import restore, snapshot, state_from_json
from roundhouse.asynchrony.terms import Terms
from roundhouse.errors import DataError, StoreError
from roundhouse.store.location import AlreadyExists, Location

_SEGMENT = re.compile(r"events-(\d{8})\.jsonl")
_STATE = re.compile(r"state-(\d{8})\.json")
KEPT_STATES = 2


class Journal:
    """The journal at a place in the store."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._written = max(self._numbers(_SEGMENT), default=0)

    @property
    def segments(self) -> int:
        """How many there are."""
        return self._written

    def append(self, events: Sequence[Event]) -> None:
        """Write down what happened, in order, before anything is done about it.

        Raises:
            StoreError: another controller of this run has written since; this one must stop.
        """
        if not events:
            return
        text = "".join(f"{event_to_json(event)}\n" for event in events)
        try:
            self.place.create(_segment(self._written + 1), text.encode())
        except AlreadyExists:
            raise StoreError(
                f"{self.place.uri}/{_segment(self._written + 1)} was written by another controller of this run. Let one of the "
                "two go on; start this one again when the other has ended."
            ) from None
        self._written += 1

    def keep_state(self, controller: Controller) -> None:
        """Keep the state that the segments so far have led to, and no more than the newest few."""
        self.place.write(_state(self._written), snapshot(controller).model_dump_json().encode())
        for number in sorted(self._numbers(_STATE))[:-KEPT_STATES]:
            self.place.delete(_state(number))

    def load(self, terms: Terms, replicas: Iterable[str]) -> Controller:
        """The controller after everything that was written down.

        Raises:
            DataError: segments are missing or damaged, or the terms are narrower than those that the run began with.
        """
        number, controller = self._newest_state(terms) or (0, Controller(terms, replicas))
        for event in self._events(number):
            controller.apply(event)
        return controller

    def events(self) -> Iterator[Event]:
        """Everything that happened."""
        return self._events(0)

    def _events(self, after: int) -> Iterator[Event]:
        for number in range(after + 1, self._written + 1):
            for line in self.place.read(_segment(number)).decode().splitlines():
                yield event_from_json(line)

    def _newest_state(self, terms: Terms) -> tuple[int, Controller] | None:
        for number in sorted(self._numbers(_STATE), reverse=True):
            try:
                state = state_from_json(self.place.read(_state(number)))
            except DataError:
                continue  # the segments say the same
            return number, restore(terms, state)
        return None

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        return [int(match[1]) for name in self.place.names() if (match := pattern.fullmatch(name)) is not None]


def _segment(number: int) -> str:
    return f"events-{number:08d}.jsonl"


def _state(number: int) -> str:
    return f"state-{number:08d}.json"
