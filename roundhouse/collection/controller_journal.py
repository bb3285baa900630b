"""The controller's events and state in the store.

    events-00000001.jsonl events-00000002.jsonl …   what happened, a segment each time it is written down
    state-00000002.json                              the state after segment 2, so that a start need not replay everything

Invariants: a segment is created once and never changed, so of two controllers of one run that both write, one wins and the
other learns of it; a state is a shorter way to what the segments say; what was appended before a crash is there after it.

Segments go some time after two states have taken their place, so that a long run has no more of them than a short one. What
has gone is not written again: there is a state of a later number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from roundhouse.collection.bound import StalenessBound
from roundhouse.collection.controller import Controller
from roundhouse.collection.controller_state import restore, snapshot, state_from_json
from roundhouse.collection.events import Event, event_from_json, event_to_json
from roundhouse.errors import DataError, StoreError
from roundhouse.store.location import AlreadyExists, Location

_SEGMENT = re.compile(r"events-(\d{8})\.jsonl")
_STATE = re.compile(r"state-(\d{8})\.json")
KEPT_STATES = 2
KEPT_SEGMENTS = 200
"""Of those before the oldest kept state, for people who ask what happened: a quarter of an hour, at one in five seconds."""


class ControllerJournal:
    """The journal at a place in the store."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._written = max([*self._numbers(_SEGMENT), *self._numbers(_STATE)], default=0)

    @property
    def segments(self) -> int:
        """How many were written, those that are gone included."""
        return self._written

    def append(self, events: Sequence[Event]) -> None:
        """Write down what happened, in order, before anything is done about it.

        Raises:
            StoreError: another controller of this run has written since; this one must stop.
        """
        if not events:
            return
        text = "".join(f"{event_to_json(event)}\n" for event in events)
        number = self._written + 1
        try:
            self.place.create(_segment(number), text.encode())
        except AlreadyExists:
            raise self._other_controller(number) from None
        if any(state >= number for state in self._numbers(_STATE)):  # it was there, and is gone
            self.place.delete(_segment(number))
            raise self._other_controller(number)
        self._written = number

    def keep_state(self, controller: Controller) -> None:
        """Keep the state that the segments so far have led to, and no more than the newest few of either."""
        self.place.write(_state(self._written), snapshot(controller).model_dump_json().encode())
        states = sorted(self._numbers(_STATE))
        for number in states[:-KEPT_STATES]:
            self.place.delete(_state(number))
        if len(states) < KEPT_STATES:
            return
        for number in self._numbers(_SEGMENT):
            if number <= states[-KEPT_STATES] - KEPT_SEGMENTS:
                self.place.delete(_segment(number))

    def load(self, terms: StalenessBound, replicas: Iterable[str]) -> Controller:
        """The controller after everything that was written down.

        Raises:
            DataError: segments are missing or damaged, or the terms are narrower than those that the run began with.
        """
        number, controller = self._newest_state(terms) or (0, Controller(terms, replicas))
        needed = range(number + 1, self._written + 1)
        if missing := sorted(set(needed) - set(self._numbers(_SEGMENT))):
            raise DataError(
                f"{self.place.uri}/{_segment(missing[0])} is missing, and no state that can be read comes after it. Restore "
                "it, or a state."
            )
        for event in self._events(needed):
            controller.apply(event)
        return controller

    def events(self) -> Iterator[Event]:
        """What happened, as far back as there are segments."""
        return self._events(sorted(self._numbers(_SEGMENT)))

    def _events(self, numbers: Iterable[int]) -> Iterator[Event]:
        for number in numbers:
            for line in self.place.read(_segment(number)).decode().splitlines():
                yield event_from_json(line)

    def _other_controller(self, number: int) -> StoreError:
        return StoreError(
            f"{self.place.uri}/{_segment(number)} was written by another controller of this run. Let one of the two go on; "
            "start this one again when the other has ended."
        )

    def _newest_state(self, terms: StalenessBound) -> tuple[int, Controller] | None:
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
