"""Horizontal bars as SVG, by hand: a picture in the documentation needs no plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

ROW, LEFT, RIGHT, WIDTH, TOP = 20, 330, 70, 900, 44


@dataclass(frozen=True)
class Bar:
    """A value with its label; ``low`` and ``high`` are drawn as a line across it where they are given."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: str = "#4878a8"


def bars(title: str, rows: Sequence[Bar], *, unit: str = "", mark: float | None = None) -> str:
    """The picture; values start at 0. ``mark`` draws a vertical line there."""
    ends = [value for row in rows for value in (row.value, row.high) if value is not None]
    most = max([*ends, mark or 0.0, 1e-9])
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + ROW * len(rows) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="22" font-size="14">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        y = TOP + ROW * index
        middle = y + ROW / 2 - 2
        parts.append(
            f'<text x="{LEFT - 8}" y="{middle + 4:.0f}" text-anchor="end">{escape(row.label)}</text>'
        )
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(0.0, row.value) * scale:.1f}" height="{ROW - 5}" '
            f'fill="{row.colour}"/>'
        )
        end = row.value
        if row.low is not None and row.high is not None:
            end = max(end, row.high)
            parts.append(
                f'<line x1="{LEFT + row.low * scale:.1f}" x2="{LEFT + row.high * scale:.1f}" '
                f'y1="{middle:.1f}" y2="{middle:.1f}" stroke="#222" stroke-width="1.5"/>'
            )
        x = LEFT + end * scale + 5
        parts.append(f'<text x="{x:.1f}" y="{middle + 4:.0f}">{row.value:.2f}{escape(unit)}</text>')
    if mark is not None:
        x = LEFT + mark * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 8}" stroke="#b03030" '
            'stroke-dasharray="4 3"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
