"""Rows of updates and lengths of trainings, of the settings and of the rows that there are."""

from seqpart.device.ranks import Ranks
from seqpart.fields import values_of
from seqpart.schedule.lengths import Length, length_of
from seqpart.settings import Settings


class Updates:
    """Rows of updates, and how many updates a training has. rows, epoch_rows: of the training set, and of an epoch."""

    def __init__(self, settings: Settings, ranks: Ranks, rows: int, epoch_rows: int) -> None:
        self._settings, self._ranks, self._rows, self.epoch_rows = settings, ranks, rows, epoch_rows
        self.largest_asked = max(values_of(settings.batch_size))
        self.independent = ranks.count > 1 and settings.methods[0].trains_independently(settings)
        """True if each of several processes trains subnets or partitions of its own."""

    @property
    def largest(self) -> int:
        """Rows of the largest update."""
        return min(self.largest_asked, self.epoch_rows)

    @property
    def only(self) -> int | None:
        """Rows of an update; None where partitions differ in it, since a block's partition is not known yet."""
        sizes = {min(size, self.epoch_rows) for size in values_of(self._settings.batch_size)}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def of_recovery(self) -> int:
        return min(self._settings.recovery_batch_size or self.largest_asked, self._rows)

    def shared(self, rows: int, *, independent: bool = True) -> int:
        """Returns the most rows of these that one process takes. independent: False for a pass that all share."""
        return rows if independent and self.independent else -(-rows // self._ranks.count)

    def length(self, epochs: float, batch: int) -> Length:
        """Length of a training for so many epochs, with updates of at most `batch` rows."""
        return length_of(epochs, self._settings.max_steps, -(-self.epoch_rows // min(batch, self.epoch_rows)))

    def longest(self) -> Length:
        """Length of the longest training of a partition, with updates of the most rows."""
        return self.length(max(values_of(self._settings.epochs)), self.largest)

    def runs(self) -> dict[str, int]:
        """{a part of the run, in words: fewest updates of it}, of the parts that each warm up anew."""
        epochs, batches = values_of(self._settings.epochs), values_of(self._settings.batch_size)
        if len(epochs) != len(batches):
            epochs, batches = epochs * len(batches), tuple(batch for batch in batches for _ in epochs)
        updates = (self.length(*one).updates for one in zip(epochs, batches, strict=True))
        runs = {"a partition" if len(set(epochs)) > 1 else "the run": min(updates)}
        if self._settings.recovery_epochs:
            runs["recovery"] = self.recovery_updates
        return runs

    @property
    def recovery_updates(self) -> int:
        return self.length(self._settings.recovery_epochs, self.of_recovery).updates
