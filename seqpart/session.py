"""One fit from directories to proof: homes are made or found again, the stages are run, checkpoints saved, results written."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import seqpart.checkpoint.manifest as manifests
from seqpart.checkpoint.export import export_weights
from seqpart.checkpoint.resume import ResumePoint, data_digest, state_of
from seqpart.checkpoint.saving import Saving
from seqpart.checkpoint.scratch_directory import open_scratch
from seqpart.data.boundary_cache import Boundaries
from seqpart.data.reader import ReaderThread
from seqpart.data.splits import write_rows
from seqpart.directory.leftovers import tell_leftovers
from seqpart.directory.run_directory import RunDirectory, new_name
from seqpart.errors import CorruptFile, DataError, Diverged, Interrupted, LimitExceeded, ModelError, OutOfMemory
from seqpart.execution.boundary_exchange import BoundaryExchange, open_exchange
from seqpart.execution.compute import Compute, PhaseDone, reads
from seqpart.execution.executor import AllocationFailed, Event, Executor, Hooks, out_of_memory
from seqpart.execution.metrics import Metrics
from seqpart.execution.partition import Partition
from seqpart.execution.slots import Slots
from seqpart.files.atomic import write_text
from seqpart.files.checksummed import with_checksum
from seqpart.files.direct import aligned
from seqpart.files.scratch import WEIGHTS
from seqpart.interrupts import Interrupts
from seqpart.memory.device import describe_versions
from seqpart.memory.limit import enforced, told
from seqpart.memory.sampler import Proof, Sampler
from seqpart.model.blocks import attach, detach, layout_of, tensors_of
from seqpart.offload.host_pool import HostPool
from seqpart.offload.store import Store
from seqpart.planning.plan import Plan
from seqpart.planning.preparation import Preparation, Prepared, Stage, refuse_small_disk
from seqpart.report.reporter import EVENTS, Reporter
from seqpart.result import Result
from seqpart.schedule.learning_rate import rate_schedule
from seqpart.schedule.phases import counted
from seqpart.schedule.steps import Phase, PhaseKind, Position, Step, Verb, checked, steps_of
from seqpart.units import format_limit, format_size

RESULT = "result.json"
PLAN = "plan.json"
JOB = "job.json"

BeforeUpdate = Callable[[Partition, Step], None]


class Session:
    """Everything that it opens is closed by `stack`."""

    def __init__(
        self, preparation: Preparation, prepared: Prepared, reporter: Reporter, sampler: Sampler, stack: ExitStack,
        *, resumed: ResumePoint | None, job: dict[str, Any] | None, before_update: BeforeUpdate | None,
    ) -> None:  # fmt: skip
        self._preparation, self._prepared, self._reporter = preparation, prepared, reporter
        self._settings, self._device = preparation.settings, preparation.device
        self._sampler, self._stack, self._job, self._before_update = sampler, stack, job, before_update
        self._resumed = resumed
        self._losses = list(resumed.losses) if resumed is not None else []
        self._test = resumed.test if resumed is not None else None
        """Loss and accuracy of the latest pass over the test rows."""
        self._partitions: list[Partition] = []
        self._state = "failed"
        self._interrupts, self._finished = Interrupts(), ""

    def carry_out(self, began: float) -> Result:
        plan = self._prepared.plan
        self._reporter.plan(plan)
        self._stack.push(lambda kind, *_: self._interrupts.end(self._finished, failed=kind is not None))
        directory = self._open_directories(plan)
        reader_thread = self._stack.enter_context(ReaderThread())
        self._sampler.usage.grant(plan.host_limit)
        host_pool_bytes, exchange_bytes = self._prepared.host_pool_bytes, self._prepared.exchange_bytes
        self._host_pool = HostPool(host_pool_bytes, self._device, first=exchange_bytes) if host_pool_bytes else None
        self._boundary_room = self._host_pool.take(exchange_bytes) if self._host_pool is not None and exchange_bytes else None
        self._store = Store(self._scratch.homes, self._device, self._host_pool)
        self._stack.callback(self._store.close)
        if self._prepared.method.exact:
            self._store.reserve(self._prepared.hosted())
        self._boundaries = Boundaries(self._scratch.rows, self._device, self._host_pool)
        self._stack.callback(self._boundaries.close)
        self._digest = data_digest(self._preparation.train, self._preparation.test)
        self._saving = Saving(
            self._settings, self._state_at, root=directory.root, scratch=self._scratch.root, store=self._store,
            boundaries=self._boundaries, reporter=self._reporter, interrupts=self._interrupts,
        )  # fmt: skip
        with directory.interruptible():
            with enforced(self._device, plan.limit):
                self._fill_homes()
                with directory.resumable(), self._interrupts:
                    self._run_stages(reader_thread)
                    with self._told("the weights were written"):
                        export_weights(directory.result(WEIGHTS), self._prepared.chain, self._prepared.costs, self._store)
                    self._saving.obey(Position(len(self._prepared.phases)), Metrics())
                    self._interrupts.hold()
                self._give_back()
            return self._conclude(directory, time.perf_counter() - began)

    def _told(self, when: str) -> AbstractContextManager[None]:
        return told(self._device, f"{when}, inside the limit of {format_size(self._prepared.plan.limit)}")

    # --- directories and homes ------------------------------------------------------------------------------------

    def _open_directories(self, plan: Plan) -> RunDirectory:
        settings, resumed = self._settings, self._resumed
        manifest = resumed.manifest if resumed is not None else None
        name = new_name(plan.method)
        root = resumed.root if resumed is not None else settings.output_dir or Path("runs") / name
        directory = RunDirectory(root, overwrite=settings.overwrite, resume=manifest is not None)

        def close(kind: type[BaseException] | None, *_: object) -> None:
            directory.close("interrupted" if kind is Interrupted else self._state)

        self._stack.push(close)
        self._scratch = open_scratch(directory, manifest, settings.offload_dir, name)
        if self._scratch is not directory:
            self._stack.push(lambda kind, *_: self._scratch.vanish(failed=kind is not None))
        if manifest is None:
            refuse_small_disk(plan, self._scratch.root, written=plan.live_bytes)
        for line in tell_leftovers(self._scratch.root.parent, directory.cleaned):
            self._reporter.say(line)
        self._reporter.open_log(directory.result(EVENTS), add=manifest is not None)
        self._reporter.record("start", **describe_versions(), settings=settings.texts())
        write_text(directory.result(PLAN), plan.to_json())
        if self._job is not None:
            write_text(directory.result(JOB), with_checksum("job", self._job))
        self._reporter.say(f"run directory {directory.root}")
        if resumed is not None:
            self._reporter.say(resumed.words(self._prepared.phases))
        return directory

    def _fill_homes(self) -> None:
        """Weights and rows: from the checkpoint, or from the model and the data."""
        resumed = self._resumed if self._resumed is not None and self._resumed.manifest is not None else None
        for name, split in (("train", self._preparation.train), ("test", self._preparation.test)):
            self._boundaries.labels[name] = split.labels
        with self._told("the blocks were built"):
            self._build_homes(keep=resumed is not None)
        if resumed is not None and resumed.manifest is not None:
            with self._told("the checkpoint was read"):
                manifests.restore(resumed.manifest, self._store, self._boundaries, self._rewrite_rows)
                self._write_missing_rows(resumed.position)
            for name in resumed.unused_states(self._prepared):
                self._store.discard(name)
            return
        with self._told("the data were read"):
            self._write_rows("train")
            self._write_rows("test")

    def _write_missing_rows(self, at: Position) -> None:
        """Rows of the data that were let go of, and that a recovery which was not planned then reads once more."""
        ahead = {reads(phase) for phase, _ in counted(self._prepared.phases[at.phase :])}
        for name in ("train", "test"):
            if (name, 0) in ahead and (name, 0) not in self._boundaries:
                self._write_rows(name)

    def _rewrite_rows(self, name: str, error: CorruptFile) -> None:
        self._reporter.say(f"{error.with_flags} It is made again from the data.")
        self._write_rows(name)

    def _write_rows(self, name: str) -> None:
        """Boundary 0: the data set's rows, checked and sent home."""
        split = self._preparation.train if name == "train" else self._preparation.test
        rows = self._boundaries.create(name, 0, self._prepared.input_layout, split.count)
        write_rows(split, rows.append)
        rows.finish()

    def _build_homes(self, *, keep: bool) -> None:
        """Every block is built alone and goes straight home: the model never exists whole. `keep`: homes are there."""
        staging = aligned(max(cost.layout.padded_nbytes for cost in self._prepared.costs))
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            module = block.build(self._device, self._settings.seed)
            tensors = {} if block.given_alive else block.own(tensors_of(module))
            if not block.given_alive and layout_of(tensors) != cost.layout:
                raise ModelError(f"{block}: its factory builds other tensors each time it is called.")
            if not keep:
                views = cost.layout.views(staging)
                if block.given_alive:
                    self._preparation.live_modules.read(block, views)
                for name, tensor in tensors.items():
                    views[name].copy_(tensor.detach())
                self._store.put(block.home, cost.layout, staging)
            detach(module)

    def _give_back(self) -> None:
        """The trained weights, to modules that were given alive. A run that ends early leaves them as they came."""
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            if block.given_alive:
                flat = aligned(cost.layout.padded_nbytes)
                if cost.weights:
                    self._store.get(block.home, flat)
                attach(block.module, cost.layout.views(flat))
                block.restore_modes()
                self._preparation.live_modules.keep(block)

    # --- the loop -------------------------------------------------------------------------------------------------

    def _run_stages(self, thread: ReaderThread) -> None:
        """Run the schedule; after a failed allocation, go on from the last finished update with half the micro-batch."""
        position, metrics = Position(), None
        if self._resumed is not None and self._resumed.manifest is not None:
            position = self._resumed.position
            metrics = Metrics.from_json(self._resumed.metrics, self._device.torch) if self._resumed.metrics else None
        self._saving.begin(changed=self._resumed is not None and bool(self._resumed.said))
        number = 0
        while number < len(self._prepared.stages):
            stage = self._prepared.stages[number]
            if position.phase >= stage.end:
                number += 1
                continue
            failed, position, metrics = self._run_stage(stage, position, metrics, thread)
            if failed is not None:
                self._sampler.known = max(self._sampler.known, self._prepared.plan.peak)  # of a plan that another replaces
                self._saving.obey(position, metrics or Metrics())
                if stage.heap:
                    self._return_heap(*failed)
                else:
                    self._halve_micro_batch(*failed)

    def _run_stage(
        self, stage: Stage, position: Position, metrics: Metrics | None, thread: ReaderThread
    ) -> tuple[tuple[str, Executor] | None, Position, Metrics | None]:
        """(what failed, where the run stands, its sums): from `position` to the stage's end, or to a failed allocation."""
        with ExitStack() as stack:
            stack.enter_context(self._device.heap.kept(stage.heap))
            exchange = self._exchange(stage)
            stack.callback(exchange.close)
            executor = self._executor(thread, stage, exchange, position, metrics)
            phases = self._prepared.phases
            self._reporter.begin(phases, position.phase, self._prepared.plan.limit, lambda: self._sampler.peak)
            stack.callback(self._reporter.end)
            self._sampler.label = lambda: str(executor.step)
            try:
                executor.run(checked(steps_of(phases[: stage.end], position), stage.resources.at_once))
            except AllocationFailed as failure:
                return (str(failure), executor), executor.position, executor.compute.rested
            except Diverged as error:
                raise Diverged(f"{error.with_flags} {self._saving.fallback(phases[executor.step.phase].stage)}") from None
            return None, executor.position, None

    def _exchange(self, stage: Stage) -> BoundaryExchange:
        rows = max(phase.batch for phase, _ in counted(self._prepared.phases))
        return open_exchange(
            stage.resources.boundary_tier, self._prepared.partition_costs, rows, stage.micro_batch, self._boundary_room,
            self._scratch.rows / "relay.part", self._device,
        )  # fmt: skip

    def _executor(
        self, thread: ReaderThread, stage: Stage, exchange: BoundaryExchange, start: Position, metrics: Metrics | None
    ) -> Executor:
        prepared, settings = self._prepared, self._settings
        partitions = self._partitions = [
            Partition(
                p, prepared.chain[part.first : part.last], prepared.costs[part.first : part.last], self._store, self._device,
                optimizer=optimizer, seed=settings.seed, autocast=settings.autocast, borrows=stage.resources.borrows,
            )
            for p, (part, optimizer) in enumerate(zip(prepared.plan.partitions, stage.optimizers, strict=True))
        ]  # fmt: skip
        for partition in partitions if stage.resources.borrows else ():
            owners = {tie.owner for _, tie in partition.tied}
            partition.lenders = [other for other in partitions if owners.intersection(other.blocks)]
        compute = Compute(
            phases=prepared.phases, partitions=partitions, losses=prepared.loss, boundaries=self._boundaries,
            cache_layouts=prepared.cache_layouts, exchange=exchange, device=self._device, reader_thread=thread,
            seed=settings.seed, start=start, metrics=metrics, falsify=self._preparation.falsify, listen=self._listen,
        )  # fmt: skip
        factor = rate_schedule(settings.lr_schedule, settings.warmup_updates)

        def rate(phase: Phase, done: int) -> float:
            return factor((phase.epoch - 1) * phase.updates + done, phase.epochs * phase.updates)

        gradients = any(phase.clips and phase.streams for phase, _ in counted(prepared.phases[: stage.end]))
        stays, slots = stage.resources.stays, stage.resources.slots
        own = {p: partitions[p].needs(to_update=True, gradients=False) for p in stays}
        shared = sorted(part.needs(to_update=True, gradients=gradients) for part in partitions if part.number not in stays)
        hooks = Hooks(listen=self._listen, guard=self._guard, at_rest=self._at_rest)
        if self._before_update is not None:
            hooks.before_update = self._before_update
        return Executor(
            phases=prepared.phases, partitions=partitions, compute=compute, boundaries=self._boundaries,
            slots=Slots(shared[-slots:], self._device, own), store=self._store, device=self._device,
            clip_grad_norm=settings.clip_grad_norm, rate=rate, hooks=hooks, start=start,
        )  # fmt: skip

    def _return_heap(self, text: str, executor: Executor) -> None:
        """Its holes were more than the plan had room for: go on with the same micro-batch, without them."""
        self._preparation.may_keep_heap = False
        micro_batch = max(stage.micro_batch for stage in self._prepared.stages)
        self._plan_anew(text, executor, micro_batch, "; from now on memory leaves the process as soon as it is free")

    def _halve_micro_batch(self, text: str, executor: Executor) -> None:
        plan = self._prepared.plan
        if executor.step.verb is Verb.LOAD:
            raise out_of_memory(executor.step, text)
        largest = max(stage.micro_batch for stage in self._prepared.stages)
        if largest == 1:
            raise OutOfMemory(
                f"memory ran out in {executor.step} at micro-batch 1, inside the limit of {format_size(plan.limit)}: {text}. "
                f"Give more than {format_limit(plan.limit)}, or cut finer with --partitions {len(plan.partitions) + 1}."
            )
        try:
            self._plan_anew(text, executor, largest // 2, f" with micro-batch {largest // 2} instead of {largest}")
        except (ModelError, DataError) as error:  # as BatchNorm says of a single row
            raise OutOfMemory(
                f"memory ran out in {executor.step} at micro-batch {largest}, inside the limit of {format_size(plan.limit)}, "
                f"and the model does not take {largest // 2} row(s) at once. Give more than {format_limit(plan.limit)}."
            ) from error

    def _plan_anew(self, text: str, executor: Executor, micro_batch: int, how: str) -> None:
        """Behind a failed allocation. The method stays: another one has other phases, and the position counts these."""
        self._preparation.methods = (self._prepared.method,)
        self._prepared = self._preparation.prepare(micro_batch=micro_batch, starts=self._prepared.plan.starts)
        self._reporter.record("allocation failed", step=str(executor.step), micro_batch=micro_batch, text=text)
        self._reporter.say(
            f"an allocation failed in {executor.step} inside the limit; going on from the last finished update{how}"
        )

    def _listen(self, event: Event) -> None:
        if isinstance(event, PhaseDone) and event.loss is not None:
            if event.phase.kind is PhaseKind.TEST:
                self._test = event.loss, event.accuracy
            elif event.phase.kind is PhaseKind.TRAIN:
                self._losses.append(event.loss)
        self._reporter.listen(event)

    def _guard(self) -> None:
        """Between two steps."""
        if not self._settings.saves:
            self._interrupts.check()
        if self._sampler.violations:
            raise LimitExceeded(
                f"the limit of {format_size(self._sampler.limit)} was passed: {format_size(self._sampler.peak)} by "
                f"{self._sampler.usage.source}, in {self._sampler.violation_label or 'start'}; the plan had predicted "
                f"{format_size(self._prepared.plan.peak)}. Earlier files are intact. Give a larger limit, and report this."
            )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _at_rest(self, executor: Executor) -> None:
        self._saving.at_rest(executor, self._partitions, self._prepared.phases)

    def _state_at(self, position: Position, metrics: Metrics) -> dict[str, Any]:
        """What a checkpoint says beside tensors."""
        return state_of(
            self._preparation,
            self._prepared,
            position,
            metrics,
            losses=self._losses,
            test=self._test,
            data=self._digest,
            job=self._job,
        )

    # --- the end --------------------------------------------------------------------------------------------------

    def _proof(self) -> Proof:
        """What was measured until now. Raises LimitExceeded."""
        plan, sampler = self._prepared.plan, self._sampler
        sampler.sample()
        self._guard()
        return Proof(
            limit=plan.limit, peak=sampler.peak, source=sampler.usage.source, predicted=max(plan.peak, sampler.known),
            runtime=plan.runtime, allocator_peak=self._device.allocator_peak(), host=plan.host_limit,
            file_growth=sampler.file_growth, samples=sampler.samples, violations=sampler.violations,
        )  # fmt: skip

    def _conclude(self, directory: RunDirectory, seconds: float) -> Result:
        plan, sampler = self._prepared.plan, self._sampler
        weights, proof = directory.root / WEIGHTS, self._proof()
        assert self._test is not None
        result = Result(
            weights=weights, test_loss=self._test[0], accuracy=self._test[1],
            train_losses=tuple(self._losses), proof=proof, plan=plan,
            seconds=round(seconds, 2), final_micro_batch=max(part.micro_batch for part in plan.partitions),
        )  # fmt: skip
        summary = {**asdict(result), "weights": str(weights), "peak at": sampler.peak_label, "plan": PLAN}
        write_text(directory.result(RESULT), json.dumps({**summary, **describe_versions()}, indent=1) + "\n")
        directory.publish()
        self._reporter.record("result", accuracy=result.accuracy, test_loss=result.test_loss, proof=asdict(proof), took=seconds)
        accuracy = "" if result.accuracy is None else f"test accuracy {100 * result.accuracy:.2f} %, "
        self._reporter.say(f"{accuracy}test loss {result.test_loss:.4f}; {seconds:.1f} s; weights in {weights}")
        self._reporter.proof(proof)
        self._state, self._finished = "done", f"the run is finished; its results are in {directory.root}."
        return result
