"""Values that blocks pass to each other, each with a number; a pack maps these numbers to tensors.

A value is given by one block and taken by any later ones: in a chain by the next one alone, in a network with skips by several.
Value 0 is the model's input rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from seqpart.device.pages import round_up

Pack = dict[int, torch.Tensor]
ROWS = 0
"""Number of the model's input, a value that no block gives."""


DEVICE = "device"
Tiers = tuple[str, ...]
"""Place of each partition's boundary (the values that it is the first to take, and their gradients) within an update: device,
host or disk. Empty: all on the device."""


def tiers_of(tiers: Iterable[str]) -> Tiers:
    found = tuple(tiers)
    return found if set(found) - {DEVICE} else ()


def tier_at(tiers: Tiers, p: int) -> str:
    return tiers[p] if tiers else DEVICE


def tiers_in_words(tiers: Tiers) -> str:
    return " and ".join(sorted(set(tiers))) or DEVICE


_GRADIENTS = 1 << 32


def gradient_of(number: int) -> int:
    """Number of the gradient of value `number`, for a gradient with a place of its own."""
    return _GRADIENTS + number


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one block gives and later ones take, for a micro-batch of `rows` rows."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """Bytes that the device allocates for it."""
    rows: int
    learns: bool
    """True if a gradient is propagated through it."""
    giver: int
    """The block that gives it; -1: it is the model's input."""
    uses: tuple[int, ...]
    """Blocks that take it, ascending; the number of blocks for the model's output."""
    example: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """A row of the data, (1, ...), if the block that takes it has shapes that depend on values."""

    @property
    def row(self) -> int:
        """Bytes of one row; for a value without a dimension of rows, its bytes divided by the rows."""
        exact = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-exact // self.rows)

    def with_rows(self, rows: int) -> "Value":
        """Returns this value for a micro-batch of `rows` rows."""
        if self.shape[:1] != (self.rows,):
            return replace(self, rows=rows)
        return replace(self, shape=(rows, *self.shape[1:]), rows=rows, nbytes=self.nbytes_at(rows))

    def sample(self, device: torch.device | None = None, *, learns: bool) -> torch.Tensor:
        """Returns rows to measure a block with: the example, repeated; or random floats, or of whole numbers zeros, which every
        vocabulary has."""
        if self.example is not None:
            x = self.example.to(device).expand(self.shape).clone(memory_format=torch.contiguous_format)
        elif has_gradients(self.dtype):
            x = torch.randn(self.shape, dtype=torch.float32, device=device).to(self.dtype)
        else:
            x = torch.zeros(self.shape, dtype=self.dtype, device=device)
        return x.requires_grad_(learns and has_gradients(self.dtype))

    def nbytes_at(self, rows: int) -> int:
        """Bytes for a micro-batch of `rows` rows. A value without a dimension of rows does not shrink with them."""
        exact = torch.Size(self.shape).numel() * self.dtype.itemsize
        return self.row * rows if self.shape[:1] == (self.rows,) else max(exact, self.row * rows)


def has_gradients(dtype: torch.dtype) -> bool:
    """True if values of this type may have gradients."""
    return dtype.is_floating_point or dtype.is_complex


class BoundaryRouting:
    """Routes of values between partitions (who gives and who takes each), for the simulator and the executor.

    entering, leaving: for each partition, the values that it takes from others and those that others take.
    """

    def __init__(self, entering: Sequence[tuple[Value, ...]], leaving: Sequence[tuple[Value, ...]]) -> None:
        self.entering, self.leaving = entering, leaving
        self.users: dict[int, list[int]] = {}
        """{number of a value: partitions that take it, ascending}."""
        for p, values in enumerate(entering):
            for value in values:
                self.users.setdefault(value.number, []).append(p)
        self.giver = {value.number: p for p, values in enumerate(leaving) for value in values}

    @property
    def is_one_value(self) -> bool:
        """True if each partition passes a single value of rows to the next, and no value skips a partition."""
        return all(
            given == taken and len(given) == 1 and given[0].shape[:1] == (given[0].rows,) and not given[0].dtype.is_complex
            for given, taken in zip(self.leaving, self.entering[1:], strict=False)
        )

    def tier_of(self, number: int, tiers: Tiers) -> str:
        """Tier in which value `number`, or its gradient, waits. Below 0: the gradient of a shared weight, which waits with the
        first boundary that is offloaded."""
        if number < 0:
            return next((tier for tier in tiers if tier != DEVICE), DEVICE)
        return tiers[self.users[number % _GRADIENTS][0]] if tiers else DEVICE

    def places(self, micro_batch: int) -> dict[int, int]:
        """{number: bytes of its place} for each value that partitions pass on in one micro-batch, and for its gradient if that
        has a place of its own."""
        found = {}
        for value in {value.number: value for values in self.entering for value in values}.values():
            found[value.number] = round_up(value.nbytes_at(micro_batch))
            if self.is_shared(value) and value.learns:
                found[gradient_of(value.number)] = found[value.number]
        return found

    def wants_gradient(self, value: Value, lowest: int) -> bool:
        """True if a partition that learns gave the value; lowest: the first partition that learns."""
        return value.learns and self.giver.get(value.number, -1) >= lowest

    def used_up(self, p: int) -> list[Value]:
        """Values that p takes, and no partition after it."""
        return [value for value in self.entering[p] if self.users[value.number][-1] <= p]

    def is_first_user(self, p: int, value: Value, lowest: int) -> bool:
        """True if p back-propagates last among the partitions that take the value and learn."""
        return not any(lowest <= user < p for user in self.users[value.number])

    def taken_again(self, p: int) -> list[Value]:
        """Values that p takes and later partitions take too: their gradients from those are there first."""
        return [value for value in self.entering[p] if self.users[value.number][-1] > p]

    def is_shared(self, value: Value) -> bool:
        """True if several partitions take the value: then its gradient is accumulated while the value is still needed."""
        return len(self.users.get(value.number, ())) > 1
