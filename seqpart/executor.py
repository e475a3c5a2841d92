"""The only loop: takes the steps of a schedule and does them. It knows verbs, never methods.

Whatever ends it, nothing stays loaded, and the error names the step. An allocation that fails inside the limit ends
it too, with the partition sent home and `position` telling where to go on with a smaller micro-batch.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from seqpart.activations import Batch, Boundaries, Reader, ReaderThread
from seqpart.device import Device
from seqpart.errors import OptionError, OutOfMemory
from seqpart.methods.method import PartitionLoss
from seqpart.resident import Resident
from seqpart.rows import RowLayout, Rows
from seqpart.schedule import Phase, PhaseKind, Position, Step, Verb
from seqpart.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One executed step: its disk traffic in bytes, and seconds."""

    step: Step
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDone:
    """One pass is over. `loss` is the mean over its rows; `accuracy` None where the outputs say nothing of classes."""

    phase: Phase
    loss: float
    accuracy: float | None
    rows: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun:
    phase: Phase
    number: int


Event = StepDone | PhaseDone | PhaseBegun


_COMPUTES = {Verb.FORWARD, Verb.BACKWARD}


class AllocationFailed(Exception):
    """An allocation failed inside the limit, at `step`; everything is at home."""

    def __init__(self, step: Step, text: str) -> None:
        super().__init__(text)
        self.step = step


@dataclass(slots=True)
class _Tally:
    """Sums over the rows of one phase. They stay on the device: reading them would make it wait."""

    loss: torch.Tensor | float = 0.0
    correct: torch.Tensor | float = 0.0
    judged: int = 0
    rows: int = 0

    def add(self, loss: torch.Tensor, scores: torch.Tensor | None, labels: torch.Tensor) -> None:
        self.loss = self.loss + loss.detach() * len(labels)
        self.rows += len(labels)
        if scores is not None and not labels.is_floating_point():
            self.correct = self.correct + (scores.detach().argmax(1) == labels).sum()
            self.judged += len(labels)


