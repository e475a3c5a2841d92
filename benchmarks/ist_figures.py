"""The tables, pictures and document of benchmarks/ist_paper.py, and what they say of the paper's claims."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ist_costs
from benchmarks.ist_arm import ARMS
from benchmarks.ist_networks import Job
from benchmarks.psl_figures import difference, points, signed

Runs = dict[str, dict[str, Any]]
"""By name, `emnist 2 layers 4 subnets ist keep seed 0`, what a run found."""
TITLES = {"emnist": "EMNIST47", "cifar": "CIFAR-10"}
NAMES = {
    "full": "full",
    "local": "local SGD",
    "ensemble": "ensemble",
    "ist zero": "IST, moments zeroed",
    "ist keep": "IST, moments kept",
}
COLOURS = {"full": "#222222", "local": "#0072B2", "ensemble": "#E69F00", "ist zero": "#CC79A7", "ist keep": "#D55E00"}
SUBNETS = (2, 4, 8)
LONGER = 4
"""Times as many epochs, in which subnets of 8 compute about as much as 2 subnets do in the others."""
LOCAL = (5, 80)
"""Other numbers of updates between exchanges than the paper's 20, which all else has."""
BEGIN, END = "<!-- made by python -m benchmarks.ist_paper: begin -->", "<!-- made by python -m benchmarks.ist_paper: end -->"


def of(runs: Runs, job: Job, what: str = "curve", rounds: str = "") -> dict[int, float]:
    """By seed, accuracy at the end in per cent; `what` may be `voted`."""
    count = 1 if job.arm == "full" else job.subnets
    begins = f"{job.data} {job.layers} layers {count} subnets {job.arm}{rounds} seed "
    named = {int(name.removeprefix(begins)): run[what] for name, run in runs.items() if name.startswith(begins)}
    return {seed: 100 * (found[-1] if isinstance(found, list) else found) for seed, found in sorted(named.items())}


def cells(runs: Runs, base: Job) -> list[Job]:
    """(data, hidden layers, subnets) of which something was found."""
    return [
        job
        for data in TITLES for layers in (1, 2, 3) for count in SUBNETS
        if of(runs, job := replace(base, data=data, layers=layers, subnets=count, arm="ist keep"))
    ]  # fmt: skip


def _told(found: dict[int, float]) -> str:
    values = np.array(list(found.values()))
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}" if len(values) > 1 else f"{values.mean():.1f}" if found else "-"


def _apart(one: dict[int, float], other: dict[int, float]) -> tuple[float, float] | None:
    """Over the seeds that both have, if these are two or more."""
    seeds = sorted(one.keys() & other.keys())
    return difference(*(np.array([found[s] for s in seeds]) for found in (one, other))) if len(seeds) > 1 else None


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def accuracies(runs: Runs, base: Job) -> list[str]:
    def rows() -> Iterator[list[str]]:
        for job in cells(runs, base):
            arms = [of(runs, replace(job, arm=arm)) for arm in ARMS]
            arms.insert(3, of(runs, replace(job, arm="ensemble"), "voted"))
            least, most = (f(len(found) for found in arms) for f in (min, max))
            seeds = str(most) if least == most else f"{least} to {most}"
            yield [TITLES[job.data], str(job.layers), str(job.subnets), *map(_told, arms), seeds]

    names = [NAMES[arm] for arm in ARMS]
    return _table(["data", "hidden layers", "N", *names[:3], "its members' vote", *names[3:], "seeds"], rows())


CLAIMS = (
    ("IST is no worse than full training (the paper's table 2)", "full"),
    ("IST is no worse than local SGD (table 2)", "local"),
    ("IST against the ensemble: alike with one hidden layer, far better with more (table 3)", "ensemble"),
    ("Moments kept against moments zeroed", "ist zero"),
)
WORDS = {"more": "better", "less": "worse", "alike": "alike"}


