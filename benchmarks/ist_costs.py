"""What the arms of benchmarks/ist_paper.py move and compute: the IST paper's formulas (section 2.3), and counted.

N_0 .. N_t: units of the inputs, hidden layers and outputs; n: sites; J: updates from exchange to exchange; B: rows of a site's
update. Numbers that come in at all sites are counted, not those that go out.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ist_networks import Job, Subnet, blocks, units

FLOAT = 4
"""Bytes of a number."""


def _products(sizes: Sequence[int]) -> tuple[int, int, int]:
    """N_{i-1} N_i of the first layer, of those in between, of the last."""
    each = [one * other for one, other in pairwise(sizes)]
    return each[0], sum(each[1:-1]), each[-1]


def paper_moved(job: Job) -> float:
    """Numbers per gradient step. Data parallel for `full`; local SGD has no formula in the paper: J steps for one of these."""
    first, between, last = _products(job.sizes)
    if job.arm in ("full", "local"):
        return job.subnets * (first + between + last) / (job.local if job.arm == "local" else 1)
    return (first + last) / job.local + between / (job.subnets * job.local)


def paper_flops(job: Job) -> float:
    """Per gradient step. The paper's formula for data parallel is of one site and that for IST of all; here all are of all."""
    first, between, last = _products(job.sizes)
    if job.arm in ("full", "local"):
        return 4 * job.batch * (first + between + last) * job.subnets
    return 4 * job.batch * (first + last) + 4 * job.batch * between / job.subnets


def _networks(job: Job) -> list[nn.Module]:
    """What the sites hold after an exchange."""
    network = nn.Sequential(*blocks(job.sizes, job.seed))
    if job.arm in ("full", "local"):
        return [network] * job.subnets
    return [Subnet(network, own, job.subnets).net for own in units(job, 1)]


def matrices(job: Job) -> int:
    """Numbers that come in at an exchange, of weight matrices alone: all that the formulas count."""
    return sum(tensor.numel() for network in _networks(job) for tensor in network.parameters() if tensor.ndim == 2)


def exchanged(job: Job) -> int:
    """Bytes that come in at an exchange: with biases, normalisations and their buffers."""
    return sum(tensor.nbytes for network in _networks(job) for tensor in network.state_dict().values())


def exchanges(job: Job) -> int:
    """Of a run; those of `full` as data parallel training would have them."""
    if job.arm == "ensemble":
        return 1
    return job.epochs * (job.updates if job.arm == "full" else -(-job.updates // job.local))


def moments(job: Job) -> int:
    """Bytes of Adam's two moments and count of steps, which come too where they are kept."""
    if job.arm != "ist keep":
        return 0
    return sum(2 * p.numel() * FLOAT + FLOAT for network in _networks(job) for p in network.parameters())


def moved(job: Job) -> int:
    """Bytes of a run. In the first round there are no moments yet."""
    return exchanges(job) * exchanged(job) + (exchanges(job) - 1) * moments(job)


def flops(job: Job) -> int:
    """Of an update of all sites, as torch counts those of matrix products, forward and backward."""
    total = 0
    for network in _networks(job):
        with FlopCounterMode(display=False) as counter:
            network(torch.zeros(job.batch, job.sizes[0])).sum().backward()
        total += counter.get_total_flops()
    return total


def flops_of_inputs(job: Job) -> float:
    """What the formula leaves out: gradients of the inputs of every layer but the first."""
    _, between, last = _products(job.sizes)
    if job.arm in ("full", "local"):
        return 2 * job.batch * (between + last) * job.subnets
    return 2 * job.batch * (last + between / job.subnets)


def computed(job: Job) -> float:
    """FLOPs of a run: what an update takes times updates, of all rows that a site sees."""
    return flops(replace(job, subnets=1) if job.arm == "full" else job) * job.epochs * job.shard / job.batch
