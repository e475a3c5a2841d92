"""The figures as one table: for the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from profiling import answer
from profiling.figures import Figures, compute_bound
from seqpart.units import format_size

Value = int | float | str | None


def _text(value: Value) -> str:
    return str(value) if value is not None else "-"


def _number(show: Callable[[float], str]) -> Callable[[Value], str]:
    """`show` for numbers; a dash where there is none."""
    return lambda value: show(value) if isinstance(value, int | float) else "-"


_size = _number(lambda value: format_size(int(value)))

COLUMNS: list[tuple[str, str, Callable[[Value], str]]] = [
    ("method", "method", _text),
    ("fits", "fits?", _text),
    ("peak", "peak", _size),
    ("predicted", "predicted", _size),
    ("allocator_peak", "allocator", _size),
    ("runtime", "runtime", _size),
    ("ram", "RAM", _size),
    ("pinned", "pinned", _size),
    ("disk_read", "disk read", _size),
    ("disk_written", "written", _size),
    ("epoch_seconds", "s/epoch", _number("{:.2f} s".format)),
    ("samples_per_second", "samples/s", _number("{:,.0f}".format)),
    ("share_of_bound", "of bound", _number(lambda value: f"{100 * value:.0f} %")),
    ("train_loss", "train loss", _number("{:.4f}".format)),
    ("accuracy", "accuracy", _number(lambda value: f"{100 * value:.2f} %")),
]
"""(key in JSON and CSV, title, how it is shown). The peak is seen from outside; so is the disk's traffic."""


def rows_of(found: Sequence[Figures]) -> list[dict[str, Value]]:
    compute = compute_bound(list(found))
    return [
        {
            "method": row.way.name, "fits": _verdict(row), "peak": row.peak if row.done else row.needs,
            "predicted": row.said("predicted"), "allocator_peak": row.said("allocator_peak"), "runtime": row.said("runtime"),
            "ram": max(run.ram for run in row.runs), "pinned": row.said("pinned"), "disk_read": row.first.disk_read,
            "disk_written": row.first.disk_written, "epoch_seconds": row.epoch_seconds,
            "samples_per_second": row.samples_per_second, "share_of_bound": row.share_of_bound(compute),
            "train_loss": row.train_loss, "accuracy": row.said("accuracy"),
        }
        for row in found
    ]  # fmt: skip


def _verdict(row: Figures) -> str:
    """`yes`, or what it asked for; a way that fitted nowhere says why in the notes."""
    if row.fits:
        return "yes"
    if row.first.status in (answer.REFUSED, "died"):
        return row.first.status
    return f"no: asks for {format_size(row.needs)}" if row.needs else "no"


def notes_of(found: Sequence[Figures]) -> list[str]:
    facts, first = found[0].facts, found[0].first
    compute = compute_bound(list(found))
    lines = [
        f"limit {format_size(facts['limit'])}; {facts['parameters']:,} parameters in {facts['blocks']} blocks, "
        f"{facts['rows']:,} rows an epoch, batch {facts['batch_size']}; {len(found[0].runs)} run(s) of each, in turn",
        f"peak: {first.source}; the highest of all runs. Bound of an epoch: {compute:.2f} s of plain training's computation, "
        f"or the busiest link (disk {facts['read'] / 1e9:.1f} GB/s read, {facts['write'] / 1e9:.1f} GB/s written)",
        f"{_machine(facts['versions'])}, {time.strftime('%Y-%m-%d')}",
    ]
    return lines + [f"{row.way.name}: {run.message}" for row in found for run in row.runs[:1] if run.message]


def _machine(versions: dict[str, Any]) -> str:
    gpu = "" if versions["gpu"] == "none" else f", {versions['gpu']}"
    return f"{versions['machine']}{gpu}, torch {versions['torch']}, seqpart {versions['seqpart']}"


def shown(found: Sequence[Figures]) -> list[list[str]]:
    """The table's cells, without columns that hold nothing for anybody."""
    rows = rows_of(found)
    used = [(key, title, show) for key, title, show in COLUMNS if any(row[key] not in (None, 0) for row in rows)]
    return [[title for _, title, _ in used], *([show(row[key]) for key, _, show in used] for row in rows)]


def terminal(found: Sequence[Figures]) -> Table:
    head, *rows = shown(found)
    table = Table(box=SIMPLE, pad_edge=False)
    for number, title in enumerate(head):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(found: Sequence[Figures]) -> str:
    head, *rows = shown(found)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes_of(found))]) + "\n"


def as_csv(found: Sequence[Figures]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [key for key, _, _ in COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows_of(found))
    return out.getvalue()


def as_json(found: Sequence[Figures]) -> dict[str, Any]:
    """All of it, the curves included: [seconds since the process began, bytes, the step that was running]."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "facts": found[0].facts,
        "compute_bound": compute_bound(list(found)),
        "table": rows_of(found),
        "runs": [
            {
                "method": run.way.name, "status": run.status, "message": run.message, "peak": run.peak, "ram": run.ram,
                "file_pages": run.file_pages, "seconds": run.seconds, "source": run.source, "disk_read": run.disk_read,
                "disk_written": run.disk_written, "said": run.said,
                "memory": [[round(at, 3), used, step] for at, used, step in run.curve],
            }
            for row in found for run in row.runs
        ],
    }  # fmt: skip
