"""The HTML page of a run: its settings, plan, events and proof, in one file without external resources."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from seqpart.plan.plan import as_text_rows
from seqpart.report.page_data import Pass, RecordedRun
from seqpart.report.reporter import plan_notes, plan_title
from seqpart.units import format_seconds, format_size

STYLE = Path(__file__).with_name("page.css")
_SIDE = 1000
"""Units of the drawing, in either direction."""
_TICKS = 4
_MOST_POINTS = 700
_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)

Point = tuple[float, float]
Level = tuple[str, str, float]
"""A horizontal line in a figure: its CSS class, name and value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One data series. `look`: its CSS class. `joined`: connected by a line, else dots."""

    name: str
    look: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Format of one axis. `whole`: starts at 0. `steps`: distances between ticks, instead of 1, 2, 5 times a power of 10."""

    text: Callable[[float], str]
    whole: bool = False
    steps: tuple[float, ...] = ()


def figure(
    title: str, series: Sequence[Series], x: Axis, y: Axis, *, levels: Sequence[Level] = (), marks: Sequence[float] = ()
) -> str:
    """Returns a figure with lines and points over `x`. marks: x of thin vertical lines."""
    points = [point for one in series for point in one.points]
    across = _range([at for at, _ in points], x)
    up = _range([value for _, value in points] + [value for *_, value in levels], y)
    drawn = [
        *(f'<path class="grid" d="M0 {_y(value, up)}H{_SIDE}"/>' for value in ticks(*up, y.steps)),
        *(f'<path class="mark" d="M{_x(at, across)} 0V{_SIDE}"/>' for at in marks),
        *(f'<path class="level {look}" d="M0 {_y(value, up)}H{_SIDE}"/>' for look, _, value in levels),
        *(_drawn(one, across, up) for one in series),
    ]
    beside = [
        f'<span class="y" style="bottom:{_percent(value, up):.2f}%">{escape(y.text(value))}</span>'
        for value in ticks(*up, y.steps)
    ]
    below = [
        f'<span class="x" style="left:{_percent(value, across):.2f}%">{escape(x.text(value))}</span>'
        for value in ticks(*across, x.steps)
    ]
    shown = [*((one.look, one.name) for one in series), *((look, name) for look, name, _ in levels)]
    names = "".join(f'<li class="{look}">{escape(name)}</li>' for look, name in shown)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="legend">{names}</ul><div class="plot">{"".join(beside)}'
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>{''.join(below)}</div></figure>"
    )


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Returns a bar chart of (name, size, text after it)."""
    largest = max((size for _, size, _ in rows), default=0.0) or 1.0
    lines = [
        f'<div class="bar"><span>{escape(name)}</span><i><b style="width:{100 * size / largest:.1f}%"></b></i>'
        f"<span>{escape(words)}</span></div>"
        for name, size, words in rows
    ]
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(lines)}</figure>"


def _percent(value: float, ends: Point) -> float:
    """Returns the place of a value between the ends of an axis, from 0 to 100."""
    first, last = ends
    return 100 * (value - first) / (last - first)


def _x(value: float, across: Point) -> str:
    return f"{_SIDE / 100 * _percent(value, across):.1f}"


def _y(value: float, up: Point) -> str:
    return f"{_SIDE - _SIDE / 100 * _percent(value, up):.1f}"


def _drawn(series: Series, across: Point, up: Point) -> str:
    points = thinned([point for point in series.points if all(map(math.isfinite, point))])
    if not points:
        return ""
    where = [f"{_x(at, across)} {_y(value, up)}" for at, value in points]
    if series.joined and len(points) > 1:
        return f'<path class="line {series.look}" d="M{"L".join(where)}"/>'
    return f'<path class="dots {series.look}" d="{"".join(f"M{point}h0" for point in where)}"/>'


def thinned(points: Sequence[Point]) -> list[Point]:
    """Thins points to as many as can be distinguished: the highest of neighbours, and the last one."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    found = [max(group, key=lambda point: point[1]) for group in groups]
    return found if found[-1] == points[-1] else [*found, points[-1]]


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """Returns the first and the last number of an axis, with a margin; never equal."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if axis.whole:
        return 0.0, 1.04 * max(high, 1e-9)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def ticks(low: float, high: float, steps: Sequence[float] = ()) -> list[float]:
    """Returns about four round numbers from `low` to `high`: multiples of one of `steps`, or of 1, 2, 5 times a power of 10."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    usual = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    step = next((own for own in steps if own >= rough), usual)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


_STEPS = {
    "load": "waiting for partitions to come (LOAD)", "forward": "forward passes", "backward": "backward passes",
    "update": "optimizer steps", "drop": "sending partitions home (DROP)", "split": "cutting subnets out (SPLIT)",
    "merge": "putting subnets back (MERGE)",
}  # fmt: skip
_LINES = 6
"""Most partitions with their own line; more share one line, in order."""
_LISTED = 200
_VERSIONS = ("seqpart", "torch", "python", "system", "machine", "gpu")
_TIME = Axis(text=format_seconds, whole=True, steps=_SECONDS)


