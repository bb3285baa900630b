"""docs/failures.md has every failure code with its kind, and the table of policies as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.operations import FailuresConfig
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.health.policy import Past, after_failure, code_of_type

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()
KINDS = {"InfraError": "infra", "DataError": "data", "RoundhouseError": "fatal"}


def bases_by_class() -> dict[str, set[str]]:
    """Names of base classes by name of class, in the whole library."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "roundhouse").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases
                }
                found.setdefault(node.name, set()).update(names)
    return found


def ancestors(name: str, bases: dict[str, set[str]]) -> set[str]:
    above: set[str] = set()
    waiting = [name]
    while waiting:
        new = bases.get(waiting.pop(), set()) - above
        above |= new
        waiting += new
    return above | {name}


def kinds_by_code() -> dict[str, str]:
    bases = bases_by_class()
    found = {"unexpected_error": "defect"}
    for name in bases:
        above = ancestors(name, bases)
        if "RoundhouseError" in above and not name.startswith("_"):
            found[code_of_type(name)] = next(kind for base, kind in KINDS.items() if base in above)
    return found


def test_the_page_has_every_code_with_its_kind_and_a_remedy() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (infra|data|fatal|defect) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert {code: kind for code, kind, _, _ in rows} == kinds_by_code()
    assert all(meaning.strip() and remedy.strip() for _, _, meaning, remedy in rows)


@pytest.mark.parametrize(
    "row",
    [("infra", InfraError("i")), ("data", DataError("d")), ("fatal", ConfigError("c")), ("defect", KeyError("k"))],
)
def test_the_page_has_the_table_of_policies(row: tuple[str, Exception]) -> None:
    kind, error = row
    policies: list[Any] = ["stop_on_error", "stop_on_critical", "continue"]
    steps = [after_failure(error, FailuresConfig(policy=policy), Past()).step for policy in policies]
    cells = " | ".join({"stop": "stop", "skip": "skip", "wait": "wait, try again"}[step] for step in steps)
    assert f"| {kind} | {cells} |" in PAGE


def test_the_page_names_every_key_of_the_section() -> None:
    for key in FailuresConfig.model_fields:
        assert f"failures.{key}" in PAGE
