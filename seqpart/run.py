"""One fit from directories to proof: homes are made or found again, the stages are run, checkpoints saved, results written."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import seqpart.manifest as manifests
from seqpart.activations import Boundaries, ReaderThread
from seqpart.arena import Arena
from seqpart.blocks import attach, detach, layout_of, tensors_of
from seqpart.checkpoint import WEIGHTS, export_weights
from seqpart.device import describe_versions
from seqpart.direct import aligned
from seqpart.errors import CorruptFile, Interrupted, LimitExceeded, ModelError, OutOfMemory, StoreError
from seqpart.executor import AllocationFailed, Event, Executor, Hooks
from seqpart.ingest import pour
from seqpart.interrupts import Interrupts
from seqpart.meter import Proof, Sampler, enforced
from seqpart.passes import Passes, PhaseDone
from seqpart.plan import Plan
from seqpart.preparation import Preparation, Prepared, Stage, refuse_small_disk
from seqpart.progress import Progress, data_digest, state_of
from seqpart.rateschedule import rate_schedule
from seqpart.relay import Relay
from seqpart.relaying import open_relay
from seqpart.report import EVENTS, Reporter
from seqpart.resident import Resident
from seqpart.rundir import SCRATCH_PREFIX, RunDirectory, clear_leftovers, new_name, resumable, write_text
from seqpart.schedule import Phase, PhaseKind, Position, Step, checked, steps_of
from seqpart.slots import Slots
from seqpart.store import Store
from seqpart.tally import Tally
from seqpart.units import format_limit, format_size

RESULT = "result.json"
PLAN = "plan.json"
JOB = "job.json"

Witness = Callable[[Resident, Step], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run left. `accuracy` is None for a regression."""

    weights: Path
    """A safetensors file with the model's own parameter names."""
    test_loss: float
    accuracy: float | None
    train_losses: tuple[float, ...]
    """Mean loss of every training pass, in order."""
    proof: Proof
    plan: Plan
    seconds: float
    final_micro_batch: int


