"""Chains of blocks that are nothing but numbers, and problems made of them, to plan for without a model."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from hypothesis import strategies as st

from seqpart.data.row_packs import RowPack
from seqpart.methods import METHODS
from seqpart.model.packs import Value
from seqpart.plan.problem import Machine, Problem
from seqpart.profile.blocks import BlockCost
from seqpart.profile.machine import Speeds
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.row_file import RowLayout


class _Chain(list):
    """Blocks of which only places count."""

    whole_parts = ()


def value(number, nbytes):
    """What block `number` takes, for a micro-batch of 8 rows."""
    return Value(number, (8, nbytes // 32), torch.float32, nbytes, 8, True, number - 1, (number,))


def block(weights, saved, output, flops):
    """A block of so many bytes, for a micro-batch of 8 rows."""
    layout = Layout.of([TensorSpec(name="w", shape=(weights // 4,), dtype=torch.float32)])
    return BlockCost(
        layout=layout, trainable=("w",), gradient_layout=layout, gradients=weights, held=0, buffers=0,
        forward_peak=saved + output, saved=saved + output, saved_alone=saved,
        saved_sizes=(saved, output), backward_peak=weights + output,
        accumulate_peak=2 * weights + output, inference_peak=output, takes=(value(0, output),), gives=(value(1, output),),
        flops=flops,
    )  # fmt: skip


def joined(blocks):
    """The blocks in a row: each takes what the one before gave."""
    return [
        replace(cost, takes=(value(number, cost.input),), gives=(value(number + 1, cost.output),))
        for number, cost in enumerate(blocks)
    ]


def problem_of(blocks, limit, *, micro_batch, starts, speeds, **machine):
    """machine: fields of its Machine that are to be others."""
    blocks, rows = joined(blocks), RowLayout((blocks[0].takes[0].row // 4,), torch.float32)
    states = [Layout.of([TensorSpec(name="m", shape=(2 * cost.weights // 4,), dtype=torch.float32)]) for cost in blocks]
    usual = {
        "device": "a test", "host_counts": False, "runtime": 0, "growth": 0, "heap_below": 0, "contention": 0.15,
        "boundary_tiers": ("device",), "graph_tiers": ("disk",), "host_room": 0,
    }  # fmt: skip
    return Problem(
        chain=_Chain(SimpleNamespace(number=number, tied=()) for number in range(len(blocks))), method=METHODS["sil"],
        machine=Machine(speeds=speeds, **usual | machine), limit=limit,
        costs_at=lambda _: blocks, counted_at=lambda _: blocks, states=states,
        loss_of=lambda _: lambda _: (0, 0), optimizer=None, batch_size=16, the_batch=16,
        micro_batch=micro_batch, starts=starts, count=None, defers_updates=False, label_row=0, input_row=rows,
        row_pack=lambda _: RowPack.of_one(0, rows), can_cut_after=lambda _: True, train_rows=32, test_rows=8, auto=True,
    )  # fmt: skip


KB = 1 << 12
blocks = st.builds(
    block, weights=st.integers(1, 60).map(lambda n: n * KB), saved=st.integers(0, 40).map(lambda n: n * KB),
    output=st.integers(1, 10).map(lambda n: n * KB), flops=st.integers(1, 100).map(lambda n: n * 10**6),
)  # fmt: skip
speeds = st.builds(
    lambda read, write: Speeds(flops=1e10, optimizer=1e9, read=read, write=write),
    st.sampled_from([2e7, 2e8, 2e9]), st.sampled_from([2e7, 2e8, 2e9]),
)  # fmt: skip
