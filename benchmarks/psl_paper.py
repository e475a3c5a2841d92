"""Figures 6 and 7 of the PSL paper (Raynaud, Orban and Bigeon 2023) again, by the public Trainer: PNG and JSON.

    python -m benchmarks.psl_paper --data-dir DIR              five seeds: 50 minutes on one core, beside others' work
    python -m benchmarks.psl_paper --quick                     two seeds on a little noise, to see that it runs; not kept
    python -m benchmarks.psl_paper --table                     what was found, as docs/psl.md has it

DIR holds torchvision's MNIST, and cifar10-subset/train.npz and test.npz with `images` and `labels`. Networks, losses, batch
sizes and Adam are the paper's; of the training rows the first ones. What is in the JSON already is not run again, but with
--again.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import children, psl_figures, quick, record

ROWS = {"mnist": (6000, 8), "cifar": (8000, 8)}
"""Training rows and epochs: as many as one core trains in less than an hour. The paper takes all 60,000 and 50,000 rows."""
TEST_ROWS, SEEDS = 2000, 5
BATCHES = (20, 100)
NAME, GROUP = "psl_paper", "curves"


def wanted(small: bool) -> dict[str, list[str]]:
    """The runs: a name, and the options of benchmarks/psl_arm.py."""
    runs = {}
    for data, (rows, epochs) in list(ROWS.items())[: 1 if small else None]:
        size = ["--rows", "40", "--epochs", "2", "--test-rows", "20", "--seeds", "2"]
        if not small:
            size = ["--rows", str(rows), "--epochs", str(epochs), "--test-rows", str(TEST_ROWS), "--seeds", str(SEEDS)]
        for batch in BATCHES[: 1 if small else None]:
            for network in ("lenet", "psnet"):
                for loss in ("nll", "psl"):
                    runs[f"{data} batch {batch} {network} {loss}"] = [data, network, loss, "--batch", str(batch), *size]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--table", action="store_true", help="print what was found in Markdown")
    quick.add_to(parser)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--figures", type=Path, help="folder of the pictures (default: docs/psl)")
    options = parser.parse_args()
    quick.need("matplotlib")
    if options.table:
        print(psl_figures.markdown(record.load(NAME)[GROUP]))
        return
    if options.data_dir is None and not options.quick:
        parser.error("give --data-dir")
    with quick.places(options.quick) as docs:
        printed = quick.printed if options.quick else children.printed
        found: dict[str, dict[str, Any]] = {} if options.again else record.load(NAME)
        data = quick.data(docs / "data") if options.quick else options.data_dir
        for run, words in wanted(options.quick).items():
            if run in found.get(GROUP, {}):
                continue
            places = ["--data-dir", str(data), "--folder", tempfile.gettempdir()]
            told = printed("benchmarks.psl_arm", *words, *places, name=run, environment=children.one_thread())
            record.note(NAME, found, GROUP, {run: told})
            ends = ", ".join(f"{100 * one['curve'][-1]:.1f}" for one in told.values())
            print(f"{run}: {ends} %; {sum(one['seconds'] for one in told.values()):.0f} s", flush=True)
        pictures = psl_figures.draw(found[GROUP], options.figures or docs / "psl")
        print(psl_figures.markdown(found[GROUP]))
        print(f"{record.path_of(NAME)}; {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
