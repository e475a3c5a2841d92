"""The dynamic program finds what trying every cut finds."""

from hypothesis import given
from hypothesis import strategies as st

from seqpart.plan.dynamic import Piece, best_cut


@st.composite
def problems(draw):
    """Pieces for a chain of up to 7 blocks; what leaves a piece depends on where it ends, as in a network."""
    blocks = draw(st.integers(1, 7))
    boundary = draw(st.lists(st.integers(0, 9), min_size=blocks + 1, max_size=blocks + 1))
    weight = draw(st.lists(st.integers(0, 5), min_size=blocks, max_size=blocks))
    every = [(first, last) for first in range(blocks) for last in range(first + 1, blocks + 1)]
    kept = draw(st.lists(st.sampled_from(every), unique=True, max_size=len(every)))
    return [Piece(first, last, boundary[last], sum(weight[first:last])) for first, last in kept], blocks


def every_cut(pieces, blocks, at=0):
    if at == blocks:
        yield ()
    for piece in pieces:
        if piece.first == at:
            for rest in every_cut(pieces, blocks, piece.last):
                yield (piece, *rest)


def score(cut):
    """Fewest partitions, then the smallest boundaries, then the best balance."""
    return len(cut), sum(piece.boundary for piece in cut[:-1]), sum(piece.weight**2 for piece in cut)


@given(problems())
def test_the_best_cut_is_the_best_of_all_cuts(problem):
    cuts = list(every_cut(*problem))
    found = best_cut(*problem)
    if not cuts:
        assert found is None
    else:
        assert found in cuts
        assert score(found) == min(map(score, cuts))


@given(problems(), st.integers(1, 7))
def test_with_a_count_it_is_the_best_of_the_cuts_with_so_many_partitions(problem, count):
    cuts = [cut for cut in every_cut(*problem) if len(cut) == count]
    found = best_cut(*problem, count)
    if not cuts:
        assert found is None
    else:
        assert found in cuts
        assert score(found) == min(map(score, cuts))


@given(problems())
def test_pieces_may_come_in_any_order(problem):
    pieces, blocks = problem
    one, other = best_cut(pieces, blocks), best_cut(pieces[::-1], blocks)
    assert (one is None) == (other is None)
    assert one is None or other is None or score(one) == score(other)


def test_one_piece_that_covers_all_is_no_cut():
    whole, left, right = Piece(0, 2, 9, 4), Piece(0, 1, 0, 2), Piece(1, 2, 0, 2)
    assert best_cut([left, whole, right], 2) == (whole,)
    assert best_cut([left, whole, right], 2, 2) == (left, right)


def test_what_leaves_the_last_partition_costs_nothing():
    near, far = Piece(0, 1, 1, 1), Piece(0, 2, 2, 1)
    tails = [Piece(1, 3, 100, 1), Piece(2, 3, 0, 1)]
    assert best_cut([near, far, *tails], 3) == (near, tails[0])
