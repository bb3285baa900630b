"""The commands of this plug-in. Each imports its modules when it runs."""

from __future__ import annotations

import typer

from roundhouse.cli.options import error_console

DIFFERS = 1
"""Exit code if a replay without substitutions differs, or if an environment fails its test."""


def progress(line: str) -> None:
    """Report progress on stderr; stdout has the result."""
    error_console().print(f"[dim]{line}[/]", highlight=False)


def span_of(text: str) -> range:
    """`10:20` (both included) or `12`.

    Raises:
        typer.BadParameter: it is neither.
    """
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise typer.BadParameter(
            f"{text!r} is not a span of iterations. Give first:last, such as 10:20, or one number."
        )
    return range(int(first), int(last if colon else first) + 1)
