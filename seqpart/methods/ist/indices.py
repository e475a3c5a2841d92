"""Assigns the units of a hidden layer to parts, as a function of (seed, round, layer) alone.

B. Yuan, C. R. Wolfe, C. Dun, Y. Tang, A. Kyrillidis and C. Jermaine, "Distributed Learning of Fully Connected Neural Networks
using Independent Subnet Training" (2022), section 2.1: every hidden neuron belongs to exactly one subnet, each layer is drawn
independently of the others.
"""

import numpy as np

from seqpart.device.device import keyed_seed

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def groups_of(units: int, parts: int, group: int) -> int:
    """Returns the number of groups of `group` units, if that divides `units` and gives every part one; else `units`."""
    return units // group if units % group == 0 and units // group >= parts else units


def widths(units: int, parts: int, group: int) -> tuple[int, ...]:
    """Returns the units of each part: equal in every round, as even as groups allow; the first parts have one group more."""
    groups = groups_of(units, parts, group)
    each = units // groups
    return tuple(each * (groups // parts + (part < groups % parts)) for part in range(parts))


def index_sets(seed: int, round_: int, layer: int, units: int, parts: int, group: int) -> tuple[Ints, ...]:
    """Returns the units of each part, ascending: a partition of all of them."""
    groups = groups_of(units, parts, group)
    order = np.random.default_rng(keyed_seed(seed, "subnets", round_, layer)).permutation(groups)
    each, sets, first = units // groups, [], 0
    for width in widths(units, parts, group):
        own = np.sort(order[first : first + width // each])
        sets.append((own[:, None] * each + np.arange(each)).reshape(-1))
        first += len(own)
    return tuple(sets)


def places(units: Ints, count: int, before: int, after: int) -> Ints:
    """Returns the indices of `units`, of `count`, on an axis of before x count x after, such as (q, k, v) x heads x size."""
    whole = (np.arange(before)[:, None] * count + units)[:, :, None] * after + np.arange(after)
    return whole.reshape(-1)
