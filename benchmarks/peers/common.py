"""What every arm shares: options, rows, and the loop that times updates and prints one JSON line."""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.networks import BATCHES, DEPTHS, NAMES, RATES, WIDTHS, Factory, factories, mean_loss

REFUSED = 3
"""Exit code of an arm that cannot run on this machine; why stands in the last line of standard error."""

Update = Callable[[torch.Tensor, torch.Tensor], float]
Forward = Callable[[torch.Tensor], torch.Tensor]


def refuse(why: str) -> None:
    print(f"refused: {why}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(REFUSED)  # some libraries' threads would keep the process


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", choices=NAMES, default="S")
    made.add_argument("--width", type=int, help="default: the network's")
    made.add_argument("--depth", type=int, help="blocks between the first and the last; default: the network's")
    made.add_argument("--batch", type=int, help="rows of an update; default: the network's")
    made.add_argument("--updates", type=int, default=5)
    made.add_argument("--seconds", type=float, help="train for so long instead, then count right answers on the test rows")
    made.add_argument("--folder", type=Path, default=Path(), help="where files on disk go: a real disk")
    made.add_argument("--data", type=Path, required=True, help="made by benchmarks.peers.data")
    made.add_argument("--seed", type=int, default=0)
    return made


@dataclass
class Task:
    """One network, its rows and its numbers."""

    options: argparse.Namespace
    blocks: list[Factory]
    batch: int
    rate: float
    rows: dict[str, torch.Tensor]

    @property
    def count(self) -> int:
        return len(self.rows["x"])

    def update_rows(self, number: int, updates: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of update `number` and those behind it: in order, from the first again after the last."""
        picked = torch.arange(number * self.batch, (number + updates) * self.batch) % self.count
        return self.inputs(self.rows["x"][picked]), self.rows["y"][picked].long()

    @staticmethod
    def inputs(x: torch.Tensor) -> torch.Tensor:
        """Characters lie in memory as bytes, and an embedding wants int64."""
        return x if x.is_floating_point() else x.long()


def task_of(options: argparse.Namespace) -> Task:
    name = options.network
    width, depth = options.width or WIDTHS[name], options.depth or DEPTHS[name]
    rows = torch.load(options.data, weights_only=True)
    return Task(options, factories(name, width, depth), options.batch or BATCHES[name], RATES[name], rows)


def one_process() -> None:
    """What a launcher would say to the only process there is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Chain(torch.nn.Module):
    """The blocks, each recomputed in the backward pass."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x


def train(task: Task, update: Update, forward: Forward, began: float) -> None:
    """Run updates until there are enough, or the seconds are over; print what was found."""
    options = task.options
    setup = time.perf_counter() - began
    print(f"set up in {setup:.1f} s", file=sys.stderr, flush=True)
    seconds: list[float] = []
    losses: list[float] = []
    while sum(seconds) < options.seconds if options.seconds else len(seconds) < options.updates:
        at = time.perf_counter()
        losses.append(update(*task.update_rows(len(seconds))))
        seconds.append(time.perf_counter() - at)
        print(f"update {len(seconds)}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    accuracy = right(task, forward) if options.seconds else None
    show(seconds=seconds, losses=losses, accuracy=accuracy, setup_s=setup)


def right(task: Task, forward: Forward) -> float:
    """Share of right answers on the test rows."""
    found = asked = 0
    with torch.no_grad():
        for x, y in zip(task.rows["test_x"].split(task.batch), task.rows["test_y"].split(task.batch), strict=True):
            found += int((forward(task.inputs(x)).argmax(-1) == y).sum())
            asked += y.numel()
    return found / asked


def show(**found: Any) -> None:
    """The one line on standard output that the runner reads."""
    sys.stderr.flush()
    print(json.dumps(found), flush=True)


__all__ = ["REFUSED", "Chain", "Task", "mean_loss", "one_process", "parser", "refuse", "right", "show", "task_of", "train"]
