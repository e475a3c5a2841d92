"""The only loop: executes the steps of a schedule. It knows verbs and phases, never methods.

It looks ahead for the next LOAD and starts it as soon as a slot is free: one partition is prefetched, and the one before
is saved, while another computes. However the loop ends, nothing stays loaded, and the error names the step. An
allocation that fails inside the limit ends it too: then all homes hold a finished update, and `position` says
where to go on with a smaller micro-batch.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from seqpart.device.ranks import Ranks
from seqpart.errors import Diverged, OutOfMemory, first_line
from seqpart.model.inspection import explained_step
from seqpart.model.optimizers import GradientNorm, total_norm
from seqpart.model.scheduler import Groups
from seqpart.runtime.compute import Compute
from seqpart.runtime.partition import Partition
from seqpart.runtime.slots import Slots
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import counted
from seqpart.schedule.progress import Progress
from seqpart.schedule.steps import REWRITES_HOMES, Lookahead, Position, Step, StepDone, Verb
from seqpart.store.store import Store, Transfer

_CAN_BE_UNDONE = {Verb.LOAD, Verb.FORWARD, Verb.BACKWARD, Verb.REDUCE}


def out_of_memory(step: Step, text: str) -> OutOfMemory:
    """Returns the error for memory that ran out in a step whose memory does not depend on the micro-batch."""
    return OutOfMemory(f"memory ran out in {step}, where a smaller micro-batch cannot help: {text}.")


class AllocationFailed(Exception):
    """An allocation failed inside the limit, in `step`; every home is as the executor's `position` says."""

    def __init__(self, step: Step, text: str) -> None:
        super().__init__(text)
        self.step = step


