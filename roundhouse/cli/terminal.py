"""The boundary to a terminal: control characters of data are shown, not executed.

Invariant: text of a policy, an environment or a store cannot move the cursor, set the clipboard or change the title of
a terminal. Only Roundhouse's own styles can. Files and pipes get texts unchanged.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderHook, RenderResult
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

WIDEST = 10_000
"""Columns of a file or pipe, in which nothing wraps."""
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks that change the order in which a terminal shows characters, so that a line can look like another."""
_SHOWN |= {code: f"\\u{code:04x}" for code in _DIRECTIONS}


def visible_controls(text: str) -> str:
    r"""Return the text with control characters of C0 and C1, and marks of direction, as escapes; newlines and tabs stay.

    >>> visible_controls("a\x1b]52;c;QQ\x07")
    'a\\x1b]52;c;QQ\\x07'
    """
    return text.translate(_SHOWN)


def terminal_console(*, stderr: bool = False) -> Console:
    """Return a console that shows control characters in its texts, and wraps no line in a file or pipe."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = WIDEST
    console.push_render_hook(_ShowControls())
    return console


def show_controls_in_logs() -> None:
    """Let log records of this process show control characters if stderr is a terminal."""
    if sys.stderr.isatty():
        logging.setLogRecordFactory(_VisibleRecord)


class _VisibleRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return visible_controls(super().getMessage())


class _ShowControls(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(each) for each in renderables]


class _Visible:
    """A renderable that shows the control characters of its texts; rich's control segments stay."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(visible_controls(segment.text), segment.style)
