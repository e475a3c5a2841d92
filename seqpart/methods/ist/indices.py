"""Which units of a hidden layer each part has in a round: a function of (seed, round, layer) alone.

B. Yuan, C. R. Wolfe, C. Dun, Y. Tang, A. Kyrillidis and C. Jermaine, "Distributed Learning of Fully Connected Neural Networks
using Independent Subnet Training" (2022), section 2.1: every hidden neuron belongs to exactly one subnet, each layer is drawn
independently of the others.
"""

import numpy as np

from seqpart.device.device import keyed_seed

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def groups_of(units: int, parts: int, group: int) -> int:
    """Groups that `units` are dealt in: of `group` units where they are a multiple of it, and enough for every part; else of
    one."""
    return units // group if units % group == 0 and units // group >= parts else units


def widths(units: int, parts: int, group: int) -> tuple[int, ...]:
    """Units of each part: the same in every round, and as even as groups allow; the first parts have one group more."""
    groups = groups_of(units, parts, group)
    each = units // groups
    return tuple(each * (groups // parts + (part < groups % parts)) for part in range(parts))


def index_sets(seed: int, round_: int, layer: int, units: int, parts: int, group: int) -> tuple[Ints, ...]:
    """The units of each part, ascending: disjoint, and together all of them."""
    groups = groups_of(units, parts, group)
    order = np.random.default_rng(keyed_seed(seed, "subnets", round_, layer)).permutation(groups)
    each, sets, first = units // groups, [], 0
    for width in widths(units, parts, group):
        own = np.sort(order[first : first + width // each])
        sets.append((own[:, None] * each + np.arange(each)).reshape(-1))
        first += len(own)
    return tuple(sets)


def places(units: Ints, count: int, before: int, after: int) -> Ints:
    """Where `units`, of `count`, are on an axis of before x count x after places: as heads lie in (q, k, v) x heads x size."""
    whole = (np.arange(before)[:, None] * count + units)[:, :, None] * after + np.arange(after)
    return whole.reshape(-1)
