"""The page at the end of smoke.sh, contract.sh and speed.sh: part, seconds, how it ended, and its main figures.

    python -m benchmarks.gpu.page FOLDER     which has parts.tsv (part, seconds, exit code), PART.log, and `begun`, made first

Figures are read from the JSON files that the parts wrote since `begun`; of a part without one its failed tests and its last
line are shown. A page has at most 10,000 characters.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.assumptions import line
from benchmarks.gpu.llama import said as of_arm
from benchmarks.gpu.measures import Row
from benchmarks.gpu.verified import said as of_model

_TIMED_OUT = ("124", "137")
_WIDTH, _MOST, _FAILED_TESTS = 110, 10_000, 12
_GB = 1e9
_OFF = 1.25
"""What a plan assumes may be off by this factor before the page names it."""


def assumptions(result: dict[str, Any]) -> list[str]:
    known = [row for row in result["rows"] if row["assumed"] and row["measured"] is not None]
    off = [row for row in known if row["unit"] != "B" and not 1 / _OFF <= row["measured"] / row["assumed"] <= _OFF]
    more = [row for row in known if row["unit"] == "B" and row["measured"] > row["assumed"]]
    failed = [row["what"] for row in result["rows"] if row["note"].startswith("failed")]
    found = [f"{len(result['rows'])} rows of {result['device']}"]
    found += [f"{row['what']}: {row['measured'] / row['assumed']:.2f} of what is assumed" for row in off]
    found += [f"{row['what']}: {row['measured'] / 1e6:.1f} MB, assumed {row['assumed'] / 1e6:.1f}" for row in more]
    return found + ([f"could not be measured: {', '.join(failed)}"] if failed else [])


def probe(result: dict[str, Any]) -> list[str]:
    return [" ".join(line(Row(**row)).replace(" - ", " ").split()) for row in result["rows"]]


def verified(result: dict[str, Any]) -> list[str]:
    return [f"{name}: {of_model(found)}" for name, found in result.items()]


def resumed(result: dict[str, Any]) -> list[str]:
    return [f"{result['killed']['killed']} kill(s), then {'the' if result['equal'] else 'NOT the'} weights of an unbroken run"]


def llama(result: dict[str, Any]) -> list[str]:
    arms = [f"{result['size']} {name}: {of_arm(arm)}" for name, arm in result["arms"].items()]
    return arms + ([f"left out: {', '.join(result['left_out'])}"] if result["left_out"] else [])


def overlap(result: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {result[name]:.3f}" for name in ("wall", "computing", "up", "down"))
    return [
        f"wall / longest {result['ratio']:.2f}: seconds of an update: {parts}; predicted {result['predicted']:.3f}",
        f"peak {_error(result['predicted peak'], result['peak'])}, violations {result['violations']}",
    ]


def grid(result: dict[str, Any]) -> list[str]:
    cells = result["cells"]
    done = [cell for cell in cells if cell["peak"] and cell["predicted"]]
    errors = [cell["predicted"] / cell["peak"] - 1 for cell in done]
    found = [f"{len(cells)} cells, {sum(cell['violation'] for cell in cells)} violations, left out {len(result['left_out'])}"]
    if errors:
        found.append(f"predicted peaks off by {min(errors):+.1%} to {max(errors):+.1%} in {len(errors)} cells")
    return found


def frontier(result: dict[str, Any]) -> list[str]:
    return _arms(result["arms"], result["network"])


def peers(result: dict[str, Any]) -> list[str]:
    return [text for network, arms in result.items() for text in _arms(arms, network)]


def _arms(arms: dict[str, Any], network: str) -> list[str]:
    return [
        f"{network} {name}: {arm['seconds']:.3f} s, {arm['peak'] / _GB:.2f} GB"
        if "seconds" in arm
        else f"{network} {name}: {arm['refused'][: _WIDTH - 30]}"
        for name, arm in arms.items()
    ]


def _error(predicted: float, measured: float) -> str:
    return f"{measured / _GB:.3f} GB, predicted {predicted / _GB:.3f} ({predicted / measured - 1:+.1%})"


FIGURES: dict[str, tuple[str, str, Callable[[dict[str, Any]], list[str]]]] = {
    "probe": ("gpu-probe", "cuda", probe),
    "verified": ("gpu-verified", "cuda", verified),
    "resumed": ("gpu-resumed", "cuda", resumed),
    "llama": ("gpu-llama", "cuda", llama),
    "llama-3B": ("gpu-llama-3B", "cuda", llama),
    "assumptions": ("gpu-assumptions", "cuda", assumptions),
    "overlap": ("gpu-overlap", "cuda", overlap),
    "grid": ("contract_grid", "gpu", grid),
    "frontier": ("gpu-frontier", "gpu", frontier),
    "peers": ("peers", "gpu", peers),
}
"""By part: the name of its results, the machine in it, and what it tells."""


def figures(part: str, folder: Path) -> list[str]:
    """Of this call only: a file that is older was another's."""
    if part in FIGURES:
        name, machine, told = FIGURES[part]
        path = record.path_of(name, machine)
        try:
            if path.stat().st_mtime >= (folder / "begun").stat().st_mtime:
                return told(json.loads(path.read_text())["result"])
        except FileNotFoundError:
            pass
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            return [f"{path.name} is not what was expected: {error!r}"]
    log = folder / f"{part}.log"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    failed = [text for text in lines if text.startswith(("FAILED ", "ERROR "))]
    return [*failed[:_FAILED_TESTS], lines[-1]] if lines else ["no output"]


def page(folder: Path) -> tuple[list[str], int]:
    """(its lines, how many parts failed)."""
    lines, failures = [f"{'part':12} {'seconds':>7}  {'ended':9} figures"], 0
    for entry in (folder / "parts.tsv").read_text().splitlines():
        part, seconds, status = entry.split("\t")
        ended = {"0": "ok", **dict.fromkeys(_TIMED_OUT, "timed out")}.get(status, f"failed {status}")
        ended, failures = (status if status == "left out" else ended), failures + (status != "0")
        for number, figure in enumerate(figures(part, folder)):
            head = f"{part:12} {seconds:>7}  {ended:9}" if not number else " " * 31
            lines.append(f"{head} {figure[:_WIDTH]}")
    return [*lines, f"{failures} parts did not end well"], failures


def main(words: Sequence[str] | None = None) -> int:
    (folder,) = sys.argv[1:] if words is None else words
    lines, failures = page(Path(folder))
    *most, last = lines
    print("\n".join(most)[: _MOST - len(last) - 2] + f"\n{last}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
