"""Weights that are exported while training goes on: the options --export-every and --keep-exports."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from seqpart.config import EVALUATION, Files
from seqpart.errors import CorruptFile
from seqpart.files import remove
from seqpart.runtime.watch import updates_before
from seqpart.schedule.best import Criterion, Evaluated
from seqpart.schedule.phases import Phases
from seqpart.schedule.steps import Position
from seqpart.schema import Finite, Whole, as_type
from seqpart.store.atomic import write_text
from seqpart.store.scratch import EXPORTS
from seqpart.text import read_text


class _Entry(msgspec.Struct):
    file: str
    update: Whole
    epoch: Finite
    value: Finite | None = None
    """The number by which evaluations are compared, as it was found; None where exports do not follow evaluations."""


class Exports:
    """The exported weights of one run, in `root`/exports, with a list of them.

    criterion: compares evaluations. since: updates before this process: what was exported after them is made again.
    """

    def __init__(self, files: Files, root: Path, criterion: Criterion, since: int) -> None:
        self._every, self._most, self._folder, self._criterion = files.exporting, files.keep_exports, root / EXPORTS, criterion
        self._list = self._folder / "exports.json"
        self._entries: list[_Entry] = []
        self._at: tuple[int, float] = 0, 0.0
        self._value: float | None = None
        self.last = 0
        """Updates before the latest export."""
        self.due = False
        """True if the weights are to be exported where the run stands."""
        if self._every is None:
            if not since and self._list.exists():  # of a run that is replaced
                for entry in self._read():
                    remove(self._folder / entry.file)
                remove(self._list)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for entry in self._read() if self._list.exists() else []:
            if entry.update <= since:
                self._entries.append(entry)
                self.last = entry.update
            else:
                remove(self._folder / entry.file)

    def _read(self) -> list[_Entry]:
        try:
            found = as_type(list[_Entry], json.loads(read_text(self._list)))
        except (OSError, ValueError) as error:
            raise CorruptFile(f"{self._list} is damaged: {error}. Remove it; the other files stay.", self._list) from None
        return [entry for entry in found if Path(entry.file).name == entry.file and (self._folder / entry.file).exists()]

    def at_rest(self, phases: Phases, at: Position, tested: Sequence[Evaluated], *, trained: bool = True) -> None:
        """Decides whether an export is due at this position. tested: the evaluations so far. trained: True right after an
        update; a run that was stopped goes to its last evaluation without the updates before it."""
        if self._every is None or not (trained or self._every == EVALUATION):
            return
        self._value, is_due = None, False
        update, epochs = self._at = updates_before(phases, at)
        if self._every == EVALUATION:
            is_due = bool(tested) and tested[-1].update == update
            self._value = self._criterion.found(tested[-1]) if is_due else None
        elif self._every.updates is not None:
            is_due = update % self._every.updates == 0
        elif not at.updates and self._every.epochs is not None:
            is_due = epochs % self._every.epochs == 0
        self.due = is_due and update != self.last

    def write(self, export: Callable[[Path], None]) -> Path:
        """Exports the weights, with nothing on the device, and removes those that are not kept. Returns the file."""
        update, epochs = self._at
        entry = _Entry(file=f"update-{update:08d}.safetensors", update=update, epoch=float(epochs), value=self._value)
        export(self._folder / entry.file)
        entries, self.last, self.due = [*self._entries, entry], update, False
        kept = entries
        if self._most is not None and len(entries) > self._most:
            kept = entries[-self._most :]
            if self._every == EVALUATION:
                better = sorted(entries, key=self._rank)[: self._most]
                kept = [one for one in entries if one in better]
        for one in entries:  # before the list: what it no longer names would stay after a kill
            if one not in kept:
                remove(self._folder / one.file)
        write_text(self._list, msgspec.json.format(msgspec.json.encode(kept)).decode() + "\n")
        self._entries = kept
        return self._folder / entry.file

    def _rank(self, entry: _Entry) -> float:
        value = entry.value if entry.value is not None else math.inf
        return -value if self._criterion.larger else value
