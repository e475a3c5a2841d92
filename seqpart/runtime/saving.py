"""When a run saves a checkpoint, when it ends because of a signal, and what it falls back to after it has diverged.

Weights that are not finite show in the next loss at the latest. So a checkpoint is proven by a finite loss that was computed
from it, and of the two that are kept one is proven: a new one becomes the latest, and the latest becomes the previous one
if it is proven. If it is not, nothing was learned in between, and the new one replaces it.
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
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.steps import Position
from seqpart.store.scratch import CHECKPOINT, PREVIOUS
from seqpart.store.store import Store

_HOME_EVERY = 600.0
"""Seconds between two flushes to the homes in a run without checkpoints: a failed update can roll back to there."""


class Saving:
    """Saves checkpoints of the run in `root`, whose homes and rows are in `scratch`; `state` gives what is not tensors."""

    def __init__(
        self, files: Files, state: Callable[[Position, Metrics], dict[str, Any]],
        *, root: Path, scratch: Path, store: Store, boundaries: Boundaries, reporter: Reporter, interrupts: Interrupts,
    ) -> None:  # fmt: skip
        self._saves, self._every = files.saves, files.saving
        self._state, self._root, self._scratch = state, root, scratch
        self._store, self._boundaries, self._reporter, self._interrupts = store, boundaries, reporter, interrupts
        self._saved_at, self._updates_since, self._changed = time.monotonic(), 0, False
        self._executor: Executor | None = None
        self._proven, self._losses_before = False, 0
        """True if a finite loss was computed from the latest checkpoint; the number of losses when it was saved."""
        self.error_noted = False
        """True if an error's message says how to resume the run after it."""

    def begin(self, *, changed: bool = False) -> None:
        """Starts counting time, as training begins. changed: save at once, as the run differs from the latest checkpoint."""
        self._saved_at, self._changed = time.monotonic(), changed

    def is_due(self, at: Position, phases: Sequence[Phase]) -> bool:
        """Returns True if a checkpoint is due. Call it once wherever the whole run stands at a position."""
        self._updates_since += 1
        updates, seconds = self._every
        return self._saves and (
            (updates is not None and self._updates_since >= updates)
            or (seconds is not None and time.monotonic() - self._saved_at >= seconds)
            or self._changed
            or _begins_training(phases, at)
        )

    def at_rest(self, executor: Executor, *, due: bool) -> None:
        """Saves a checkpoint if it is due, and obeys a signal. Called where the whole run stands at a position.

        Raises Diverged before it saves anything that is not finite, and Interrupted.
        """
        self._look_for_proof(executor)
        if not self._saves and time.monotonic() - self._saved_at >= _HOME_EVERY:
            executor.flush()
            self._saved_at = time.monotonic()
        if due or self._interrupts.waiting:
            executor.refuse_divergence(weights=True)
            self.flush(executor)
            self.obey(executor.position, executor.compute.committed, due=due)

    def flush(self, executor: Executor) -> None:
        """Saves everything that changed to the homes, and waits for it."""
        executor.flush()
        for partition in executor.compute.partitions:  # also one that is being loaded, whose last save may still run
            partition.transfer.wait()

    def after_error(self, executor: Executor) -> str:
        """Saves before an error of the user's own code ends the run. Returns a sentence on how to go on."""
        if not self._saves:
            return "Nothing was saved (--save-every never)."
        executor.refuse_divergence(weights=True)
        self.flush(executor)
        self.save(executor.position, executor.compute.committed)
        self.error_noted = True
        there, before = "there", executor.rolled_back
        if before:
            there = f"after {before}, when all that stays on the device was saved last (--save-every)"
        return f"The run is saved as it stood {there}: go on with {resuming(self._root)}"

    def _look_for_proof(self, executor: Executor) -> None:
        if executor is not self._executor:
            self._executor, self._losses_before = executor, 0
        if not self._proven and executor.compute.losses_computed > self._losses_before:
            executor.refuse_divergence()
            self._proven = True

    def obey(self, position: Position, metrics: Metrics, *, due: bool = False) -> None:
        """Saves if `due`, and ends the run if a signal is pending. The homes must be at `position`. Raises Interrupted."""
        waiting = self._interrupts.waiting  # read once: a signal from here on causes no save
        if due or (waiting and self._saves):
            self.save(position, metrics)
        if waiting and self._saves:
            raise Interrupted(self._root)
        if waiting:
            self._interrupts.check()

    def save(self, position: Position, metrics: Metrics) -> None:
        """Makes the homes, which must be at `position`, the latest checkpoint."""
        began = time.perf_counter()
        state = self._state(position, metrics)
        manifests.save(self._root, self._scratch, state, self._store, self._boundaries, instead=not self._proven)
        self._saved_at, self._updates_since, self._changed = time.monotonic(), 0, False
        if self._executor is not None:
            self._proven, self._losses_before = False, self._executor.compute.losses_computed
        self._reporter.record(
            "checkpoint", phase=position.phase, updates=position.updates, took=round(time.perf_counter() - began, 3)
        )

    def fallback(self, stage: int) -> str:
        """Returns a sentence on how to go on after the run has diverged in `stage`."""
        other = f"another {'--recovery-lr' if stage else '--lr'}, --lr-schedule or --warmup-updates, or with --clip-grad-norm 1"
        latest, previous = self._root / CHECKPOINT, self._root / PREVIOUS
        if self._proven and latest.exists():
            return f"The last checkpoint is from before it diverged: go on from it with {resuming(self._root)} and {other}."
        if previous.exists():
            return (
                "The run diverges right after the last checkpoint, but not after the previous one: go on from that with "
                f"{resuming(previous)} and {other}."
            )
        saved = "The run diverges right after the only checkpoint" if latest.exists() else "Nothing had been saved"
        return f"{saved}: start again with {other}."


def _begins_training(phases: Sequence[Phase], at: Position) -> bool:
    """True if other parts of the network begin to learn at `at`: what was learned before must not be lost."""
    if not at.phase or at.updates or at.phase == len(phases):
        return False
    phase = phases[at.phase]
    begins = phase.kind is PhaseKind.TRAIN and phase.epoch == 1 and phase.within.updates_of_epoch is None
    return begins or phases[at.phase - 1].kind is PhaseKind.GATHER
