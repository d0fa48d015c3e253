"""A scatter plot as SVG: a logarithmic x axis of bytes, and a label beside each mark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from xml.sax.saxutils import escape

from benchmarks.convergence.labels import Box, Label, place

__all__ = ["Level", "Mark", "plot", "ticks"]

WIDTH, HEIGHT = 960, 600
INSIDE = Box(64, 64, WIDTH - 24, HEIGHT - 56)  # the plot without its margins
FONT_PX, LABEL_PX = 13, 12
CHARACTER_PX = 6.7  # more than the mean width in usual fonts, so that no label is wider than this
RADIUS = 5.0
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5478d", "#5b4fa2", "#8a6d1b", "#444444", "#17858b")


@dataclass(frozen=True)
class Mark:
    x: float  # positive
    y: float
    label: str
    shape: int = 0  # 0 a disc, 1 a square, 2 a diamond: each has a meaning
    colour: int = 0


@dataclass(frozen=True)
class Level:
    """A dashed line at this height."""

    y: float
    label: str


MarkOrLevel = TypeVar("MarkOrLevel", Mark, Level)


def plot(
    title: str,
    axes: tuple[str, str],
    marks: Sequence[Mark],
    levels: Sequence[Level] = (),
    shapes: Sequence[str] = (),
    y_most: float = math.inf,
    front: Sequence[Mark] = (),
) -> str:
    """``axes``: what x and y are. ``shapes``: what each shape means. What is above ``y_most`` lies
    on the upper edge, and its label says where it would be. ``front``: marks that a line joins."""
    joined = [_lowered(mark, y_most) for mark in front]
    marks = [_lowered(mark, y_most) for mark in marks]
    levels = [_lowered(level, y_most) for level in levels]
    x_axis = _Axis.logarithmic([mark.x for mark in marks])
    y_axis = _Axis.linear([mark.y for mark in marks] + [level.y for level in levels])
    parts = [*_frame(title, axes, x_axis, y_axis), *_key(shapes)]
    taken = []
    for level in levels:
        y = y_axis.at(level.y)
        line = f"M{INSIDE.left} {y:.1f}H{INSIDE.right}"
        parts.append(f'<path d="{line}" stroke="#888" stroke-dasharray="5 4"/>')
        parts.append(_text(INSIDE.left + 6, y - 5, level.label, fill="#666"))
        taken.append(Box(INSIDE.left, y - 1, INSIDE.right, y + 1))
        taken.append(Box(INSIDE.left, y - 18, INSIDE.left + 10 + _width(level.label), y))
    points = [(x_axis.at(mark.x), y_axis.at(mark.y)) for mark in marks]
    parts.append(_line([(x_axis.at(mark.x), y_axis.at(mark.y)) for mark in joined]))
    sizes = [(_width(mark.label), float(LABEL_PX)) for mark in marks]
    for mark, point, label in zip(
        marks, points, place(points, sizes, INSIDE, RADIUS + 2, taken), strict=True
    ):
        parts += _drawn(mark, point, label)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="{FONT_PX}">'
    )
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def _line(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="#999" stroke-dasharray="2 4"/>'


def _lowered(each: MarkOrLevel, y_most: float) -> MarkOrLevel:
    if each.y <= y_most:
        return each
    return replace(each, y=y_most, label=f"{each.label} ↑ {each.y:.2f}")


@dataclass(frozen=True)
class _Axis:
    """From values to pixels: ``low`` and ``high`` are at its ends, or their logarithms are."""

    low: float
    high: float
    ends_px: tuple[float, float]
    ticks: tuple[float, ...]
    is_log: bool

    @classmethod
    def logarithmic(cls, values: Sequence[float]) -> _Axis:
        logs = [math.log10(value) for value in values] or [0.0]
        room = 0.06 * max(max(logs) - min(logs), 0.5)
        low, high = min(logs) - room, max(logs) + room
        decades = range(math.floor(low), math.ceil(high))
        marked = (decade + math.log10(factor) for decade in decades for factor in (1, 3))
        kept = tuple(10**log for log in marked if low <= log <= high)
        return cls(low, high, (INSIDE.left, INSIDE.right), kept, is_log=True)

    @classmethod
    def linear(cls, values: Sequence[float]) -> _Axis:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        room = 0.08 * max(high - low, 0.05)
        low, high = low - room, high + room
        ends = (INSIDE.bottom, INSIDE.top)
        return cls(low, high, ends, tuple(ticks(low, high)), is_log=False)

    def at(self, value: float) -> float:
        share = ((math.log10(value) if self.is_log else value) - self.low) / (self.high - self.low)
        first, last = self.ends_px
        return first + share * (last - first)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, three to nine."""
    power = 10 ** math.floor(math.log10((high - low) / 4))
    step = max(f * power for f in (1, 2, 5) if f == 1 or (high - low) / (f * power) >= 4)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _frame(title: str, axes: tuple[str, str], x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    yield _text(INSIDE.left, 24, title, size=16)
    yield _text(INSIDE.left, INSIDE.top - 10, axes[1])
    yield _text((INSIDE.left + INSIDE.right) / 2, HEIGHT - 14, axes[0], anchor="middle")
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        yield f'<path d="M{x:.1f} {INSIDE.top}V{INSIDE.bottom}" stroke="#e4e4e4"/>'
        yield _text(x, INSIDE.bottom + 18, _bytes(tick), anchor="middle")
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        yield f'<path d="M{INSIDE.left} {y:.1f}H{INSIDE.right}" stroke="#e4e4e4"/>'
        yield _text(INSIDE.left - 8, y + 4, f"{tick:.2f}", anchor="end")
    corner = f"M{INSIDE.left} {INSIDE.top}V{INSIDE.bottom}H{INSIDE.right}"
    yield f'<path d="{corner}" fill="none" stroke="#333"/>'


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.999 * size:
            return f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def _key(shapes: Sequence[str]) -> Iterator[str]:
    """What the shapes mean, above the plot on the right."""
    x = INSIDE.right - sum(30 + _width(meaning) for meaning in shapes)
    for number, meaning in enumerate(shapes):
        yield _shape(number, x + RADIUS, 20, "#555")
        yield _text(x + 2 * RADIUS + 5, 24, meaning)
        x += 30 + _width(meaning)


def _drawn(mark: Mark, point: tuple[float, float], label: Label) -> Iterator[str]:
    colour = COLOURS[mark.colour % len(COLOURS)]
    if label.leader:
        x, y, end_x, end_y = label.leader
        line = f"M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"
        yield f'<path d="{line}" stroke="{colour}" stroke-opacity="0.5"/>'
    yield _shape(mark.shape, *point, colour)
    yield _text(label.box.left, label.box.bottom - 2, mark.label, fill=colour, size=LABEL_PX)


def _shape(shape: int, x: float, y: float, colour: str) -> str:
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{colour}"/>'
    if shape == 1:
        r = RADIUS - 0.5
        path = f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z"
        return f'<path d="{path}" fill="white" stroke="{colour}" stroke-width="2"/>'
    r = RADIUS + 1.5
    path = f"M{x:.1f} {y - r:.1f}l{r} {r}l{-r} {r}l{-r} {-r}z"
    return f'<path d="{path}" fill="{colour}"/>'


def _width(text: str) -> float:
    return CHARACTER_PX * len(text)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#222", size: int = FONT_PX
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
