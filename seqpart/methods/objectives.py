"""Losses of inner partitions under `sil`, against fixed random targets; no gradient leaves the partition.

A loss compares features, (n, size) in float32 with labels (n,): one row for every position if tokens have a label each, else
one row for each sample. `prototype` and `orthogonal` average a convolution's channels over 2 x 2 fields of its space,
(rows, C, H, W) to (rows, 4 C): an average over all of it would lose positions, which later partitions need
(docs/objectives.md). The paper's `mse` takes all C x H x W of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from seqpart.config import WITH_DIRECTIONS
from seqpart.device.device import keyed_seed, random_words, shifted
from seqpart.methods.method import SyntheticLoss, Targets

_AT_ONCE = 1 << 18
"""Elements that are drawn at once: each makes temporaries of 8 bytes."""
_ORTHOGONAL = 1 << 16
"""Most elements that are made orthogonal. In rows of more than 256 numbers random directions are nearly orthogonal: their
cosines are 1 / sqrt(size), and the gain of orthogonal ones in 60 dimensions was gone at 256 (docs/objectives.md)."""


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
        bits = random_words((classes[:, None] << 32) + columns, self._key)
        into.copy_(shifted(bits, 41)).add_(0.5).mul_(2.0**-23)  # 23 bits and a half: exact in float32, never 0 or 1
        if self._normal:
            into.mul_(2).sub_(1).erfinv_().mul_(2**0.5)


def _orthogonal(rows: torch.Tensor) -> torch.Tensor:
    """Returns the nearest matrix with orthonormal rows, or columns (a tight frame) if it has more rows than columns.

    Computed on the CPU, whose bits are the same under every limit and with every GPU, and whose library is loaded already."""
    left, _, right = torch.linalg.svd(rows.cpu().double(), full_matrices=False)
    nearest: torch.Tensor = left @ right
    return nearest.to(rows)


def has_positions(shape: tuple[int, ...], label_shape: tuple[int, ...]) -> bool:
    """True if an output of this shape has one position for each of a row's labels, and features there."""
    return not label_shape or (shape[: len(label_shape)] == label_shape and len(shape) > len(label_shape))


def why_unsuited(objective: str, shape: tuple[int, ...], label_shape: tuple[int, ...]) -> str:
    """Returns what an output of this shape lacks for the objective, in words; "" if nothing."""
    if not has_positions(shape, label_shape):
        return f"labels stand for {label_shape} positions, which method sil needs as its first dimensions"
    if objective in WITH_DIRECTIONS and _Features(shape, label_shape, pooled=True).size < 2:
        return f"objective {objective} tells classes apart by directions, for which one feature is too few"
    return ""


