"""The planner's dynamic program, over ints: where to cut the chain; and a bound of what memory can save.

Where to cut: of all cuts whose partitions fit, take the fewest partitions, then the smallest boundaries, then the best balance.
Each of the three adds up over partitions, so the best cut of a chain's first blocks is part of the best cut of all.
"""

from collections.abc import Iterable, Iterator, Sequence
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


def best_cut(pieces: Sequence[Piece], blocks: int, count: int | None = None) -> tuple[Piece, ...] | None:
    """Returns the best way to cover `blocks` blocks with `pieces`, or None. With `count`, in exactly so many partitions."""
    if count is None:
        return _walk(pieces, blocks)
    for chain in _layers(pieces, blocks, count):
        return chain
    return None


def _walk(pieces: Sequence[Piece], blocks: int) -> tuple[Piece, ...] | None:
    best: dict[int, tuple[Score, Piece | None]] = {0: ((0, 0, 0), None)}
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if piece.first in best:
            score = _add(best[piece.first][0], piece, blocks)
            if piece.last not in best or score < best[piece.last][0]:
                best[piece.last] = (score, piece)
    if blocks not in best:
        return None
    chain: list[Piece] = []
    at = blocks
    while at > 0:
        step = best[at][1]
        assert step is not None
        chain.append(step)
        at = step.first
    return tuple(reversed(chain))


def _layers(pieces: Sequence[Piece], blocks: int, count: int) -> Iterator[tuple[Piece, ...]]:
    """Yields the best cut into exactly `count` partitions, if any: one layer of states for each partition."""
    layer: dict[int, tuple[Score, tuple[Piece, ...]]] = {0: ((0, 0, 0), ())}
    for _ in range(count if count <= blocks else 0):
        after: dict[int, tuple[Score, tuple[Piece, ...]]] = {}
        for piece in pieces:
            if piece.first in layer:
                score, chain = layer[piece.first]
                score = _add(score, piece, blocks)
                if piece.last not in after or score < after[piece.last][0]:
                    after[piece.last] = (score, (*chain, piece))
        layer = after
    if blocks in layer and count <= blocks:
        yield layer[blocks][1]


def _add(score: Score, piece: Piece, blocks: int) -> Score:
    boundary = piece.boundary if piece.last < blocks else 0
    return score[0] + 1, score[1] + boundary, score[2] + piece.weight**2


def most_saved(options: Iterable[tuple[float, int]], left: float) -> float:
    """Most seconds that `left` bytes can save with options (seconds, bytes), if options were divisible."""
    seconds = 0.0
    for saves, nbytes in sorted(options, key=lambda option: -option[0] / max(1, option[1])):
        if left <= 0:
            break
        seconds += saves * min(1.0, left / max(1, nbytes))
        left -= nbytes
    return seconds
