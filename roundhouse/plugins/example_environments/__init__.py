"""Environments to learn from, with generated problems: games, a warehouse, a database, programs and commands in a sandbox."""

from __future__ import annotations

from roundhouse.plugins import Plugin


def _environment(name: str, module: str) -> Plugin:
    return Plugin(f"{__name__}.{module}:{name}", f"{__name__}.section:{name}Environment")


PLUGINS = {
    "environment.guess_number": _environment("GuessNumber", "search"),
    "environment.lookup": _environment("Lookup", "search"),
    "environment.warehouse": _environment("Warehouse", "warehouse"),
    "environment.sql_world": _environment("SqlWorld", "sql_world"),
    "environment.code": _environment("Code", "code"),
    "environment.terminal": _environment("Terminal", "terminal"),
    "environment.bug_fix": _environment("BugFix", "bug_fix"),
    "environment.short_questions": _environment("ShortQuestions", "short_questions"),
    "environment.frozen_lake": _environment("FrozenLake", "frozen_lake"),
}
