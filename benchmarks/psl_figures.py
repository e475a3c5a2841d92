"""The pictures and tables of benchmarks/psl_paper.py, and what they say of the paper's claims."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Runs = dict[str, dict[str, Any]]
"""By name, `mnist batch 20 lenet nll`, what each seed found."""
TITLES = {"mnist": ("Figure 6", "MNIST"), "cifar": ("Figure 7", "CIFAR-10")}
ARMS = {
    ("lenet", "nll"): ("LeNet, NLL", "#0072B2", "o-"),
    ("lenet", "psl"): ("LeNet, PSL", "#0072B2", "s--"),
    ("psnet", "nll"): ("PSNet, NLL", "#D55E00", "o-"),
    ("psnet", "psl"): ("PSNet, PSL", "#D55E00", "s--"),
}
CLOSE = 2.0
"""Points of accuracy within which PSL ends close to NLL: the paper says close and gives no number."""


def curves(runs: Runs, data: str, batch: int, network: str, loss: str) -> np.ndarray:
    """Test accuracies in per cent (seeds, epochs)."""
    named = runs[f"{data} batch {batch} {network} {loss}"]
    return np.array([[100 * accuracy for accuracy in run["curve"]] for run in named.values()])


def cells(runs: Runs) -> list[tuple[str, int]]:
    """(data, batch size) of all runs, in their order."""
    return list(dict.fromkeys((name.split()[0], int(name.split()[2])) for name in runs))


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Mean of one - other over seeds, and its standard error."""
    apart = one - other
    return float(apart.mean()), float(apart.std(ddof=1) / math.sqrt(len(apart)))


def signed(mean: float, error: float) -> str:
    """In words, where it is more than two standard errors from nothing."""
    return "more" if mean > 2 * error else "less" if mean < -2 * error else "alike"


def claims(runs: Runs) -> Iterator[tuple[str, str, str]]:
    """(claim, where, what was found)."""
    for data, batch in cells(runs):
        for network, name in (("lenet", "LeNet"), ("psnet", "PSNet")):
            nll, psl = (curves(runs, data, batch, network, loss) for loss in ("nll", "psl"))
            where = f"{name}, {TITLES[data][1]}, batch {batch}"
            first, last = difference(psl[:, 0], nll[:, 0]), difference(psl[:, -1], nll[:, -1])
            slower = {"less": "yes", "more": "no: faster", "alike": "alike"}[signed(*first)]
            yield "PSL starts slower than NLL", where, f"{slower} ({points(first)} after the first epoch)"
            ends = "yes" if abs(last[0]) <= CLOSE else "no"
            yield f"and ends close to it (within {CLOSE:g} points)", where, f"{ends} ({points(last)})"
            spread = psl[:, -1].std(ddof=1), nll[:, -1].std(ddof=1)
            wider = "yes" if spread[0] > spread[1] else "no"
            yield "its runs deviate more", where, f"{wider} ({spread[0]:.2f} against {spread[1]:.2f})"
        if data == "cifar":
            for loss in ("nll", "psl"):
                beats = difference(*(curves(runs, data, batch, network, loss)[:, -1] for network in ("psnet", "lenet")))
                found = {"more": "yes", "less": "no", "alike": "alike"}[signed(*beats)]
                yield (
                    "PSNet beats LeNet, with fewer weights",
                    f"{loss.upper()}, CIFAR-10, batch {batch}",
                    (f"{found} ({points(beats)})"),
                )


def points(pair: tuple[float, float]) -> str:
    return f"{pair[0]:+.2f} ± {pair[1]:.2f} points"


def markdown(runs: Runs) -> str:
    """The tables of docs/psl.md."""
    lines = []
    for data, batch in cells(runs):
        lines += [
            f"| {TITLES[data][1]}, batch {batch} | after the 1st epoch | at the end | lowest after the 1st |",
            "|---|---|---|---|",
        ]
        for (network, loss), (title, *_) in ARMS.items():
            found = curves(runs, data, batch, network, loss)
            first, last = found[:, 0], found[:, -1]
            lines.append(
                f"| {title} | {first.mean():.1f} ± {first.std(ddof=1):.1f} % | {last.mean():.1f} ± {last.std(ddof=1):.1f} % | "
                f"{found[:, 1:].min():.1f} % |"
            )
        lines.append("")
    by_claim: dict[str, list[str]] = {}
    for claim, where, found in claims(runs):
        by_claim.setdefault(claim, []).append(f"| {where} | {found} |")
    for claim, rows in by_claim.items():
        lines += [f"| {claim} | |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip()


def draw(runs: Runs, folder: Path) -> list[Path]:
    """One PNG for each data set: a panel for each batch size, means over seeds with one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#8A8A8A",
             "axes.labelcolor": "#222222", "figure.figsize": (9.6, 4.2), "figure.constrained_layout.use": True}  # fmt: skip
    written = []
    with plt.rc_context(style):
        for data in dict.fromkeys(data for data, _ in cells(runs)):
            batches = [batch for other, batch in cells(runs) if other == data]
            figure, panels = plt.subplots(1, len(batches), sharey=True, squeeze=False)
            for axes, batch in zip(panels[0], batches, strict=True):
                _panel(axes, runs, data, batch)
            panels[0][0].set_ylabel("test accuracy, %")
            panels[0][-1].legend(frameon=False, loc="lower right")
            path = folder / f"{TITLES[data][0].lower().replace(' ', '')}.png"
            figure.savefig(path, dpi=110, facecolor="white")
            plt.close(figure)
            written.append(path)
    return written


def _panel(axes: Any, runs: Runs, data: str, batch: int) -> None:
    for (network, loss), (title, colour, line) in ARMS.items():
        found = curves(runs, data, batch, network, loss)
        epochs = np.arange(1, found.shape[1] + 1)
        mean, deviation = found.mean(0), found.std(0, ddof=1)
        axes.plot(epochs, mean, line, color=colour, ms=4, lw=1.3, label=title)
        axes.fill_between(epochs, mean - deviation, mean + deviation, color=colour, alpha=0.12, lw=0)
    axes.set(xlabel="epoch")
    axes.set_title(f"{TITLES[data][0]}: {TITLES[data][1]}, batch {batch}", loc="left", fontsize=10.5)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