def _halves(size: int) -> list[int]:
    """Returns the sizes of the two fields along a spatial axis; of one field if its size is 1."""
    return [size - size // 2, size // 2] if size > 1 else [size]


class _Features:
    """Turns a partition's output into features and back. pooled: average a convolution over its fields."""

    def __init__(self, shape: tuple[int, ...], label_shape: tuple[int, ...], *, pooled: bool) -> None:
        assert has_positions(shape, label_shape), f"a boundary of shape {shape} for labels of shape {label_shape}"
        self._shape, self._positions = shape, len(label_shape)
        self._pools = pooled and not label_shape and len(shape) >= 3
        sizes = (shape[0], *(len(_halves(size)) for size in shape[1:])) if self._pools else shape[self._positions :]
        self.size = math.prod(sizes)

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        if not self._pools:
            return output.flatten(1 + self._positions).reshape(-1, self.size).float()
        fields = [output]
        for axis, size in enumerate(self._shape[1:], 2):
            fields = [part for field in fields for part in torch.split(field, _halves(size), axis)]
        over_space = tuple(range(2, output.ndim))
        return torch.stack([field.mean(over_space) for field in fields], 2).flatten(1).float()

    def back(self, features: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns an output (rows, *boundary) that has these features."""
        if not self._pools:
            return features.view(rows, *self._shape)
        halves = [_halves(size) for size in self._shape[1:]]
        output = features.view(rows, self._shape[0], *map(len, halves))
        for axis, sizes in enumerate(halves, 2):
            places = [number for number, size in enumerate(sizes) for _ in range(size)]
            output = output.index_select(axis, torch.tensor(places, device=output.device))
        return output


class Regression:
    """Mean squared error to kappa * U(0, 1): the paper's objective, eq. 1."""

    def __init__(self, targets: Targets) -> None:
        self._features = _Features(targets.output_shape, targets.label_shape, pooled=False)
        kappa = 10.0 if targets.config.kappa is None else targets.config.kappa
        self._labels = _labels(targets, self._features.size, normal=False, finish=lambda rows: rows.mul_(kappa))
        rows = self._labels.kept
        self._squares = None if rows is None else torch.linalg.vector_norm(rows, dim=1).square()
        self.nbytes = self._labels.nbytes + (0 if self._squares is None else self._squares.nbytes)

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Not F.mse_loss: on CPU its scalar keeps a buffer as large as the output alive, which no fake tensor shows.
        return (self._features(output) - self._labels.of(labels.flatten())).square().mean()

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows, squares = self._labels.kept, self._squares
        if rows is None or squares is None:
            return None  # all targets would be drawn for every micro-batch, only to count hits
        # The nearest row wins: -|h - s|^2 without |h|^2, which is the same for every class.
        return 2 * self._features(output) @ rows.T - squares, labels.flatten()

    def ideal(self, labels: torch.Tensor) -> torch.Tensor:
        return self._features.back(self._labels.of(labels.flatten()), len(labels))


class Prototypes:
    """Cross-entropy to fixed random unit directions, one per class: logits = scale * cos(direction, LayerNorm(h)).

    LayerNorm without learned weights keeps the logits' size independent of depth and width. It is our own objective, not
    the paper's: better than regression on every network tried, and worse than tuned full training (docs/objectives.md).
    """

    orthogonal: ClassVar[bool] = False

    def __init__(self, targets: Targets) -> None:
        self._features = _Features(targets.output_shape, targets.label_shape, pooled=True)
        self._size = (self._features.size,)
        scale = targets.config.prototype_scale_of(targets.partition, targets.classes)
        self._scale = scale / self._features.size**0.5
        self._directions = _labels(
            targets, self._features.size, normal=True, orthogonal=self.orthogonal,
            finish=lambda rows: rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True)),
        )  # fmt: skip
        self.nbytes = self._directions.nbytes

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._logits(output), labels.flatten())

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._directions.kept is None else (self._logits(output), labels.flatten())

    def ideal(self, labels: torch.Tensor) -> torch.Tensor:
        return self._features.back(self._directions.of(labels.flatten()).mul_(self._features.size**0.5), len(labels))

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = F.layer_norm(self._features(output), self._size) * self._scale
        if (directions := self._directions.kept) is not None:
            return features @ directions.T
        draws = [functools.partial(self._directions.of, classes) for classes in self._directions.parts()]
        return torch.cat([_Projection.apply(features, draw) for draw in draws], dim=1)


class _Projection(torch.autograd.Function):
    """features @ directions.T, with directions that are drawn again in backward: the graph would otherwise hold all pieces of
    them. (torch.utils.checkpoint does the same, but loads torch's compiler.)"""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.draw, ctx.type = draw, features.dtype
        return features @ draw().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient @ ctx.draw().to(gradient.dtype)).to(ctx.type), None


class Orthogonal(Prototypes):
    """`Prototypes` with orthogonal directions: a change along one class's direction does not change another class's logit.

    With few more features than classes random directions interfere: 47 in 60 dimensions have cosines of 0.13 and more.
    """

    orthogonal: ClassVar[bool] = True


def _labels(
    targets: Targets, size: int, *, normal: bool, finish: Callable[[torch.Tensor], object], orthogonal: bool = False
) -> SyntheticLabels:
    return SyntheticLabels(
        keyed_seed(targets.seed, "sil", targets.partition), targets.classes, size, normal=normal, finish=finish,
        orthogonal=orthogonal, most=targets.most, device=targets.device,
    )  # fmt: skip


OBJECTIVES: dict[str, Callable[[Targets], SyntheticLoss]] = {
    "orthogonal": Orthogonal, "prototype": Prototypes, "mse": Regression,
}  # fmt: skip
