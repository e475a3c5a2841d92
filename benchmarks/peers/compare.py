"""Every arm's smallest memory, its speed there and at equal memory, and its accuracy after equal time.

    python -m benchmarks.peers.compare S                        one network: hours
    python -m benchmarks.peers.compare S --arms ours,mapped     some arms; what is known of the others stays
    python -m benchmarks.peers.compare --table                  what was found so far, in Markdown
    python -m benchmarks.peers.compare S --quick                seqpart alone on a small network, to see that it runs; not kept

For every arm: the smallest cgroup, to 8 %, in which it trains within the time allowed for an update; then, arms in turn and
round by round, the seconds per update there and at equal memory (the smallest of the best exact peer, or seqpart's where that
is more); seqpart in the smallest cgroup of every peer; and the share of right answers after equal time. What is already in
benchmarks/results is not measured again, but with --again.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import children, quick
from benchmarks.peers import results
from benchmarks.peers.arms import ARMS, Environments
from benchmarks.peers.cell import Cell, NoCgroup, Warm, end_by_exception, run, swap_file

ALLOWED = {"S": 20, "L": 80, "T": 90}
"""Seconds for an update, by which the smallest memory is judged: 10 to 20 times a plain loop's. --allowed says others."""
SETUP = 120
"""Seconds to begin: libraries are read again and again in little memory, and weights are written."""
TIMED = {"S": 60, "L": 150, "T": 150}
"""Seconds of training for the accuracy after equal time: an update takes longer in the larger networks."""
SWAP = {"S": 4 << 30, "L": 12 << 30, "T": 8 << 30}
STEP = 1.08
PROBED, WARM_UP, MEASURED = 3, 2, 5
"""Updates of a probe; of a measurement, not timed and timed."""
FLOOR = 150 << 20
"""Below it no Python with torch begins; the lower end for arms that page."""
REFUSED = 3


@dataclass
class Bench:
    """One network, and where things are."""

    network: str
    environments: Environments
    folder: Path
    data: Path
    shape: list[str]
    """--width and --depth, for a quick look."""
    step: float
    rounds: int
    allowed: float
    """Seconds for an update."""
    found: dict[str, Any] = field(default_factory=dict)
    keep: Any = None
    """Saves `found`."""
    cold: bool = True
    """Whether libraries are taken out of the page cache first, and other processes that map them are waited for."""

    def attempt(
        self, name: str, size: int | None, updates: int, *, limit: int | None = None, seconds: float | None = None
    ) -> Any:
        """(cell, what the program printed, or None where it did not come to its end)."""
        arm = ARMS[name]
        with self.scratch() as scratch, swap_file(scratch / "swap", SWAP[self.network]) if arm.swap and size else nullcontext():
            command = [
                str(self.environments.python(arm)), "-m", f"benchmarks.peers.{arm.module}", *arm.options,
                "--network", self.network, *self.shape, "--data", str(self.data), "--folder", str(scratch),
                "--updates", str(updates),
                *(["--seconds", str(seconds)] if seconds else []), *(["--limit", f"{limit}B"] if limit else []),
            ]  # fmt: skip
            cell = run(
                command, size, swap=SWAP[self.network] if arm.swap else 0, environment=self.environments.variables(arm),
                timeout=SETUP + self.allowed * updates if not seconds else SETUP + 4 * seconds + 600,
                cold=[*self.environments.libraries(arm), self.data] if self.cold else [],
            )  # fmt: skip
        return cell, _printed(cell)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir=self.folder, prefix="peers-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def arm(self, name: str) -> dict[str, Any]:
        kept: dict[str, Any] = self.found.setdefault("arms", {}).setdefault(name, {})
        return kept

    def able(self, names: list[str]) -> list[str]:
        return [name for name in names if "smallest" in self.arm(name)]


def _printed(cell: Cell) -> dict[str, Any] | None:
    if cell.exit_code not in (0, REFUSED):
        return None
    lines = [line for line in cell.output.splitlines() if line.startswith('{"')]
    return json.loads(lines[-1]) if lines else None


def _brief(cell: Cell, printed: dict[str, Any] | None) -> dict[str, Any]:
    """What is kept of a run."""
    told = {key: getattr(cell, key) for key in ("peak", "used", "read", "written", "warm", "out_of_memory", "late")}
    if printed is None:
        return told | {"exit_code": cell.exit_code, "error": cell.errors.splitlines()[-1:]}
    extra = {key: printed[key] for key in ("accuracy", "micro_batch", "partitions", "method", "violations") if key in printed}
    return told | {"seconds": printed.get("seconds", [])[WARM_UP:], "setup_s": printed.get("setup_s")} | extra


