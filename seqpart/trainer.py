"""The facade: `Trainer(model, mem_limit="2GB").fit(train, test)`. It wires rooms together and schedules nothing."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from seqpart.activations import Boundaries, ReaderThread
from seqpart.arena import Arena
from seqpart.blocks import attach, detach, layout_of, tensors_of
from seqpart.checkpoint import WEIGHTS, export_weights
from seqpart.device import describe_versions, open_device
from seqpart.direct import aligned
from seqpart.errors import LimitExceeded, ModelError, OptionError, OutOfMemory
from seqpart.executor import AllocationFailed, Event, Executor, PhaseDone
from seqpart.gauge import Gauge
from seqpart.ingest import as_split, pour
from seqpart.interrupts import Interrupts
from seqpart.meter import Proof, Sampler, enforced
from seqpart.methods.method import LossFunction
from seqpart.optimizers import Build, describe
from seqpart.plan import Plan
from seqpart.preparation import Preparation, Prepared, refuse_small_disk
from seqpart.report import EVENTS, Reporter
from seqpart.resident import Resident
from seqpart.rows import RowLayout
from seqpart.rundir import SCRATCH_PREFIX, RunDirectory, clear_leftovers, new_name, write_text
from seqpart.schedule import PhaseKind, Position, checked, one_at_a_time
from seqpart.settings import Settings
from seqpart.store import Store
from seqpart.units import format_limit, format_size

RESULT = "result.json"
PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run left. `accuracy` is None for a regression."""

    weights: Path
    """A safetensors file with the model's own parameter names."""
    test_loss: float
    accuracy: float | None
    proof: Proof
    plan: Plan
    seconds: float
    final_micro_batch: int


