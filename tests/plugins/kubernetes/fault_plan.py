"""Faults of an API server drawn by a seed, for every call of a whole run.

Invariant: which of the calls of a kind (`create jobs`, `watch pods`) fail, and how, is a function of the seed alone, however
the threads that make them take turns. Of each kind the first calls meet every fault there is; later no more than `IN_A_ROW`
fail one after the other, so a run that repeats what may pass comes to its end.
"""

from __future__ import annotations

import random
from collections import Counter
from urllib.parse import parse_qs, urlsplit

from tests.plugins.kubernetes.fault_proxy import EXPIRED, LOST, TORN, Fault

IN_A_ROW = 4
SHARE = 0.6
"""Of the later calls fail, until so many did in a row."""
_BUSY = Fault(429, headers={"Retry-After": "1"}, reason="TooManyRequests")
_BROKEN = Fault(500, reason="InternalError")
_CONTENDED = Fault(409, reason="Conflict")
"""A create that met another write of its namespace's quota: nothing was created."""
_AWAY = Fault(503, reason="ServiceUnavailable")
_LOST, _TORN, _EXPIRED, _GONE = Fault(LOST), Fault(TORN), Fault(EXPIRED), Fault(410, reason="Expired")
DECKS: dict[str, tuple[Fault, ...]] = {
    "create": (_CONTENDED, _BUSY, _BROKEN, _LOST),
    "get": (_BUSY, _BROKEN, _AWAY, _LOST),
    "watch": (_EXPIRED, _BUSY, _BROKEN, _GONE, _TORN),
    "log": (_BUSY, _BROKEN, _TORN),
}


class FaultPlan:
    """A pack of cards for each kind of call, all of its faults once; shuffled anew when it is used up."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._randoms: dict[str, random.Random] = {}
        self._packs: dict[str, list[Fault]] = {}
        self._row: Counter[str] = Counter()
        self.drawn: Counter[tuple[str, int]] = Counter()
        """Faults by verb and status."""
        self.calls: Counter[str] = Counter()
        """All calls by kind, failed ones too."""

    def draw(self, method: str, path: str) -> Fault | None:
        """Return the fault of this call; the proxy asks for the calls in order."""
        verb, kind = _kind(method, path)
        self.calls[kind] += 1
        if verb not in DECKS:
            return None
        rng = self._randoms.setdefault(kind, random.Random(f"{self._seed} {kind}"))
        # in their order: a watch that is torn has to wait for an event, and would keep the others from happening
        pack = self._packs.setdefault(kind, list(DECKS[verb]))
        if self.calls[kind] > len(DECKS[verb]) and (self._row[kind] >= IN_A_ROW or rng.random() >= SHARE):
            self._row[kind] = 0
            return None
        if not pack:
            pack += rng.sample(DECKS[verb], len(DECKS[verb]))
        fault = pack.pop(0)
        self._row[kind] += 1
        self.drawn[verb, fault.status] += 1
        return fault


def _kind(method: str, path: str) -> tuple[str, str]:
    """(`watch`, `watch pods`) of a GET of pods with watch=1."""
    parts = urlsplit(path)
    places = parts.path.strip("/").split("/")
    _, plural, *rest = places[places.index("namespaces") + 1 :]
    if rest[-1:] == ["log"]:
        return "log", "log"
    verb = {"POST": "create", "GET": "get"}.get(method, method)
    verb = "watch" if "watch" in parse_qs(parts.query) else verb
    return verb, f"{verb} {plural}"
