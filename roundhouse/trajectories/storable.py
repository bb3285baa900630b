"""Values that a table of rollouts can hold: the numbers of one model call, and text.

Invariant: a call that `call_problem` accepts fits the columns of `schemas.TURNS`, and every text in a table has passed
`storable_text`. Validation judges later whether the numbers are true.

A lone surrogate (half of an emoji, binary output) is not a Unicode character and cannot be sent or stored. It is
replaced by U+FFFD when the text enters the conversation, so that policy, verifier and record have the same text.

    >>> storable_text("cut \\ud83d")
    'cut �'
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1
"""Token IDs, policy versions and counts are stored as int32."""


def call_problem(prompt: Any, generation: Any, log_probs: Any, policy_version: Any, version_spans: Any = None) -> str:
    """Return the reason why a model call cannot be recorded; empty if it can.

    Args:
        prompt, generation: token IDs; the prompt may be the new part alone.
        log_probs: one a generated token, or none.
        version_spans: None, or `[{"version": 3, "tokens": 17}, …]`.
    """
    for name, values in (("prompt_token_ids", prompt), ("generation_token_ids", generation)):
        if problem := _token_problem(name, values):
            return problem
    if problem := _log_prob_problem(log_probs):
        return problem
    if len(log_probs) not in (0, len(generation)):
        return f"{len(generation)} generated tokens and {len(log_probs)} log-probabilities"
    if not _is_count(policy_version):
        return f"policy_version is {shown(policy_version)}, not a whole number from 0 to {LARGEST}"
    return _span_problem(version_spans)


def _token_problem(name: str, values: Any) -> str:
    if not isinstance(values, list):
        return f"{name} is {shown(values)}, not a list"
    if kind := _other_type(values, Integral):
        return f"{name} holds a {kind}, not only whole numbers"
    try:
        array("i", values)
    except OverflowError:
        return f"{name} holds a number outside of int32"
    return ""


def _log_prob_problem(values: Any) -> str:
    if not isinstance(values, list):
        return f"generation_log_probs is {shown(values)}, not a list"
    if kind := _other_type(values, Real):
        return f"generation_log_probs holds a {kind}, not only numbers"
    try:
        array("d", values)
    except OverflowError:
        return "generation_log_probs holds a number outside of float64"
    return ""


def _span_problem(spans: Any) -> str:
    if spans is None:
        return ""
    fits = isinstance(spans, list) and all(
        isinstance(span, dict) and _is_count(span.get("version")) and _is_count(span.get("tokens")) for span in spans
    )
    return (
        ""
        if fits
        else f"version_spans is {shown(spans)}, not a list of objects with the whole numbers version and tokens"
    )


def _other_type(values: Iterable[Any], base: type) -> str:
    """Return the name of a type among these values that is not a `base`; a truth value is not a number."""
    for kind in {*map(type, values)}:
        if kind is bool or not issubclass(kind, base):
            return kind.__name__
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= LARGEST


def shown(value: Any) -> str:
    """Return a short form of any value; Python refuses to print an integer of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        text = f"a {type(value).__name__} with too many digits to print"
    return text if len(text) <= 100 else f"{text[:100]}…"


def storable_text(text: str) -> str:
    """Return the text with each lone surrogate replaced by U+FFFD; a whole pair becomes its character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_text(value: Any) -> str:
    """Return the JSON of a value as a storable text.

    Raises:
        TypeError, ValueError, RecursionError: the value is not JSON.
    """
    return storable_text(json.dumps(value, ensure_ascii=False))


def storable_json(value: Any) -> Any:
    """Return the value itself, or, if it holds a lone surrogate, the same JSON with storable texts.

    A value that is not JSON is returned unchanged: the reader that needs its JSON reports it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return value
    storable = storable_text(text)
    return value if storable == text else json.loads(storable)
