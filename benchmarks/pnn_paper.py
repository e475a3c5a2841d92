"""The figures of the PNN paper (arXiv 2403.11204) again, by the public Trainer: PNG and JSON.

    python -m benchmarks.pnn_paper --data-dir DIR              ten seeds, all figures: about an hour on two cores
    python -m benchmarks.pnn_paper --quick                     a run of each kind on noise, to see that it runs; not kept
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

from benchmarks import children, pnn_arm, pnn_figures, quick, record
from benchmarks.pnn_arm import MACS, macs, macs_of

NAME = "pnn_paper"
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


def wanted(small: bool) -> dict[str, Runs]:
    """By figure, the runs it needs: a name, and the options of benchmarks/pnn_arm.py."""
    seeds, few = (1, 1) if small else (SEEDS, FEW)
    short = ["--left-epochs", "1", "--right-epochs", "4"] if small else []
    base = ["baseline", *(["--epochs", "3"] if small else [])]
    recovery = ["--recovery", "2" if small else "10"]
    curves: Runs = {}
    for seed in range(seeds):
        curves[f"baseline seed {seed}"] = [*base, "--seed", str(seed), "--test-every", "1"]
        curves[f"pnn seed {seed}"] = ["pnn", *short, *recovery, "--seed", str(seed), "--test-every", "2"]
    left = {
        f"kappa {kappa} left {epochs} seed {seed}": [
            "pnn", *short, "--kappa", str(kappa), "--left-epochs", str(epochs), "--seed", str(seed),
        ]
        for kappa in (2, 10) for epochs in (LEFT_EPOCHS[:1] if small else LEFT_EPOCHS) for seed in range(few)
    }  # fmt: skip
    kappas = {
        f"kappa {kappa} seed {seed}": ["pnn", *short, "--kappa", str(kappa), "--seed", str(seed)]
        for kappa in (KAPPAS[:1] if small else KAPPAS) for seed in range(few)
    }  # fmt: skip
    alike = {
        f"{name} seed {seed}": ["pnn", *short, *words, "--seed", str(seed), "--test-every", "2"]
        for name, words in ALIKE.items() for seed in range(few)
    }  # fmt: skip
    more = {
        f"{objective} {inputs} partitions {count} seed {seed}": [
            "pnn", *short, "--objective", objective, "--inputs", inputs, "--partitions", str(count), "--seed", str(seed),
        ]
        for objective in ("mse", "prototype") for inputs in ("cached", "synthetic") for count in ((2,) if small else (2, 3, 4))
        for seed in range(few)
    }  # fmt: skip
    times = ["--times", "1"] if small else []
    weights = {f"from seed {seed}": ["weights", "--seed", str(seed), *times] for seed in range(0, 10 if small else 300, 10)}
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
        printed = quick.printed if options.quick else children.printed
        told = printed("benchmarks.pnn_arm", *words, *places, name=group[0][1], environment=children.one_thread())
        for figure, name, _ in group:
            record.note(NAME, found, figure, {name: told})
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
    quick.add_to(parser)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--figures", type=Path, help="folder of the pictures (default: docs/pnn)")
    options = parser.parse_args()
    quick.need("matplotlib", "ptflops")
    if options.table:
        print(pnn_figures.markdown(record.load(NAME)))
        return
    if options.data_dir is None and not options.quick:
        parser.error("give --data-dir")
    counted = macs()
    if counted != MACS:
        sys.exit(f"ptflops counts {counted} multiply-accumulates by layer; expected {MACS}.")
    with quick.places(options.quick) as docs:
        if options.quick:
            options.mnist_dir, options.processes = quick.data(docs / "data"), 1
            options.data_dir = options.mnist_dir / "EMNIST47"
        everything(options, options.figures or docs / "pnn")


def everything(options: argparse.Namespace, figures: Path) -> None:
    found = {} if options.again else record.load(NAME)
    runs = [
        (figure, name, words) for figure, named in wanted(options.quick).items() for name, words in named.items()
        if name not in found.get(figure, {}) and (figure != "weights" or options.mnist_dir is not None)
    ]  # fmt: skip
    carried_out(runs, found, options)
    found["summary"] = summary(found)
    path = record.save(NAME, found)
    pictures = pnn_figures.draw(found, figures)
    told = found["summary"]
    for name in ("baseline", "pnn", "recovered"):
        print(f"{name}: {told[f'{name} mean']:.2f} % +- {told[f'{name} deviation']:.2f} ({len(told[name])} seeds)")
    for other, (whole, right) in told["r_squared"].items():
        print(f"{pnn_figures.REFERENCE} against {other}: R^2 {whole:.3f}, over the right partition's epochs {right:.3f}")
    print(f"{path}; {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
