"""Write the rows that all arms train on: python -m benchmarks.peers.data S|L|T FILE [--data-dir DIR]

Made once, with seqpart's own readers and in seqpart's environment; the arms only load the file.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.peers.networks import CONTEXT

TEST_ROWS = 64
"""Of the text: 8,192 characters to predict. All 871 windows would take longer than the training."""


def main() -> None:
    from seqpart.zoo import datasets, text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=["S", "L", "T"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data-dir", type=Path, help="for T: where the text input.txt of tinyshakespeare is")
    options = parser.parse_args()
    if options.network == "T":
        if options.data_dir is None or not (options.data_dir / "input.txt").is_file():
            parser.error("T needs --data-dir DIR with tinyshakespeare's input.txt in it")
        splits = text.load(options.data_dir / "input.txt", CONTEXT)
    else:
        splits = datasets.digits()
    (x, y), (test_x, test_y) = ((torch.cat(list(split.open())), split.labels) for split in splits)
    if options.network == "T":
        test_x, test_y = test_x[:TEST_ROWS], test_y[:TEST_ROWS]
    rows = {"x": x, "y": y, "test_x": test_x, "test_y": test_y}
    # Whole numbers as bytes: every arm holds the file whole.
    torch.save({name: t.clone() if t.is_floating_point() else t.to(torch.uint8) for name, t in rows.items()}, options.file)


if __name__ == "__main__":
    main()
