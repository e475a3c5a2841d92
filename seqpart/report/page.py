"""The page: what was asked for, what was planned, what happened, and the proof. One file that needs nothing from elsewhere."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from seqpart.plan.plan import Plan, as_text_rows
from seqpart.report.page_data import Pass, Run
from seqpart.report.page_figures import Axis, Level, Series, bars, figure, seconds_axis
from seqpart.report.page_style import STYLE
from seqpart.report.reporter import plan_notes, plan_title
from seqpart.units import format_seconds, format_size

_STEPS = {
    "load": "waiting for partitions to come (LOAD)", "forward": "forward passes", "backward": "backward passes",
    "update": "optimizer steps", "drop": "sending partitions home (DROP)", "split": "cutting subnets out (SPLIT)",
    "merge": "putting subnets back (MERGE)",
}  # fmt: skip
_LINES = 6
"""Partitions that have a line of their own; more are one line, as they come."""
_LISTED = 200
_VERSIONS = ("seqpart", "torch", "python", "system", "machine", "gpu")
_TIME = seconds_axis(format_seconds)


def document(run: Run) -> str:
    """The whole page."""
    parts = [
        _head(run), _tiles(run), _missing(run), _memory(run), _losses(run), _time(run), _planned(run), _proof(run), _asked(run),
        _values(run),
    ]  # fmt: skip
    title = escape(f"seqpart: {run.root.resolve().name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def _head(run: Run) -> str:
    settings = run.start.get("settings", {})
    method = run.plan.method if run.plan is not None else settings.get("method", "")
    model, data = run.job.get("model"), run.job.get("data")
    what = [f"method {method}" if method else "", f"model {model}" if model else "", f"data {data}" if data else ""]
    when = run.result.get("finished") or run.start.get("time", "")
    day = str(when)[:19].replace("T", " ") + " UTC" if when else ""  # without the parts of a second
    words = [run.said, *(word for word in what if word), f"{run.processes} processes" if run.processes > 1 else "", day]
    return (
        f"<header><h1>{escape(run.root.resolve().name)}</h1>"
        f'<p class="state {escape(run.state)}">{escape(" · ".join(word for word in words if word))}</p></header>'
    )


def _tiles(run: Run) -> str:
    proof, tiles = run.result.get("proof"), list[tuple[str, str]]()
    limit = _limit(run)
    peak = proof["peak"] if proof else max((held for curve in run.curves for _, held in curve.points), default=None)
    if peak is not None and limit:
        tiles.append(("highest memory", f"{format_size(peak)} of {format_size(limit)} ({100 * peak / limit:.0f} %)"))
    if proof:
        tiles.append(("violations of the limit", str(proof["violations"])))
    tests = [one for one in run.passes if one.kind == "test"]
    accuracy = run.result.get("accuracy", tests[-1].accuracy if tests else None)
    loss = run.result.get("test_loss", tests[-1].loss if tests else None)
    of_average = run.result.get("average_accuracy"), run.result.get("average_loss")
    for of, (share, mean) in {"": (accuracy, loss), " of the average": of_average}.items():
        if share is not None:
            tiles.append((f"test accuracy{of}", f"{100 * share:.2f} %"))
        if mean is not None:
            tiles.append((f"test loss{of}", f"{mean:.4f}"))
    if run.seconds:
        tiles.append(("time", format_seconds(run.seconds)))
    return '<ul class="tiles">' + "".join(f"<li><b>{escape(v)}</b>{escape(k)}</li>" for k, v in tiles) + "</ul>"


def _missing(run: Run) -> str:
    if not run.missing:
        return ""
    return '<section class="missing"><h2>Not there</h2>' + _list(run.missing) + "</section>"


def _limit(run: Run) -> int:
    return run.plan.limit if run.plan is not None else next((curve.limit for curve in run.curves[::-1]), 0)


def _memory(run: Run) -> str:
    if not run.curves:
        return ""
    series = [Series(name="", look="s1", points=[(at, float(held)) for at, held in curve.points]) for curve in run.curves]
    names = [Series(name="measured, the highest of each moment", look="s1", points=())]
    levels = [Level(name=f"limit {format_size(_limit(run))}", look="limit", value=_limit(run))]
    if run.plan is not None:
        levels.append(Level(name=f"predicted peak {format_size(run.plan.peak)}", look="predicted", value=run.plan.peak))
    drawn = figure(
        "Memory over time", [*names, *series], _TIME, Axis(name="memory", text=lambda held: format_size(int(held)), whole=True),
        levels=levels, marks=[(at, 0.0) for at in run.resumed_at],
    )  # fmt: skip
    words = f"Read from: {run.curves[-1].source}."
    if run.resumed_at:
        words += " Upright lines: another process went on there."
    return f"<section><h2>Memory</h2>{drawn}<p>{escape(words)}</p></section>"


def _losses(run: Run) -> str:
    if not run.passes:
        return ""
    marks = [(at, 0.0) for at in run.resumed_at]
    found = figure(
        "Loss", _series(run.passes, "loss"), _TIME, Axis(name="loss", text=lambda value: f"{value:.4g}"), marks=marks
    )
    right = _series([one for one in run.passes if one.accuracy is not None], "accuracy")
    if right:
        text = Axis(name="accuracy", text=lambda value: f"{100 * value:.4g} %")
        found += figure("Accuracy", right, _TIME, text, marks=marks)
    return f"<section><h2>Loss and accuracy</h2>{found}</section>"


def _series(passes: Sequence[Pass], what: str) -> list[Series]:
    """Training as lines, one for each partition where they are few; tests as dots."""
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


def _time(run: Run) -> str:
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
    issued = " On a card a step lasts as long as it took to issue it." if _on_a_card(run) else ""
    return (
        f"<section><h2>Where the time went</h2>{bars('Seconds by kind of step', rows)}<p>What comes from a home or goes there "
        "while another partition computes costs only the seconds that were waited for. Outside of steps: planning, writing of "
        f"the first homes and rows, checkpoints, results.{issued}</p></section>"
    )


def _on_a_card(run: Run) -> bool:
    return run.plan is not None and not run.plan.device.startswith("CPU")


def _moved(read: int, written: int) -> str:
    moved = [f"{format_size(read)} read" if read else "", f"{format_size(written)} written" if written else ""]
    return "".join(f", {word}" for word in moved if word)


def _planned(run: Run) -> str:
    if run.plan is None:
        return ""
    title, notes = escape(plan_title(run.plan)), _list(plan_notes(run.plan))
    return f"<section><h2>Plan</h2><p>{title}</p>{_plan_table(run.plan)}{notes}</section>"


def _plan_table(plan: Plan) -> str:
    rows = as_text_rows(plan)
    return _table(list(rows[0]), [list(map(str, row.values())) for row in rows])


def _proof(run: Run) -> str:
    proof = run.result.get("proof")
    if not proof:
        return ""
    error = 100 * (proof["predicted"] - proof["peak"]) / max(1, proof["peak"])
    rows = [
        ("limit", format_size(proof["limit"])),
        ("what was measured", str(proof["source"])),
        ("highest value", f"{format_size(proof['peak'])}, {100 * proof['peak'] / proof['limit']:.1f} % of the limit"),
        ("seen at step", str(run.result.get("peak at") or "unknown")),
        ("samples", f"{proof['samples']:,}"),
        ("predicted", f"{format_size(proof['predicted'])}, {error:+.1f} % of the highest value"),
        ("of it runtime (libraries or context)", format_size(proof["runtime"])),
        ("host memory granted beside the limit", format_size(proof["host"])),
        ("file pages grew by", format_size(proof["file_growth"])),
        ("violations", str(proof["violations"])),
    ]
    if proof.get("allocator_peak") is not None:
        rows.insert(6, ("the allocator's own peak", format_size(proof["allocator_peak"])))
    resumed = "<p>The proof is of the last process: what came before it has its own curve above.</p>" if run.resumed_at else ""
    return f"<section><h2>Proof of the limit</h2>{_table([], [list(row) for row in rows])}{resumed}</section>"


def _asked(run: Run) -> str:
    """What was set, and by which versions it ran."""
    options = {**run.start.get("settings", {}), **run.job}
    asked = [[name.replace("_", "-"), _said(value)] for name, value in options.items() if value not in (None, "None")]
    versions = [[name, str(run.start[name])] for name in _VERSIONS if name in run.start]
    if not asked and not versions:
        return ""
    return (
        f"<section><h2>Job</h2><details><summary>settings</summary>{_table([], asked)}</details>"
        f"<details><summary>versions and machine</summary>{_table([], versions)}</details></section>"
    )


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _values(run: Run) -> str:
    """The numbers that the figures show."""
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
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in _shown(lines)) + "</ul>"


def _shown(lines: Iterable[str]) -> Iterator[str]:
    yield from itertools.islice(lines, _LISTED)
