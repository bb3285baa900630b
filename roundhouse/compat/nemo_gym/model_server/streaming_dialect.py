"""What streaming clients of `/v1/responses` send beyond the strict dialect, brought into it; pure functions.

Invariant: the result passes the strict check wherever the conversation itself can be shown. Such clients (coding agents on
the command line) send bookkeeping fields, hosted tools, tools grouped in namespaces, and items of their own; those that a
chat engine cannot be shown are left out, since refusing them would end the rollout.

    tools: [{"type": "namespace", "name": "fs", "tools": [{"name": "read"}]}]
        ->  a function tool fs__read, whose calls go back as {"namespace": "fs", "name": "read"}
"""

from __future__ import annotations

import logging
from typing import Any

from roundhouse.compat.nemo_gym.model_server.requests import RESPONSES_FIELDS, Body, invalid

log = logging.getLogger(__name__)

_JOINT = "__"
_SHOWN = frozenset({"message", "reasoning", "function_call", "function_call_output"})

Namespaces = dict[str, tuple[str, str]]
"""Joined tool name to namespace and name."""


def strict_body(body: Any) -> tuple[Body, Namespaces]:
    """The body in the strict dialect, and the namespaces to put back with `with_namespaces`.

    Raises:
        InvalidRequest: it is no object.
    """
    if not isinstance(body, dict):
        raise invalid([], "an object is required", body)
    namespaces: Namespaces = {}
    strict = {key: value for key, value in body.items() if key in RESPONSES_FIELDS and key != "stream"}
    given = strict.get("input")
    offered = list(strict.get("tools") or ())
    if isinstance(given, list):
        offered += [tool for item in given if _kind(item) == "additional_tools" for tool in item.get("tools") or ()]
        strict["input"] = [_joined_call(item) for item in given if _kind(item) in _SHOWN]
        _told("items", [_kind(item) for item in given if _kind(item) not in _SHOWN | {"additional_tools"}])
        _lead_with_instructions(strict)
    tools = _flat_tools(offered, namespaces)
    if tools or "tools" in strict:
        strict["tools"] = tools
    return strict, namespaces


def with_namespaces(response: Body, namespaces: Namespaces) -> Body:
    """The response, its calls of namespaced tools told as such."""
    if not namespaces:
        return response
    return {**response, "output": [_split_call(item, namespaces) for item in response["output"]]}


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else type(item).__name__


def _flat_tools(tools: list[Any], namespaces: Namespaces) -> list[Body]:
    flat: list[Body] = []
    for tool in tools:
        if _kind(tool) == "namespace":
            for inner in tool.get("tools") or ():
                name = f"{tool.get('name')}{_JOINT}{inner.get('name')}"
                namespaces[name] = (str(tool.get("name")), str(inner.get("name")))
                flat.append({**inner, "type": "function", "name": name})
        elif _kind(tool) == "function" and tool.get("name"):
            flat.append(tool)
        else:
            _told("tools", [_kind(tool)])
    return flat


def _joined_call(item: Body) -> Body:
    if item.get("type") != "function_call" or not item.get("namespace"):
        return item
    joined = {key: value for key, value in item.items() if key != "namespace"}
    return {**joined, "name": f"{item['namespace']}{_JOINT}{item['name']}"}


def _split_call(item: Body, namespaces: Namespaces) -> Body:
    if item["type"] != "function_call" or item["name"] not in namespaces:
        return item
    namespace, name = namespaces[item["name"]]
    return {**item, "namespace": namespace, "name": name}


def _lead_with_instructions(strict: Body) -> None:
    """Make the leading system and developer messages one system message, as most chat templates admit no more."""
    items, texts = strict["input"], [strict.get("instructions") or ""]
    leading = 0
    while leading < len(items) and items[leading].get("role") in ("system", "developer"):
        content = items[leading].get("content") or ""
        texts.append(content if isinstance(content, str) else "".join(part.get("text") or "" for part in content))
        leading += 1
    if leading:
        strict["instructions"] = "\n\n".join(text for text in texts if text)
        strict["input"] = items[leading:]


def _told(what: str, kinds: list[str]) -> None:
    if kinds:
        log.warning(
            "Left out of a streaming request: %s of type %s, which no chat engine can be shown.",
            what,
            sorted(set(kinds)),
        )
