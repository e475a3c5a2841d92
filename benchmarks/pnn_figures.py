"""The pictures of benchmarks/pnn_paper.py, and the numbers that are read off them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pnn_arm import CLASSES, MACS, macs_of

Named = dict[str, dict[str, Any]]
_LEFT, _RIGHT, _RECOVERY, _INK = "#FFF3C4", "#EBD9C3", "#F6D5DF", "#222222"
_COLOURS = {"baseline": "#0072B2", "pnn": "#D55E00"}
_ROWS = 1e12
_CHANCE = 100 / CLASSES
REFERENCE = "kappa 10, lr 0.01"
"""Of figure 9: what the others are compared with."""


def accuracies(runs: Named, begins: str) -> list[float]:
    """Of the ends of all runs of that name, in per cent, by seed."""
    return [
        100 * run["accuracy"] for name, run in sorted(runs.items(), key=lambda item: _seed(item[0])) if name.startswith(begins)
    ]


def _seed(name: str) -> int:
    return int(name.rpartition("seed ")[2])


def _curves(runs: Named, begins: str) -> tuple[np.ndarray, np.ndarray]:
    """(MACs (points,), accuracies in per cent (runs, points))."""
    chosen = [run["curve"] for name, run in runs.items() if name.startswith(begins)]
    return np.array([at for at, _ in chosen[0]]), np.array([[100 * accuracy for _, accuracy in curve] for curve in chosen])


def r_squared(runs: Named, other: str) -> tuple[float, float]:
    """How far the mean curve of `other` follows that of (kappa 10, lr 0.01): 1 - residuals / variance.

    (over the whole training in equal steps of MACs, at chance while the left partition trains; over the right one's epochs).
    """
    at, expected = _curves(runs, f"{REFERENCE} seed")
    found = _curves(runs, f"{other} seed")[1].mean(axis=0)
    mean = expected.mean(axis=0)
    begins = 2 * at[0] - at[1]
    steps = np.linspace(0, at[-1], 1000)
    whole = [np.interp(steps, [begins, *at], [_CHANCE, *curve]) for curve in (mean, found)]
    return _explained(*whole), _explained(mean, found)


def _explained(expected: np.ndarray, found: np.ndarray) -> float:
    spread = ((expected - expected.mean()) ** 2).sum()
    return float(1 - ((found - expected) ** 2).sum() / spread) if spread else float("nan")


PAPER = {"baseline": "76.2", "pnn": "71.5", "recovered": "77.5"}
"""Per cent of test accuracy, figures 6 and 10 of the paper: EMNIST balanced, ten runs."""


def markdown(found: dict[str, Any]) -> str:
    """The tables of docs/pnn.md."""
    told = found["summary"]
    names = {
        "baseline": "full training, 40 epochs",
        "pnn": "PNN, N_L 5, N_R 160, kappa 10",
        "recovered": "and 10 epochs of recovery",
    }
    lines = ["| test accuracy | paper | here |", "|---|---|---|"]
    for name, title in names.items():
        mean, deviation, seeds = told[f"{name} mean"], told[f"{name} deviation"], len(told[name])
        lines.append(f"| {title} | {PAPER[name]} % | {mean:.2f} % ± {deviation:.2f} ({seeds} seeds) |")
    for title, runs, word in (("kappa", found["kappa"], "kappa"), *_by_kappa(found["left epochs"])):
        swept = _sweep(runs, word)
        lines += ["", f"| {title} | {' | '.join(f'{at:g}' for at in swept)} |", f"|---{'|---' * len(swept)}|"]
        lines.append(f"| test accuracy, % | {' | '.join(f'{np.mean(values):.1f}' for values in swept.values())} |")
    lines += ["", f"| R^2 against {REFERENCE} | whole training | right partition's epochs |", "|---|---|---|"]
    lines += [f"| {name} | {whole:.3f} | {right:.3f} |" for name, (whole, right) in told["r_squared"].items()]
    lines += ["", "| partitions | 2 | 3 | 4 |", "|---|---|---|---|"]
    for objective, inputs, swept in _by_objective(found["partitions"]):
        means = [f"{np.mean(values):.1f}" for values in swept.values()]
        lines.append(f"| {objective}, {inputs} inputs | {' | '.join(means)} |")
    return "\n".join(lines)


def _by_kappa(runs: Named) -> Iterator[tuple[str, Named, str]]:
    for kappa in ("2", "10"):
        yield f"N_L at kappa {kappa}", {name: run for name, run in runs.items() if name.startswith(f"kappa {kappa} ")}, "left"


def _by_objective(runs: Named) -> Iterator[tuple[str, str, dict[float, list[float]]]]:
    """(objective, inputs, accuracies by number of partitions)"""
    for objective in ("mse", "prototype"):
        for inputs in ("cached", "synthetic"):
            chosen = {name: run for name, run in runs.items() if name.startswith(f"{objective} {inputs} ")}
            yield objective, inputs, _sweep(chosen, "partitions")


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """One PNG for each figure whose runs are there."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#8A8A8A",
             "axes.labelcolor": _INK, "figure.figsize": (7.2, 4.4), "figure.constrained_layout.use": True}  # fmt: skip
    written = []
    with plt.rc_context(style):
        for name, paint in _figures(found):
            figure, axes = plt.subplots()
            paint(axes)
            axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
            axes.set_axisbelow(True)
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=120, facecolor="white")
            plt.close(figure)
            written.append(path)
    return written