class Executor:
    """Runs the steps of a schedule: `compute` runs forward and backward, `slots` are the device memory for partitions."""

    def __init__(
        self, compute: Compute, slots: Slots, store: Store, *, clip_grad_norm: float | None,
        rate: Callable[[Phase, int], float | Groups], ranks: Ranks, rewrites: Mapping[Verb, Callable[[int, int], int | None]],
    ) -> None:  # fmt: skip
        """rate: of (phase, its finished updates). rewrites: functions of (partition, round) for the verbs that rewrite homes;
        that of GATHER returns the bytes sent."""
        self.step, self.compute = Step(Verb.LOAD, 0), compute
        self.progress = Progress(compute.phases, compute.start)
        self._phases, self._partitions, self._boundaries = compute.phases, compute.partitions, compute.boundaries
        self._device, self._hooks, self._slots, self._store = compute.device, compute.hooks, slots, store
        self._clip, self._rate, self._ranks = clip_grad_norm, rate, ranks
        self._rewrites, self._in_step = rewrites, False
        self._loaded = compute.loaded
        self._loading: dict[int, Partition] = {}
        self._norms: dict[tuple[int, int], GradientNorm] = {}
        self.learning_rate: float | None = None
        self.gradient_norm: torch.Tensor | None = None
        """Total gradient norm of the last optimizer step, before clipping."""
        self._marked = compute.start, compute.committed
        """The last position at which every home was up to date, and the metric sums of the pass there."""
        self.rolled_back = ""
        """The update that the homes were rolled back to, if an error undid finished updates too; else ""."""
        self._handlers = {
            Verb.LOAD: self._load,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.REDUCE: self._reduce,
            Verb.UPDATE: self._update,
            Verb.DROP: self._drop,
            **dict.fromkeys(REWRITES_HOMES, self._rewrite_homes),
        }

    @property
    def position(self) -> Position:
        """The position of the run: the end of the last finished update; one that has begun does not count."""
        return self.progress.position

    def running(self, steps: Iterable[Step]) -> Iterator[None]:
        """Runs `steps` to their end or to where a hook stops them; yields wherever the whole run stands at a position, before
        `at_rest` is called there.

        Raises AllocationFailed if memory ran out inside the limit, and whatever a step raises.
        """
        failed = ""
        ahead = Lookahead(steps)
        try:
            for step in ahead:
                self.step = step
                if self._run_step(step):
                    yield
                    if not self._hooks.at_rest(self):
                        break
                self._prefetch(ahead)
            self.flush()
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                explained = explained_step(error)
                explained.add_note(f"while running {self.step} in {self._phases[self.step.phase]}")
                if self._in_step and self.step.verb in _CAN_BE_UNDONE:
                    with contextlib.suppress(Exception):  # the error that is being raised says what is wrong
                        self._roll_back(str(explained))
                        self._hooks.failed(self, explained)
                if explained is error:
                    raise
                raise explained from error
            text = first_line(error)
            if self.step.verb not in _CAN_BE_UNDONE:
                raise out_of_memory(self.step, text) from None
            failed = text
        finally:
            self.compute.close_reader()
            if not failed:
                self._release_all()
                self._slots.close()
        if failed:  # outside the handler: its traceback kept the failed step's tensors alive
            self._roll_back(failed)
            self._slots.close()
            raise AllocationFailed(self.step, failed)

    def _run_step(self, step: Step) -> bool:
        """Runs one step. Returns True if the whole run stands at a position after it."""
        began, before = time.perf_counter(), self.position
        self._in_step = True
        read, written = self._handlers[step.verb](step)
        tests = self._phases[step.phase].kind is PhaseKind.TEST
        self._in_step = tests  # the user's metrics are a part of its last step
        if self.progress.finish(step):
            try:
                self._end_update(step)
            except Exception:
                if tests:  # which are to begin again
                    self.progress.position = before
                raise
        self._in_step = False
        took = time.perf_counter() - began
        self._hooks.listen(StepDone(step=step, bytes_read=read, bytes_written=written, seconds=took))
        resting = step.verb is Verb.UPDATE and not self.progress.updated
        return resting or (self._phases[step.phase].kind is not PhaseKind.TRAIN and step.verb is not Verb.LOAD)

    def _end_update(self, step: Step) -> None:
        """Ends an update, and its pass if that is over too."""
        if step.verb is Verb.UPDATE:
            self._norms.clear()
            self.compute.end_update(self._phases[step.phase])
        if self.position.phase != step.phase and step.verb not in REWRITES_HOMES:
            self.compute.end_phase(step.phase)

    def refuse_divergence(self, *, weights: bool = False) -> None:
        """Raises Diverged if a loss of the pass so far is not finite, or with `weights` a trainable weight of a loaded
        partition. Call it only while at rest; it synchronizes with a CUDA device."""
        phase, done = self._phases[self.step.phase], self.position.updates
        if self.position.phase == self.step.phase:  # else the end of the phase has checked already
            self.compute.refuse_divergence(self.step.phase, done if phase.kind is PhaseKind.TRAIN else None)
        for partition in self._loaded.values() if weights else ():
            partition.refresh()
            if name := _spoilt_weight(partition):
                where = f"update {done or phase.updates} of {phase}" if phase.kind is PhaseKind.TRAIN else str(phase)
                raise Diverged(f"training diverged: {name} is not finite after {where}.")

    def flush(self) -> None:
        """Saves everything that changed and waits: then the homes are what `position` says. Call it only while at rest."""
        for partition in self._loaded.values():
            partition.save(keep_state=True, again=True)
        weights = self._save_weights()
        self._wait_for_homes()
        for transfer in weights:
            transfer.wait()

    def _save_weights(self) -> list[Transfer]:
        """Starts to save changed weights that stay on the device, of partitions that are not loaded."""
        others = (partition for p, partition in enumerate(self._partitions) if p not in self._loaded)
        return [partition.save_weights() for partition in others if partition.unsaved]

    def _wait_for_homes(self) -> None:
        for p, partition in enumerate(self._partitions):
            if p not in self._loading:
                partition.transfer.wait()

    # --- coming and going -----------------------------------------------------------------------------------------

    def _prefetch(self, ahead: Lookahead) -> None:
        while self._slots.count > 1 and self._slots.any_free:
            step = ahead.next_load(set(self._loading))
            if step is None or step.partition in self._loaded or step.partition in self._loading:
                return
            if self._takes_slot(step) and not self._slots.has_free(step.partition, self._slot_bytes(step)):
                return
            here = {*self._loaded, *self._loading}
            partition = self._partitions[step.partition]
            if partition.awaits_step or any(one.number in here or one.awaits_step for one in partition.lenders):
                return  # its weights, or the tied ones that it would borrow, are not saved yet
            try:
                self._begin_load(step)
            except Exception as error:
                if not self._device.is_out_of_memory(error):
                    raise
                return  # its own LOAD will fail again, where the run can go back

    def _begin_load(self, step: Step) -> None:
        partition = self._partitions[step.partition]
        partition.make_room()
        slot = self._slots.take(step.partition, self._slot_bytes(step)) if self._takes_slot(step) else None
        # Slots are of one size in all ranks, which so begin their loads in one order.
        partition.begin_load(slot, to_update=step.more and self._is_owner(step))
        self._loading[step.partition] = partition

    def _is_owner(self, step: Step) -> bool:
        """True if this rank has the optimizer state of the step's partition."""
        phase = self._phases[step.phase]
        return phase.owner_of(step.partition) == phase.rank

    def _takes_slot(self, step: Step) -> bool:
        return not self._partitions[step.partition].weights_stay or self._slot_bytes(step) > 0

    def _slot_bytes(self, step: Step) -> int:
        phase, p = self._phases[step.phase], step.partition
        return self._partitions[p].needs(to_update=step.more, gradients=phase.gradients_wait(p))

    def _load(self, step: Step) -> tuple[int, int]:
        if step.partition not in self._loading:
            self._begin_load(step)
        partition = self._loading[step.partition]
        read = partition.finish_load(learns=self._phases[step.phase].trains(step.partition))
        self._loaded[step.partition] = self._loading.pop(step.partition)
        return read, 0

    def _drop(self, step: Step) -> tuple[int, int]:
        p = step.partition
        again = self.progress.needs_state(p, self._phases[step.phase].stage)
        streams = again and p in self._phases[step.phase].streams
        gradients = step.more and self._is_owner(step)
        slot, free, written = self._loaded[p].begin_drop(keep_state=again, gradients=gradients, again=streams, stay=again)
        if slot is not None:
            self._slots.give(slot, free)
        del self._loaded[p]
        self.compute.forget_loss(p)
        self._device.release_cached()
        needed = {phase.reads for phase, _ in counted(self._phases[self.position.phase :])}
        for split in ("train", "test"):
            if (split, p) not in needed:
                self._boundaries.discard(split, p)
        return 0, written

    def _rewrite_homes(self, step: Step) -> tuple[int, int]:
        """Does SPLIT, GATHER or MERGE with every home saved. Returns (bytes read, bytes written); of GATHER (0, bytes sent)."""
        self._wait_for_homes()
        self._slots.close()  # the next partitions may need slots of other sizes
        before, now = replace(self._store.traffic), self._store.traffic
        sent = self._rewrites[step.verb](step.partition, self._phases[step.phase].epoch)
        if sent is not None:
            return 0, sent
        return now.bytes_read - before.bytes_read, now.bytes_written - before.bytes_written

    # --- work -----------------------------------------------------------------------------------------------------

    def _forward(self, step: Step) -> tuple[int, int]:
        done = self.compute.forward(step)
        if self._phases[step.phase].kind is PhaseKind.TEST:
            self._loaded[step.partition].tested()
        return done

    def _backward(self, step: Step) -> tuple[int, int]:
        traffic = self.compute.backward(step)
        if self._phases[step.phase].ranks == 1 and self.compute.span(step).ends_update:
            self._end_backward(step)
        return traffic

    def _reduce(self, step: Step) -> tuple[int, int]:
        self.compute.share_losses(step)
        partition = self._loaded[step.partition]
        partition.buffers.share(self._ranks)
        if not self._phases[step.phase].trains(step.partition):
            return 0, 0
        sent = self._ranks.add_up(list(partition.trainable.values()))
        self._end_backward(step)
        return 0, sent

    def _end_backward(self, step: Step) -> None:
        """Completes the gradients of a partition, once all micro-batches of the update are back-propagated."""
        phase, partition = self._phases[step.phase], self._loaded[step.partition]
        # The number is in host memory, and nothing has to synchronize, or the pass ends here, which synchronizes anyway.
        if self._device.shares_memory or phase.updates == 1:
            self.compute.refuse_divergence(step.phase, self.position.updates + 1)
        if (scale := self.compute.scale(step.phase, self.position.updates)) is not None:
            partition.scale_gradients(scale)
        self.compute.call_hooks(step)
        if self._clip is not None:
            self._norms.update(partition.gradient_norms())

    def _update(self, step: Step) -> tuple[int, int]:
        phase, partition = self._phases[step.phase], self._partitions[step.partition]
        partition.finish_state()
        if not self.progress.updated and phase.breadth_first:
            self._mark_homes()
        if phase.kind is PhaseKind.TRAIN:
            self._hooks.before_update(partition, step)
        clip = None
        if self._clip is not None and phase.trains(step.partition):
            total = total_norm([self._norms[place] for place in sorted(self._norms)])
            clip = (self._clip, total) if total is not None else None
        stays = step.partition not in phase.streams
        place = phase.stage, phase.share_of(self.position.updates)[0]
        rate = self._rate(phase, self.position.updates)
        partition.update(rate, clip, stays=stays, place=place)
        sent = 0
        given_at_load = self._store.divides and not partition.weights_stay and phase.drops_after_update(step.partition)
        if phase.divides_state and phase.trains(step.partition) and not given_at_load:
            sent = self._ranks.give(list(partition.trainable.values()), phase.owner_of(step.partition))
            partition.changed = True
        if partition.optimizer is not None and phase.trains(step.partition):
            # A partition may have no parameter of the model's first group, which then has its first rate there.
            first = rate.options[0] if isinstance(rate, Groups) else partition.optimizer.param_groups[0]
            self.learning_rate = first.get("lr")
            self.gradient_norm = clip[1] if clip is not None else None
        return 0, sent

    def _mark_homes(self) -> None:
        """Marks the homes if all that the last update changed is at home or being saved: a failed update rolls back to here."""
        if not any(partition.changed or partition.unsaved for partition in self._partitions):
            self._wait_for_homes()
            self._store.mark()
            self._marked = self.position, self.compute.committed

    # --- endings --------------------------------------------------------------------------------------------------

    def _roll_back(self, text: str) -> None:
        """Undoes the unfinished update after a failed allocation or another error, and saves what the last update left."""
        phase = self._phases[self.step.phase]
        self.compute.abandon()
        for transfer in self._save_weights():
            transfer.follow()
        for p in list(self._loading):
            self._loading.pop(p).release()
        if self.progress.updated and phase.breadth_first:
            self._undo_finished_updates(text)
        for partition in self._partitions:
            partition.abandon_update()
        self._device.release_cached()
        for partition in self._loaded.values():
            slot, free, _ = partition.begin_drop(keep_state=True)
            free()
            if slot is not None:
                self._slots.give(slot, free)
        self._loaded.clear()
        self._wait_for_homes()
        self._store.refuse_lost()

    def _undo_finished_updates(self, text: str) -> None:
        """Rolls the homes back to the last mark, because some partitions have made the optimizer step already. The mark is at
        this update's beginning if nothing stays on the device, else where a checkpoint was saved or this loop began."""
        self._release_all()
        if not self._store.rollback():
            raise OutOfMemory(
                f"memory ran out in {self.step} in the middle of an update, and the weights in host memory cannot be restored: "
                f"{text}. Resume from the last checkpoint with a larger --mem-limit or a smaller --micro-batch-size."
            )
        before, (position, self.compute.committed) = self.position, self._marked
        self.rolled_back = f"update {position.updates} of {self._phases[position.phase]}" if position != before else ""
        self.progress = Progress(self._phases, position)

    def _release_all(self) -> None:
        for partition in self._partitions:
            partition.release()
        self._loaded.clear()
        self._loading.clear()


def _spoilt_weight(partition: Partition) -> str:
    """Returns the name of a trainable weight that is not finite everywhere, or "". Takes no memory."""
    for block in partition.blocks:
        for name, parameter in block.module.named_parameters():
            if not (parameter.requires_grad and parameter.is_floating_point() and parameter.numel()):
                continue
            if not all(math.isfinite(extreme) for extreme in torch.aminmax(parameter.detach())):  # with a NaN both are NaN
                return f"{block.name}.{name}"
    return ""
