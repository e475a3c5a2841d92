"""Phases with few updates, passes and micro-batches, and what these stand for: a run as long as one looks at to predict it."""

from dataclasses import replace

from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Phases

_WALKED = 4
"""Updates of a pass that are walked through."""


def shortened(phases: Phases) -> tuple[list[Phase], dict[int, tuple[int, int]], dict[tuple[int, int | None], int]]:
    """Phases with few updates, epochs and micro-batches, and what these stand for.

    {number of a phase: (updates it stands for, passes left out)}, {(phase, micro-batch): micro-batches it stands for}.
    """
    short: list[Phase] = []
    more: dict[int, tuple[int, int]] = {}
    stands_for: dict[tuple[int, int | None], int] = {}
    for phase, times in (pair for stretch in phases.stretches for pair in stretch.walked()):
        more[len(short)] = phase.updates, times - 1
        ragged = phase.rows % phase.batch or phase.batch
        rows = phase.rows if phase.updates <= _WALKED else (_WALKED - 1) * phase.batch + ragged
        shorter, counts = _with_few_micro_batches(replace(phase, rows=rows))
        stands_for |= {(len(short), m): count for m, count in counts.items()}
        short.append(shorter)
    return short, more, stands_for


# [Note: equal micro-batches] Those of an update differ in the rows of the last alone, and memory rises or falls by the same
# bytes from one to the next. So the first (there are no gradients yet), the second, the last two and those between make the
# highest peaks, and the second stands for those between: of a forward pass, which takes more with each, the last but one
# is looked at, and of a backward pass, which takes less with each, the second before those that it stands for have gone.

_ALONE = 4
"""Micro-batches of an update that are walked through."""


def _with_few_micro_batches(phase: Phase) -> tuple[Phase, dict[int, int]]:
    """`phase` with at most so many micro-batches in an update, and {micro-batch: how many it stands for}."""
    size, batch = phase.micro_batch, min(phase.batch, phase.rows)
    count, updates = -(-batch // size), phase.updates
    if phase.kind is not PhaseKind.TRAIN or count <= _ALONE or phase.in_pairs:
        return phase, {}
    short = (_ALONE - 1) * size + (batch % size or size)
    stands_for = {update * _ALONE + 1: count - _ALONE + 1 for update in range(updates)}
    last = phase.rows - (updates - 1) * batch
    if last < batch:  # one fewer, so that it stays the shortest
        count = -(-last // size)
        stands_for[(updates - 1) * _ALONE + 1] = max(1, count - _ALONE + 2)
        last = (_ALONE - 2) * size + (last % size or size) if count >= _ALONE else last
    else:
        last = short
    return replace(phase, rows=(updates - 1) * short + last, batch=short), stands_for
