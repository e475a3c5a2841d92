"""How long planning takes: one limit after the other, from one that is refused to one under which everything fits.

    python -m benchmarks.planning_speed

Blocks of a linear layer and ReLU of width 512, batch 256, Adam's two moments, method auto. What is timed is the choice alone,
with the blocks' costs and the machine's rates known. Prints a table and writes benchmarks/results/planning_speed-*.json.
"""

import gc
import sys
import time
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from benchmarks.record import save
from seqpart.data.row_packs import RowPack
from seqpart.device.heap import RETURNED_FROM
from seqpart.errors import DoesNotFit
from seqpart.methods import methods_named
from seqpart.model.blocks import as_chain
from seqpart.plan.exact import choose_exact
from seqpart.plan.problem import Machine, Problem, micro_batches
from seqpart.profile.blocks import BlockCost, measure_chain
from seqpart.profile.machine import Speeds
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.row_file import RowLayout

WIDTH, BATCH = 512, 256
SPEEDS = Speeds(flops=1e11, optimizer=1e9, read=2e9, write=1e9)
SHARES = (0.0, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6, 2.5)
"""Limits, as parts of what weights, gradients and moments of all blocks take."""


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def moments(cost: BlockCost) -> Layout:
    specs = cost.layout.specs
    return Layout.of([TensorSpec(name=f"{s.name}.{part}", shape=s.shape, dtype=s.dtype) for s in specs for part in ("m", "v")])


def problem_of(count: int, rows: int) -> Problem:
    chain = as_chain([block] * count)
    costs_at = cache(lambda micro_batch: measure_chain(chain, (WIDTH,), micro_batch))
    layout = RowLayout((WIDTH,), torch.float32)
    machine = Machine(
        device="cpu", host_counts=True, runtime=300 << 20, growth=1 << 20, heap_below=RETURNED_FROM, speeds=SPEEDS,
        boundary_tiers=("device", "disk"), host_room=0, contention=0.3, may_keep_heap=True,
    )  # fmt: skip
    problem = Problem(
        chain=chain, method=methods_named("streamed")[0], machine=machine, limit=0, costs_at=costs_at,
        counted_at=costs_at, states=[moments(cost) for cost in costs_at(BATCH)], loss_of=lambda rows: lambda _: (120 * rows, 0),
        optimizer=None, batch_size=BATCH, the_batch=BATCH, micro_batch=None, starts=None, count=None,
        defers_updates=False, label_row=8, input_row=layout,
        row_pack=lambda _: RowPack.of_one(0, layout), can_cut_after=lambda _: True, train_rows=rows, test_rows=10_000,
        auto=True,
    )  # fmt: skip
    for micro_batch in micro_batches(problem):
        costs_at(micro_batch)
    return problem


def timed(problem: Problem) -> dict[str, object]:
    """The choice once more from nothing: seconds on the clock and of the processor, and what it was."""
    problem = replace(problem, known={})
    began, worked = time.perf_counter(), time.process_time()
    try:
        method, candidate, _ = choose_exact(problem, methods_named("auto"))
        chosen = f"{method.name}, {len(candidate.parts)} partition(s), micro-batch {candidate.micro_batch}"
    except DoesNotFit as refusal:
        assert refusal.smallest is not None
        chosen = f"refused, {refusal.smallest >> 20} MiB"
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    return {"limit": problem.limit, "seconds": seconds, "processor_seconds": processor, "chosen": chosen}


def main() -> int:
    torch.set_num_threads(1)
    gc.freeze()  # as the command does: collections look at nothing that libraries have made
    found: dict[str, list[dict[str, object]]] = {}
    for count, rows in ((100, 60_000), (300, 60_000), (100, 256_000_000)):
        problem = problem_of(count, rows)
        state = 4 * sum(cost.weights for cost in problem.costs_at(BATCH))
        for share in SHARES:
            one = timed(replace(problem, limit=(320 << 20) + int(share**2 * state)))
            found.setdefault(f"{count} blocks, {rows} rows", []).append(one)
            cells = f"{count:4d} blocks {rows:>10d} rows  {one['limit'] >> 20:6d} MiB"
            print(f"{cells}  {one['seconds']:5.2f} s  {one['processor_seconds']:5.2f} s  {one['chosen']}", flush=True)
    print(save("planning_speed", found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
