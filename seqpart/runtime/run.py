"""One run: opens directories and homes, runs the stages under an observer, saves checkpoints, and proves its memory."""

import gc
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import astuple, replace
from functools import cache, cached_property
from typing import Any

import msgspec
import torch

from seqpart.checkpoint.changes import Place, layers_of, row_digests
from seqpart.checkpoint.resume import ResumePoint, State, data_digest, gathers
from seqpart.data.reader import ReaderThread
from seqpart.device.limit import RUNTIME_VARIES, Grant, enforced, translate_oom
from seqpart.device.sampler import MEMORY, Proof, Sampler
from seqpart.errors import Diverged, DoesNotFit, Interrupted, LimitExceeded, ModelError, OutOfMemory, StoreError, resuming
from seqpart.interrupts import Interrupts
from seqpart.methods.ist.moving import Parting
from seqpart.methods.ist.parts import JointChain
from seqpart.model.metrics import Metrics
from seqpart.model.scheduler import Groups, Scheduler, rate_schedule
from seqpart.plan.planner import ExecutionPlan, Planner, Stage
from seqpart.profile.partition import state_layouts
from seqpart.report.reporter import Reporter
from seqpart.runtime import replanning
from seqpart.runtime.boundary_io import BoundaryIO, open_boundaries
from seqpart.runtime.compute import Compute, Exchanges, Hooks
from seqpart.runtime.executor import AllocationFailed, Executor
from seqpart.runtime.exports import Exports
from seqpart.runtime.graph_offload import GraphOffload, open_graphs
from seqpart.runtime.observer import Failure, Observer
from seqpart.runtime.partition import Partition
from seqpart.runtime.pauses import Pauses, PlanAnew
from seqpart.runtime.saving import Saving
from seqpart.runtime.slots import Slots
from seqpart.runtime.watch import Watch, updates_before
from seqpart.runtime.weight_store import UNBEGUN, WeightStore, open_places
from seqpart.schedule.best import LoopState
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import counted, rooms_for_gradients
from seqpart.schedule.progress import checked
from seqpart.schedule.steps import Event, PhaseDone, Position, StepDone, Verb, steps_of
from seqpart.units import format_size

_GRANT_SECONDS = 0.5
"""Seconds between two checks of what was reserved for generated code; a check takes a millisecond."""

Ended = Generator[None, None, tuple[Failure | None, Position, Metrics]]
"""Yields at every pause, then returns (what failed, the run's position, its metric sums there)."""


