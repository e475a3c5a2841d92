"""Synthetic intermediate labels: fixed random rows, one for each class, that can be drawn again at any time.

Row c is a function of (key, c) alone: its element j is the counter c * 2^32 + j through SplitMix64 (Steele, Lea and Flood
2014, "Fast splittable pseudorandom number generators"), started at the key. The bits are the same on every device; what is
computed from them (a normal distribution, a norm) is rounded as the device rounds. So labels that would take too much memory
never exist whole: a row is drawn when its class occurs, and freed.
"""

from collections.abc import Callable

import torch

_AT_ONCE = 1 << 18
"""Elements that are drawn at once: each makes temporaries of 8 bytes."""
_ORTHOGONAL = 1 << 16
"""Most elements that are made orthogonal. In rows of more than 256 numbers random directions are nearly orthogonal: their
cosines are 1 / sqrt(size), and the gain of orthogonal ones in 60 dimensions was gone at 256 (docs/objectives.md)."""
_STEP, _FIRST, _SECOND = (factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants, as torch's int64."""


class SyntheticLabels:
    """`classes` rows of `size` numbers from U(0, 1), or with `normal` N(0, 1); `finish` changes rows (n, size) in place.

    orthogonal: up to 65,536 numbers are made orthogonal all together, and always kept; larger labels stay as they are drawn.
    kept: all labels, (classes, size), if they take at most `most` bytes; else None.
    """

    def __init__(
        self, key: int, classes: int, size: int, *, normal: bool, orthogonal: bool = False,
        finish: Callable[[torch.Tensor], object], most: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._key, self._size, self._normal, self._finish = key, size, normal, finish
        self._classes = torch.arange(classes, device=device)
        self._rows_at_once = max(1, most // (4 * size))
        orthogonal = orthogonal and classes * size <= _ORTHOGONAL
        self.kept = self._drawn(self._classes) if orthogonal or classes <= self._rows_at_once else None
        if self.kept is not None and orthogonal:
            self.kept = _orthogonal(self.kept)
            finish(self.kept)
        self.nbytes = 0 if self.kept is None else self.kept.nbytes

    def of(self, classes: torch.Tensor) -> torch.Tensor:
        """Returns the rows (n, size) of `classes` (n,)."""
        return self._drawn(classes) if self.kept is None else self.kept[classes]

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Returns all classes in order, in pieces whose rows take at most `most` bytes each."""
        return torch.split(self._classes, self._rows_at_once)

    def _drawn(self, classes: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(len(classes), self._size, dtype=torch.float32, device=classes.device)
        step = max(1, _AT_ONCE // self._size)
        for some, rows in zip(torch.split(classes, step), torch.split(drawn, step), strict=True):
            for start in range(0, self._size, _AT_ONCE):
                self._draw(some, start, rows[:, start : start + _AT_ONCE])
            self._finish(rows)
        return drawn

    def _draw(self, classes: torch.Tensor, start: int, into: torch.Tensor) -> None:
        columns = torch.arange(start, start + into.shape[1], device=into.device)
        bits = ((classes[:, None] << 32) + columns).mul_(_STEP).add_(self._key)
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
        bits.bitwise_xor_(_shifted(bits, 31))
        into.copy_(_shifted(bits, 41)).add_(0.5).mul_(2.0**-23)  # 23 bits and a half: exact in float32, never 0 or 1
        if self._normal:
            into.mul_(2).sub_(1).erfinv_().mul_(2**0.5)


def _orthogonal(rows: torch.Tensor) -> torch.Tensor:
    """Returns the nearest matrix with orthonormal rows, or columns (a tight frame) if it has more rows than columns.

    Computed on the CPU, whose bits are the same under every limit and with every GPU, and whose library is loaded already."""
    left, _, right = torch.linalg.svd(rows.cpu().double(), full_matrices=False)
    nearest: torch.Tensor = left @ right
    return nearest.to(rows)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Returns a logical right shift, which fills with zeros; torch's own shift fills with the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
