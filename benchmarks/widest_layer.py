"""The widest hidden layer that trains under a limit, by full, streamed and ist: table 4 of the latter's paper in our terms.

    python -m benchmarks.widest_layer [--mem-limit 1GB]
    python -m benchmarks.widest_layer --quick      one method under a small limit, to see that it runs; not kept

A multilayer perceptron of two hidden layers as wide as each other, with BatchNorm, on real digits with Adam: the width is
doubled and then bisected to 256 neurons by dry runs, and the widest is trained for one epoch, in a process of its own.
"""

import argparse
import functools
import json
import tempfile
from pathlib import Path

from benchmarks import quick
from benchmarks.children import printed
from benchmarks.record import save
from seqpart import Trainer
from seqpart.errors import SeqpartError
from seqpart.zoo.datasets import digits

ARMS = {
    "full": ("full", 0), "streamed": ("streamed", 0), "ist, 2 subnets": ("ist", 2), "ist, 4 subnets": ("ist", 4),
    "ist, 8 subnets": ("ist", 8),
}  # fmt: skip
STEP = 256
QUICK = {"limit": "400MB", "step": 1024, "arms": ("ist, 2 subnets",)}


def network(width: int) -> list[object]:
    from torch import nn

    def hidden(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU())

    return [functools.partial(hidden, 64), functools.partial(hidden, width), functools.partial(nn.Linear, width, 10)]


def trainer(width: int, arm: str, limit: str, folder: str) -> Trainer:
    method, subnets = ARMS[arm]
    own = {"subnets": subnets, "local_steps": 7} if subnets else {}
    return Trainer(
        network(width), mem_limit=limit, method=method, epochs=1, batch_size=64, lr=1e-3, quiet=True,
        output_dir=Path(folder) / "run", **own,
    )  # type: ignore[arg-type]  # fmt: skip


def fits(width: int, arm: str, limit: str) -> bool:
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer(width, arm, limit, folder).plan(train, test)
        except SeqpartError:
            return False
    return True


def widest(arm: str, limit: str, step: int) -> int:
    """In units of `step`: doubled, then bisected."""
    low, high = 0, 4
    while fits(high * step, arm, limit):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step, arm, limit) else (low, middle)
    return low * step


def trained(width: int, arm: str, limit: str) -> dict[str, object]:
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(width, arm, limit, folder)
        run.count_from_start()
        result = run.fit(train, test)
    plan, proof = result.plan, result.proof
    return {
        "width": width, "parameters": plan.parameters, "full state": plan.full_state, "predicted": plan.peak,
        "measured": proof.peak, "violations": proof.violations, "seconds": result.seconds, "accuracy": result.accuracy,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mem-limit", default="1GB")
    parser.add_argument("--find", help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=STEP, help=argparse.SUPPRESS)
    quick.add_to(parser)
    asked = parser.parse_args()
    arms = QUICK["arms"] if asked.quick else tuple(ARMS)
    if asked.quick:
        asked.mem_limit, asked.step = QUICK["limit"], QUICK["step"]
    if asked.find:
        print(json.dumps({"width": widest(asked.find, asked.mem_limit, asked.step)}))
    elif asked.train:
        print(json.dumps(trained(asked.width, asked.train, asked.mem_limit)))
    else:
        found = {}
        for arm in arms:
            own = ("--mem-limit", asked.mem_limit, "--step", asked.step)
            width = printed("benchmarks.widest_layer", *own, "--find", arm, name=arm)["width"]
            found[arm] = printed("benchmarks.widest_layer", *own, "--train", arm, "--width", width, name=arm)
            print(arm, json.dumps(found[arm]), flush=True)
        with quick.places(asked.quick):
            print(save("widest-layer", {"limit": asked.mem_limit, "arms": found}, "cpu"))


if __name__ == "__main__":
    main()
