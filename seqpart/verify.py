"""`seqpart verify`: some updates of the user's own model under the limit and again as a whole, every bit compared.

    (1) limited     the method, cut and streamed as it will train: a digest of every tensor before each update and at the end
    (2) control     the same with a wrong replay: a check that does not notice it is blind, and proves nothing
    (3) reference   the whole network, in as much memory as that takes: a digest of every tensor, compared with (1)
    (4) again       only where they differ: (1) up to the tensor that (3) left on disk, for the numbers

Digests, because all tensors of some updates are many times the model. (3) needs the memory that the limit is there to
avoid: equality with full training is seen where full training can run, on a smaller model of the same blocks if need be.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
import xxhash

from seqpart.activations import ReaderThread
from seqpart.arguments import gathered
from seqpart.direct import aligned
from seqpart.errors import DoesNotFit, OptionError, OutOfMemory, VerifyMismatch
from seqpart.executor import Executor
from seqpart.gauge import Gauge
from seqpart.ingest import as_split
from seqpart.job import Job, opened
from seqpart.losses import LossFunction
from seqpart.meter import Sampler, limit_for
from seqpart.methods import EXACT
from seqpart.optimizers import Build
from seqpart.plan import Plan
from seqpart.preparation import Preparation, Prepared
from seqpart.report import Reporter
from seqpart.run import Run
from seqpart.rundir import new_name
from seqpart.schedule import PhaseKind
from seqpart.trainer import Trainer
from seqpart.units import format_size
from seqpart.watch import STATE, VALUE, Enough, Key, Watch

_KEPT = ".given"
"""Home of the weights with which a module was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What `verify` returns: both ways gave the same bits, and a wrong replay did not go unnoticed."""

    method: str
    reference: str
    steps: int
    plan: Plan
    """The one under the limit."""
    peak: int
    """Measured under the limit, in bytes."""
    tensors: int
    comparisons: int
    digest: str
    """Of all that was compared."""
    caught: str
    """The first tensor in which the wrong replay was noticed."""

    def __str__(self) -> str:
        return (
            f"proof: {self.method} in {len(self.plan.partitions)} partitions under {format_size(self.plan.limit)} equals "
            f"{self.reference}, bit for bit: {self.tensors} tensors (weights, gradients, optimizer state, buffers, loss) in "
            f"{self.comparisons} comparisons over {self.steps} update(s), digest {self.digest}; a wrong replay was noticed"
        )


def verify(
    model: object, train: object, loss: LossFunction | None = None, optimizer: str | Build | None = None,
    *, steps: int = 3, reference: str = "full", reporter: Reporter | None = None, **options: Any,
) -> Agreement:  # fmt: skip
    """Train `model` for `steps` updates under the limit and again by `reference`, and compare every bit.

    model, train, loss, optimizer, options: as `Trainer` and its `fit` take them; `method` is "streamed" if it is left
    out. Modules that were given alive get back the weights that they came with.

    Raises VerifyMismatch with the first tensor that differs, or where the check did not notice a wrong replay;
    DoesNotFit where the reference has no room; OptionError and the like as training would.
    """
    reporter = reporter or Reporter(quiet=True)
    _refuse(steps, reference, options)
    folder = Path(options.get("offload_dir") or "runs") / new_name("verify")
    options = {"method": "streamed", **options, "offload_dir": None, "output_dir": folder, "save_every": "never"}
    limited = _Way.planned("limited", Trainer(model, loss, optimizer, quiet=True, **options), train)
    _refuse_plan(limited, steps, reference)
    other = _reference(limited, Trainer(model, loss, optimizer, quiet=True, **_whole(options, limited, reference)), train)
    reporter.say(_announced(limited, other, steps))

    first, kept = Watch(steps), folder.with_suffix(".tensor")
    limited.run(first, reporter)
    control = Watch(steps, expected=first.seen)
    # What falsifies needs memory of its own: the control is not held to the limit.
    replace(limited, name="control", limit=max(limited.limit, other.limit)).run(control, reporter, falsify=True)
    compared = Watch(steps, expected=first.seen, keeps=kept)
    try:
        other.run(compared, reporter)
        if compared.first is not None:
            again = Watch(steps, wanted=(compared.first, kept))
            replace(limited, name="again").run(again, reporter)
            raise VerifyMismatch(_told(limited, other, compared.first, first, again))
    finally:
        kept.unlink(missing_ok=True)
    if control.first is None:
        raise VerifyMismatch(
            f"the check is blind: {limited.method} was run once more with falsified activations and gradients, and all tensors "
            f"of {steps} update(s) stayed the same. Nothing is proven. Does anything learn? More --steps may tell."
        )
    found = _agreement(limited, other, first, str(control.first))
    reporter.say(str(found))
    return found


# --- what is refused ----------------------------------------------------------------------------------------------


def _refuse(steps: int, reference: str, options: dict[str, Any]) -> None:
    if steps < 1:
        raise OptionError(f"--steps: expected a number of updates from 1 up; found {steps}.")
    exact = [method.name for method in EXACT]
    if reference not in exact:
        raise OptionError(f"--reference: expected one of {', '.join(exact)}; found {reference!r}.")
    if options.get("method") == "sil":
        raise OptionError(
            "--method sil is approximate: its bits are not those of full training. Verify streamed or checkpointed."
        )
    if options.get("method") == "full":
        raise OptionError("--method full is what the others are compared with. Verify streamed or checkpointed.")
    if options.get("output_dir") or options.get("overwrite"):
        raise OptionError("--output-dir and --overwrite: verify keeps no results. --offload-dir says where its files may be.")


def _refuse_plan(limited: "_Way", steps: int, reference: str) -> None:
    plan, phases = limited.prepared.plan, limited.prepared.phases
    if len(plan.partitions) == 1:
        raise OptionError(
            f"the network fits {format_size(plan.limit)} as one partition, which is full training already: there is nothing to "
            "verify. Give a smaller --mem-limit, or --method streamed --partitions 2."
        )
    if plan.method == reference:
        raise OptionError(f"--reference {reference} is what is to be verified. Give another one, or another --method.")
    updates = sum(phase.updates for phase in phases if phase.kind is PhaseKind.TRAIN)
    if steps > updates:
        raise OptionError(f"--steps {steps}: training has {updates} update(s) in all. Give at most that, or more --epochs.")


def _whole(options: dict[str, Any], limited: "_Way", reference: str) -> dict[str, Any]:
    """The settings of the reference: the same micro-batches, in all the memory that there is."""
    device = limited.preparation.device
    room = min(device.total_memory(), Gauge(device).read() + device.free_memory())
    micro_batch = limited.prepared.plan.partitions[0].micro_batch
    return {**options, "method": reference, "mem_limit": room, "micro_batch_size": micro_batch, "partitions": "auto"}


def _reference(limited: "_Way", trainer: Trainer, train: object) -> "_Way":
    """Raises DoesNotFit where there is no room for it: then there is nothing to compare with."""
    try:
        found = _Way.planned("reference", trainer, train)
    except DoesNotFit as error:
        needs = "" if error.smallest is None else f" needs {format_size(error.smallest)}, and"
        settings = trainer.settings
        raise DoesNotFit(
            f"verify compares with {settings.method} training, which{needs} has {format_size(int(settings.mem_limit))} here "
            f"(micro-batch {settings.micro_batch_size}). What is compared must run, whatever --mem-limit is. Verify a model of "
            "fewer or narrower blocks of the same kinds, with a smaller --micro-batch-size, or on a machine with more memory"
            + ("; or take --reference checkpointed, which needs less." if settings.method == "full" else "."),
            smallest=error.smallest,
        ) from None
    # What the plan needs, and a little: it is not the limit of the reference that is to be proven.
    found.limit = max(limited.limit, min(found.limit, limit_for(found.prepared.plan.peak) * 11 // 10))
    return found


# --- what is said -------------------------------------------------------------------------------------------------


def _announced(limited: "_Way", other: "_Way", steps: int) -> str:
    plan = limited.prepared.plan
    count, micro_batch = len(plan.partitions), plan.partitions[0].micro_batch
    kept = count - 1 - plan.keeps_graph_from if plan.keeps_graph_from is not None else 0
    return (
        f"verify: {steps} update(s) of {limited.method} under {format_size(limited.limit)} ({count} partitions, micro-batch "
        f"{micro_batch}, {plan.slots} slot(s), boundaries on {plan.relay}, activations of {kept + 1} kept), then with a wrong "
        f"replay, then of {other.method} under {format_size(other.limit)}"
    )


def _agreement(limited: "_Way", other: "_Way", watch: Watch, caught: str) -> Agreement:
    total = xxhash.xxh3_128()
    for key in sorted(watch.seen):
        total.update(repr(key).encode() + watch.seen[key])
    return Agreement(
        method=limited.method, reference=other.method, steps=watch.steps, plan=limited.prepared.plan, peak=limited.peak,
        tensors=len({key[1:] for key in watch.seen}), comparisons=len(watch.seen), digest=total.hexdigest(), caught=caught,
    )  # fmt: skip


def _told(limited: "_Way", other: "_Way", key: Key, first: Watch, again: Watch) -> str:
    """What differs, by how much, and whether the model repeats itself at all."""
    if again.seen.get(key) == first.seen.get(key):
        cause = (
            f"{limited.method} gave the same bits when it was run again: what is computed a second time is not what was "
            "computed first. Does a block keep state that is neither parameter nor buffer? If none does, report this."
        )
    else:
        cause = (
            f"{limited.method} gave other bits when it was run again: the model does not repeat itself. Does a block draw "
            "random numbers that are not torch's, keep state that is neither parameter nor buffer, or use kernels that add in "
            "any order?"
        )
    return f"{limited.method} and {other.method} differ, first in {key} {key.when(first.steps)}: {again.difference}.\n  {cause}"


# --- one run, and what is seen of it ------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Way:
    """One way to train, planned and ready; each `run` begins anew, with the weights that the model came with."""

    name: str
    method: str
    preparation: Preparation
    prepared: Prepared
    limit: int
    """What its runs are held to: the user's limit, or more."""
    peak: int = 0
    """Measured in the last run."""

    @classmethod
    def planned(cls, name: str, trainer: Trainer, train: object) -> "_Way":
        split = as_split(train, "training")
        preparation = trainer.prepare(split, split)
        prepared = preparation.planned()
        plan = prepared.plan
        return cls(name=name, method=plan.method, preparation=preparation, prepared=prepared, limit=plan.limit)

    def run(self, watch: Watch, reporter: Reporter, *, falsify: bool = False) -> None:
        """Train until `watch` has seen enough. Nothing stays on the disk."""
        preparation, began = self.preparation, time.perf_counter()
        preparation.falsify = falsify
        prepared = replace(self.prepared, plan=replace(self.prepared.plan, limit=self.limit))
        sampler = Sampler(Gauge(preparation.device), limit=self.limit)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, preparation.folder, ignore_errors=True)
            silent = Reporter(quiet=True)
            stack.callback(silent.close)
            stack.enter_context(preparation.device.own_random_state())
            sampler.start()
            stack.callback(sampler.stop)
            with suppress(Enough):
                _Watched(preparation, prepared, silent, sampler, stack, watch).carry_out(began)
        self.peak = sampler.peak
        word = "noticed" if falsify else "differs"
        seen = "" if watch.first is None else f"  {word} in {watch.first} {watch.first.when(watch.steps)}"
        seconds = time.perf_counter() - began
        reporter.say(f"  {self.name:<9}  {self.method:<12}  peak {format_size(self.peak):>8}  {seconds:6.1f} s{seen}")