class Run:
    """Everything that it opens is closed by `stack`."""

    def __init__(
        self, preparation: Preparation, prepared: Prepared, reporter: Reporter, sampler: Sampler, stack: ExitStack,
        *, progress: Progress | None, job: dict[str, Any] | None, witness: Witness | None,
    ) -> None:  # fmt: skip
        self._preparation, self._prepared, self._reporter = preparation, prepared, reporter
        self._settings, self._device = preparation.settings, preparation.device
        self._sampler, self._stack, self._job, self._witness = sampler, stack, job, witness
        self._progress = progress
        self._losses = list(progress.losses) if progress is not None else []
        self._test = progress.test if progress is not None else None
        """Loss and accuracy of the latest pass over the test rows."""
        self._residents: list[Resident] = []
        self._state = "failed"
        self._interrupts = Interrupts()
        self._saved_at, self._updates_since = time.monotonic(), 0

    def carry_out(self, began: float) -> Result:
        plan = self._prepared.plan
        self._reporter.plan(plan)
        directory = self._directory = self._open_directories(plan)
        reader_thread = self._stack.enter_context(ReaderThread())
        self._sampler.gauge.grant(plan.host_limit)
        arena_bytes, relay_bytes = self._prepared.arena_bytes, self._prepared.relay_bytes
        self._arena = Arena(arena_bytes, self._device, first=relay_bytes) if arena_bytes else None
        self._boundary_room = self._arena.take(relay_bytes) if self._arena is not None and relay_bytes else None
        self._store = Store(self._scratch.homes, self._device, self._arena)
        self._stack.callback(self._store.close)
        if self._prepared.method.exact:
            self._store.reserve(self._prepared.hosted())
        self._boundaries = Boundaries(self._scratch.rows, self._device, self._arena)
        self._stack.callback(self._boundaries.close)
        self._stack.callback(self._give_back)
        self._digest = data_digest(self._preparation.train, self._preparation.test)
        with directory.interruptible():
            with enforced(self._device, plan.limit):
                self._fill_homes()
                with directory.resumable(), self._interrupts:
                    self._run_stages(reader_thread)
                    with self._told("the weights were written"):
                        export_weights(directory.result(WEIGHTS), self._prepared.chain, self._prepared.costs, self._store)
                    self._obey(Position(len(self._prepared.phases)), Tally())
            return self._conclude(directory, time.perf_counter() - began)

    @contextmanager
    def _told(self, when: str) -> Iterator[None]:
        """Outside the loop no smaller micro-batch helps: say when memory ran out."""
        try:
            yield
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"memory ran out while {when}, inside the limit of {format_size(self._prepared.plan.limit)}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Give a larger --mem-limit."
            ) from error

    # --- directories and homes ------------------------------------------------------------------------------------

    def _open_directories(self, plan: Plan) -> RunDirectory:
        settings, progress = self._settings, self._progress
        manifest = progress.manifest if progress is not None else None
        name = new_name(plan.method)
        root = progress.root if progress is not None else settings.output_dir or Path("runs") / name
        directory = RunDirectory(root, overwrite=settings.overwrite, resume=manifest is not None)
        self._stack.callback(lambda: directory.close(self._state))
        self._scratch = directory
        elsewhere = manifest.scratch if manifest is not None and manifest.scratch.resolve() != root.resolve() else None
        if elsewhere is None and manifest is None and settings.offload_dir is not None:
            elsewhere = settings.offload_dir / f"{SCRATCH_PREFIX}{name}"
        if elsewhere is not None:
            self._scratch = RunDirectory(elsewhere, run=root, resume=manifest is not None)
            self._stack.callback(self._scratch.vanish)
        if manifest is None:
            refuse_small_disk(plan, self._scratch.root)
        self._tell_leftovers(directory)
        self._reporter.open_log(directory.result(EVENTS), add=manifest is not None)
        self._reporter.record("start", **describe_versions(), settings={k: str(v) for k, v in asdict(settings).items()})
        write_text(directory.result(PLAN), plan.to_json())
        if self._job is not None:
            write_text(directory.result(JOB), json.dumps(self._job, indent=1) + "\n")
        self._reporter.say(f"run directory {directory.root}")
        if progress is not None:
            self._reporter.say(progress.words(self._prepared.phases))
        return directory

    def _tell_leftovers(self, directory: RunDirectory) -> None:
        parent = self._scratch.root.parent
        found, freed = clear_leftovers(parent)
        if found or directory.cleaned:
            self._reporter.say(f"cleaned up {format_size(freed + directory.cleaned)} that killed runs had left")
        waiting, held = resumable(parent)
        if waiting:
            self._reporter.say(
                f"{waiting} interrupted run(s) beside this one hold {format_size(held)}: --resume them, or remove them"
            )

    def _fill_homes(self) -> None:
        """Weights and rows: from the checkpoint, or from the model and the data."""
        progress = self._progress if self._progress is not None and self._progress.manifest is not None else None
        for name, split in (("train", self._preparation.train), ("test", self._preparation.test)):
            self._boundaries.labels[name] = split.labels
        with self._told("the blocks were built"):
            self._build_homes(keep=progress is not None)
        if progress is not None and progress.manifest is not None:
            with self._told("the checkpoint was read"):
                manifests.restore(progress.manifest, self._store, self._boundaries, self._pour_again)
            for name in progress.unused_states(self._prepared):
                self._store.discard(name)
            return
        with self._told("the data were read"):
            self._pour("train")
            self._pour("test")

    def _pour_again(self, name: str, error: CorruptFile) -> None:
        self._reporter.say(f"{error} It is made again from the data.")
        self._pour(name)

    def _pour(self, name: str) -> None:
        """Boundary 0: the data set's rows, checked and sent home."""
        split = self._preparation.train if name == "train" else self._preparation.test
        rows = self._boundaries.create(name, 0, self._prepared.input_layout, split.count)
        pour(split, rows.append)
        rows.finish()

    def _build_homes(self, *, keep: bool) -> None:
        """Every block is built alone and goes straight home: the model never exists whole. `keep`: homes are there."""
        staging = aligned(max(cost.layout.room for cost in self._prepared.costs))
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            module = block.build(self._device, self._settings.seed)
            tensors = block.own(tensors_of(module))
            if layout_of(tensors) != cost.layout:
                raise ModelError(f"{block}: its factory builds other tensors each time it is called.")
            if not keep:
                views = cost.layout.views(staging)
                for name, tensor in tensors.items():
                    views[name].copy_(tensor.detach())
                self._store.put(block.home, cost.layout, staging)
            detach(module)

    def _give_back(self) -> None:
        """Weights of modules that were given alive, back from their homes: trained, or as they came if the run failed."""
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            if block.given_alive and block.home in self._store and not block.live_bytes and cost.weights:
                flat = aligned(cost.layout.room)
                try:
                    self._store.get(block.home, flat)
                except StoreError:
                    if self._state == "done":
                        raise
                    continue  # the run has its own error to tell
                attach(block.husk, cost.layout.views(flat))
                block.restore_modes()

    # --- the loop -------------------------------------------------------------------------------------------------

    def _run_stages(self, thread: ReaderThread) -> None:
        """Run the schedule; after a failed allocation, go on from the last finished update with half the micro-batch."""
        position, tally = Position(), None
        if self._progress is not None and self._progress.manifest is not None:
            position = self._progress.position
            tally = Tally.from_json(self._progress.tally, self._device.torch) if self._progress.tally else None
        self._saved_at = time.monotonic()
        number = 0
        while number < len(self._prepared.stages):
            stage = self._prepared.stages[number]
            if position.phase >= stage.end:
                number += 1
                continue
            failed, position, tally = self._run_stage(stage, position, tally, thread)
            if failed is not None:
                self._obey(position, tally or Tally())
                self._halve_micro_batch(*failed)

    def _run_stage(
        self, stage: Stage, position: Position, tally: Tally | None, thread: ReaderThread
    ) -> tuple[tuple[str, Executor] | None, Position, Tally | None]:
        """(what failed, where the run stands, its sums): from `position` to the stage's end, or to a failed allocation."""
        with ExitStack() as stack:
            relay = self._relay(stage)
            stack.callback(relay.close)
            executor = self._executor(thread, stage, relay, position, tally)
            phases = self._prepared.phases
            self._reporter.begin(phases, position.phase, self._prepared.plan.limit, lambda: self._sampler.peak)
            stack.callback(self._reporter.end)
            self._sampler.label = lambda: str(executor.step)
            try:
                executor.run(checked(steps_of(phases[: stage.end], position), stage.means.slots))
            except AllocationFailed as failure:
                return (str(failure), executor), executor.position, executor.passes.rested
            return None, executor.position, None

    def _relay(self, stage: Stage) -> Relay:
        rows = max(phase.batch for phase in self._prepared.phases)
        return open_relay(
            stage.means.relay, self._prepared.partition_costs, rows, stage.micro_batch, self._boundary_room,
            self._scratch.rows / "relay.part", self._device,
        )  # fmt: skip

    def _executor(self, thread: ReaderThread, stage: Stage, relay: Relay, start: Position, tally: Tally | None) -> Executor:
        prepared, settings = self._prepared, self._settings
        residents = self._residents = [
            Resident(
                p, prepared.chain[part.first : part.last], prepared.costs[part.first : part.last], self._store, self._device,
                optimizer=optimizer, seed=settings.seed, autocast=settings.autocast, borrows=stage.means.borrows,
            )
            for p, (part, optimizer) in enumerate(zip(prepared.plan.partitions, stage.optimizers, strict=True))
        ]  # fmt: skip
        for resident in residents if stage.means.borrows else ():
            owners = {tie.owner for _, tie in resident.tied}
            resident.lenders = [other for other in residents if owners.intersection(other.blocks)]
        passes = Passes(
            phases=prepared.phases, residents=residents, losses=prepared.loss, boundaries=self._boundaries,
            cache_layouts=prepared.cache_layouts, relay=relay, device=self._device, reader_thread=thread, seed=settings.seed,
            start=start, tally=tally, falsify=self._preparation.falsify, listen=self._listen,
        )  # fmt: skip
        factor = rate_schedule(settings.lr_schedule, settings.warmup_updates)

        def rate(phase: Phase, done: int) -> float:
            return factor((phase.epoch - 1) * phase.updates + done, phase.epochs * phase.updates)

        gradients = any(phase.clips and phase.streamed for phase in prepared.phases[: stage.end])
        rooms = sorted(resident.needs(to_update=True, gradients=gradients) for resident in residents)
        hooks = Hooks(listen=self._listen, guard=self._guard, at_rest=self._at_rest)
        if self._witness is not None:
            hooks.witness = self._witness
        return Executor(
            phases=prepared.phases, residents=residents, passes=passes, boundaries=self._boundaries,
            slots=Slots(rooms[-stage.means.slots :], self._device), store=self._store, device=self._device,
            clip_grad_norm=settings.clip_grad_norm, rate=rate, hooks=hooks, start=start,
        )  # fmt: skip

    def _halve_micro_batch(self, text: str, executor: Executor) -> None:
        plan = self._prepared.plan
        largest = max(stage.micro_batch for stage in self._prepared.stages)
        if largest == 1:
            raise OutOfMemory(
                f"memory ran out in {executor.step} at micro-batch 1, inside the limit of {format_size(plan.limit)}: {text}. "
                f"Give more than {format_limit(plan.limit)}, or cut finer with --partitions {len(plan.partitions) + 1}."
            )
        self._preparation.methods = (self._prepared.method,)  # another one has other phases, and the position counts these
        self._prepared = self._preparation.prepare(micro_batch=largest // 2, starts=plan.starts)
        self._reporter.record("allocation failed", step=str(executor.step), micro_batch=largest // 2, text=text)
        self._reporter.say(
            f"an allocation failed in {executor.step} inside the limit; going on from the last finished update with "
            f"micro-batch {largest // 2} instead of {largest}"
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
                f"{self._sampler.gauge.source}, in {self._sampler.violation_label or 'start'}; the plan had foretold "
                f"{format_size(self._prepared.plan.peak)}. Earlier files are intact. Give a larger limit, and report this."
            )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _at_rest(self, executor: Executor) -> None:
        """Everything stands at a position: the moment to save, if it is time to, or to obey a signal."""
        self._updates_since += 1
        updates, seconds = self._settings.saving
        due = (updates is not None and self._updates_since >= updates) or (
            seconds is not None and time.monotonic() - self._saved_at >= seconds
        )
        if due or self._interrupts.waiting:
            executor.settle()
            for resident in self._residents:  # also one that is coming, and may be on its way home before that
                resident.transfer.wait()
            self._obey(executor.position, executor.passes.rested, due=due)

    def _obey(self, position: Position, tally: Tally, *, due: bool = False) -> None:
        """The homes are what `position` says: save if it is `due`, end if a signal waits."""
        waiting = self._interrupts.waiting  # once: what comes from here on is not saved
        if self._settings.saves and (due or waiting):
            self._save(position, tally)
        if waiting and self._settings.saves:
            self._state = "interrupted"
            raise Interrupted(self._directory.root)
        if waiting:
            self._interrupts.check()

    def _save(self, position: Position, tally: Tally) -> None:
        began = time.perf_counter()
        state = state_of(
            self._preparation, self._prepared, position, tally, losses=self._losses, test=self._test, data=self._digest
        )
        manifests.save(self._directory.root, self._scratch.root, state, self._store, self._boundaries)
        self._saved_at, self._updates_since = time.monotonic(), 0
        self._reporter.record(
            "checkpoint", phase=position.phase, updates=position.updates, took=round(time.perf_counter() - began, 3)
        )

    # --- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, directory: RunDirectory, seconds: float) -> Result:
        plan, sampler = self._prepared.plan, self._sampler
        weights = directory.root / WEIGHTS
        sampler.sample()
        self._guard()
        assert self._test is not None
        proof = Proof(
            limit=plan.limit, peak=sampler.peak, source=sampler.gauge.source, predicted=plan.peak, runtime=plan.runtime,
            allocator_peak=self._device.allocator_peak(), host=plan.host_limit, file_growth=sampler.file_growth,
            samples=sampler.samples, violations=sampler.violations,
        )  # fmt: skip
        result = Result(
            weights=weights, test_loss=self._test[0], accuracy=self._test[1],
            train_losses=tuple(self._losses), proof=proof, plan=plan,
            seconds=round(seconds, 2), final_micro_batch=max(part.micro_batch for part in plan.partitions),
        )  # fmt: skip
        summary = {
            **asdict(result),
            "weights": str(weights),
            "peak at": sampler.peak_label,
            "plan": PLAN,
            **describe_versions(),
        }
        write_text(directory.result(RESULT), json.dumps(summary, indent=1) + "\n")
        directory.publish()
        self._reporter.record("result", accuracy=result.accuracy, test_loss=result.test_loss, proof=asdict(proof), took=seconds)
        accuracy = "" if result.accuracy is None else f"test accuracy {100 * result.accuracy:.2f} %, "
        self._reporter.say(f"{accuracy}test loss {result.test_loss:.4f}; {seconds:.1f} s; weights in {weights}")
        self._reporter.proof(proof)
        self._state = "done"
        return result