def claims(runs: Runs, base: Job) -> Iterator[tuple[str, str, str]]:
    """(claim, where, what was found) of IST with its moments kept."""
    for claim, arm in CLAIMS:
        for job in cells(runs, base):
            apart = _apart(of(runs, replace(job, arm="ist keep")), of(runs, replace(job, arm=arm)))
            if apart is not None:
                where = f"{TITLES[job.data]}, {job.layers} hidden layer{'s' * (job.layers > 1)}, N = {job.subnets}"
                yield claim, where, f"{WORDS[signed(*apart)]} ({points(apart)})"


def verdicts(runs: Runs, base: Job) -> list[str]:
    """A line for each claim, with a column for each number of subnets."""
    lines = []
    by_claim: dict[str, dict[str, list[str]]] = {}
    for claim, where, found in claims(runs, base):
        by_claim.setdefault(claim, {}).setdefault(where.rpartition(", ")[0], []).append(found)
    for claim, places in by_claim.items():
        lines += [f"**{claim}.**", ""]
        lines += _table(["", *(f"N = {count}" for count in SUBNETS)], ([where, *found] for where, found in places.items()))
    return lines


def costs(base: Job) -> list[str]:
    """The paper's formulas beside what is counted."""

    def rows() -> Iterator[list[str]]:
        for layers in (2, 3):
            for count in SUBNETS:
                for arm in ("full", "local", "ist zero", "ist keep"):
                    job = replace(base, layers=layers, subnets=count, arm=arm)
                    apart = 1 if arm == "full" else job.local
                    told = ist_costs.exchanged(job) + ist_costs.moments(job)
                    flops, inputs = ist_costs.flops(job), ist_costs.flops_of_inputs(job)
                    yield [
                        str(layers), str(count), "data parallel" if arm == "full" else NAMES[arm],
                        f"{ist_costs.paper_moved(job):,.1f}", f"{ist_costs.matrices(job) / apart:,.1f}", f"{told / apart:,.0f}",
                        f"{ist_costs.paper_flops(job) / 1e6:,.2f}", f"{(flops - inputs) / 1e6:,.2f}", f"{flops / 1e6:,.2f}",
                    ]  # fmt: skip

    return _table(
        ["hidden layers", "N", "", "numbers moved: formula", "counted, weight matrices", "bytes moved: all that is sent",
         "MFLOP: formula", "counted, without gradients of inputs", "counted"],
        rows(),
    )  # fmt: skip


def rates(tuning: Runs, base: Job) -> list[str]:
    """What was chosen; where it is the grid's first or last, that is said."""

    def best(data: str, count: int, arm: str) -> str:
        begins = f"{data} {1 if arm == 'full' else count} subnets {arm} lr "
        named = {float(name.removeprefix(begins)): run["curve"][-1] for name, run in tuning.items() if name.startswith(begins)}
        if not named:
            return "-"
        rate = max(named, key=named.__getitem__)
        return f"{rate:g}" + (" (edge)" if rate in (min(named), max(named)) else "")

    rows = ([TITLES[data], str(count), *(best(data, count, arm) for arm in ARMS)] for data in TITLES for count in SUBNETS)
    return _table(["data", "N", *NAMES.values()], (row for row in rows if row[-1] != "-"))


def others(found: dict[str, Runs], base: Job) -> list[str]:
    """More epochs, and other numbers of updates between exchanges."""
    runs, longer, rounds = (found.get(group, {}) for group in ("runs", "longer", "rounds"))
    eight = replace(base, subnets=8)
    arms = [replace(eight, arm=arm) for arm in ("ensemble", "ist zero", "ist keep")]
    lines = ["EMNIST47, two hidden layers, N = 8:", ""]
    lines += _table(["epochs", *(NAMES[job.arm] for job in arms)], [
        [str(base.epochs), *(_told(of(runs, job)) for job in arms)],
        [str(LONGER * base.epochs), *(_told(of(longer, job)) for job in arms)],
    ])  # fmt: skip
    two = replace(base, subnets=2, arm="ist keep")
    apart = {base.local: of(runs, two), **{local: of(rounds, two, rounds=f" J {local}") for local in LOCAL}}
    lines += ["EMNIST47, two hidden layers, N = 2, moments kept, J updates between exchanges:", ""]
    moved = (f"{ist_costs.moved(replace(two, local=local)) / 1e6:,.0f} MB" for local in sorted(apart))
    lines += _table(["J", *map(str, sorted(apart))], [
        ["accuracy", *(_told(apart[local]) for local in sorted(apart))], ["moved", *moved],
    ])  # fmt: skip
    return lines