class _Watched(Run):
    """A run that ends where its watch has seen enough, leaves no results, and gives weights back as they came."""

    def __init__(
        self,
        preparation: Preparation,
        prepared: Prepared,
        reporter: Reporter,
        sampler: Sampler,
        stack: ExitStack,
        watch: Watch,
    ) -> None:
        super().__init__(preparation, prepared, reporter, sampler, stack, progress=None, job=None, witness=watch.before_update)
        self._watch, self._goes_on = watch, True

    def _pour(self, name: str) -> None:
        """The training rows alone: nothing is tested."""
        if name == "train":
            super()._pour(name)

    def _build_homes(self, *, keep: bool) -> None:
        super()._build_homes(keep=keep)
        for block in self._prepared.chain:
            if block.given_alive and block.home in self._store:
                self._copy_home(block.home, block.home + _KEPT)

    def _give_back(self) -> None:
        for block in self._prepared.chain:
            if block.home + _KEPT in self._store:
                self._copy_home(block.home + _KEPT, block.home)
        super()._give_back()

    def _copy_home(self, source: str, target: str) -> None:
        layout = self._store.layout(source)
        flat = aligned(layout.room)
        self._store.get(source, flat)
        self._store.put(target, layout, flat)

    def _at_rest(self, executor: Executor) -> None:
        self._interrupts.check()
        self._goes_on = self._prepared.phases[executor.position.phase].kind is PhaseKind.TRAIN
        self._watch.at_rest(executor)

    def _halve_micro_batch(self, text: str, executor: Executor) -> None:
        micro_batch = max(stage.micro_batch for stage in self._prepared.stages)
        raise OutOfMemory(
            f"memory ran out in {executor.step} at micro-batch {micro_batch}, inside the limit of "
            f"{format_size(self._prepared.plan.limit)}: {text}. Training would go on with half of it; to verify that, give "
            f"--micro-batch-size {max(1, micro_batch // 2)}."
        )

    def _run_stages(self, thread: ReaderThread) -> None:
        with suppress(Enough):
            super()._run_stages(thread)
        if not self._watch.found:  # nothing is loaded any more: there is room to read the homes
            self._see_homes()
            self._watch.miss()
        raise Enough

    def _see_homes(self) -> None:
        """What the last update left. Of optimizer state nothing is kept where no update would follow."""
        for block in self._prepared.chain:
            for home, kind in ((block.home, VALUE), (block.state_home, STATE))[: 2 if self._goes_on else 1]:
                if home not in self._store:
                    continue
                layout = self._store.layout(home)
                flat = aligned(layout.room)
                self._store.get(home, flat)
                for name, tensor in layout.views(flat).items():
                    self._watch.see(Key(self._watch.steps, kind, block.number, f"{block.name}.{name}"), tensor)


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VerifyJob(Job):
    """Prove on your own model that training under the limit gives the bits of full training, or name the tensor that differs.

    Some updates are made under --mem-limit, again with a deliberately wrong replay, which must be noticed, and again by
    --reference, which needs the memory of full training. Exit code 0: every bit is the same; 5: not, or the check is blind.
    """

    method: str = "streamed"
    """What is to be verified: streamed, checkpointed, or auto (whichever training would take)."""
    steps: int = 3
    """Updates to compare, from the first one on."""
    reference: str = "full"
    """What it is to be equal to: full, or checkpointed or streamed, which need less memory."""


_NOT_OURS = (
    "resume", "plan", "plan_out", "dry_run", "print_schedule", "output_dir", "overwrite", "recovery_epochs",
)  # fmt: skip


def verified(arguments: Sequence[str]) -> None:
    """`seqpart verify ARGUMENTS`. Raises what `verify` raises."""
    job = tyro.cli(
        VerifyJob, args=gathered(list(arguments), VerifyJob), prog="seqpart verify", config=(tyro.conf.OmitArgPrefixes,)
    )
    given = [f"--{name.replace('_', '-')}" for name in _NOT_OURS if getattr(job, name)]
    if given:
        raise OptionError(f"{', '.join(given)}: verify trains a few updates and keeps nothing. Leave it out.")
    reporter = Reporter(quiet=job.quiet)
    _, trainer, train, _ = opened(job, reporter)
    verify(trainer.model, train, steps=job.steps, reference=job.reference, reporter=reporter, **job.settings())
