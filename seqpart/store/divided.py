"""A store whose weights several ranks divide: each keeps those of its own partitions, and gives them to all at each load."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from seqpart.device.device import Device, Event
from seqpart.device.ranks import Ranks
from seqpart.store.host_pool import HostPool
from seqpart.store.layout import Layout
from seqpart.store.movers import movers
from seqpart.store.store import Store, Transfer


class DividedStore(Store):
    """The homes of one rank: weights only if it owns them, others as in a `Store`.

    All ranks begin to get the same weights in the same order: their owner reads them, and a thread gives them to the others.
    """

    divides = True

    def __init__(
        self, folder: Path, device: Device, host_pool: HostPool | None, ranks: Ranks, owners: Mapping[str, int]
    ) -> None:
        """owners: {home of weights: the rank that keeps it}."""
        super().__init__(folder, device, host_pool)
        self._ranks, self._owners = ranks, owners
        self._spreading = movers(1, "seqpart-ranks")
        self._failed: BaseException | None = None
        """The first error while a home was given. The other ranks may wait for that one, and must not get a later one as it."""

    def owns(self, name: str) -> bool:
        return self._owners.get(name, self._ranks.number) == self._ranks.number

    def close(self) -> None:
        self._spreading.shutdown()
        super().close()

    def begin_put(
        self, items: Iterable[tuple[str, Layout, torch.Tensor]], after: Callable[[], object], *, checksummed: bool = True
    ) -> Transfer:
        return super().begin_put([item for item in items if self.owns(item[0])], after, checksummed=checksummed)

    def begin_get(
        self, items: Iterable[tuple[str, torch.Tensor]], after: Callable[[], object], *, narrow: bool = False
    ) -> Transfer:
        work = list(items)
        if not any(name in self._owners for name, _ in work):
            return super().begin_get(work, after, narrow=narrow)
        transfer = Transfer(self._device)
        for name, flat in work:
            read = super().begin_get([(name, flat)], after) if self.owns(name) else None
            given = self._spreading.submit(self._spread, self._owners[name], flat, after, read)
            transfer = transfer.with_other(Transfer(self._device, [given], read.nbytes if read is not None else 0))
        return transfer

    def _spread(self, owner: int, flat: torch.Tensor, after: Callable[[], object], read: Transfer | None) -> Event:
        """Gives the bytes that this rank has read to the others, or gets them from their owner."""
        if self._failed is not None:
            raise self._failed
        try:
            if read is not None:
                read.wait()
            else:
                after()
            self._ranks.spread(flat, owner)
        except BaseException as error:
            self._failed = error
            raise
        return self._device.mark()
