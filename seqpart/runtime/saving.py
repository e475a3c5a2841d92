"""When a run saves a checkpoint, ends because a signal has come, and what it falls back to when it diverges.

Weights that are not finite show in the next loss at the latest. So a checkpoint is proven by a finite loss that was computed
from it, and of the two that are kept one is proven: a new one takes the place of the latest, and the latest that of the one
before, unless it is not proven. Then nothing was learned in between, and the new one takes its place.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import seqpart.checkpoint.manifest as manifests
from seqpart.config import Files
from seqpart.data.boundary_cache import Boundaries
from seqpart.errors import Interrupted, resuming
from seqpart.interrupts import Interrupts
from seqpart.model.metrics import Metrics
from seqpart.report.reporter import Reporter
from seqpart.runtime.executor import Executor
from seqpart.runtime.partition import Partition
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.steps import Position
from seqpart.store.scratch import CHECKPOINT, PREVIOUS
from seqpart.store.store import Store

_HOME_EVERY = 600.0
"""Seconds after which all goes home where nothing is saved: an update that fails can go back to there."""


class Saving:
    """The checkpoints of the run in `root`, whose homes and rows are in `scratch`; `state` says the rest of a position."""

    def __init__(
        self, files: Files, state: Callable[[Position, Metrics], dict[str, Any]],
        *, root: Path, scratch: Path, store: Store, boundaries: Boundaries, reporter: Reporter, interrupts: Interrupts,
    ) -> None:  # fmt: skip
        self._saves, self._every = files.saves, files.saving
        self._state, self._root, self._scratch = state, root, scratch
        self._store, self._boundaries, self._reporter, self._interrupts = store, boundaries, reporter, interrupts
        self._saved_at, self._updates_since, self._changed = time.monotonic(), 0, False
        self._executor: Executor | None = None
        self._proven, self._judged = False, 0
        """Whether a loss was computed from the latest checkpoint, and the losses that there had been when it was saved."""
        self.told = False
        """Whether an error says how the run goes on behind it."""

    def begin(self, *, changed: bool = False) -> None:
        """Training begins: count time from here. changed: not as the latest checkpoint says; the first save is not put off."""
        self._saved_at, self._changed = time.monotonic(), changed

    def at_rest(self, executor: Executor, partitions: Sequence[Partition], phases: Sequence[Phase]) -> None:
        """Everything stands at a position: the moment to save, if it is time to, or to obey a signal.

        Raises Diverged before anything is saved that is not finite.
        """
        self._updates_since += 1
        updates, seconds = self._every
        due = self._saves and (
            (updates is not None and self._updates_since >= updates)
            or (seconds is not None and time.monotonic() - self._saved_at >= seconds)
            or self._changed
            or _begins_training(phases, executor.position)
        )
        self._look_for_proof(executor)
        if not self._saves and time.monotonic() - self._saved_at >= _HOME_EVERY:
            executor.flush()
            self._saved_at = time.monotonic()
        if due or self._interrupts.waiting:
            executor.refuse_divergence(weights=True)
            self.flush(executor, partitions)
            self.obey(executor.position, executor.compute.committed, due=due)

    def flush(self, executor: Executor, partitions: Sequence[Partition]) -> None:
        """All that changed is at home."""
        executor.flush()
        for partition in partitions:  # also one that is coming, and may be on its way home before that
            partition.transfer.wait()

    def behind_error(self, executor: Executor, partitions: Sequence[Partition]) -> str:
        """Save before an error of the user's own code ends the run. How to go on, in words."""
        if not self._saves:
            return "Nothing was saved (--save-every never)."
        executor.refuse_divergence(weights=True)
        self.flush(executor, partitions)
        self.save(executor.position, executor.compute.committed)
        self.told = True
        there = "as it stood there"
        if executor.went_back:
            there = f"as it stood behind {executor.went_back}, when all that stays on the device was saved last (--save-every)"
        return f"The run is saved {there}: go on with {resuming(self._root)}"

    def _look_for_proof(self, executor: Executor) -> None:
        if executor is not self._executor:
            self._executor, self._judged = executor, 0
        if not self._proven and executor.compute.judged > self._judged:
            executor.refuse_divergence()
            self._proven = True

    def obey(self, position: Position, metrics: Metrics, *, due: bool = False) -> None:
        """The homes are what `position` says: save if it is `due`, end if a signal waits. Raises Interrupted."""
        waiting = self._interrupts.waiting  # once: what comes from here on is not saved
        if due or (waiting and self._saves):
            self.save(position, metrics)
        if waiting and self._saves:
            raise Interrupted(self._root)
        if waiting:
            self._interrupts.check()

    def save(self, position: Position, metrics: Metrics) -> None:
        """The homes are what `position` says: let them be the latest checkpoint."""
        began = time.perf_counter()
        state = self._state(position, metrics)
        manifests.save(self._root, self._scratch, state, self._store, self._boundaries, instead=not self._proven)
        self._saved_at, self._updates_since, self._changed = time.monotonic(), 0, False
        if self._executor is not None:
            self._proven, self._judged = False, self._executor.compute.judged
        self._reporter.record(
            "checkpoint", phase=position.phase, updates=position.updates, took=round(time.perf_counter() - began, 3)
        )

    def fallback(self, stage: int) -> str:
        """How to go on after the run has diverged in `stage`, in words."""
        other = f"another {'--recovery-lr' if stage else '--lr'}, --lr-schedule or --warmup-updates, or with --clip-grad-norm 1"
        latest, previous = self._root / CHECKPOINT, self._root / PREVIOUS
        if self._proven and latest.exists():
            return f"The last checkpoint is from before that: go on from it with {resuming(self._root)} and {other}."
        if previous.exists():
            return (
                "The last checkpoint led to it at once, and the one before it did not: go on from that with "
                f"{resuming(previous)} and {other}."
            )
        saved = "The only checkpoint led to it at once" if latest.exists() else "Nothing had been saved"
        return f"{saved}: start again with {other}."


def _begins_training(phases: Sequence[Phase], at: Position) -> bool:
    """Whether another part of the network begins to learn there: what the ones before have learned is not to be lost."""
    if not at.phase or at.updates or at.phase == len(phases):
        return False
    phase = phases[at.phase]
    return phase.kind is PhaseKind.TRAIN and phase.epoch == 1 and phase.updates_of_epoch is None
