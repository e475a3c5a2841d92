"""The figures of the PNN paper (arXiv 2403.11204) again, by the public Trainer: PNG and JSON.

    python -m benchmarks.pnn_paper --data-dir DIR              ten seeds, all figures: about an hour on two cores
    python -m benchmarks.pnn_paper --data-dir DIR --quick      two seeds, few epochs: does it run?
    python -m benchmarks.pnn_paper --table                     what was found, as docs/pnn.md has it

DIR holds EMNIST's idx files (any split with 47 classes) or torchvision's EMNIST. Network, optimizer, order and batch size are
the paper's. Figure 1 takes MNIST from --mnist-dir. What is in the JSON already is not run again, but with --again.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import children, pnn_arm, pnn_figures, record
from benchmarks.pnn_arm import MACS, macs, macs_of

SEEDS, FEW = 10, 3
"""Seeds of figures 6 and 10, and of the sweeps."""
LEFT_EPOCHS = (1, 2, 3, 5, 10, 20)
KAPPAS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
ALIKE = {
    pnn_figures.REFERENCE: ["--kappa", "10"],
    "kappa 1, lr 0.1": ["--kappa", "1", "--left-lr", "0.1", "--right-lr", "0.1"],
    "kappa 1, lr 0.1 left alone": ["--kappa", "1", "--left-lr", "0.1"],
}
"""Figure 9. The paper does not say whose learning rate it is: of both partitions, or of the left one alone."""
Runs = dict[str, list[str]]


def wanted(quick: bool) -> dict[str, Runs]:
    """By figure, the runs it needs: a name, and the options of benchmarks/pnn_arm.py."""
    seeds, few = (2, 1) if quick else (SEEDS, FEW)
    short = ["--right-epochs", "4"] if quick else []
    base = ["baseline", *(["--epochs", "3"] if quick else [])]
    recovery = ["--recovery", "2" if quick else "10"]
    curves: Runs = {}
    for seed in range(seeds):
        curves[f"baseline seed {seed}"] = [*base, "--seed", str(seed), "--test-every", "1"]
        curves[f"pnn seed {seed}"] = ["pnn", *short, *recovery, "--seed", str(seed), "--test-every", "2"]
    left = {
        f"kappa {kappa} left {epochs} seed {seed}": [
            "pnn", *short, "--kappa", str(kappa), "--left-epochs", str(epochs), "--seed", str(seed),
        ]
        for kappa in (2, 10) for epochs in (LEFT_EPOCHS[:2] if quick else LEFT_EPOCHS) for seed in range(few)
    }  # fmt: skip
    kappas = {
        f"kappa {kappa} seed {seed}": ["pnn", *short, "--kappa", str(kappa), "--seed", str(seed)]
        for kappa in (KAPPAS[:2] if quick else KAPPAS) for seed in range(few)
    }  # fmt: skip
    alike = {
        f"{name} seed {seed}": ["pnn", *short, *words, "--seed", str(seed), "--test-every", "2"]
        for name, words in ALIKE.items() for seed in range(few)
    }  # fmt: skip
    more = {
        f"{objective} {inputs} partitions {count} seed {seed}": [
            "pnn", *short, "--objective", objective, "--inputs", inputs, "--partitions", str(count), "--seed", str(seed),
        ]
        for objective in ("mse", "prototype") for inputs in ("cached", "synthetic") for count in (2, 3, 4)
        for seed in range(few)
    }  # fmt: skip
    weights = {f"from seed {seed}": ["weights", "--seed", str(seed)] for seed in range(0, 10 if quick else 300, 10)}
    return {
        "weights": weights,
        "curves": curves,
        "left epochs": left,
        "kappa": kappas,
        "kappa and rate": alike,
        "partitions": more,
    }


def carried_out(
    runs: Iterable[tuple[str, str, list[str]]], found: dict[str, dict[str, Any]], options: argparse.Namespace
) -> None:
    """All of them, two at a time, each saved when it is done; what two figures need is trained once."""
    alike: dict[str, list[tuple[str, str, list[str]]]] = {}
    for run in runs:
        asked = vars(pnn_arm.parser().parse_args([*run[2], "--data-dir", ""])) | {"test_every": None}
        alike.setdefault(str(asked), []).append(run)

    def one(group: list[tuple[str, str, list[str]]]) -> None:
        words = max((words for _, _, words in group), key=lambda words: "--test-every" in words)
        data = options.mnist_dir if words[0] == "weights" else options.data_dir
        places = ["--data-dir", str(data), "--folder", tempfile.gettempdir()]
        told = children.printed("benchmarks.pnn_arm", *words, *places, name=group[0][1], environment=children.one_thread())
        for figure, name, _ in group:
            record.note(options.name, found, figure, {name: told})
            print(f"{figure}: {name}: {100 * told['accuracy']:.2f} %", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        for work in [pool.submit(one, group) for group in alike.values()]:
            work.result()


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The numbers that the paper prints beside its figures."""
    of = pnn_figures.accuracies
    curves = found["curves"]
    pnn = [run["curve"][run["recovers_at"][0] - 1][1] for name, run in sorted(curves.items()) if name.startswith("pnn")]
    told: dict[str, Any] = {
        "baseline": of(curves, "baseline"), "pnn": [100 * accuracy for accuracy in pnn], "recovered": of(curves, "pnn"),
        "macs": dict(zip(("left", "right"), macs_of(2), strict=True)),
        "r_squared": {other: pnn_figures.r_squared(found["kappa and rate"], other) for other in list(ALIKE)[1:]},
    }  # fmt: skip
    for name in ("baseline", "pnn", "recovered"):
        values = np.array(told[name])
        told[f"{name} mean"], told[f"{name} deviation"] = float(values.mean()), float(values.std())
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--mnist-dir", type=Path, help="torchvision's MNIST, for figure 1")
    parser.add_argument("--table", action="store_true", help="print what was found in Markdown")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--figures", type=Path, default=Path("docs/pnn"), help="folder of the pictures")
    options = parser.parse_args()
    options.name = "pnn_paper-quick" if options.quick else "pnn_paper"
    if options.table:
        print(pnn_figures.markdown(record.load(options.name)))
        return
    if options.data_dir is None:
        parser.error("give --data-dir")
    counted = macs()
    if counted != MACS:
        sys.exit(f"ptflops counts {counted} multiply-accumulates by layer; expected {MACS}.")
    found = {} if options.again else record.load(options.name)
    runs = [
        (figure, name, words) for figure, named in wanted(options.quick).items() for name, words in named.items()
        if name not in found.get(figure, {}) and (figure != "weights" or options.mnist_dir is not None)
    ]  # fmt: skip
    carried_out(runs, found, options)
    found["summary"] = summary(found)
    path = record.save(options.name, found)
    pictures = pnn_figures.draw(found, options.figures)
    told = found["summary"]
    for name in ("baseline", "pnn", "recovered"):
        print(f"{name}: {told[f'{name} mean']:.2f} % +- {told[f'{name} deviation']:.2f} ({len(told[name])} seeds)")
    for other, (whole, right) in told["r_squared"].items():
        print(f"{pnn_figures.REFERENCE} against {other}: R^2 {whole:.3f}, over the right partition's epochs {right:.3f}")
    print(f"{path}; {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
