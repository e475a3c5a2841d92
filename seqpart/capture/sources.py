"""Finds the tensors of rows that a number of the whole batch is computed from: a mean, a sum, scores of all pairs of rows.

    hidden (rows, 16) -> softmax -> gates (rows, 4) -> mean over rows -> (4,)
                                    source             computed with the loss

A micro-batch has another such number than the batch, and how a loss of it adds up cannot be seen from the number. The loss gets
the sources, which add up as rows do, and computes the number itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from seqpart.capture.program import Op, Program, following, generalised, needed_for
from seqpart.capture.recorder import Recorder
from seqpart.capture.segment import Segment, Steps
from seqpart.model.packs import ROWS

_MOST = 32 << 20
"""Most bytes of a row's sources: a loss of more cannot be tried."""
_JOINED = -1
"""Number of the joined tensor, which has the rows, in the program of the numbers."""


def sources_of(number: int, recorder: Recorder, follows: Callable[[int], bool]) -> set[int] | None:
    """Returns the numbers of the tensors that `number` is computed from by functions alone: tensors of rows, and constants that
    are computed from parameters. None where a layer computes it, or a function that takes a parameter or buffer.

    follows: tells if the shape of a tensor follows the rows.
    """
    of_rows = following({ROWS}, recorder.ops)
    makers = {made: op for op in recorder.ops for made in op.makes}
    now = recorder.current  # `to` and `contiguous` may return a tensor itself, under another number
    found, seen, left = set[int](), set[int](), [number]
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        op = makers.get(one)
        own = [] if one in of_rows else [op for op in needed_for({one}, recorder.ops)[0] if op.is_module or op.owned]
        if one in now and (own or (one in of_rows and follows(one))):
            found.add(one)
        elif op is None or op.is_module or op.owned or op.effect:
            return None
        else:
            left += op.uses
    if sum(recorder.tensor(one).nbytes for one in found) > _MOST * recorder.rows:
        return None
    return found


def comparing_rows(shapes: Mapping[int, tuple[int, ...]], others: Mapping[int, tuple[int, ...]], ops: Iterable[Op]) -> set[int]:
    """Returns the numbers of tensors that compare rows with each other, and of all that follows these.

    shapes, others: by number, in two runs with other rows. Two dimensions of scores of all pairs differ, and none of a mean.
    """
    of_rows = following({ROWS}, ops)
    found = {
        number
        for number in of_rows & shapes.keys() & others.keys()
        if sum(one != other for one, other in zip(shapes[number], others[number], strict=False)) != 1
    }
    return following(found, ops)


def learned_through(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[bool]:
    """Tells for each of `inputs` if it gets a gradient from `outputs`. The graph stays."""
    ends = [tensor for tensor in outputs if tensor.requires_grad]
    learns = [tensor for tensor in inputs if tensor.requires_grad]
    if not ends or not learns:
        return [False] * len(inputs)
    own = [torch.ones_like(tensor) for tensor in ends]
    grads = iter(torch.autograd.grad(ends, learns, own, retain_graph=True, allow_unused=True))
    return [tensor.requires_grad and next(grads) is not None for tensor in inputs]


class Computed:
    """Numbers of a batch as a function of their sources, as two runs of a model with different rows show it."""

    def __init__(self, numbers: Sequence[int], sources: Sequence[int], recorder: Recorder) -> None:
        self.sources, self._numbers = tuple(sources), tuple(numbers)
        self._program = self._of(recorder)

    def _of(self, recorder: Recorder) -> Program:
        ops = needed_for(set(self._numbers), recorder.ops, set(self.sources))[0]
        return Program(ops=ops, output=0, shapes={}, learns=frozenset())

    def merged(self, recorder: Recorder, rows: int, other_rows: int) -> Segment:
        """Returns the module (joined tensor, *sources) -> numbers. Raises Differs if the second run does other things."""
        ops = generalised(self._program, self._of(recorder), rows, other_rows).ops
        steps = Steps(ops, (_JOINED, *self.sources), self._numbers, 0)
        return Segment({}, {}, steps, steps, "numbers of the batch")