def smallest(bench: Bench, name: str) -> None:
    """Bisect the size of the cgroup; keeps every probe."""
    kept, arm = bench.arm(name), ARMS[name]
    if why := bench.environments.missing(arm):
        kept["refused"] = why
        return
    kept.pop("refused", None)
    limit = None
    if arm.ours:
        cell, printed = bench.attempt(name, None, PROBED, limit=1 << 20)
        if printed is None or not printed.get("smallest"):
            kept["refused"] = (cell.errors.splitlines() or ["said nothing"])[-1]
            return
        limit = round(1.005 * printed["smallest"])
    cell, printed = bench.attempt(name, None, PROBED, limit=limit)
    if printed is None or cell.exit_code:
        kept["refused"] = (cell.errors.splitlines() or [""])[-1] if cell.exit_code == REFUSED else _why(cell, printed)
        return
    kept["unlimited"] = _brief(cell, printed) | {"limit": limit}
    low = FLOOR if arm.pages else 0.9 * cell.peak
    probes = kept["probes"] = []
    found = _bisect(bench, name, low, 1.1 * cell.peak + (100 << 20), limit, probes)
    if found is None:
        kept["refused"] = "did not come to its end in any size that was tried"
        return
    kept["smallest"] = found | {"limit": limit}


def _bisect(bench: Bench, name: str, low: float, high: float, limit: int | None, probes: list[Any]) -> dict[str, Any] | None:
    def probe(size: float) -> dict[str, Any] | None:
        cell, printed = bench.attempt(name, round(size), PROBED, limit=limit)
        good = printed is not None and cell.exit_code == 0 and max(printed["seconds"]) <= bench.allowed
        brief = _brief(cell, printed) | {
            "size": round(size),
            "allowed": bench.allowed,
            "good": good,
            "all": printed and printed.get("seconds"),
        }
        probes.append(brief)
        _say(f"{name:15s}{size / 1e6:8.0f} MB  {'trains' if good else _why(cell, printed)}  {brief['all'] or ''}")
        return brief if good else None

    best = probe(high)
    for _ in range(5):
        if best is not None:
            break
        low, high = high, 1.3 * high
        best = probe(high)
    if best is None:
        return None
    while high > bench.step * low:
        middle = (low * high) ** 0.5
        if found := probe(middle):
            best, high = found, middle
        else:
            low = middle
    return best


def _why(cell: Cell, printed: dict[str, Any] | None) -> str:
    if cell.out_of_memory:
        return "killed: out of memory"
    if cell.late or printed is not None:
        return "too slow"
    return f"failed ({cell.exit_code}): {(cell.errors.splitlines() or [''])[-1][:120]}"


def at_smallest(bench: Bench, name: str) -> None:
    """Once more at its smallest size, timed. A longer run may need a step more, which then is its smallest."""
    kept = bench.arm(name)
    runs, place = kept.setdefault("at_smallest", []), kept["smallest"]
    for _ in range(6):
        cell, printed = bench.attempt(name, place["size"], WARM_UP + MEASURED, limit=place["limit"])
        if printed is not None and cell.exit_code == 0:
            runs.append(_brief(cell, printed) | {"size": place["size"]})
            place["peak"] = max(place["peak"], cell.peak)
            _tell(name, place["size"], runs[-1])
            return
        _say(f"{name:15s}{place['size'] / 1e6:8.0f} MB  {_why(cell, printed)} in a longer run: one step more")
        place["size"] = round(bench.step * place["size"])
        runs.clear()


def at_size(
    bench: Bench, name: str, size: int, seconds: float | None = None, updates: int | None = None
) -> dict[str, Any] | None:
    """A measurement in a cgroup of `size`; seqpart gets the limit that leaves files what they had at its smallest."""
    arm, place = ARMS[name], bench.arm(name)["smallest"]
    limit = None
    if arm.ours:
        limit = max(place["limit"], size - max(0, place["size"] - place["limit"]))
        if limit > size / 0.9:
            return None
    for _ in range(6):
        cell, printed = bench.attempt(name, size, updates or WARM_UP + MEASURED, limit=limit, seconds=seconds)
        if printed is not None and cell.exit_code == 0:
            brief = _brief(cell, printed) | {"size": size, "limit": limit, "updates": len(printed["seconds"])}
            brief["trained_s"] = sum(printed["seconds"])
            _tell(name, size, brief)
            return brief
        _say(f"{name:15s}{size / 1e6:8.0f} MB  {_why(cell, printed)}")
        if limit is None or limit <= place["limit"]:
            return None
        limit = max(place["limit"], round(limit / bench.step))
    return None


def measure(bench: Bench, names: list[str], *, accuracy: bool) -> None:
    """Everything behind the smallest sizes, arms in turn."""
    for number in range(bench.rounds):
        for name in bench.able(names):
            if len(bench.arm(name).get("at_smallest", [])) <= number:
                at_smallest(bench, name)
                bench.keep()
    peers = [name for name in bench.able(list(bench.found["arms"])) if ARMS[name].exact and not ARMS[name].ours]
    if not peers or "ours" not in bench.able(["ours"]):
        return
    # Arms that page may go on below what seqpart can do at all, ever more slowly: they are compared in its smallest memory.
    equal = max(min(bench.arm(name)["smallest"]["size"] for name in peers), bench.arm("ours")["smallest"]["size"])
    if bench.found.get("equal") != equal:
        bench.found["equal"] = equal
        for kept in bench.found["arms"].values():
            kept.pop("at_equal", None)
            kept.pop("timed", None)
    everyone = [name for name in dict.fromkeys(["ours", *names]) if name in bench.able([name])]
    for number in range(bench.rounds):
        for name in everyone:
            _round_of(bench, name, equal, number)
    for name in everyone if accuracy else ():
        if "timed" not in bench.arm(name) and bench.arm(name).get("at_smallest"):
            timed(bench, name, max(equal, bench.arm(name)["smallest"]["size"]))
            bench.keep()


