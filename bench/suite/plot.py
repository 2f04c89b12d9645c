"""Lines on two logarithmic axes as an SVG that can be read on a light and on a dark page. Pure.

A library for this would be the largest dependency of the project, and none writes styles that follow the reader's
colour scheme. Each line has its own colour, shape of points and label, so none depends on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 560, 48, 384
LEGEND_X, LEGEND_STEP = 580, 22
COLOURS = (  # light, dark: each with a contrast of at least 4.5 to its page
    ("#0b57d0", "#8ab4f8"),
    ("#b3261e", "#f2a29c"),
    ("#8a4b00", "#f6bf6b"),
    ("#146c2e", "#7fd694"),
    ("#7b2ca3", "#d9a6f2"),
    ("#006a75", "#6fd3df"),
    ("#7a2e55", "#f0a3cb"),
    ("#4d4d4d", "#c4c4c4"),
    ("#5a5a00", "#d6d16f"),
)
STYLE = """
:root { --page: #ffffff; --ink: #1b1b1b; --soft: #5c5c5c; --grid: #d9d9d9; %s }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --ink: #ececec; --soft: #a9b0b8; --grid: #343a42; %s } }
.page { fill: var(--page) } .grid { stroke: var(--grid) } .axis { stroke: var(--soft) }
text { fill: var(--ink); font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
.title { font-size: 15px; font-weight: 600 } .name { font-weight: 600 } .soft { fill: var(--soft); font-size: 12px }
.line { fill: none; stroke-width: 2 } .ours { stroke-width: 3 }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """A line. `points` are numbers above zero."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_ours: bool = False


def log_plot(title: str, description: str, x_name: str, y_name: str, lines: Sequence[Series]) -> str:
    """The drawing; `description` is for screen readers. ValueError without any point."""
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError(f"there is nothing to draw for {title!r}")
    across, up = _Axis([x for x, _ in points], LEFT, RIGHT), _Axis([y for _, y in points], BOTTOM, TOP)
    drawn = [line for line in lines if line.points]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(description)}</desc>',
        f"<style>{STYLE % _palettes(len(drawn))}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="26">{escape(title)}</text>',
        *_grid(across, up),
        f'<text class="soft" x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 40}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text class="soft" x="{LEFT}" y="{TOP - 8}">{escape(y_name)}</text>',
    ]
    for number, line in enumerate(drawn):
        parts += _line(number, line, across, up)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """From powers of ten to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)) + 1e-9)
        self.high = max(self.low + 1, math.ceil(math.log10(max(values)) - 1e-9))
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[int]:
        return list(range(self.low, self.high + 1))


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for power in across.ticks():
        x = across.at(10.0**power)
        parts.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{BOTTOM}"/>')
        parts.append(f'<text class="soft" x="{x}" y="{BOTTOM + 20}" text-anchor="middle">{tick(power)}</text>')
    for power in up.ticks():
        y = up.at(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick(power)}</text>')
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    return parts


def tick(power: int) -> str:
    """10**power with separators."""
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:.{-power}f}"


def _line(number: int, line: Series, across: _Axis, up: _Axis) -> list[str]:
    places = [(across.at(x), up.at(y)) for x, y in sorted(line.points)]
    path = "".join(f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(places))
    kind, colour = "line ours" if line.is_ours else "line", f"var(--c{number})"
    parts = [f'<path class="{kind}" style="stroke: {colour}" d="{path}"/>']
    parts += [_point(number, x, y, colour) for x, y in places]
    y = TOP + 8 + number * LEGEND_STEP
    parts.append(_point(number, LEGEND_X, y, colour))
    name = ' class="name"' if line.is_ours else ""
    parts.append(f'<text{name} x="{LEGEND_X + 12}" y="{y + 4}">{escape(line.name)}</text>')
    return parts


def _point(number: int, x: float, y: float, colour: str) -> str:
    fill = f'style="fill: {colour}"'
    match number % 4:
        case 0:
            return f'<circle cx="{x}" cy="{y}" r="4.5" {fill}/>'
        case 1:
            return f'<rect x="{x - 4:g}" y="{y - 4:g}" width="8" height="8" {fill}/>'
        case 2:
            return f'<path d="M{x} {y - 5:g}L{x + 5:g} {y + 4:g}H{x - 5:g}Z" {fill}/>'
        case _:
            return f'<path d="M{x} {y - 5.5:g}L{x + 5.5:g} {y}L{x} {y + 5.5:g}L{x - 5.5:g} {y}Z" {fill}/>'


def _palettes(count: int) -> tuple[str, str]:
    """The colours of `count` lines, on a light and on a dark page."""
    if count > len(COLOURS):
        raise ValueError(f"there are colours for {len(COLOURS)} lines, not for {count}")
    light, dark = zip(*COLOURS[:count], strict=True)
    return tuple(" ".join(f"--c{number}: {colour};" for number, colour in enumerate(one)) for one in (light, dark))  # type: ignore[return-value]