class Trainer:
    """Trains `model` under a memory limit.

    model: an nn.Sequential, a list of modules, or a list of factories that each return a module (then the model never
        exists whole). Modules given alive are emptied while the run lasts and get their trained weights at the end.
    loss: (output, labels) -> mean loss, for the end of the network; default cross-entropy, or mean squared error for
        float labels.
    optimizer: `adam`, `adamw`, `sgd`, or a function from a list of parameters to a torch optimizer.
    options: the fields of Settings; `mem_limit` is required. A list gives each partition its own value.

    Raises OptionError or ModelError for what cannot be honoured.
    """

    def __init__(
        self, model: object, loss: LossFunction | None = None, optimizer: str | Build | None = None,
        *, quiet: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self._optimizer = None
        if callable(optimizer):
            clash = sorted({"lr", "weight_decay", "momentum"} & set(options))
            if clash:
                raise OptionError(f"{', '.join(clash)}: the optimizer function sets these itself; leave them out here.")
            self._optimizer = describe(getattr(optimizer, "__name__", "optimizer"), optimizer)
        elif optimizer is not None:
            options["optimizer"] = optimizer
        self.settings = Settings.of(**options)
        self.model, self._loss, self._quiet = model, loss, quiet
        self.device = open_device(self.settings.device)
        self.device.settle()

    def plan(self, train: object, test: object, *, reuse: Plan | None = None) -> Plan:
        """The plan, and nothing else: no file is written, nothing is trained. Raises what `fit` would raise of it."""
        return self.prepare(train, test, reuse=reuse).planned().plan

    def prepare(self, train: object, test: object, *, reuse: Plan | None = None) -> Preparation:
        """Everything checked and measured, ready to be planned."""
        with self.device.own_random_state():
            return self._prepared(train, test, reuse)

    def _prepared(self, train: object, test: object, reuse: Plan | None) -> Preparation:
        return Preparation(
            self.model, self.settings, as_split(train, "training"), as_split(test, "test"), self.device,
            final_loss=self._loss, optimizer=self._optimizer, folder=self._scratch_parent(), reuse=reuse,
        )  # fmt: skip

    def _scratch_parent(self) -> Path:
        return self.settings.offload_dir or self.settings.output_dir or Path("runs")

    def fit(self, train: object, test: object, *, reuse: Plan | None = None, reporter: Reporter | None = None) -> Result:
        """Train on `train` and evaluate on `test`: pairs (x, y) or data sets of (x, y) items.

        Raises DoesNotFit before anything is trained, LimitExceeded when the limit was passed, StoreError for disks.
        """
        sampler = Sampler(Gauge(self.device), limit=1 << 62)
        reporter = reporter or Reporter(quiet=self._quiet)
        began = time.perf_counter()
        with ExitStack() as stack:
            stack.callback(reporter.close)
            stack.enter_context(self.device.own_random_state())
            sampler.start()
            stack.callback(sampler.stop)
            preparation = self.prepare(train, test, reuse=reuse)
            sampler.limit = preparation.limit
            run = _Run(preparation, preparation.planned(), reporter, sampler, stack)
            return run.carry_out(began)


class _Run:
    """One fit: directories, homes, the loop, the result. Everything it opens is closed by `stack`."""

    def __init__(
        self, preparation: Preparation, prepared: Prepared, reporter: Reporter, sampler: Sampler, stack: ExitStack
    ) -> None:
        self._preparation, self._prepared, self._reporter = preparation, prepared, reporter
        self._settings, self._device = preparation.settings, preparation.device
        self._sampler, self._stack = sampler, stack
        self._last_test: PhaseDone | None = None
        self._state = "failed"
        self._interrupts = Interrupts()

    def carry_out(self, began: float) -> Result:
        plan = self._prepared.plan
        self._reporter.plan(plan)
        directory = self._open_directories(plan)
        reader_thread = self._stack.enter_context(ReaderThread())
        self._sampler.gauge.grant(plan.host_limit)
        arena = Arena(self._prepared.arena_bytes, self._device) if self._prepared.arena_bytes else None
        self._store = Store(self._scratch.homes, self._device, arena)
        self._stack.callback(self._store.close)
        self._boundaries = Boundaries(self._scratch.rows, self._device, arena)
        self._stack.callback(self._boundaries.close)
        self._stack.callback(self._give_back)
        with enforced(self._device, plan.limit):
            with self._told("the data were read"):
                self._pour_data()
            with self._told("the blocks were built"):
                self._build_homes()
            self._loop(reader_thread)
            with self._told("the weights were written"):
                export_weights(directory.result(WEIGHTS), self._prepared.chain, self._prepared.costs, self._store)
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

    def _open_directories(self, plan: Plan) -> RunDirectory:
        settings = self._settings
        name = new_name(settings.method)
        root = settings.output_dir or Path("runs") / name
        directory = RunDirectory(root, overwrite=settings.overwrite)
        self._stack.callback(lambda: directory.close(self._state))
        self._scratch = directory
        if settings.offload_dir is not None:
            self._scratch = RunDirectory(settings.offload_dir / f"{SCRATCH_PREFIX}{name}")
            self._stack.callback(self._scratch.vanish)
        refuse_small_disk(plan, self._scratch.root)
        found, freed = clear_leftovers(self._scratch.root.parent)
        if found or directory.cleaned:
            self._reporter.say(f"cleaned up {format_size(freed + directory.cleaned)} that killed runs had left")
        self._reporter.open_log(directory.result(EVENTS))
        self._reporter.record("start", **describe_versions(), settings={k: str(v) for k, v in asdict(settings).items()})
        write_text(directory.result(PLAN), plan.to_json())
        self._reporter.say(f"run directory {directory.root}")
        return directory

    def _pour_data(self) -> None:
        """Boundary 0: the data set's rows, checked and sent home."""
        for name, split in (("train", self._preparation.train), ("test", self._preparation.test)):
            rows = self._boundaries.create(name, 0, RowLayout(split.shape, torch.float32), split.count)
            pour(split, rows.append)
            rows.finish()
            self._boundaries.labels[name] = split.labels

    def _build_homes(self) -> None:
        """Every block is built alone and goes straight home: the model never exists whole."""
        staging = aligned(max(cost.layout.room for cost in self._prepared.costs))
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            module = block.build(self._device, self._settings.seed)
            tensors = tensors_of(module)
            if layout_of(tensors) != cost.layout:
                raise ModelError(f"{block}: its factory builds other tensors each time it is called.")
            views = cost.layout.views(staging)
            for name, tensor in tensors.items():
                views[name].copy_(tensor.detach())
            self._store.put(block.home, cost.layout, staging)
            detach(module)

    def _loop(self, thread: ReaderThread) -> None:
        """Run the schedule; after a failed allocation, go on from the last finished update with half the micro-batch."""
        position = Position()
        slot = self._device.empty(max(part.slot for part in self._prepared.partition_costs))
        while True:
            executor = self._executor(thread, slot, position)
            phases = self._prepared.phases
            self._reporter.begin(phases, position.phase, self._prepared.plan.limit, lambda: self._sampler.peak)
            self._sampler.label = lambda executor=executor: str(executor.step)  # type: ignore[misc]
            try:
                with self._interrupts:
                    executor.run(checked(one_at_a_time(phases, position)))
                return
            except AllocationFailed as failure:
                position, text = executor.position, str(failure)
            finally:
                self._reporter.end()
            self._halve_micro_batch(text, executor)

    def _halve_micro_batch(self, text: str, executor: Executor) -> None:
        plan = self._prepared.plan
        largest = max(part.micro_batch for part in plan.partitions)
        if largest == 1:
            raise OutOfMemory(
                f"memory ran out in {executor.step} at micro-batch 1, inside the limit of {format_size(plan.limit)}: {text}. "
                f"Give more than {format_limit(plan.limit)}, or cut finer with --partitions {len(plan.partitions) + 1}."
            )
        self._prepared = self._preparation.prepare(micro_batch=largest // 2, starts=plan.starts)
        self._reporter.record("allocation failed", step=str(executor.step), micro_batch=largest // 2, text=text)
        self._reporter.say(
            f"an allocation failed in {executor.step} inside the limit; going on from the last finished update with "
            f"micro-batch {largest // 2} instead of {largest}"
        )

    def _executor(self, thread: ReaderThread, slot: torch.Tensor, start: Position) -> Executor:
        prepared = self._prepared
        residents = [
            Resident(
                p, prepared.chain[part.first : part.last], prepared.costs[part.first : part.last], self._store, self._device,
                optimizer=optimizer, seed=self._settings.seed,
            )
            for p, (part, optimizer) in enumerate(zip(prepared.plan.partitions, prepared.optimizers, strict=True))
        ]  # fmt: skip
        return Executor(
            phases=prepared.phases, residents=residents, losses=prepared.loss, boundaries=self._boundaries,
            cache_layouts=prepared.cache_layouts, slot=slot, store=self._store, device=self._device, reader_thread=thread,
            seed=self._settings.seed, clip_grad_norm=self._settings.clip_grad_norm, listen=self._listen, guard=self._guard,
            start=start,
        )  # fmt: skip

    def _listen(self, event: Event) -> None:
        if isinstance(event, PhaseDone) and event.phase.kind is PhaseKind.TEST:
            self._last_test = event
        self._reporter.listen(event)

    def _guard(self) -> None:
        """Between two steps, when nothing is half done."""
        self._interrupts.check()
        if self._sampler.violations:
            raise LimitExceeded(
                f"the limit of {format_size(self._sampler.limit)} was passed: {format_size(self._sampler.peak)} by "
                f"{self._sampler.gauge.source}, in {self._sampler.violation_label or 'start'}; the plan had foretold "
                f"{format_size(self._prepared.plan.peak)}. Earlier files are intact. Give a larger limit, and report this."
            )

    def _give_back(self) -> None:
        """Weights of modules that were given alive, back from their homes: trained, or as they came if the run failed."""
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            if block.given_alive and block.home in self._store and not block.live_bytes and cost.weights:
                flat = aligned(cost.layout.room)
                self._store.get(block.home, flat)
                attach(block.husk, cost.layout.views(flat))
                block.husk.train(block.was_training)

    def _conclude(self, directory: RunDirectory, seconds: float) -> Result:
        plan, sampler = self._prepared.plan, self._sampler
        weights = directory.root / WEIGHTS
        sampler.sample()
        self._guard()
        assert self._last_test is not None
        proof = Proof(
            limit=plan.limit, peak=sampler.peak, source=sampler.gauge.source, predicted=plan.peak, runtime=plan.runtime,
            allocator_peak=self._device.allocator_peak(), host=plan.host_limit, file_growth=sampler.file_growth,
            samples=sampler.samples, violations=sampler.violations,
        )  # fmt: skip
        result = Result(
            weights=weights, test_loss=self._last_test.loss, accuracy=self._last_test.accuracy, proof=proof, plan=plan,
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
