"""Memory over time with the limit line, one curve for each method; below it, step by step, what one of them did."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.figures import Figures, Run
from profiling.trace import TRAIN, Ran
from seqpart.units import format_size

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B"]
"""Okabe and Ito's, which the colour-blind can tell apart."""
_VERBS = {"L": ("load", "#9ECAE1"), "F": ("forward", "#C7E9C0"), "B": ("backward", "#FDD0A2"), "U": ("update", "#DADAEB"),
          "D": ("drop", "#D9D9D9"), "S": ("split", "#FEE391"), "M": ("merge", "#FEC44F")}  # fmt: skip
_LIMIT, _INK, _FAINT = "#C00000", "#222222", "#8A8A8A"
_FEW_STEPS = 30


def draw(found: Sequence[Figures], path: Path) -> bool:
    """Write the PNG; False where matplotlib (the extra `plot`) is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    close = _closest(found)
    style = {"font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
             "axes.edgecolor": _FAINT, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}  # fmt: skip
    with plt.rc_context(style):
        figure = plt.figure(figsize=(13, 8.2 if close else 5.4), layout="constrained")
        grid = figure.add_gridspec(2 if close else 1, 2, width_ratios=[2.3, 1], height_ratios=[1.45, 1] if close else [1])
        unit = _unit(max(row.peak for row in found))
        _over_time(figure.add_subplot(grid[0, 0]), found, unit)
        _bars(figure.add_subplot(grid[0, 1]), found, unit)
        if close:
            _step_by_step(figure.add_subplot(grid[1, :]), *close, found, unit)
        facts = found[0].facts
        figure.suptitle(
            f"{facts['parameters'] / 1e6:,.1f} M parameters under {format_size(facts['limit'])}", x=0.012, ha="left",
            fontsize=14, fontweight="bold", color=_INK,
        )  # fmt: skip
        figure.savefig(path, dpi=130, facecolor="white")
        plt.close(figure)
    return True


def _unit(largest: int) -> tuple[float, str]:
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _limit_line(axes: Any, limit: float, top: float, *, upright: bool = False) -> None:
    if upright:
        axes.axvline(limit, color=_LIMIT, linewidth=1.4, linestyle=(0, (5, 3)))
        return
    axes.axhspan(limit, top, color=_LIMIT, alpha=0.05, linewidth=0)
    axes.axhline(limit, color=_LIMIT, linewidth=1.4, linestyle=(0, (5, 3)))


def _over_time(axes: Any, found: Sequence[Figures], unit: tuple[float, str]) -> None:
    scale, name = unit
    limit = found[0].facts["limit"] / scale
    top = 1.08 * max(limit, max(row.peak for row in found) / scale)
    end = max((_end(row.first) - _start(row.first) for row in found), default=1.0) or 1.0
    _limit_line(axes, limit, top)
    for number, row in enumerate(found):
        start, last = _start(row.first), _end(row.first)
        points = [(at - start, used / scale) for at, used, _ in row.first.curve if at <= last]
        if points:
            axes.plot(*zip(*points, strict=True), color=_colour(number), linewidth=1.3, label=row.way.name)
            axes.plot(*points[-1], "o", color=_colour(number), markersize=4)
    axes.text(end * 1.01, limit, "limit ", color=_LIMIT, ha="right", va="bottom", fontsize=9)
    axes.set(xlim=(-0.06 * end, end * 1.01), ylim=(0, top), xlabel="seconds since training began", ylabel=name)
    axes.set_title("memory over time, seen from outside", loc="left", fontsize=10.5, color=_INK)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False, fontsize=9, ncols=min(4, len(found)))  # no run is ever down there


def _start(run: Run) -> float:
    """Where training began; a run that never came so far is shown from its process's beginning."""
    return run.steps[0].began if run.steps else 0.0


def _end(run: Run) -> float:
    """Where the last step ended; what comes after is the interpreter's leaving."""
    if run.steps:
        return run.steps[-1].ended
    return run.curve[-1][0] if run.curve else 0.0


