"""Values on their way up from partition to partition, and their gradients on the way down, through an exchange."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from seqpart.model.packs import Handing, Pack, Value, gradient_of
from seqpart.runtime.exchange import BoundaryExchange, Key, copied_as_it_lies


class Handover:
    """entering, leaving: of each partition, what comes from others and what others take."""

    def __init__(
        self, exchange: BoundaryExchange, entering: Sequence[tuple[Value, ...]], leaving: Sequence[tuple[Value, ...]]
    ) -> None:
        self._exchange, self._handing = exchange, Handing(entering, leaving)
        self._waiting: set[Key] = set()
        """Gradients that are there, as what others took may have none."""

    def give_up(self, m: int, pack: Pack) -> None:
        """What others need of micro-batch m."""
        for number, tensor in pack.items():
            self._exchange.put((number, m), tensor)

    def take_up(self, p: int, m: int, *, to_keep: bool = False) -> Pack:
        """What enters partition p; it stays for others, and for p's backward. to_keep: in memory that is not used again."""
        pack = {value.number: self._exchange.get((value.number, m)) for value in self._handing.entering[p]}
        lent = [number for number in pack if to_keep and self._exchange.lends((number, m))]
        return pack | {number: copied_as_it_lies(pack[number]) for number in lent}

    def used_up(self, p: int, m: int) -> None:
        """Nobody behind p takes what p was the last to take."""
        for value in self._handing.used_up(p):
            self._exchange.forget((value.number, m))

    def wanted(self, p: int, lowest: int) -> frozenset[int]:
        """Values entering p whose gradients somebody below is to learn by; `lowest`: the first partition that learns."""
        return frozenset(v.number for v in self._handing.entering[p] if self._handing.wants_gradient(v, lowest))

    def taken_again(self, p: int) -> frozenset[int]:
        """Values entering p that others take behind it too: their gradients are there first."""
        return frozenset(value.number for value in self._handing.taken_again(p))

    def take_gradients(self, p: int, m: int, edges: Collection[int]) -> Pack:
        """Those that wait for what p gave, and for what it took and others did too. Only of `edges` they are of use."""
        found: Pack = {}
        for value in (*self._handing.leaving[p], *self._handing.taken_again(p)):
            key = self._gradient_key(value, m)
            if key in self._waiting:
                self._waiting.remove(key)
                if value.number in edges:
                    found[value.number] = self._exchange.take(key)
                else:
                    self._exchange.forget(key)
        return found

    def give_down(self, p: int, m: int, gradients: Mapping[int, torch.Tensor], lowest: int) -> None:
        """What back-propagation through p leaves for others. Who takes a value last of all leaves its activation to nobody."""
        for value in self._handing.entering[p]:
            key, gradient = self._gradient_key(value, m), gradients.get(value.number)
            if self._handing.is_first_user(p, value, lowest) and (gradient is None or key[0] != value.number):
                self._exchange.forget((value.number, m))
            if gradient is not None:
                self._exchange.put(key, gradient)
                self._waiting.add(key)

    def gradients_wait(self, m: int) -> bool:
        return any(key[1] == m for key in self._waiting)

    def give_shared(self, number: int, m: int, gradient: torch.Tensor) -> None:
        """Of a weight that a lower partition owns."""
        self._exchange.put((-1 - number, m), gradient)
        self._waiting.add((-1 - number, m))

    def take_shared(self, number: int, m: int) -> Iterable[torch.Tensor]:
        key = -1 - number, m
        if key in self._waiting:
            self._waiting.remove(key)
            yield self._exchange.take(key)

    def abandon(self) -> None:
        """Forget the unfinished update."""
        self._waiting.clear()

    def _gradient_key(self, value: Value, m: int) -> Key:
        """Of one that several partitions take it has a place of its own: the value itself is still needed."""
        return (gradient_of(value.number) if self._handing.is_shared(value) else value.number), m


def falsified(handed: torch.Tensor) -> torch.Tensor:
    """Slightly wrong, as no normalization takes back."""
    if not handed.is_floating_point():
        return handed.flip(*range(handed.ndim))
    growing = torch.linspace(2**-7, 2**-5, handed.numel(), dtype=torch.float32, device=handed.device).view(handed.shape)
    return handed + (handed * growing).to(handed.dtype)