def _round_of(bench: Bench, name: str, equal: int, number: int) -> None:
    """One round at equal memory, and of seqpart in this peer's smallest memory."""
    kept = bench.arm(name)
    if kept["smallest"]["size"] <= equal and len(kept.setdefault("at_equal", [])) <= number:
        kept["at_equal"] += [run] if (run := at_size(bench, name, equal)) else []
        bench.keep()
    if ARMS[name].ours:
        return
    size = kept["smallest"]["size"]
    versus = bench.found.setdefault("versus", {}).setdefault(name, {"size": size, "runs": []})
    if versus["size"] != size:
        versus |= {"size": size, "runs": []}
    if len(versus["runs"]) <= number:
        versus["runs"] += [run] if (run := at_size(bench, "ours", size)) else []
        bench.keep()


def timed(bench: Bench, name: str, size: int) -> None:
    """Accuracy after equal time. seqpart is told how many updates that is, by its speed at this size."""
    seconds, updates = TIMED[bench.network], 1
    if bench.shape:
        seconds = 5
    if ARMS[name].ours:
        kept = bench.arm(name)
        speed = [second for run in kept.get("at_equal") or kept["at_smallest"] for second in run["seconds"]]
        updates = max(1, round(seconds / median(speed)))
    if run := at_size(bench, name, size, seconds=seconds, updates=updates):
        bench.arm(name)["timed"] = run


def _tell(name: str, size: int, brief: dict[str, Any]) -> None:
    middle = f"{median(brief['seconds']):8.2f} s per update" if brief["seconds"] else ""
    accuracy = f", accuracy {brief['accuracy']:.3f}" if brief.get("accuracy") is not None else ""
    _say(f"{name:15s}{size / 1e6:8.0f} MB {middle}, own memory {brief['peak'] / 1e6:.0f} MB{accuracy}")


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", choices=list(ALLOWED))
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    quick.add_to(parser)
    parser.add_argument("--allowed", type=float, help=f"seconds for an update; default: {ALLOWED}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-accuracy", action="store_true", help="leave the accuracy after equal time for another call")
    parser.add_argument("--again", action="store_true", help="measure these arms again")
    parser.add_argument("--table", action="store_true", help="print what was found so far, in Markdown")
    parser.add_argument("--folder", type=Path, default=Path(), help="where files of the arms lie: a real disk")
    parser.add_argument("--environments", type=Path, default=Path(__file__).parent / ".environments")
    parser.add_argument("--data-dir", type=Path, help="for T: where tinyshakespeare's input.txt is")
    options = parser.parse_args()
    if unknown := set(options.arms.split(",")) - set(ARMS):
        parser.error(f"unknown arms {', '.join(sorted(unknown))}: expected some of {', '.join(ARMS)}")
    if not options.network and not options.table:
        parser.error("give a network, or --table")
    if options.network == "T" and not options.data_dir and not (options.quick or options.table):
        parser.error("T needs --data-dir DIR with tinyshakespeare's input.txt in it")
    return options


def main() -> None:
    options = arguments()
    end_by_exception()
    result = {} if options.quick else results.load("peers")
    if options.table:
        print(results.markdown(result))
        return
    names = ["ours"] if options.quick else options.arms.split(",")
    found = result.setdefault(options.network, {})
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="peers-data-") as folder:
        data = Path(folder).resolve() / "rows.pt"
        if options.quick:
            options.data_dir = quick.data(Path(folder) / "quick") / "tinyshakespeare"
        place = ["--data-dir", str(options.data_dir)] if options.data_dir else []
        children.shown("benchmarks.peers.data", options.network, data, *place)
        allowed = options.allowed or (3 if options.quick else ALLOWED[options.network])
        bench = Bench(
            options.network, Environments(options.environments.absolute()), options.folder.absolute(), data,
            ["--width", "64", "--depth", "2"] if options.quick else [], 3.0 if options.quick else STEP,
            1 if options.quick else options.rounds, allowed, found,
            (lambda: None) if options.quick else lambda: results.save("peers", result), cold=not options.quick,
        )  # fmt: skip
        for name in names:
            if options.again:
                found.setdefault("arms", {}).pop(name, None)
                found.get("versus", {}).pop(name, None)
            if "smallest" not in bench.arm(name):
                smallest(bench, name)
                bench.keep()
        measure(bench, names, accuracy=not options.no_accuracy)
        bench.keep()
    results.show(options.network, found)


if __name__ == "__main__":
    try:
        main()
    except (NoCgroup, Warm) as refusal:
        sys.exit(f"refused: {refusal}")
