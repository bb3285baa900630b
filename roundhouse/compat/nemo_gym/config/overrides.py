"""Command-line overrides in the form that NeMo Gym's users know: `+a.b=1`, `++a.b=[x, y]`, `a.b=true`, `~a.b`.

Invariant: parsing is pure and total: a text becomes an `Override` or a ConfigError that quotes it.

    +a.b=1, ++a.b=1   set the value, whether or not the key is there
    a.b=1             change a value that is there; a key that is not is refused, since it is mostly a spelling mistake
    ~a.b              remove the key; ~a.b=1 only if its value is 1

A value is `null`, `true`, `false`, a number, a quoted text, a list `[x, y]`, a mapping `{k: v}`, an interpolation `${…}`, or
plain text. A backslash takes the next character as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from roundhouse.errors import ConfigError

Action = Literal["set", "change", "remove"]

_NAME = re.compile(r"[^\s=~+\[\]{}][^\s=\[\]{}]*")
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT = re.compile(r"[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Override:
    """One override: what to do with the key at `path`."""

    action: Action
    path: tuple[str, ...]
    value: Any
    text: str
    """As it was given, for messages."""

    @property
    def has_value(self) -> bool:
        return self.value is not _ABSENT


def parse_override(text: str) -> Override:
    """
    Raises:
        ConfigError: it is none of the four forms, or its value cannot be read.
    """
    action: Action = "change"
    rest = text.strip()
    if rest.startswith("~"):
        action, rest = "remove", rest[1:]
    elif rest.startswith("+"):
        action, rest = "set", rest.removeprefix("++") if rest.startswith("++") else rest[1:]
    name, equals, value = rest.partition("=")
    if not _NAME.fullmatch(name) or (action != "remove" and not equals):
        raise ConfigError(f"The override {text!r} is none of +key=value, ++key=value, key=value and ~key.")
    path = tuple(name.split("."))
    if not all(path):
        raise ConfigError(f"The override {text!r} has an empty part in its key {name!r}.")
    return Override(action, path, _Value(value, text).read() if equals else _ABSENT, text)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """(a, b), 1 -> {a: {b: 1}}"""
    for key in reversed(path):
        value = {key: value}
    return value


class _Value:
    """Reads one value; a cursor over its text."""

    def __init__(self, value: str, override: str) -> None:
        self._text = value
        self._at = 0
        self._override = override

    def read(self) -> Any:
        value = self._element(stops="")
        self._skip_space()
        if self._at < len(self._text):
            raise self._wrong(f"{self._text[self._at :]!r} follows the value")
        return value

    def _element(self, stops: str) -> Any:
        self._skip_space()
        match self._peek():
            case "[":
                return list(self._list())
            case "{":
                return dict(self._mapping())
            case "'" | '"':
                return self._quoted()
        return _scalar(self._plain(stops))

    def _list(self) -> Iterator[Any]:
        self._at += 1
        while not self._closed("]"):
            yield self._element(stops=",]")
            self._separated("]")

    def _mapping(self) -> Iterator[tuple[str, Any]]:
        self._at += 1
        while not self._closed("}"):
            key = self._quoted() if self._peek() in "'\"" else self._plain(":,}").strip()
            if self._peek() != ":":
                raise self._wrong(f"the key {key!r} has no ':'")
            self._at += 1
            yield key, self._element(stops=",}")
            self._separated("}")

    def _closed(self, bracket: str) -> bool:
        self._skip_space()
        if self._peek() != bracket:
            return False
        self._at += 1
        return True

    def _separated(self, bracket: str) -> None:
        self._skip_space()
        if self._peek() == ",":
            self._at += 1
        elif self._peek() != bracket:
            raise self._wrong(f"',' or {bracket!r} is missing")

    def _quoted(self) -> str:
        quote = self._text[self._at]
        self._at += 1
        taken = []
        while (character := self._peek()) != quote:
            if not character:
                raise self._wrong(f"the quote {quote} is not closed")
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in (quote, "\\"):
                self._at += 1
            taken.append(self._text[self._at])
            self._at += 1
        self._at += 1
        return "".join(taken)

    def _plain(self, stops: str) -> str:
        """Up to one of `stops` outside of `${…}`."""
        taken, depth = [], 0
        while character := self._peek():
            if character == "\\" and self._at + 1 < len(self._text):
                self._at += 1
            elif self._text.startswith("${", self._at):
                depth += 1
            elif character == "}" and depth:
                depth -= 1
            elif not depth and character in stops:
                break
            taken.append(self._text[self._at])
            self._at += 1
        return "".join(taken).strip()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> None:
        while self._peek().isspace():
            self._at += 1

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"The override {self._override!r} cannot be read: {what}.")


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