def markdown(found: dict[str, Runs], base: Job, pictures: Iterable[str]) -> str:
    """What stands between the two marks of the document."""
    runs = found["runs"]
    shown = [line for picture in pictures for line in (f"![accuracy against {Path(picture).stem}]({picture})", "")]
    return "\n".join([
        "### Accuracy on test rows, per cent, mean and deviation over seeds", "", *accuracies(runs, base),
        "### The claims", "",
        "Of IST with moments kept; mean difference over seeds and its standard error, alike where it is within two.", "",
        *verdicts(runs, base), "### Accuracy against what was moved and computed", "", *shown,
        "### What a gradient step moves and computes", "",
        f"All N sites together, EMNIST47, width {base.width}, J = {base.local}, B = {base.batch} rows at each site.", "",
        *costs(base), "### More epochs, and other rounds", "", *others(found, base),
        "### Learning rates, chosen on validation rows", "", *rates(found["tuning"], base),
    ]).rstrip()  # fmt: skip


def document(found: dict[str, Runs], base: Job, path: Path) -> list[Path]:
    """Put tables and pictures into `path`, between its marks; what stands around them stays."""
    pictures = draw(found["runs"], base, path.parent / "ist")
    made = markdown(found, base, [str(picture.relative_to(path.parent)) for picture in pictures])
    around = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
    head, _, rest = around.partition(BEGIN)
    path.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")
    return [path, *pictures]


def draw(runs: Runs, base: Job, folder: Path) -> list[Path]:
    """Accuracy against bytes moved and against FLOPs: a panel for each data set and number of hidden layers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    panels = list(dict.fromkeys((job.data, job.layers) for job in cells(runs, base) if job.layers > 1))
    written = []
    axis = {
        "bytes": ("MB that come in at all sites", lambda job: ist_costs.moved(job) / 1e6, (1, 10, 100, 1000, 10_000)),
        "flops": ("GFLOP", lambda job: ist_costs.computed(job) / 1e9, (5, 10, 20, 50, 100)),
    }  # fmt: skip
    for name, (label, cost, ticks) in axis.items():
        figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.9), squeeze=False, layout="constrained")
        for one, (data, layers) in zip(axes[0], panels, strict=True):
            for arm in ARMS:
                _line(one, runs, replace(base, data=data, layers=layers, arm=arm), cost)
            one.set(xscale="log", xlabel=f"{label} in a run")
            one.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            one.set_xticks([], minor=True)
            one.set_title(f"{TITLES[data]}, {layers} hidden layers", loc="left", fontsize=10)
            one.spines[["top", "right"]].set_visible(False)
            one.grid(axis="y", color="#E6E6E6", linewidth=0.7)
        axes[0][0].set_ylabel("test accuracy, %")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS), frameon=False)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=110, facecolor="white")
        plt.close(figure)
    return written


def _line(axes: Any, runs: Runs, job: Job, cost: Any) -> None:
    """One arm with N = 2, 4, 8, each point with its N; full training moves as data parallel training on N sites would."""
    jobs = [replace(job, subnets=count) for count in SUBNETS if of(runs, replace(job, subnets=count))]
    means = [np.mean(list(of(runs, one).values())) for one in jobs]
    errors = [np.std(list(of(runs, one).values())) for one in jobs]
    at = [cost(one) for one in jobs]
    axes.errorbar(at, means, yerr=errors, fmt="o-", ms=4, lw=1.2, color=COLOURS[job.arm], label=NAMES[job.arm])
    for one, x, y in zip(jobs, at, means, strict=True):
        axes.annotate(str(one.subnets), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7, color=COLOURS[job.arm])
