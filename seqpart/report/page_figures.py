"""Figures of the page: lines, points and bars as SVG and HTML that need nothing from elsewhere.

The drawing stretches with the page, and the words beside it do not: they are HTML, so that they can be read on a phone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_SIDE = 1000
"""Units of the drawing, in either direction."""
_TICKS = 4
_MOST_POINTS = 700
_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of one thing. `look`: the class that colours it. `joined`: by a line, else each is a dot."""

    name: str
    look: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A value that lies across the figure."""

    name: str
    look: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """What the numbers of one direction look like. `whole`: they begin at 0. `counts`: they are whole numbers."""

    name: str
    text: Callable[[float], str]
    whole: bool = False
    steps: tuple[float, ...] = ()


def seconds_axis(text: Callable[[float], str]) -> Axis:
    return Axis(name="time", text=text, whole=True, steps=tuple(map(float, _SECONDS)))


def figure(
    title: str, series: Sequence[Series], x: Axis, y: Axis, *, levels: Sequence[Level] = (), marks: Sequence[Point] = ()
) -> str:
    """A figure with lines and points over `x`. marks: (place on x, 0) of thin upright lines."""
    points = [point for one in series for point in one.points]
    across = _range([at for at, _ in points], x)
    up = _range([value for _, value in points] + [level.value for level in levels], y)
    place = _Place(across, up)
    drawn = [
        *(f'<path class="grid" d="M0 {place.y(value)}H{_SIDE}"/>' for value in ticks(*up, y.steps)),
        *(f'<path class="mark" d="M{place.x(at)} 0V{_SIDE}"/>' for at, _ in marks),
        *(f'<path class="level {level.look}" d="M0 {place.y(level.value)}H{_SIDE}"/>' for level in levels),
        *(_drawn(one, place) for one in series),
    ]
    beside = [
        f'<span class="y" style="bottom:{place.share_up(value):.2f}%">{escape(y.text(value))}</span>'
        for value in ticks(*up, y.steps)
    ]
    below = [
        f'<span class="x" style="left:{place.share_across(value):.2f}%">{escape(x.text(value))}</span>'
        for value in ticks(*across, x.steps)
    ]
    shown = [*((one.look, one.name) for one in series), *((level.look, level.name) for level in levels)]
    names = "".join(f'<li class="{look}">{escape(name)}</li>' for look, name in shown)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="legend">{names}</ul><div class="plot">{"".join(beside)}'
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>{''.join(below)}</div></figure>"
    )


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """(name, size, words behind it) of each bar."""
    largest = max((size for _, size, _ in rows), default=0.0) or 1.0
    lines = [
        f'<div class="bar"><span>{escape(name)}</span><i><b style="width:{100 * size / largest:.1f}%"></b></i>'
        f"<span>{escape(words)}</span></div>"
        for name, size, words in rows
    ]
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(lines)}</figure>"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where numbers lie in the drawing."""

    across: tuple[float, float]
    up: tuple[float, float]

    def share_across(self, value: float) -> float:
        first, last = self.across
        return 100 * (value - first) / (last - first)

    def share_up(self, value: float) -> float:
        first, last = self.up
        return 100 * (value - first) / (last - first)

    def x(self, value: float) -> str:
        return f"{_SIDE / 100 * self.share_across(value):.1f}"

    def y(self, value: float) -> str:
        return f"{_SIDE - _SIDE / 100 * self.share_up(value):.1f}"


def _drawn(series: Series, place: _Place) -> str:
    points = thinned([point for point in series.points if all(map(math.isfinite, point))])
    if not points:
        return ""
    where = [f"{place.x(at)} {place.y(value)}" for at, value in points]
    if series.joined and len(points) > 1:
        return f'<path class="line {series.look}" d="M{"L".join(where)}"/>'
    return f'<path class="dots {series.look}" d="{"".join(f"M{point}h0" for point in where)}"/>'


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most so many that they can be told apart: of neighbours the highest, and the last one as it is."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    found = [max(group, key=lambda point: point[1]) for group in groups]
    return found if found[-1] == points[-1] else [*found, points[-1]]


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """The first and the last number of an axis, with some room; never the same."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if axis.whole:
        return 0.0, 1.04 * max(high, 1e-9)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def ticks(low: float, high: float, steps: Sequence[float] = ()) -> list[float]:
    """Round numbers from `low` to `high`, about four: multiples of one of `steps`, or of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    usual = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    step = next((own for own in steps if own >= rough), usual)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
