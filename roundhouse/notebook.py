"""HTML for notebooks. All texts are escaped: a run's rows hold what a model wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 240, 48, 3
"""Of a curve, in pixels."""


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table, left-aligned so that texts can be read.

    >>> html_table(["a"], [["<b>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td style="text-align:left">&lt;b&gt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    text = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f'<td style="text-align:left">{escape(text)}</td>'


def svg_curve(points: Sequence[tuple[float, float]], label: str) -> str:
    """Return a curve through the points, with its first and last value; nothing without points."""
    if not points:
        return ""
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    places = [
        (
            MARGIN + (WIDTH - 2 * MARGIN) * (x - low_x) / ((high_x - low_x) or 1),
            HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (y - low_y) / ((high_y - low_y) or 1),
        )
        for x, y in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="currentColor"/>' for x, y in places)
    text = f"{escape(label)}: {points[0][1]:.3f} → {points[-1][1]:.3f}"
    return (
        f'<div><svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{text}"><polyline points="{line}" fill="none" '
        f'stroke="currentColor" stroke-width="1.5"/>{dots}</svg> {text}</div>'
    )


def shortened(value: object, length: int = 120) -> str:
    """Return a value's text in one line, cut off after `length` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
