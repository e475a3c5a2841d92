"""The planner's dynamic program, over ints: where to cut the chain; and a bound of what memory can save.

Where to cut: of all cuts whose partitions fit, take the fewest partitions, then the smallest boundaries, then the best balance.
Each of the three adds up over partitions, so the best cut of a chain's first blocks is part of the best cut of all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks first..last (last not included) as one partition that fits."""

    first: int
    last: int
    boundary: int
    """Bytes of one row of its output boundary."""
    weight: int
    """Bytes to be balanced between partitions."""


Score = tuple[int, int, int]
"""(partitions, boundary bytes of all cuts, sum of squared weights)."""
State = tuple[int, int]
"""(partitions, 0 where any number will do; blocks that they cover)."""


def best_cut(pieces: Sequence[Piece], blocks: int, count: int | None = None) -> tuple[Piece, ...] | None:
    """Returns the best way to cover `blocks` blocks with `pieces`, or None. With `count`, in exactly so many partitions."""
    if count is not None and count > blocks:
        return None
    best: dict[State, tuple[Score, State, Piece | None]] = {(0, 0): ((0, 0, 0), (0, 0), None)}
    """{state: (score of its best cut, the state before its last piece, that piece)}."""
    for piece in sorted(pieces, key=lambda piece: piece.first):
        for number in range(count or 1):
            before = number, piece.first
            if before in best:
                partitions, boundaries, squares = best[before][0]
                cut = piece.boundary if piece.last < blocks else 0
                score = partitions + 1, boundaries + cut, squares + piece.weight**2
                after = number if count is None else number + 1, piece.last
                if after not in best or score < best[after][0]:
                    best[after] = score, before, piece
    state, chain = (count or 0, blocks), list[Piece]()
    while state != (0, 0):
        if state not in best:
            return None
        _, state, piece_before = best[state]
        assert piece_before is not None
        chain.insert(0, piece_before)
    return tuple(chain)


def most_saved(options: Iterable[tuple[float, int]], left: float) -> float:
    """Most seconds that `left` bytes can save with options (seconds, bytes), if options were divisible."""
    seconds = 0.0
    for saves, nbytes in sorted(options, key=lambda option: -option[0] / max(1, option[1])):
        if left <= 0:
            break
        seconds += saves * min(1.0, left / max(1, nbytes))
        left -= nbytes
    return seconds