def document(run: RecordedRun) -> str:
    parts = [
        _head(run), _tiles(run), _missing(run), _memory(run), _losses(run), _time(run), _planned(run), _proof(run), _asked(run),
        _values(run),
    ]  # fmt: skip
    title = escape(f"seqpart: {run.root.resolve().name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE.read_text()}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def _head(run: RecordedRun) -> str:
    settings = run.start.get("settings", {})
    method = run.plan.method if run.plan is not None else settings.get("method", "")
    model, data = run.job.get("model"), run.job.get("data")
    what = [f"method {method}" if method else "", f"model {model}" if model else "", f"data {data}" if data else ""]
    when = (run.result and run.result.finished) or run.start.get("time", "")
    day = str(when)[:19].replace("T", " ") + " UTC" if when else ""  # without the parts of a second
    processes = f"{run.processes} processes" if run.processes > 1 else ""
    words = [run.state_in_words, *(word for word in what if word), processes, day]
    return (
        f"<header><h1>{escape(run.root.resolve().name)}</h1>"
        f'<p class="state {escape(run.state)}">{escape(" · ".join(word for word in words if word))}</p></header>'
    )


def _tiles(run: RecordedRun) -> str:
    result, tiles, limit = run.result, list[tuple[str, str]](), _limit(run)
    peak = result.proof.peak if result else max((held for curve in run.curves for _, held in curve.points), default=None)
    if peak is not None and limit:
        tiles.append(("highest memory", f"{format_size(peak)} of {format_size(limit)} ({100 * peak / limit:.0f} %)"))
    if result:
        tiles.append(("violations of the limit", str(result.proof.violations)))
    tests = [(one.accuracy, one.loss) for one in run.passes if one.kind == "test"]
    last = (result.accuracy, result.test_loss) if result else tests[-1] if tests else (None, None)
    of_average = (result.average_accuracy, result.average_loss) if result else (None, None)
    for of, (share, mean) in {"": last, " of the average": of_average}.items():
        if share is not None:
            tiles.append((f"test accuracy{of}", f"{100 * share:.2f} %"))
        if mean is not None:
            tiles.append((f"test loss{of}", f"{mean:.4f}"))
    if run.seconds:
        tiles.append(("time", format_seconds(run.seconds)))
    return '<ul class="tiles">' + "".join(f"<li><b>{escape(v)}</b>{escape(k)}</li>" for k, v in tiles) + "</ul>"


def _missing(run: RecordedRun) -> str:
    return f'<section class="missing"><h2>Missing data</h2>{_list(run.missing)}</section>' if run.missing else ""


def _limit(run: RecordedRun) -> int:
    return run.plan.limit if run.plan is not None else next((curve.limit for curve in run.curves[::-1]), 0)


def _memory(run: RecordedRun) -> str:
    if not run.curves:
        return ""
    series = [Series(name="", look="s1", points=[(at, float(held)) for at, held in curve.points]) for curve in run.curves]
    named = Series(name="measured, the highest of each moment", look="s1", points=())
    levels = [("limit", f"limit {format_size(_limit(run))}", _limit(run))]
    if run.plan is not None:
        levels.append(("predicted", f"predicted peak {format_size(run.plan.peak)}", run.plan.peak))
    drawn = figure(
        "Memory over time", [named, *series], _TIME, Axis(text=lambda held: format_size(int(held)), whole=True),
        levels=levels, marks=run.resumed_at,
    )  # fmt: skip
    lines = " Upright lines: another process went on there." if run.resumed_at else ""
    return f"<section><h2>Memory</h2>{drawn}<p>{escape(f'Read from: {run.curves[-1].source}.{lines}')}</p></section>"


def _losses(run: RecordedRun) -> str:
    if not run.passes:
        return ""
    found = figure("Loss", _series(run.passes, "loss"), _TIME, Axis(text=lambda value: f"{value:.4g}"), marks=run.resumed_at)
    right = _series([one for one in run.passes if one.accuracy is not None], "accuracy")
    if right:
        text = Axis(text=lambda value: f"{100 * value:.4g} %")
        found += figure("Accuracy", right, _TIME, text, marks=run.resumed_at)
    return f"<section><h2>Loss and accuracy</h2>{found}</section>"


def _series(passes: Sequence[Pass], what: str) -> list[Series]:
    """Returns training losses as lines, one per partition if there are few, and tests as dots."""
    training = [one for one in passes if one.kind == "train"]
    tests = [one for one in passes if one.kind == "test"]
    places = sorted({one.where for one in training}, key=lambda where: [int(n) for n in where.split()[-1].split("-")])
    groups = {where: [one for one in training if one.where == where] for where in places}
    if len(groups) > _LINES:
        groups = {"training, partition by partition": training}
    lines = [
        Series(name=f"training, {name}" if len(groups) > 1 else "training", look=f"s{number}", points=_points(own, what))
        for number, (name, own) in enumerate(groups.items(), start=1)
    ]
    return [*lines, *([Series(name="test", look="test", points=_points(tests, what), joined=False)] if tests else [])]


def _points(passes: Iterable[Pass], what: str) -> list[tuple[float, float]]:
    return [(one.at, getattr(one, what)) for one in passes if math.isfinite(getattr(one, what))]


def _time(run: RecordedRun) -> str:
    if not run.steps:
        return ""
    known = sum(found.seconds for found in run.steps.values())
    rows = [
        (
            _STEPS.get(kind, kind), found.seconds,
            f"{found.seconds:.1f} s in {found.count:,} steps{_moved(found.bytes_read, found.bytes_written)}",
        )
        for kind, found in sorted(run.steps.items(), key=lambda item: -item[1].seconds)
    ]  # fmt: skip
    rows.append(("outside of steps", max(0.0, run.seconds - known), f"{max(0.0, run.seconds - known):.1f} s"))
    on_gpu = run.plan is not None and not run.plan.device.startswith("CPU")
    issued = " On a GPU a step lasts as long as it took to issue it." if on_gpu else ""
    return (
        f"<section><h2>Where the time went</h2>{bars('Seconds by kind of step', rows)}<p>Transfers from and to homes "
        "while another partition computes cost only the seconds that were waited for. Outside of steps: planning, writing of "
        f"the first homes and rows, checkpoints, results.{issued}</p></section>"
    )


def _moved(read: int, written: int) -> str:
    moved = [f"{format_size(read)} read" if read else "", f"{format_size(written)} written" if written else ""]
    return "".join(f", {word}" for word in moved if word)


def _planned(run: RecordedRun) -> str:
    if run.plan is None:
        return ""
    rows, notes = as_text_rows(run.plan), _list(plan_notes(run.plan))
    table = _table(list(rows[0]), [list(map(str, row.values())) for row in rows])
    return f"<section><h2>Plan</h2><p>{escape(plan_title(run.plan))}</p>{table}{notes}</section>"


def _proof(run: RecordedRun) -> str:
    if run.result is None:
        return ""
    proof = run.result.proof
    error = 100 * (proof.predicted - proof.peak) / max(1, proof.peak)
    rows = [
        ("limit", format_size(proof.limit)),
        ("what was measured", proof.source),
        ("highest value", f"{format_size(proof.peak)}, {100 * proof.peak / proof.limit:.1f} % of the limit"),
        ("seen at step", run.result.peak_at or "unknown"),
        ("samples", f"{proof.samples:,}"),
        ("predicted", f"{format_size(proof.predicted)}, {error:+.1f} % of the highest value"),
        ("of it runtime (libraries or context)", format_size(proof.runtime)),
        ("host memory granted beside the limit", format_size(proof.host)),
        ("file pages grew by", format_size(proof.file_growth)),
        ("violations", str(proof.violations)),
    ]
    if proof.allocator_peak is not None:
        rows.insert(6, ("the allocator's own peak", format_size(proof.allocator_peak)))
    resumed = "<p>The proof is of the last process: what came before it has its own curve above.</p>" if run.resumed_at else ""
    return f"<section><h2>Proof of the limit</h2>{_table([], [list(row) for row in rows])}{resumed}</section>"


def _asked(run: RecordedRun) -> str:
    options = {**run.start.get("settings", {}), **run.job}
    asked = [[name.replace("_", "-"), _as_text(value)] for name, value in options.items() if value not in (None, "None")]
    versions = [[name, str(run.start[name])] for name in _VERSIONS if name in run.start]
    if not asked and not versions:
        return ""
    return (
        f"<section><h2>Job</h2><details><summary>settings</summary>{_table([], asked)}</details>"
        f"<details><summary>versions and machine</summary>{_table([], versions)}</details></section>"
    )


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _values(run: RecordedRun) -> str:
    """Returns the numbers in the figures as tables."""
    if not run.passes:
        return ""
    shown = run.passes[-_LISTED:]
    left = f"<p>The last {_LISTED} of {len(run.passes)}.</p>" if len(shown) < len(run.passes) else ""
    rows = [
        [
            one.kind, one.where, str(one.epoch) if one.kind == "train" else "", f"{one.at:.1f} s", f"{one.loss:.5g}",
            "" if one.accuracy is None else f"{100 * one.accuracy:.2f} %",
        ]
        for one in shown
    ]  # fmt: skip
    table = _table(["pass", "of", "epoch", "ended at", "loss", "accuracy"], rows)
    return f"<section><details><summary>all passes in numbers</summary>{left}{table}</details></section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead>" if head else ""
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{"" if head else "pairs"}">{names}<tbody>{"".join(lines)}</tbody></table></div>'


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in itertools.islice(lines, _LISTED)) + "</ul>"
