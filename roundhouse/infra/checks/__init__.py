"""What `roundhouse doctor` checks, one module a subject, and the result of a check.

Invariant: what is not `ok` says in `remedy` what a person can do about it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Finding(BaseModel):
    """Result of a check."""

    model_config = ConfigDict(frozen=True)

    name: str
    """What was looked at; stable, for programs."""
    status: Literal["ok", "warn", "fail"]
    """warn: it works, but slowly or not for everything. fail: a run will not work."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do; empty when it is ok."""


def ok(name: str, detail: str) -> Finding:
    return Finding(name=name, status="ok", detail=detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, status="warn", detail=detail, remedy=remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, status="fail", detail=detail, remedy=remedy)