def _bars(axes: Any, found: Sequence[Figures], unit: tuple[float, str]) -> None:
    scale, name = unit
    limit = found[0].facts["limit"] / scale
    values = [(row.peak if row.done else row.needs or row.peak) / scale for row in found]
    longest = max(limit, *values)
    for number, (row, value) in enumerate(zip(found, values, strict=True)):
        axes.barh(number, value, color=_colour(number), alpha=1.0 if row.fits else 0.35, height=0.62)
        if row.said("predicted"):
            axes.plot([row.said("predicted") / scale] * 2, [number - 0.38, number + 0.38], color=_INK, linewidth=1.6)
        axes.text(longest * 1.05, number, _beside(row), va="center", fontsize=8.5, color=_INK, linespacing=1.25)
    _limit_line(axes, limit, 0, upright=True)
    axes.set(yticks=range(len(found)), yticklabels=[row.way.name for row in found], xlim=(0, longest * 1.8), xlabel=name)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= longest * 1.05])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title("peak (bar), predicted (mark), limit (dashed)", loc="left", fontsize=10.5, color=_INK)


def _beside(row: Figures) -> str:
    if not row.done:
        return f"does not fit\nasks for {format_size(row.needs)}" if row.needs else row.first.status
    speed = f"{row.epoch_seconds:.2f} s an epoch" if row.epoch_seconds is not None else ""
    accuracy = row.said("accuracy")
    right = f", {100 * accuracy:.1f} % right" if accuracy is not None else ""
    return f"{format_size(row.peak)}{'' if row.fits else ', over the limit'}\n{speed}{right}"


def _closest(found: Sequence[Figures]) -> tuple[Run, list[Ran]] | None:
    """A run of seqpart's, and the steps of it that are shown one by one."""
    ours = sorted(
        (row.first for row in found if not row.way.plain and row.done), key=lambda run: run.said["method"] != "streamed"
    )
    steps = [step for step in ours[0].steps if step.kind == TRAIN] if ours else []
    return (ours[0], _excerpt(steps)) if steps else None


def _excerpt(steps: list[Ran]) -> list[Ran]:
    """One whole update from the middle where partitions take turns within one; else what surrounds a change of partition."""
    updates = [number for number, step in enumerate(steps) if step.label == "U0"]
    if len(updates) > 2:
        middle = len(updates) // 2
        one = steps[updates[middle - 1] + 1 : updates[middle] + 1]
        if any(step.label.startswith("D") for step in one):
            return one
    drops = [number for number, step in enumerate(steps) if step.label.startswith("L")]
    centre = drops[len(drops) // 2] if drops else len(steps) // 2
    return steps[max(0, centre - _FEW_STEPS // 2) : centre + _FEW_STEPS // 2]


def _step_by_step(axes: Any, run: Run, steps: list[Ran], found: Sequence[Figures], unit: tuple[float, str]) -> None:
    scale, name = unit
    limit = found[0].facts["limit"] / scale
    start, end = steps[0].began, steps[-1].ended
    top = 1.18 * max(limit, run.peak / scale)
    seen = set()
    for step in steps:
        title, colour = _VERBS.get(step.label[0], ("", "#FFFFFF"))
        axes.axvspan(step.began - start, step.ended - start, color=colour, linewidth=0, label=None if title in seen else title)
        seen.add(title)
        if step.ended - step.began > (end - start) / 30:
            axes.text(
                (step.began + step.ended) / 2 - start, top * 0.965, step.label, ha="center", va="top", fontsize=7.5, color=_INK
            )
    number = next(n for n, row in enumerate(found) if run is row.first)
    points = [(at - start, used / scale) for at, used, _ in run.curve if start - 0.1 <= at <= end + 0.1]
    axes.plot(*zip(*points, strict=True), color=_colour(number), linewidth=1.8) if points else None
    axes.axhline(limit, color=_LIMIT, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.set(xlim=(0, end - start), ylim=(0, top), xlabel="seconds", ylabel=name)
    axes.set_title(
        f"{run.way.name}, step by step: {len(steps)} steps, partitions 0-{run.said['partitions'] - 1}", loc="left",
        fontsize=10.5, color=_INK,
    )  # fmt: skip
    axes.legend(loc="lower right", ncols=5, fontsize=8.5, framealpha=0.9, edgecolor="none")
