"""Tool schemas in a form that every chat template can show.

Pydantic and MCP servers write `$ref` to definitions and `anyOf` for nullable values, which a template that reads `type`
and `properties` does not show. Invariant: the template's schema has each definition inlined, and a `type` wherever a
union has one; a schema without references and unions is unchanged.

    {"$defs": {"F": {"type": "object", …}}, "properties": {"f": {"$ref": "#/$defs/F"}, "n": {"anyOf": [{"type":
    "integer"},
     {"type": "null"}]}}}
        ->  {"properties": {"f": {"type": "object", …}, "n": {"type": "integer", "nullable": true}}}

A recursive definition is inlined once; inside itself, only its type is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roundhouse.generation.protocol import BadRequest

MAX_NODES = 20_000
"""Parts of one tool's schema with its definitions in place. Definitions that hold others twice grow without bound."""
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *_DEFINITIONS)
"""Keys with values that are maps from free names, not words of JSON Schema."""
_DATA = frozenset({"default", "const", "enum", "examples", "example", "required", "description", "title"})
_UNIONS = ("anyOf", "oneOf")


def shown_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in chat shape with their definitions in place.

    Raises:
        BadRequest: a reference leads nowhere, or the schema is too large; names the tool.
    """
    return [_shown_tool(tool) for tool in tools]


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(parameters := function.get("parameters"), dict):
        return tool
    try:
        schema = _Inliner(parameters).inline(parameters)
    except (BadRequest, RecursionError) as error:
        raise BadRequest(f"The tool {function.get('name')}: {error}", "tools") from error
    return {**tool, "function": {**function, "parameters": schema}}


def properties_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each property in a schema: its path, the mapping that holds it, and its name there."""
    if isinstance(schema, list):
        for item in schema:
            yield from properties_of(item, path)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "properties" and isinstance(value, dict):
                for own, inner in value.items():
                    yield f"{path}{own}", value, own
                    yield from properties_of(inner, f"{path}{own}.")
            elif name not in _DATA:
                yield from properties_of(value, path)


class _Inliner:
    """Puts the definitions of one schema in place."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._nodes = 0

    def inline(self, schema: Any, within: tuple[str, ...] = ()) -> Any:
        """Return a part of the schema with its definitions in place; `within` are the references that led to it."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise BadRequest(f"its schema has more than {MAX_NODES} parts with its definitions in place. Simplify it.")
        if isinstance(schema, list):
            return [self.inline(item, within) for item in schema]
        if not isinstance(schema, dict):
            return schema
        parts = {key: self._value(key, value, within) for key, value in schema.items() if key != "$ref"}
        if isinstance(reference := schema.get("$ref"), str):
            target = self._definition(reference)
            if reference in within:
                target = {"type": target.get("type", "object")}
            parts = {**self.inline(target, (*within, reference)), **parts}
        if schema is self._root:
            parts = {key: value for key, value in parts.items() if key not in _DEFINITIONS}
        return _typed(parts)

    def _value(self, key: str, value: Any, within: tuple[str, ...]) -> Any:
        if key in _DEFINITIONS or key in _DATA:
            return value
        if key in _NAMED and isinstance(value, dict):
            return {name: self.inline(each, within) for name, each in value.items()}
        return self.inline(value, within)

    def _definition(self, reference: str) -> dict[str, Any]:
        """The part of the root that `#/$defs/Name` names."""
        part: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
        if not reference.startswith("#") or not isinstance(part, dict):
            raise BadRequest(
                f"its schema refers to {reference}, which is missing in it. Add the definition to the schema."
            )
        return part


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with a type in its unions; a union of one kind becomes that kind."""
    for key in _UNIONS:
        choices = schema.get(key)
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            continue
        rest = {name: value for name, value in schema.items() if name != key}
        kinds = [choice for choice in choices if choice.get("type") != "null"]
        if len(kinds) == 1:
            nullable = {"nullable": True} if len(kinds) < len(choices) else {}
            return {**kinds[0], **nullable, **rest}
        types = list(dict.fromkeys(choice["type"] for choice in choices if isinstance(choice.get("type"), str)))
        if types and "type" not in schema:
            return {"type": types[0] if len(types) == 1 else types, **schema}
    if isinstance(parts := schema.get("allOf"), list) and parts and all(isinstance(part, Mapping) for part in parts):
        return _merged([*parts, {name: value for name, value in schema.items() if name != "allOf"}])
    return schema


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One schema for values that satisfy all of `parts`; of two statements on one key the last stands."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, kind in (("properties", dict), ("required", list)):
            if not isinstance(part.get(name, kind()), kind):
                raise BadRequest(f"its schema has {name} in a part of allOf: {type(part[name]).__name__}. Correct it.")
        both = {
            "properties": {**merged.get("properties", {}), **part.get("properties", {})},
            "required": [*merged.get("required", []), *part.get("required", [])],
        }
        merged |= {**part, **{key: value for key, value in both.items() if value}}
    return merged