class Run:
    """One run, complete once constructed: everything that it opens is closed by `stack`.

    observer: follows the run. resumed: the checkpoint that it goes on from. job: JSON for whoever resumes it. falsify: what
    backward takes from the boundary exchange is slightly wrong.
    """

    def __init__(
        self, planner: Planner, prepared: ExecutionPlan, reporter: Reporter, sampler: Sampler, stack: ExitStack,
        *, observer: Observer | None = None, resumed: ResumePoint | None = None, job: dict[str, Any] | None = None,
        falsify: bool = False,
    ) -> None:  # fmt: skip
        self.prepared, self.reporter, self.sampler = prepared, reporter, sampler
        self.planner, self._observer, self._resumed, self._job = planner, observer or Observer(), resumed, job
        self.settings, self.device, self._falsify, self.ranks = planner.settings, planner.device, falsify, planner.ranks
        before = resumed.state if resumed is not None else None
        self.losses = list(before.losses) if before is not None else []
        self.test = before.test if before is not None else None
        """(loss, accuracy) of the latest pass over the test rows."""
        self._partitions: list[Partition] = []
        self.failed_at: Position | None = None
        """Position at which an error ended the steps; every home is as it should be there."""
        self._stopped, self._has_failed, self._granted_at = False, False, 0.0
        self._grant: Grant = lambda *, at_rest=False, untouched=0: False
        self._turns: list[tuple[int, PhaseDone | float]] = []
        """(partition, its pass, or the loss of one that was ended) since GATHER, which gives them to the other ranks."""
        self._state, self._finished, self.interrupts = UNBEGUN, "", Interrupts(agreed=planner.ranks.count > 1)
        reporter.plan(prepared.plan)
        stack.push(lambda kind, *_: self.interrupts.end(self._finished, failed=kind is not None))
        self.directory, self.scratch = open_places(
            prepared.plan, self.settings, reporter, stack, resumed=resumed, job=job, state=lambda: self._state
        )
        sampler.timeline.leave(
            self.directory.result(MEMORY), limit=prepared.plan.limit, source=sampler.usage.source,
            add=resumed is not None and resumed.manifest is not None,
        )  # fmt: skip
        if resumed is not None:
            reporter.say(resumed.words(prepared.phases))
        self.reader_thread = stack.enter_context(closing(ReaderThread()))
        self.reader_thread.watched = self._observer.watched
        sampler.usage.grant(prepared.plan.host_limit)
        kept = before.loop if before is not None else LoopState(frozen=[*planner.late], learns=[*planner.late])
        self.pauses = Pauses(
            prepared.chain, prepared.costs, self._optimizers_built, kept, self._counts_own, planner.late, planner.model,
            planner.loss,
        )  # fmt: skip
        self.watch = Watch(self._observer, self.settings, sampler, kept, self._pause_for_callback)
        self.heard = self.watch.heard(len(prepared.plan.partitions), planner.test.sets)
        self.homes = WeightStore(planner, prepared, self.scratch, reporter, self._explaining_memory, stack)
        self.homes.store.watched = self._observer.watched
        if self.settings.save_every != "never":
            _ = self._identity  # it reads rows: now, and not while a partition takes memory, or has other attributes
        self.pauses.attributes.set_again(kept.attributes)
        since, criterion = self.resumed_at, self.watch.evaluations.criterion
        self.exports = Exports(self.settings, self.directory.root, criterion, updates_before(prepared.phases, since)[0])
        self.saving = Saving(
            self.settings, self._state_at, root=self.directory.root, scratch=self.scratch.root,
            store=self.homes.store, boundaries=self.homes.boundaries, reporter=reporter, interrupts=self.interrupts,
        )  # fmt: skip

    def _optimizers_built(self) -> Iterator[torch.optim.Optimizer]:
        for partition in self._partitions:
            optimizer = partition.built() if partition.built is not None else None
            if optimizer is not None:
                yield optimizer

    def _counts_own(self) -> bool:
        """True if optimizers of several partitions have counted updates, each its own."""
        several = len(self._partitions) > 1 and any(one.found.counts for one in self.prepared.stages[0].optimizers)
        return several and (self._resumed is not None or any(partition.built is not None for partition in self._partitions))

    @contextmanager
    def limited(self, *, rows: bool = True) -> Iterator[None]:
        """Fills the homes under the enforced limit, and keeps it enforced inside. rows: write the data's rows too."""
        reading, plan = self.planner.reading, self.prepared.plan
        beside = reading.held + reading.beside(max(stage.micro_batch for stage in self.prepared.stages))
        untouched = plan.untouched(self.prepared.costs, self.planner.updates.largest)
        with enforced(self.device, plan.limit, beside=beside, untouched=untouched) as self._grant:
            self.homes.fill(self._resumed, rows=rows)
            self.homes.share()
            self._state = "failed"  # until `finish`
            yield

    def finish(self, words: str) -> None:
        """Marks the run as done. words: the answer to a pending signal."""
        self._state, self._finished = "done", words

    def _explaining_memory(self, when: str) -> AbstractContextManager[None]:
        return translate_oom(self.device, f"{when}, inside the limit of {format_size(self.prepared.plan.limit)}")

    # --- the loop -------------------------------------------------------------------------------------------------

    def run_stages(self, start: Position | None = None) -> None:
        """Runs the schedule from `start`, or from the run's checkpoint, to its end or until the observer stops it."""
        for _ in self.stages(start):
            pass

    def stages(self, start: Position | None = None) -> Generator[None, None, None]:
        """Does the work of `run_stages` as a generator, and yields wherever the whole run stands at a position.

        After a failed allocation it goes on from the last position with all homes up to date, with a plan that needs less.
        """
        at, metrics = self._beginning() if start is None else (start, Metrics())
        if start is None and at == Position():
            self.watch.begin()
        self.exports.at_rest(self.prepared.phases, at, self.watch.evaluations.all)
        (self.exports.due,) = self.ranks.any_of(self.exports.due)
        if self.exports.due:  # the checkpoint was saved right before
            self._export(at, metrics)
        at, metrics = self._ended_early(at, metrics)
        self.saving.begin(changed=self._resumed is not None and bool(self._resumed.remarks))
        self._stopped, number = False, 0
        while number < len(self.prepared.stages) and not self._stopped:
            stage = self.prepared.stages[number]
            if at.phase >= stage.end:
                number += 1
                continue
            failure, at, metrics = yield from self._run_stage(stage, at, metrics)
            if failure is not None:
                if self.ranks.count > 1:  # the others are in the middle of an update, with the same plan
                    raise OutOfMemory(
                        f"memory ran out in {failure.step} on rank {self.ranks.number} of {self.ranks.count}: {failure.text}. "
                        "Give a larger --mem-limit, or a smaller --micro-batch-size."
                    )
                try:
                    self._go_on_after(failure, metrics)
                except (OutOfMemory, DoesNotFit) as error:
                    self.failed_at = failure.at
                    self._save_before(error, failure.at, metrics)
                    raise
            if self.pauses.unplanned:
                self.saving.save(at, metrics)
                names = ", ".join(self.pauses.unplanned[:3]) + (" and others" if len(self.pauses.unplanned) > 3 else "")
                self.reporter.say(f"{names} learn from now on: making a new plan")
                raise PlanAnew(self.directory.root)
            at, metrics = self._ended_early(at, metrics)
        self._grant(at_rest=True)  # weights come back to the model: into new memory, beside a heap with holes

    def _ended_early(self, at: Position, metrics: Metrics) -> tuple[Position, Metrics]:
        """Returns the position to go on from, and the metric sums there: after the training if its end was requested."""
        end = self.watch.end_after(self.prepared.phases, at)
        if end is None:
            return at, metrics
        phase = self.prepared.phases[at.phase]
        if at.updates and phase.independent:
            self._turns.append((phase.partition, metrics.mean_loss))
        elif at.updates:
            self.losses.append(metrics.mean_loss)
        self.watch.tell_end(self.reporter, phase.share_of(at.updates)[0])
        return end, Metrics()

    @property
    def resumed_at(self) -> Position:
        """Position at which the run goes on; that of its first update, unless it was resumed."""
        return Position() if self._resumed is None else self._resumed.position

    def _beginning(self) -> tuple[Position, Metrics]:
        resumed = self._resumed
        if resumed is None or resumed.state is None:
            return Position(), Metrics()
        at, phases = resumed.position, self.prepared.phases
        if at.phase < len(phases) and phases[at.phase].elsewhere:  # another rank goes on with that turn
            return Position(at.phase + 1), Metrics()
        return at, Metrics.of(resumed.state.tally)

    def _run_stage(self, stage: Stage, at: Position, metrics: Metrics) -> Ended:
        """Runs `stage` to its end, to a stop, or to a failed allocation. Returns (what failed, position, metric sums)."""
        self._held = self.sampler.usage.read()
        with self.device.heap.kept(stage.heap):
            while True:  # in the same heap: a new one would start above what libraries have kept in this one
                self.pauses.changed = False
                failure, at, metrics = yield from self._run_steps(stage, at, metrics)
                if failure is not None:  # free the failed step's graphs first, or the heap could not shrink
                    self._partitions = []
                    gc.collect()
                if failure is not None or not self._begins_anew(stage, at, metrics):
                    return failure, at, metrics

    def _begins_anew(self, stage: Stage, at: Position, metrics: Metrics) -> bool:
        """True if the stage, left at position `at`, goes on at once: with another set of trainable parameters, or after an
        export, which is made here."""
        exports = self.exports.due
        if exports:
            self._export(at, metrics)
        ends = self._stopped or at.phase >= stage.end or self.watch.end_after(self.prepared.phases, at) is not None
        return (exports or self.pauses.changed) and not self.pauses.unplanned and not ends

    def _export(self, at: Position, metrics: Metrics) -> None:
        """Exports the weights at this position. An error of the disk ends the run, which is saved first if it can be."""
        self._partitions = []  # and their slots
        self.homes.collect()
        if not self.ranks.leads:
            self.exports.due = False
            return
        try:
            self.reporter.record("export", file=str(self.exports.write(self.homes.export)), updates=self.exports.last)
            self.homes.discard_others()
        except StoreError as error:
            self._save_before(error, at, metrics)
            raise

    def _save_before(self, error: Exception, at: Position, metrics: Metrics) -> None:
        """Saves the run before `error` ends it, if it can be. Nothing is on the device."""
        if self.settings.saves and not self._divides_state:
            with suppress(StoreError):
                self.saving.save(at, metrics)
                self.reporter.add_note(error, f"The run is saved: go on with {resuming(self.directory.root)}")

    def _run_steps(self, stage: Stage, start: Position, metrics: Metrics) -> Ended:
        with ExitStack() as stack:
            between = self._between(stage)
            stack.callback(between.close)
            graphs = self._graphs(stage)
            stack.callback(graphs.close)
            executor = self._executor(stage, between, graphs, start, metrics)
            phases = self.prepared.phases
            self.reporter.begin(phases, start, self.prepared.plan.limit, lambda: self.sampler.peak)
            stack.callback(self.reporter.end)
            self.sampler.label = lambda: str(executor.step)
            stack.callback(self._keep_label)
            failure = None
            try:
                yield from executor.running(checked(steps_of(phases[: stage.end], start), stage.resources.at_once))
            except AllocationFailed as failed:
                failure = Failure(
                    step=failed.step, text=str(failed), at=executor.position, keeps_heap=stage.heap > 0,
                    micro_batch=max(stage.micro_batch for stage in self.prepared.stages),
                )  # fmt: skip
            except Diverged as error:
                advice = self._observer.when_diverged or self.saving.fallback(phases[executor.step.phase].stage)
                raise Diverged(f"{error.with_flags} {advice}") from None
            return failure, executor.position, executor.compute.committed

    def _keep_label(self) -> None:
        """Replaces the sampler's label of the current step by its text, so that it holds no executor and its graphs."""
        label = self.sampler.label()
        self.sampler.label = lambda: label

    def _between(self, stage: Stage) -> BoundaryIO:
        rows = max((phase.own.batch for phase, _ in counted(self.prepared.phases) if phase.through is not None), default=1)
        return open_boundaries(
            stage.resources.tiers, self.prepared.partition_costs, rows, stage.micro_batch, self.homes.boundary_room,
            self.scratch.rows / "relay.part", self.device,
        )  # fmt: skip

    def _graphs(self, stage: Stage) -> GraphOffload:
        several = [phase for phase, _ in counted(self.prepared.phases) if phase.through is not None]
        micro_batches = max((phase.own.micro_batches_per_update for phase in several), default=1)
        rooms = self.homes.graph_rooms(self.prepared.graph_rooms)
        return open_graphs(
            self.prepared.partition_costs, stage.offloads, micro_batches, rooms, self.scratch.rows / "graphs.part",
            self.device,
        )  # fmt: skip

    def _executor(self, stage: Stage, between: BoundaryIO, graphs: GraphOffload, start: Position, metrics: Metrics) -> Executor:
        prepared, settings, granted = self.prepared, self.settings, stage.resources
        partitions = self._partitions = [
            Partition(
                p, prepared.chain[part.first : part.last], prepared.costs[part.first : part.last], self.homes.store,
                self.device, optimizer=optimizer, seed=settings.seed, autocast=settings.autocast, borrows=granted.borrows,
                weights_stay=p in granted.weights_stay,
                host_steps=self.homes.host_steps if p in granted.host_steps else None,
            )
            for p, (part, optimizer) in enumerate(zip(prepared.plan.partitions, stage.optimizers, strict=True))
        ]  # fmt: skip
        for partition in partitions if granted.borrows else ():
            owners = {tie.owner for _, tie in partition.tied}
            partition.lenders = [other for other in partitions if owners.intersection(other.blocks)]
        exchanges = Exchanges(
            boundaries=self.homes.boundaries, reader_thread=self.reader_thread, between=between, graphs=graphs,
            falsify=self._falsify,
        )  # fmt: skip
        hooks = Hooks(
            listen=self._listen, sinks=self.heard, at_rest=self._at_rest, before_update=self._observer.before_update,
            failed=self._failed,
        )  # fmt: skip
        compute = Compute(
            prepared, partitions, exchanges, self.device, hooks, seed=settings.seed, start=start, metrics=metrics,
            ranks=self.ranks,
        )  # fmt: skip
        waiting = rooms_for_gradients(prepared.phases[: stage.end])
        # Where all stay, one that a test pass loads without its state must not take a slot that another needs for training.
        all_stay = not granted.borrows and granted.slots == len(partitions)  # ist's parts take turns in fewer
        staying = range(len(partitions)) if all_stay else granted.stays
        own = {p: partitions[p].needs(to_update=True, gradients=False) for p in staying}
        shared = sorted(one.needs(to_update=True, gradients=p in waiting) for p, one in enumerate(partitions) if p not in own)
        return Executor(
            compute, Slots(shared[-granted.slots:], self.device, own), self.homes.store,
            clip_grad_norm=settings.clip_grad_norm, rate=self.rate_of(stage), ranks=self.ranks,
            rewrites=self._rewrites(stage),
        )  # fmt: skip

    def rate_of(self, stage: Stage) -> Callable[[Phase, int], float | Groups]:
        """Returns the function of (phase, its finished updates) that gives the learning rate of all partitions it trains."""
        schedule = self.settings.lr_schedule
        if isinstance(schedule, str):
            factor = rate_schedule(schedule, self.settings.warmup_updates)
            return lambda phase, done: factor(*phase.share_of(done))
        whole, values = self.planner.optimizers.whole, lambda: self.watch.evaluations.values
        scheduler = cache(lambda optimizer: Scheduler(schedule, whole(optimizer), values))
        return lambda phase, done: scheduler(stage.optimizers[phase.partition]).at(phase.share_of(done)[0])

    def _rewrites(self, stage: Stage) -> Mapping[Verb, Callable[[int, int], int | None]]:
        prepared = self.prepared
        if not isinstance(prepared.chain, JointChain):
            return {Verb.GATHER: self.homes.gather}
        parting = Parting(
            prepared.chain, [cost.layout for cost in prepared.costs],
            state_layouts(prepared.chain, prepared.costs, stage.optimizers[-1]),
            [(part.first, part.last) for part in prepared.plan.partitions], self.homes.store,
            keeps_moments=self.settings.subnet_moments != "zero", ranks=self.ranks, give=self.homes.give,
        )  # fmt: skip
        return {Verb.SPLIT: parting.split, Verb.GATHER: parting.gather, Verb.MERGE: parting.merge}

    def _go_on_after(self, failure: Failure, metrics: Metrics) -> None:
        self.sampler.known = max(self.sampler.known, self.prepared.plan.peak)  # the plan that is about to be replaced
        if self.heard.own is not None:
            self.heard.own.reset()  # a test begins again, and what was kept of its rows would be missing from the next plan
        self._go_back(failure.at)
        self.saving.obey(failure.at, metrics)
        self._observer.failed(failure)
        request = replace(self.prepared.request, micro_batch=failure.micro_batch)
        # Kernels for another number of rows, such as the last batch's, may keep memory of their own.
        grown = self.sampler.usage.read() - self._held
        request = replace(request, spare=request.spare + grown) if grown > RUNTIME_VARIES else request
        if self._grant() and (planned := replanning.planned_or_none(self.planner, self.prepared, request)) is not None:
            self._go_on(failure, planned, " again, as memory was reserved for generated code")
            return
        self._grant(at_rest=True)  # what remains of the heap is charged to the limit, and not used
        self._has_failed = self.device.shares_memory
        if failure.keeps_heap:  # the heap had more gaps than the plan had room for
            planned = replanning.planned_anew(self.planner, self.prepared, replace(request, may_keep_heap=False))
            self._go_on(failure, planned, "; from now on freed memory leaves the process at once")
        elif self.device.keeps_heap and self.device.heap.map_small():
            self._grant(at_rest=True)
            planned = replanning.planned_anew(self.planner, self.prepared, request)
            self._go_on(failure, planned, "; from now on small tensors leave the process at once, too")
        elif (smaller := replanning.planned_smaller(self.planner, self.prepared, request)) is not None:
            spare = format_size(smaller.request.spare)
            self._go_on(failure, smaller, f" with the same micro-batch and a plan that leaves {spare} more of the limit")
        else:
            halved = replanning.planned_halved(self.planner, self.prepared, failure)
            self._go_on(failure, halved, f" with micro-batch {halved.request.micro_batch} instead of {failure.micro_batch}")

    @contextmanager
    def _pause_for_callback(self) -> Iterator[None]:
        """A context for a callback. Memory that runs out there ends the run: a smaller plan would not call it again."""
        with self.pauses.callback(), translate_oom(self.device, "a callback ran"):
            yield

    def _go_back(self, at: Position) -> None:
        over = counted(self.prepared.phases[: at.phase])
        self.losses = self.losses[: sum(times for phase, times in over if phase.kind is PhaseKind.TRAIN)]
        self.watch.evaluations.go_back(at.phase)

    def _failed(self, executor: Executor, error: Exception) -> None:
        """Saves after an error ended a step, when every home is as the executor's position says."""
        self.failed_at = executor.position
        self._go_back(self.failed_at)
        if self.settings.saves and not (self._divides_state or isinstance(error, Diverged)):  # it would diverge again
            self.reporter.add_note(error, self.saving.after_error(executor))

    @property
    def is_trained(self) -> bool:
        """True if no training was left when an error ended the run."""
        return self._is_trained_at(self.failed_at or Position())

    def _is_trained_at(self, at: Position) -> bool:
        at = self.watch.end_after(self.prepared.phases, at) or at
        return all(phase.kind is not PhaseKind.TRAIN for phase, _ in counted(self.prepared.phases[at.phase :]))

    def _go_on(self, failure: Failure, planned: ExecutionPlan, how: str) -> None:
        micro_batch, self.prepared = planned.request.micro_batch, self._observer.shaped(planned)
        self.homes.boundaries.keep_in_memory(planned.plan.rows_in_memory)
        self.reporter.record("allocation failed", step=str(failure.step), micro_batch=micro_batch, text=failure.text)
        self.reporter.warn(
            f"an allocation failed in {failure.step} inside the limit; going on with update {failure.at.updates + 1} of "
            f"{self.prepared.phases[failure.at.phase]}{how}"
        )

    def _listen(self, event: Event) -> None:
        if isinstance(event, PhaseDone) and event.phase.independent and event.phase.kind is PhaseKind.TRAIN:
            self._turns.append((event.phase.partition, event))
            if event.phase.is_turn:
                return
        step = event.step if isinstance(event, StepDone) and event.step.verb is Verb.GATHER else None
        if step is not None and step.partition == self.prepared.phases[step.phase].partition:
            all_turns, self._turns = self.ranks.gather(self._turns), []
            all_of_them = [(p, rank, done) for rank, own in enumerate(all_turns) for p, done in own]
            for _, rank, done in sorted(all_of_them, key=lambda one: one[0]):
                loss = done.loss if isinstance(done, PhaseDone) else done
                self.losses += [] if loss is None else [loss]
                if isinstance(done, PhaseDone) and (done.phase.is_turn or rank != self.ranks.number):
                    self._hear(done)
        self._hear(event)
        if isinstance(event, StepDone):
            self._guard()

    def _hear(self, event: Event) -> None:
        if isinstance(event, PhaseDone) and event.loss is not None:
            if event.phase.kind is PhaseKind.TEST:
                self.test = event.loss, event.accuracy
            elif event.phase.kind is PhaseKind.TRAIN and not event.phase.independent:
                self.losses.append(event.loss)
        self.watch.listen(event)
        self.reporter.listen(event)
        self._observer.listen(event)

    def _guard(self) -> None:
        """Runs between two steps: raises LimitExceeded if the sampler has seen more than the limit, makes room for generated
        code, and handles a signal if the run saves no checkpoints. Raises MemoryError just below the limit once an allocation
        has failed: the C library then serves others from what it has reserved already, which the kernel does not refuse."""
        if not self.settings.saves:
            self.interrupts.check()  # which several ranks do where they agree
        if time.monotonic() > self._granted_at + _GRANT_SECONDS:
            self._granted_at = time.monotonic()
            self._grant()
        if self._has_failed and self.sampler.sample() > self.prepared.plan.limit - RUNTIME_VARIES:
            raise MemoryError("what the C library had reserved before is used up")
        if self.sampler.violations:
            raise LimitExceeded(
                f"the limit of {format_size(self.sampler.limit)} was passed: {format_size(self.sampler.peak)} by "
                f"{self.sampler.usage.source}, in {self.sampler.violation_label or 'start'}; the plan had predicted "
                f"{format_size(self.prepared.plan.peak)}. Earlier files are intact. Give a larger limit, and report this."
            )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _at_rest(self, executor: Executor) -> bool:
        phases = self.prepared.phases
        if self.planner.late:
            self.pauses.unfreeze(updates_before(phases, executor.position)[0])
        try:
            self.watch.at_rest(executor, phases, self.heard)
            due = self.saving.is_due(executor.position, phases)
            trained = executor.step.verb is Verb.UPDATE
            self.exports.at_rest(phases, executor.position, self.watch.evaluations.all, trained=trained)
            due = not self._is_independent(executor) and self._agree(due)
        except Exception as error:
            if self.ranks.leads and not self._divides_state:
                self._remember_best(executor)  # the checkpoint's evaluations name it
                self.reporter.add_note(error, self.saving.after_error(executor))
            if self.homes.store.divides and self._is_trained_at(executor.position):  # all is at home since the training ended
                self.failed_at = executor.position
            raise
        self._remember_best(executor)
        self.watch.end_here(executor.step.phase, phases)
        if self._divides_state and (due or self.interrupts.waiting):
            self.saving.flush(executor)
            self.homes.collect(states=True)
        if self.homes.store.divides and trained and self._is_trained_at(executor.position):
            self.saving.flush(executor)
            self.homes.collect(everywhere=True)  # what fails in the last test loses no weights
        with self._saved_first():
            self.saving.at_rest(executor, due=due and self.ranks.leads)
        self._stopped = not self._observer.at_rest(executor)
        goes_on = self.watch.end_after(phases, executor.position) is None
        # Newly trainable parameters need a new executor, and an export all memory.
        return not self._stopped and not (self.pauses.changed or self.exports.due) and goes_on

    def _agree(self, due: bool) -> bool:
        """Makes a signal, a callback's stop, or an export, of which one of several ranks knows, hold for all. Returns True if a
        checkpoint is `due` in the first. Raises ModelError if they train other parameters from here on."""
        if self.ranks.count > 1:
            own = self.interrupts.has_come, bool(self.watch.ending.asked), due, self.exports.due, self.pauses.changed
            came, ends, due, self.exports.due, changed = self.ranks.any_of(*own)
            if changed and len({*map(tuple, self.ranks.gather(self.pauses.frozen))}) > 1:
                raise ModelError(
                    "requires_grad was changed in a callback, and not alike on all ranks, which exchange their gradients. Let "
                    "the callback do the same on every rank."
                )
            self.interrupts.agree(came=came)
            for why in self.ranks.gather(self.watch.ending.asked) if ends else ():
                self.watch.ending.ask(why)
        return due

    def _is_independent(self, executor: Executor) -> bool:
        """True if each rank trains subnets or partitions of its own there: they agree, and save, when all are gathered."""
        phases, at, done = self.prepared.phases, executor.position, executor.step.phase
        gathered = phases[done].kind is PhaseKind.GATHER and at.phase == done + 1
        return at.phase < len(phases) and phases[at.phase].independent and not gathered

    @cached_property
    def _divides_state(self) -> bool:
        """True if other ranks have optimizer state, or subnets, that the first must be given before it saves."""
        return any(phase.divides_state or phase.elsewhere for phase, _ in counted(self.prepared.phases))

    @contextmanager
    def _saved_first(self) -> Iterator[None]:
        """A context in which a signal ends the other ranks only when the first has saved: torchrun ends those that are left."""
        ends = self.ranks.count > 1 and self.interrupts.waiting
        if ends and not self.ranks.leads and (root := self.ranks.gather(None)[0]) is not None:
            raise Interrupted(root)
        try:
            yield
        finally:
            if ends and self.ranks.leads:
                self.ranks.gather(self.directory.root if self.settings.saves else None)

    def _remember_best(self, executor: Executor) -> None:
        if self.watch.has_new_best:
            self.saving.flush(executor)
            self.homes.collect()
            if self.ranks.leads:
                self.homes.remember()
            self.watch.has_new_best = False

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Identifies the data and the model: digests of the data and its rows, and the layers."""
        data, before = (self.planner.train, self.planner.test), self._resumed.state if self._resumed is not None else None
        changed = before is not None and before.loop.attributes  # of a model that is alive, before another plan was made
        layers = before.layers if before is not None and changed else layers_of(self.planner.chain.whole)
        if self._observer.counts_updates:
            return {"data": "", "rows": {}, "layers": layers, "session": True}
        return {"data": data_digest(*data), "rows": row_digests(*data), "layers": layers, "session": False}

    def _state_at(self, position: Position, metrics: Metrics) -> dict[str, Any]:
        """Returns a checkpoint's state other than tensors."""
        if self.pauses.unplanned:
            self._identity["layers"] = []  # the next plan's layers differ: others of them are frozen
        planner, prepared = self.planner, self.prepared
        state = State(
            settings=planner.settings.texts(), plan=prepared.plan.to_json(), position=(position.phase, position.updates),
            place=astuple(Place.of(prepared.phases, position)),
            epochs=planner.epochs(len(prepared.plan.partitions), prepared.request.trained_epochs),
            micro_batches=[stage.micro_batch for stage in prepared.stages], tally=metrics.tally(), losses=self.losses,
            test=self.test, functions=planner.functions, tuned=planner.optimizers.tuned,
            label_bytes=prepared.request.label_bytes,
            job=self._job, loop=self.pauses.noted_in(self.watch.state()), gathers=gathers(prepared.phases),
            threads=torch.get_num_threads(), **self._identity,
        )  # fmt: skip
        return msgspec.to_builtins(state)  # type: ignore[no-any-return]

    def take_best(self) -> None:
        """Restores the weights of the best evaluation, if they were kept and it was not the last one."""
        best, last = self.watch.evaluations.best, self.watch.evaluations.all[-1:]
        if not self.settings.keep_best or best is None or best.phase in [one.phase for one in last]:
            return
        if self.ranks.leads:
            self.homes.recall()
        self.homes.share()
        self.test = best.loss, best.accuracy
        self.reporter.say(f"the weights are those after update {best.update}, of the best evaluation")

    # --- the end --------------------------------------------------------------------------------------------------

    def proof(self) -> Proof:
        """Returns the memory measured until now. Raises LimitExceeded."""
        plan, sampler = self.prepared.plan, self.sampler
        sampler.sample()
        self._guard()
        return Proof(
            limit=plan.limit, peak=sampler.peak, source=sampler.usage.source, predicted=max(plan.peak, sampler.known),
            runtime=plan.runtime, allocator_peak=self.device.allocator_peak(), host=plan.host_limit,
            file_growth=sampler.file_growth, samples=sampler.samples, violations=sampler.violations,
        )  # fmt: skip
