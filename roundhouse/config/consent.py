"""Consent of a person to the code, files, servers and secrets that a configuration names.

Write access to a store includes `run.json`. Invariant: each key that decides which code is executed, which files are read or
which server receives a secret is marked at its declaration (`section.Consent`); this module lists the marked keys of a
configuration. A section is accepted or refused as a whole, so that an accepted secret cannot be sent to another server.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from roundhouse import plugins
from roundhouse.config.models import RunConfig
from roundhouse.config.secrets import secret_places
from roundhouse.config.section import Consent, Section


@dataclass(frozen=True)
class SectionKeys:
    """Keys of one section that need a person's consent."""

    place: str
    """Dotted key of the section; empty for the configuration itself."""
    values: Mapping[str, Any]
    """Values by key, in the form of JSON."""
    code: tuple[str, ...]
    """Keys that name code, whose files belong to the digest."""

    @property
    def digest(self) -> str:
        """SHA-256 of the section's place, its keys with their values, and the bytes of the code files that they name.

        A relative path begins at a directory among the values, at NEXRL_PATH or at the working directory, as when it is loaded.
        """
        texts = [text for name in self.code for text in _texts(self.values[name])]
        bases = [*texts, os.environ.get("NEXRL_PATH", "."), "."]
        files = {text: _digest_of_file(text, bases) for text in texts}
        canonical = json.dumps([self.place, dict(self.values), files], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def dotted(self) -> dict[str, str]:
        """Return the values as text by dotted key."""
        prefix = f"{self.place}." if self.place else ""
        return {f"{prefix}{name}": str(value) for name, value in self.values.items()}


def keys_to_accept(config: RunConfig, place: str = "") -> list[SectionKeys]:
    """Return the keys that need a person's consent if only a store names them.

    Args:
        place: return only the section with this key and the sections inside it; empty for all.
    """
    sections = (
        SectionKeys(key, (code := _code_of(section)) | _keys_of(section, has_data), tuple(code))
        for key, section, has_data in _sections(config, "", False)
        if f"{key}.".startswith(f"{place}." if place else "")
    )
    return [keys for keys in sections if keys.values]


def unnamed_code(
    config: RunConfig,
    overrides: Iterable[str],
    accepted: Callable[[SectionKeys], bool] = lambda keys: False,
    place: str = "",
) -> dict[str, str]:
    """Return the keys that need consent, dotted, with their values as text.

    Args:
        overrides: `key=value` of the person's own command line; their keys need no further consent.
        accepted: whether a person accepted a section earlier.
        place: check only the section with this key and the sections inside it; empty for all.
    """
    own = [override.partition("=")[0].strip() for override in overrides]
    return {
        key: value
        for keys in keys_to_accept(config, place)
        if not accepted(keys)
        for key, value in keys.dotted().items()
        if not any(key == one or key.startswith(f"{one}.") for one in own)
    }


def _digest_of_file(text: str, bases: Iterable[str]) -> str | None:
    """Return the SHA-256 of the file that a path or `path.py:Class` names; None if it names none."""
    name = text.rpartition(":")[0] if ".py:" in text else text
    for base in bases:
        try:
            if Path(base, name).is_file():
                with Path(base, name).open("rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError):  # not a path, or not readable by this user
            continue
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(child)


def _sections(node: Any, place: str, has_data: bool) -> Iterator[tuple[str, Section, bool]]:
    """Yield each section with its key, and whether it or a section above names a local data file."""
    children: Iterable[tuple[str, Any]] = ()
    if isinstance(node, Section):
        has_data = has_data or bool(_values(node, "data"))
        yield place, node, has_data
        children = ((name, getattr(node, name)) for name in type(node).model_fields)
    elif isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, tuple):
        children = ((str(index), child) for index, child in enumerate(node))
    for name, child in children:
        yield from _sections(child, f"{place}.{name}" if place else str(name), has_data)


def _keys_of(section: Section, has_data: bool) -> dict[str, Any]:
    """Return the keys of one section that need consent, without its code."""
    endpoints, secrets = _values(section, "endpoint"), _values(section, "secret")
    if not endpoints and _declares(type(section), "endpoint"):
        secrets = {}  # for the service's own address
    for name, value, _ in _marked(section, "parameters"):
        secrets |= {f"{name}.{key}": place for key, place in secret_places(value)}
    data = _values(section, "data") if endpoints else {}
    return secrets | data | (endpoints if secrets or has_data else {})


def _code_of(section: Section) -> dict[str, Any]:
    """Return the keys of one section that name code which is not built in."""
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in type(section).model_fields.items()
    }
    code = {
        name: value
        for name, value, mark in _marked(section, "code")
        if getattr(section, name) != defaults[name]
        and not _without_consent(mark).issuperset(value if isinstance(value, list) else [str(value)])
    }
    for name, value, mark in _marked(section, "parameters"):
        code |= {f"{name}.{key}": value[key] for key in mark.code_keys if key in value}
    return code


def _without_consent(mark: Consent) -> frozenset[str]:
    return mark.built_in if mark.role is None else mark.built_in.union(plugins.names(mark.role))


def _values(section: Section, use: str) -> dict[str, Any]:
    return {name: value for name, value, _ in _marked(section, use)}


def _marked(section: Section, use: str) -> Iterator[tuple[str, Any, Consent]]:
    """Yield the keys that are set and have a mark for this use, with their values in the form of JSON."""
    for name, field in type(section).model_fields.items():
        if (value := getattr(section, name)) in (None, (), {}):
            continue
        for mark in _marks(field, value):
            if mark.use == use:
                yield name, section.model_dump(mode="json", include={name})[name], mark


def _declares(section: type[Section], use: str) -> bool:
    return any(mark.use == use for field in section.model_fields.values() for mark in _marks(field, None))


def _marks(field: FieldInfo, value: Any) -> Iterator[Consent]:
    """Yield the marks of a field and of its type that apply to this value."""
    for mark in (*field.metadata, *_metadata(field.annotation, value)):
        if isinstance(mark, Consent):
            yield mark


def _metadata(annotation: Any, value: Any) -> Iterator[Any]:
    """Yield the metadata within a type; nothing from a union that has the value among its literals."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        literals = [each for each in arguments if typing.get_origin(each) is typing.Literal]
        if any(value in typing.get_args(each) for each in literals):
            return
    if origin is typing.Annotated:
        yield from annotation.__metadata__
        arguments = arguments[:1]
    for argument in arguments:
        yield from _metadata(argument, value)