def _figures(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if found.get("weights"):
        yield "figure1", lambda axes: _randomness(axes, [pair for run in found["weights"].values() for pair in run["extremes"]])
    yield "figure4-5", lambda axes: _partitions(axes, found["partitions"])
    yield "figure6", lambda axes: _accuracy(axes, found["curves"], recovery=False)
    yield "figure7", lambda axes: _left_epochs(axes, found["left epochs"])
    yield "figure8", lambda axes: _kappas(axes, found["kappa"])
    yield "figure9", lambda axes: _alike(axes, found["kappa and rate"])
    yield "figure10", lambda axes: _accuracy(axes, found["curves"], recovery=True)


def _accuracy(axes: Any, runs: Named, *, recovery: bool) -> None:
    """Mean over seeds with one standard deviation; the background says which partition is being trained."""
    at, values = _curves(runs, "baseline")
    axes.errorbar(
        at / _ROWS, values.mean(0), values.std(0), color=_COLOURS["baseline"], fmt="o-", ms=3, lw=1, label="full training"
    )
    at, values = _curves(runs, "pnn")
    border = next(run["recovers_at"][0] for name, run in runs.items() if name.startswith("pnn") and run["recovers_at"])
    shown = slice(None) if recovery else slice(0, border)
    axes.errorbar(
        at[shown] / _ROWS, values.mean(0)[shown], values.std(0)[shown], color=_COLOURS["pnn"], fmt="o-", ms=3, lw=1, label="PNN"
    )
    left_ends = 5 * macs_of(2)[0] * _rows_of(runs) / _ROWS
    axes.axvspan(0, left_ends, color=_LEFT, lw=0, label="left")
    axes.axvspan(left_ends, at[border - 1] / _ROWS, color=_RIGHT, lw=0, label="right")
    if recovery:
        axes.axvspan(at[border - 1] / _ROWS, at[-1] / _ROWS, color=_RECOVERY, lw=0, label="recovery")
    axes.set(xlabel="MACs of the training so far (10^12)", ylabel="test accuracy, %", ylim=(0, 90), xlim=(0, None))
    axes.set_title(f"Figure {10 if recovery else 6}: N_L 5, N_R 160, kappa 10, {len(values)} seeds", loc="left", fontsize=10.5)
    axes.legend(loc="lower right", facecolor="white", framealpha=1, edgecolor="none", fontsize=9)


def _rows_of(runs: Named) -> float:
    """Training rows, from the MACs of one epoch of the baseline."""
    curve = next(run["curve"] for name, run in runs.items() if name.startswith("baseline"))
    return float(curve[0][0] / sum(MACS))


def _sweep(runs: Named, word: str) -> dict[float, list[float]]:
    """Accuracies in per cent by the number behind `word` in a run's name."""
    found: dict[float, list[float]] = {}
    for name, run in runs.items():
        parts = name.split()
        found.setdefault(float(parts[parts.index(word) + 1]), []).append(100 * run["accuracy"])
    return dict(sorted(found.items()))


def _left_epochs(axes: Any, runs: Named) -> None:
    for (title, chosen, word), colour in zip(_by_kappa(runs), ("#009E73", _COLOURS["pnn"]), strict=True):
        swept = _sweep(chosen, word)
        _bars(axes, swept, colour, title.removeprefix("N_L at "))
    axes.set(xlabel="epochs of the left partition, N_L", ylabel="test accuracy, %", xscale="log")
    axes.set_xticks(list(swept), [f"{epochs:g}" for epochs in swept])
    axes.set_title("Figure 7: N_R 160", loc="left", fontsize=10.5)
    axes.legend(frameon=False)


def _kappas(axes: Any, runs: Named) -> None:
    swept = _sweep(runs, "kappa")
    _bars(axes, swept, _COLOURS["pnn"], None)
    axes.set(xlabel="kappa", ylabel="test accuracy, %", xscale="log", ylim=(0, 90))
    axes.set_xticks(list(swept), [f"{kappa:g}" for kappa in swept])
    axes.set_title("Figure 8: N_L 5, N_R 160", loc="left", fontsize=10.5)


def _bars(axes: Any, swept: dict[float, list[float]], colour: str, label: str | None, line: str = "o-") -> None:
    means, deviations = [np.mean(v) for v in swept.values()], [np.std(v) for v in swept.values()]
    axes.errorbar(list(swept), means, deviations, fmt=line, color=colour, ms=4, lw=1, capsize=3, label=label)


def _partitions(axes: Any, runs: Named) -> None:
    for objective, inputs, swept in _by_objective(runs):
        label = f"{objective}, {'inputs from the partition before' if inputs == 'cached' else 'synthetic inputs'}"
        colour = _COLOURS["pnn"] if objective == "mse" else "#009E73"
        _bars(axes, swept, colour, label, "o-" if inputs == "cached" else "s--")
    axes.set(xlabel="partitions", ylabel="test accuracy, %", ylim=(0, 100))
    axes.set_xticks(list(swept))
    axes.set_title("Figures 4 and 5: inner partitions 5 epochs, the last one 160", loc="left", fontsize=10.5)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")


def _alike(axes: Any, runs: Named) -> None:
    others = list(dict.fromkeys(name.rpartition(" seed ")[0] for name in runs))
    for name, colour in zip(others, (_COLOURS["pnn"], "#009E73", "#8A8A8A"), strict=False):
        at, values = _curves(runs, f"{name} seed")
        label = name if name == REFERENCE else f"{name}: R^2 {r_squared(runs, name)[0]:.3f}"
        axes.errorbar(at / _ROWS, values.mean(0), values.std(0), color=colour, fmt="o-", ms=3, lw=1, label=label)
    axes.set(xlabel="MACs of the training so far (10^12)", ylabel="test accuracy, %", ylim=(0, 90), xlim=(0, None))
    axes.set_title("Figure 9: kappa and learning rate", loc="left", fontsize=10.5)
    axes.legend(frameon=False)


def _randomness(axes: Any, weights: list[tuple[float, float]]) -> None:
    least, greatest = (np.array(values) for values in zip(*weights, strict=True))
    for values, label, colour in (
        (greatest, "greatest", "#D55E00"), (least, "least", "#0072B2"), (greatest - least, "greatest - least", "#009E73"),
    ):  # fmt: skip
        axes.hist(values, bins=24, color=colour, alpha=0.75, label=label)
    axes.set(xlabel="weight of the middle layer", ylabel="trained networks")
    axes.set_title(f"Figure 1: 784-100-50-10 on MNIST, trained {len(weights)} times", loc="left", fontsize=10.5)
    axes.legend(frameon=False)
