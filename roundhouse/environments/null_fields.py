"""Remove null values that a table format added to rows.

Arrow gives every struct of a column the fields of all of them, and fills missing ones with null. A row that passed
through it has tool calls with arguments of other tools, and schemas with properties of other tools.

Invariant: only a meaningless null is removed: an argument keeps it if its schema accepts null, as does `default: null`
of such a parameter.

    {"city": "Oslo", "symbol": null}     ->    {"city": "Oslo"}        with a schema in which `symbol` is missing or a string
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roundhouse.errors import DataError

Schema = dict[str, Any]
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON Schema with one schema a name."""
_VALUES = ("default", "const", "enum", "examples", "required")
"""Keywords with data for a value."""
_MAY_BE_NULL = ("strict", "parameters")
"""Fields of a Responses tool that the contract requires, and allows to be null."""
_TYPES = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const")


def tools_of_row(tools: Any) -> list[dict[str, Any]]:
    """Return a row's tools, of chat or Responses shape, without added nulls. A JSON text is read; null means an empty list.

    Raises:
        DataError: the tools, or the parameters of one, are neither a list (an object) nor its JSON text.
    """
    tools = [] if tools is None else _from_text(tools, "tools", list)
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise DataError(f"a tool is an object, and one is {tool!r:.80}")
    tool = {key: value for key, value in tool.items() if value is not None or key in _MAY_BE_NULL}
    if isinstance(function := tool.get("function"), dict):
        return tool | {"function": _tool(function)}
    if tool.get("parameters") is not None:
        tool["parameters"] = schema_without_nulls(_from_text(tool["parameters"], "the parameters of a tool", dict))
    return tool


def _from_text(value: Any, name: str, kind: type) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{name} are a text that is not JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise DataError(f"{name} are {value!r:.80}; give {expected}, or its JSON text")
    return value


def schema_without_nulls(schema: Schema) -> Schema:
    """Return a JSON schema without the null keywords and properties that mean nothing."""
    clean: Schema = {}
    for keyword, value in schema.items():
        if value is None and not (keyword in _VALUES and _accepts_null(schema)):
            continue
        if keyword in _BY_NAME and isinstance(value, dict):
            named = {name: each for name, each in value.items() if each is not None}
            value = {
                name: schema_without_nulls(each) if isinstance(each, dict) else each for name, each in named.items()
            }
        elif keyword not in _VALUES and isinstance(value, dict):
            value = schema_without_nulls(value)
        elif keyword not in _VALUES and isinstance(value, list):
            value = [schema_without_nulls(each) if isinstance(each, dict) else each for each in value]
        clean[keyword] = value
    return clean


def arguments_without_nulls(arguments: Any, schema: Any) -> Any:
    """Return a call's arguments without the nulls that their schema does not accept.

    Args:
        schema: of these arguments; None if it is unknown; all nulls are removed then.
    """
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(arguments, list):
        return [arguments_without_nulls(each, schema.get("items")) for each in arguments]
    if not isinstance(arguments, dict):
        return arguments
    known: Mapping[str, Any] = schema.get("properties") or {}
    return {
        name: arguments_without_nulls(value, known.get(name))
        for name, value in arguments.items()
        if value is not None or (isinstance(known.get(name), dict) and _accepts_null(known[name]))
    }


def parameters_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameters' schema of each tool, of chat or Responses shape, by the tool's name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(each.get("name")): each.get("parameters") for each in functions if isinstance(each, dict)}


def _accepts_null(schema: Schema) -> bool:
    types = [types] if isinstance(types := schema.get("type"), str) else (types or [])
    if "null" in types or None in (schema.get("enum") or []):
        return True
    options = [each for keyword in ("anyOf", "oneOf") for each in schema.get(keyword) or [] if isinstance(each, dict)]
    if any(_accepts_null(option) for option in options):
        return True
    return "$ref" in schema or not any(schema.get(keyword) is not None for keyword in _TYPES)