class Executor:
    """Runs steps over `residents`, `losses` and `boundaries`; calls `listen` after every step and phase.

    `guard` is called after every step and may raise (the limit was passed). `slot` is the device's one large buffer.
    """

    def __init__(
        self, *, phases: Sequence[Phase], residents: Sequence[Resident], losses: Callable[[int], PartitionLoss],
        boundaries: Boundaries, cache_layouts: Sequence[RowLayout], slot: torch.Tensor, store: Store, device: Device,
        reader_thread: ReaderThread, seed: int, clip_grad_norm: float | None, listen: Callable[[Event], None],
        guard: Callable[[], None], start: Position,
    ) -> None:  # fmt: skip
        self.position, self.step = start, Step(Verb.LOAD, 0)
        self._start = start
        self._phases, self._residents, self._losses = phases, residents, losses
        self._boundaries, self._cache_layouts = boundaries, cache_layouts
        self._slot, self._store, self._device, self._thread = slot, store, device, reader_thread
        self._seed, self._clip, self._listen, self._guard = seed, clip_grad_norm, listen, guard
        self._loaded: dict[int, Resident] = {}
        self._loss: PartitionLoss | None = None
        self._phase: Phase | None = None
        self._reader: Reader | None = None
        self._sink: Rows | None = None
        self._tally, self._began = _Tally(), 0.0
        self._do = {
            Verb.LOAD: self._load,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.UPDATE: self._update,
            Verb.DROP: self._drop,
        }

    def run(self, steps: Iterable[Step]) -> None:
        """Do all `steps`. Raises AllocationFailed when memory ran out inside the limit, and whatever a step raises."""
        failed = ""
        try:
            for step in steps:
                self.step = step
                self._one(step)
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                error.add_note(f"while running {self.step} in {self._phases[self.step.phase]}")
                raise
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self.step.verb not in _COMPUTES:
                raise OutOfMemory(f"memory ran out in {self.step}, where a smaller micro-batch cannot help: {text}.") from None
            failed = text
        finally:
            self._close_reader()
            if not failed:
                self._release_all()
        if failed:  # outside the handler: its traceback kept the failed step's tensors alive
            self._retreat()
            raise AllocationFailed(self.step, failed)

    def _one(self, step: Step) -> None:
        began, read, written = time.perf_counter(), self._store.traffic.bytes_read, self._store.traffic.bytes_written
        row_bytes = self._do[step.verb](step)
        traffic = self._store.traffic
        self._listen(
            StepDone(
                step=step,
                bytes_read=traffic.bytes_read - read + row_bytes[0],
                bytes_written=traffic.bytes_written - written + row_bytes[1],
                seconds=time.perf_counter() - began,
            )
        )
        self._guard()

    def _load(self, step: Step) -> tuple[int, int]:
        resident = self._residents[step.partition]
        self._loaded[step.partition] = resident
        resident.load(self._slot, to_train=self._trains_from(step.phase, step.partition))
        self._loss = self._losses(step.partition)
        return 0, 0

    def _trains_from(self, phase: int, partition: int) -> bool:
        return any(p.kind is PhaseKind.TRAIN and p.partition == partition for p in self._phases[phase:])

    def _forward(self, step: Step) -> tuple[int, int]:
        batch = self._next_batch(step)
        read, written = batch.x.nbytes, 0
        with torch.no_grad():
            x, labels = self._on_device(batch)
            output = self._output(step, x, training=False)
            self._judge(output, labels)
            if self._sink is not None:
                self._sink.append(output)
                written = len(output) * self._sink.layout.nbytes
        self._finish(batch)
        return read, written

    def _backward(self, step: Step) -> tuple[int, int]:
        batch = self._next_batch(step)
        read = batch.x.nbytes
        x, labels = self._on_device(batch)
        if batch.span.start % self._phases[step.phase].batch == 0:
            self._loaded[step.partition].begin_update()
        share = (batch.span.stop - batch.span.start) / batch.span.update_rows
        self._back_propagate(step, x, labels, share)
        self._finish(batch)
        return read, 0

    def _back_propagate(self, step: Step, x: torch.Tensor, labels: torch.Tensor, share: float) -> None:
        """The partition's own loss, weighted so that the micro-batches of an update add up to its mean."""
        loss = self._judge(self._output(step, x, training=True), labels)
        if loss.requires_grad:
            (loss if share == 1.0 else loss * share).backward()  # type: ignore[no-untyped-call]

    def _judge(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        loss = self._loss(output, labels)
        with torch.no_grad():
            self._tally.add(loss, self._loss.scores(output.detach()), labels)
        return loss

    def _output(self, step: Step, x: torch.Tensor, *, training: bool) -> torch.Tensor:
        assert step.micro_batch is not None
        phase = self._phases[step.phase]
        place = (phase.epoch, *divmod(step.micro_batch, phase.micro_batches_per_update))
        return self._loaded[step.partition].forward(x, training=training, key=place)

    def _update(self, step: Step) -> tuple[int, int]:
        self._loaded[step.partition].update(self._clip)
        self.position = Position(step.phase, self.position.updates + 1)  # _enter set the phase
        self._end_phase_if_done(step.phase, self.position.updates == self._phases[step.phase].updates)
        return 0, 0

    def _drop(self, step: Step) -> tuple[int, int]:
        resident = self._loaded[step.partition]
        resident.drop(keep_state=self._trains_from(step.phase + 1, step.partition))
        del self._loaded[step.partition]
        self._loss = None
        self._device.release_cached()
        for split in ("train", "test"):
            self._boundaries.discard(split, step.partition)
        return 0, 0

    def _next_batch(self, step: Step) -> Batch:
        if self._reader is None:
            self._enter(step.phase)
        assert self._reader is not None
        batch = self._reader.take()
        assert batch.micro_batch == step.micro_batch, f"{step}: the reader is at micro-batch {batch.micro_batch}"
        return batch

    def _enter(self, number: int) -> None:
        """Open a phase: its reader, and the rows that it writes."""
        phase = self._phases[number]
        split = "test" if phase.kind is PhaseKind.TEST else "train"
        first_update = self._start.updates if number == self._start.phase else 0
        self._phase, self._tally, self._began = phase, _Tally(), time.perf_counter()
        if self.position.phase != number:
            self.position = Position(number, 0)
        if phase.kind is not PhaseKind.TRAIN and phase.partition < len(self._residents) - 1:
            layout = self._cache_layouts[phase.partition]
            self._sink = self._boundaries.create(split, phase.partition + 1, layout, phase.rows)
        rows = self._boundaries.rows(split, phase.partition)
        self._reader = Reader(
            rows,
            self._boundaries.labels[split],
            phase,
            self._device,
            self._thread,
            seed=self._seed,
            first_update=first_update,
        )
        self._listen(PhaseBegun(phase=phase, number=number))

    def _on_device(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._device.upload(batch.x).to(torch.float32), self._device.upload(batch.labels)

    def _finish(self, batch: Batch) -> None:
        """Give the batch's host memory back; a forward phase ends with its last rows, a training phase with its update."""
        assert self._reader is not None and self._phase is not None
        self._reader.done(batch)
        if self._phase.kind is not PhaseKind.TRAIN:
            self._end_phase_if_done(self.step.phase, batch.span.stop == self._phase.rows)

    def _end_phase_if_done(self, number: int, done: bool) -> None:
        if not done:
            return
        if self._sink is not None:
            self._sink.finish()
            self._sink = None
        self._close_reader()
        tally, phase = self._tally, self._phases[number]
        loss = float(tally.loss) / max(1, tally.rows)
        if loss != loss or abs(loss) == float("inf"):
            raise OptionError(f"training diverged: the loss of {phase} is {loss}. Lower --lr, or give --clip-grad-norm 1.")
        accuracy = float(tally.correct) / tally.judged if tally.judged else None
        seconds = time.perf_counter() - self._began
        self._listen(PhaseDone(phase=phase, loss=loss, accuracy=accuracy, rows=tally.rows, seconds=seconds))
        self.position = Position(number + 1, 0)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _retreat(self) -> None:
        """After a failed allocation: forget the unfinished update, send weights and optimizer state home."""
        self._tally, self._sink = _Tally(), None
        for resident in self._loaded.values():
            resident.abandon_update()
        self._device.release_cached()
        for resident in self._loaded.values():
            resident.drop(keep_state=True)
        self._loaded.clear()

    def _release_all(self) -> None:
        for resident in self._loaded.values():
            resident.release()
        self._loaded.clear()
