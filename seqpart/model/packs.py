"""What blocks hand to each other: values, each with a number; a pack is a map of tensors by these numbers.

A value is given by one block and taken by any later ones: in a chain by the next one alone, in a network with skips by several.
Value 0 is the model's input rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from seqpart.device.pages import round_up

Pack = dict[int, torch.Tensor]
ROWS = 0
"""The value that nobody gives: the model's input."""


DEVICE = "device"
Tiers = tuple[str, ...]
"""Of each partition, where what it is the first to take waits within an update, and its gradient: device, host or disk. Empty:
all of it on the device."""


def tiers_of(tiers: Iterable[str]) -> Tiers:
    found = tuple(tiers)
    return found if set(found) - {DEVICE} else ()


def tier_at(tiers: Tiers, p: int) -> str:
    """Of partition p."""
    return tiers[p] if tiers else DEVICE


def tiers_in_words(tiers: Tiers) -> str:
    return " and ".join(sorted(set(tiers))) or DEVICE


_GRADIENTS = 1 << 32


def gradient_of(number: int) -> int:
    """The number under which the gradient of a value is known, where it has a place of its own."""
    return _GRADIENTS + number


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one block gives and later ones take; for one micro-batch of `rows` rows."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """As the device allocates it."""
    rows: int
    learns: bool
    """Whether a gradient comes back through it."""
    giver: int
    """The block that gives it; -1: it is the model's input."""
    uses: tuple[int, ...]
    """Blocks that take it, ascending; one behind the last block for the model's output."""

    @property
    def row(self) -> int:
        """Bytes of one row; of what has no dimension of rows, its share."""
        exact = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-exact // self.rows)

    def with_rows(self, rows: int) -> "Value":
        """The same of a micro-batch of `rows` rows."""
        if self.shape[:1] != (self.rows,):
            return replace(self, rows=rows)
        return replace(self, shape=(rows, *self.shape[1:]), rows=rows, nbytes=self.nbytes_at(rows))

    def nbytes_at(self, rows: int) -> int:
        """Of a micro-batch of `rows` rows. What has no dimension of rows does not shrink with them."""
        exact = torch.Size(self.shape).numel() * self.dtype.itemsize
        return self.row * rows if self.shape[:1] == (self.rows,) else max(exact, self.row * rows)


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether values of this type may have some."""
    return dtype.is_floating_point or dtype.is_complex


def _is_of_rows(value: Value) -> bool:
    return value.shape[:1] == (value.rows,) and not value.dtype.is_complex


class BoundaryRouting:
    """Who gives and takes which values, once blocks are joined to partitions: one account for who simulates and who runs.

    entering, leaving: of each partition, the values that come from others and those that others take.
    """

    def __init__(self, entering: Sequence[tuple[Value, ...]], leaving: Sequence[tuple[Value, ...]]) -> None:
        self.entering, self.leaving = entering, leaving
        self.users: dict[int, list[int]] = {}
        """Partitions that take a value, ascending."""
        for p, values in enumerate(entering):
            for value in values:
                self.users.setdefault(value.number, []).append(p)
        self.giver = {value.number: p for p, values in enumerate(leaving) for value in values}

    @property
    def is_one_value(self) -> bool:
        """Whether each partition hands one value to the next, as a file of rows has it, and nothing passes over it."""
        pairs = zip(self.leaving, self.entering[1:], strict=False)
        return all(given == taken and len(given) == 1 and _is_of_rows(given[0]) for given, taken in pairs)

    def tier_of(self, number: int, tiers: Tiers) -> str:
        """Where value `number` waits, or its gradient. Below 0: the gradient of a shared weight, which goes where any boundary
        goes that leaves the device."""
        if number < 0:
            return next((tier for tier in tiers if tier != DEVICE), DEVICE)
        return tiers[self.users[number % _GRADIENTS][0]] if tiers else DEVICE

    def places(self, micro_batch: int) -> dict[int, int]:
        """Bytes of the place of each value that partitions hand to each other with one micro-batch, by its number; and of its
        gradient, where that has one of its own."""
        found = {}
        for value in {value.number: value for values in self.entering for value in values}.values():
            found[value.number] = round_up(value.nbytes_at(micro_batch))
            if self.is_shared(value) and value.learns:
                found[gradient_of(value.number)] = found[value.number]
        return found

    def wants_gradient(self, value: Value, lowest: int) -> bool:
        """Whether whoever gave it learns; `lowest`: the first partition that does."""
        return value.learns and self.giver.get(value.number, -1) >= lowest

    def used_up(self, p: int) -> list[Value]:
        """What no partition behind p takes."""
        return [value for value in self.entering[p] if self.users[value.number][-1] <= p]

    def is_first_user(self, p: int, value: Value, lowest: int) -> bool:
        """Whether it is p that back-propagates last among those that take it and learn."""
        return not any(lowest <= user < p for user in self.users[value.number])

    def taken_again(self, p: int) -> list[Value]:
        """What comes into p and is taken behind it too: its gradient there is there first."""
        return [value for value in self.entering[p] if self.users[value.number][-1] > p]

    def is_shared(self, value: Value) -> bool:
        """Whether several partitions take it: then its gradient is added up while it is still needed itself."""
        return len(self.users.get(value.number, ())) > 1
