"""What the comparison found, kept by benchmarks/record.py, and its table.

The runner calls `load` and `save`, which start a process for it: record.py imports torch, and pages of its libraries that the
runner mapped could not be counted in any arm's cgroup.
"""

import json
import sys
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import children

COLUMNS = ("arm", "smallest GB", "own GB", "s per update there", "s at {}", "ours there", "accuracy", "note")


def load(name: str) -> dict[str, Any]:
    done = _apart("load", name)
    found: dict[str, Any] = json.loads(done)
    return found


def save(name: str, result: dict[str, Any]) -> None:
    _apart("save", name, json.dumps(result))


def _apart(verb: str, name: str, text: str = "") -> str:
    return children.output("benchmarks.peers.results", verb, name, text=text)


def rows(found: dict[str, Any]) -> list[list[str]]:
    """One row of COLUMNS for each arm of a network."""
    made = []
    for name, arm in found["arms"].items():
        if "refused" in arm:
            made.append([name, *["-"] * 6, arm["refused"]])
            continue
        smallest, versus, timed = arm.get("smallest"), found.get("versus", {}).get(name), arm.get("timed")
        made.append(
            [
                name,
                _gb(smallest and smallest["size"]),
                _gb(smallest and smallest["peak"]),
                _seconds(arm.get("at_smallest")),
                _seconds(arm.get("at_equal")),
                _seconds(versus and versus["runs"]),
                "-" if not timed else f"{100 * timed['accuracy']:.1f} % ({timed['updates']} updates)",
                arm.get("note", ""),
            ]
        )
    return made


def _gb(nbytes: int | None) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes else "-"


def _seconds(runs: list[dict[str, Any]] | None) -> str:
    good = [second for run in runs or [] for second in run.get("seconds", [])]
    return f"{median(good):.2f}" if good else "-"


def columns(found: dict[str, Any]) -> list[str]:
    equal = found.get("equal")
    return [column.format(f"{_gb(equal)} GB" if equal else "equal memory") for column in COLUMNS]


def markdown(result: dict[str, Any]) -> str:
    lines = []
    for network, found in result.items():
        names = columns(found)
        lines += [f"### {network}", "", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows(found)] + [""]
    return "\n".join(lines)


def show(network: str, found: dict[str, Any]) -> None:
    table = Table(*columns(found), title=network)
    for row in rows(found):
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    from benchmarks import record

    verb, name = sys.argv[1:]
    if verb == "load":
        print(json.dumps(record.load(name)))
    else:
        print(record.save(name, json.load(sys.stdin)))


if __name__ == "__main__":
    main()
