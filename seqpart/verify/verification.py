"""`seqpart verify`: some updates of the user's own model under the limit and again as a whole, every bit compared.

    (1) limited     the method, cut and streamed as it will train: a digest of every tensor before each update and at the end
    (2) control     the same with a wrong replay: a check that does not notice it is blind, and proves nothing
    (3) reference   the whole network, in as much memory as that takes: a digest of every tensor, compared with (1)
    (+) plain       a loop that shares nothing with these but the batches: the model's own forward pass, torch's optimizer
    (4) again       only where they differ: (1) up to the tensor that (3) left on disk, for the numbers
    (5) cut in N    (1) cut in two, and after every block: the same digests
    (6) by N        (1) with a half and a quarter of the micro-batch: the same losses, where blocks treat rows alike
    (7) plan N      (1) by other plans, if they are asked for, drawn from all that a plan may answer: the same digests

(1), (3), (5) and (7) are followed by an evaluation, which is compared too.

Digests, because all tensors of some updates are many times the model. (3) needs the memory that the limit is there to
avoid: equality with full training is seen where full training can run, on a smaller model of the same blocks if need be.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from seqpart.data.splits import Split
from seqpart.device.limit import limit_for
from seqpart.device.ranks import refuse_ranks
from seqpart.device.usage import MemoryUsage
from seqpart.errors import DataError, DoesNotFit, ModelError, OptionError, VerifyMismatch
from seqpart.methods import EXACT, METHODS
from seqpart.model.compiled import as_written, original
from seqpart.model.freezing import freezing
from seqpart.model.inspection import kept_modes
from seqpart.model.losses import LossChoice
from seqpart.model.optimizer_trials import Build
from seqpart.model.packs import tiers_in_words
from seqpart.model.quantized import plain_tensors
from seqpart.model.tiling import first_that_fits
from seqpart.plan.plan import Plan
from seqpart.profile.fake_mode import FakeMode
from seqpart.report.reporter import Reporter
from seqpart.schedule.phase import PhaseKind
from seqpart.schedule.phases import counted
from seqpart.store.scratch import own_folder
from seqpart.trainer import Trainer
from seqpart.units import format_limit, format_size
from seqpart.verify.answers import VALUE, Answers, Digests, Key, digest_of, keep_tensor
from seqpart.verify.variant import Unlike, Variant, agreed, drawn_plans, train_plainly, why_not


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Result of `verify`: all bits were equal, and a wrong replay was noticed."""

    method: str
    reference: str
    steps: int
    plan: Plan
    """The plan under the limit."""
    peak: int
    """Measured under the limit, in bytes."""
    tensors: int
    comparisons: int
    digest: str
    """Digest of everything that was compared."""
    caught: str
    """The first tensor in which the wrong replay was noticed."""
    cuts: tuple[int, ...] = ()
    """Other numbers of partitions with the same bits."""
    divided: str = ""
    """Result with smaller micro-batches, as text."""
    plans: tuple[Plan, ...] = ()
    """Other plans with the same bits."""
    unlike: str = ""
    """Why no plain loop was compared; "" if one was."""

    def __str__(self) -> str:
        return (
            f"proof: {self.method} in {len(self.plan.partitions)} partitions under {format_size(self.plan.limit)} equals "
            f"{self.reference}, bit for bit: {self.tensors} tensors (weights, gradients, optimizer state, buffers, loss) in "
            f"{self.comparisons} comparisons over {self.steps} update(s), digest {self.digest}; a wrong replay was noticed"
            + (f"; a plain loop is not compared: {self.unlike}" if self.unlike else "; a plain loop has the same bits")
            + (f"; the same bits in {' and '.join(map(str, self.cuts))} partitions" if self.cuts else "")
            + (f"; the same bits by {len(self.plans)} other plan(s)" if self.plans else "")
            + f"; the same evaluation{self.divided}"
        )


def verify(
    model: object, train: object, loss: LossChoice = None, optimizer: str | Build | None = None,
    *, steps: int = 3, reference: str = "full", reuse: Plan | None = None, sweep: int = 0,
    reporter: Reporter | None = None, **options: Any,
) -> Agreement:  # fmt: skip
    """Trains `model` for `steps` updates under the limit, by `reference` and with other cuts, and compares every bit.

    An evaluation after them is compared too, and the losses of smaller micro-batches, which agree except for rounding.
    model, train, loss, optimizer, options: as `Trainer` and its `fit` take them; `method` is "streamed" if it is left
    out, or that of the plan to `reuse`, which is verified as it is. sweep: number of other plans to compare too, drawn with
    the seed. Modules that were given alive get back the weights that they came with.

    Raises VerifyMismatch with the first tensor that differs, or where the check did not notice a wrong replay;
    DoesNotFit where the reference has no room; OptionError and the like as training would.
    """
    reporter = reporter or Reporter(quiet=True)
    _refuse(steps, reference, sweep, options)
    if reuse is not None and options.get("method", "auto") not in ("auto", reuse.method):
        raise OptionError(f"--plan: that plan is by method {reuse.method}. Leave --method {options['method']} out.")
    with own_folder(Path(options.get("offload_dir") or "runs"), "verify-") as folder, ExitStack() as stack:
        # Weights, gradients and state are compared on the device, right before each step.
        options |= {"offload_dir": None, "output_dir": folder / "run", "save_every": "never", "optimizer_on": "device"}
        options = {"method": "streamed", **options} if reuse is None else {**options, "method": "auto"}

        def planned(_: ExitStack, tiled: object, chunks: int | None) -> tuple[Variant, Callable[..., Trainer]]:
            def trainer(**changed: Any) -> Trainer:
                return Trainer(tiled, loss, optimizer, quiet=True, **{**options, **changed, "tile": "never"})

            return Variant.planned("limited", trainer(), rows, reuse=reuse, loss_chunks=chunks), trainer

        asked = Trainer(model, loss, optimizer, quiet=True, **options)
        stack.enter_context(asked.device.running())
        stack.enter_context(asked.device.deterministic())
        rows, _ = asked.rows(train)
        options |= {"padding": None, "batch_size": asked.settings.batch_size, "shuffle": asked.settings.shuffle}
        stack.enter_context(as_written(model))
        ways, model = asked.attempts(reuse), stack.enter_context(plain_tensors(original(model), asked.device.kind))
        model = stack.enter_context(kept_modes(stack.enter_context(freezing(model, asked.settings.frozen, FakeMode()))))
        limited, trainer = first_that_fits(stack, model, ways, planned)
        _refuse_plan(limited, steps, reference, reuse)
        found = _compared(limited, trainer, rows, steps, reference, sweep, reporter, folder / "tensor", model)
    reporter.say(str(found))
    return found


def _compared(
    limited: Variant, trainer: Callable[..., Trainer], train: Split, steps: int, reference: str, sweep: int,
    reporter: Reporter, kept: Path, model: object,
) -> Agreement:  # fmt: skip
    """Compares the runs. kept: file for a tensor that differs."""
    whole = _whole(limited)
    other = _reference(limited, trainer(**whole, method=reference), train)
    reporter.say(_announced(limited, other, steps))

    first = Digests(steps)
    limited.run(first, reporter)
    control = Digests(steps, expected=first.seen)
    # What falsifies needs memory of its own: the control is not held to the limit.
    replace(limited, name="control", limit=max(limited.limit, other.limit)).run(control, reporter, falsify=True)
    compared = Digests(steps, expected=first.seen, keeps=kept)
    other.run(compared, reporter)
    if compared.first is not None:
        again = Digests(steps, wanted=(compared.first, kept))
        replace(limited, name="again").run(again, reporter)
        raise VerifyMismatch(_difference_in_words(limited, other, compared.first, first, again))
    if control.first is None:
        raise VerifyMismatch(
            f"the check is blind: {limited.method} was run once more with falsified activations and gradients, and all tensors "
            f"of {steps} update(s) stayed the same. Nothing is proven. Does anything learn? More --steps may tell."
        )
    _compare_evaluations(limited, other, first, compared)
    unlike = _compare_with_plain_loop(
        limited, replace(other, name="plain", limit=whole["mem_limit"]), model, first, reporter, kept
    )

    def variant(name: str, **changed: Any) -> Variant:
        return Variant.planned(name, trainer(**{**whole, "method": limited.method, **changed}), train)

    cuts = _other_cuts(limited, first, variant, reporter)
    divided = _other_micro_batches(limited, first, variant, reporter)
    plans = drawn_plans(limited, trainer(**whole, method="auto"), train, sweep) if sweep else ()
    for drawn in plans:
        one, two = Answers.of(limited.prepared.plan), Answers.of(drawn.prepared.plan)
        differ = f"{limited.method} as it was planned ({one}) and with another plan ({two}) differ"
        where = (
            "its partition stays, is loaded again or is recomputed. Does one keep state that is neither parameter nor buffer, "
            "or look at its input's grad_fn?"
        )
        _compare_evaluations(limited, drawn, first, agreed(first, drawn, reporter, differ, where))
    total = xxhash.xxh3_128()
    for key in sorted(first.seen):
        total.update(repr(key).encode() + first.seen[key])
    return Agreement(
        method=limited.method, reference=other.method, steps=steps, plan=limited.prepared.plan, peak=limited.peak,
        tensors=len({key[1:] for key in first.seen}), comparisons=len(first.seen), digest=total.hexdigest(),
        caught=str(control.first), cuts=cuts, divided=divided, unlike=unlike,
        plans=tuple(drawn.prepared.plan for drawn in plans),
    )  # fmt: skip


def _compare_with_plain_loop(
    limited: Variant, whole: Variant, model: object, first: Digests, reporter: Reporter, kept: Path
) -> str:
    """Returns why they were not compared; "" if their bits are equal. Raises VerifyMismatch."""
    began = time.perf_counter()
    try:
        with whole.session() as session, session.limited(), session.interrupts:
            if why := why_not(session):
                return why
            found = train_plainly(session, model, first.steps)
    except Unlike as other:
        return str(other)
    whole.report(reporter, time.perf_counter() - began, "")
    for (number, name), tensor in found.items():
        key = Key(first.steps, VALUE, number, f"{limited.prepared.chain[number].name}.{name}")
        if first.seen.get(key) != digest_of(tensor):
            keep_tensor(kept, tensor)
            again = Digests(first.steps, wanted=(key, kept))
            replace(limited, name="again").run(again, reporter)
            raise VerifyMismatch(
                f"{limited.method} and {whole.method} have the same bits, and a plain PyTorch loop over the same batches has "
                f"others, first in {key} {key.when(first.steps)}: {again.difference}. If the model's results do not depend "
                "on where in memory its tensors lie, report this."
            )
    return ""


# --- evaluation, other cuts, another micro-batch ------------------------------------------------------------------


def _compare_evaluations(limited: Variant, other: Variant, first: Digests, second: Digests) -> None:
    """Raises VerifyMismatch if they differ by more than kernels round for another memory layout of the rows."""
    one, two = first.evaluation, second.evaluation
    if not (one and two and _near(one[0], two[0], _CLOSE_EVALUATION) and one[1] == two[1]):
        raise VerifyMismatch(
            f"{limited.method} and {other.method} train alike, and their evaluations differ: (loss, accuracy) {one} and {two}. "
            "Does a block look at whether gradients are wanted, or at what it has seen before, when it evaluates?"
        )


def _other_cuts(limited: Variant, first: Digests, variant: Callable[..., Variant], reporter: Reporter) -> tuple[int, ...]:
    """Compares cuts into two partitions and into single blocks, where blocks show that treat inputs without a graph otherwise.

    Returns the numbers of partitions with the same bits."""
    blocks, cut = len(limited.prepared.chain), len(limited.prepared.plan.partitions)
    counts = tuple(sorted({2, blocks} - {cut}))
    for count in counts:
        starts = range(blocks) if count == blocks else (0, blocks // 2)
        other = variant(f"cut in {count}", partitions=tuple(starts))
        differ = f"{limited.method} in {cut} partitions and in {count} differ"
        where = "a partition begins with it. Does one look at its input's grad_fn, or detach it?"
        _compare_evaluations(limited, other, first, agreed(first, other, reporter, differ, where))
    return counts


def _other_micro_batches(limited: Variant, first: Digests, variant: Callable[..., Variant], reporter: Reporter) -> str:
    """Compares a half and a quarter of the micro-batch, whose losses agree except for rounding. Returns the result as text.

    Raises VerifyMismatch if the first update's losses agree and later ones do not: its gradients were weighted differently.
    """
    micro_batch, starts = limited.prepared.plan.partitions[0].micro_batch, limited.prepared.plan.starts
    narrow = limited.planner.settings.autocast is not None
    (closest, close), alike = _CLOSE_NARROW if narrow else _CLOSE, []
    for size in sorted({micro_batch // 2, micro_batch // 4} - {0}, reverse=True):
        digests = Digests(first.steps)
        try:
            other = variant(f"by {size}", micro_batch_size=size, partitions=tuple(starts))
        except (ModelError, DataError) as error:
            return f"; micro-batches of {size} are not compared, since the model does not take them: {error.with_flags}"
        other.run(digests, reporter)
        pairs = list(zip(first.losses, digests.losses, strict=True))
        if not _near(*pairs[0], closest):
            return (
                f"; micro-batches of {size} are not compared: a block takes statistics of a micro-batch (BatchNorm), or draws "
                f"random numbers for it (Dropout): the first loss is {pairs[0][1]:.6g} instead of {pairs[0][0]:.6g}"
            )
        for number, (one, two) in enumerate(pairs, 1):
            if not _near(one, two, close):
                raise VerifyMismatch(
                    f"micro-batches of {micro_batch} and of {size} differ: the mean loss of {number} update(s) is {one:.6g} "
                    f"and {two:.6g}, though that of the first is the same. The loss is not weighted as in the whole batch,"
                    " or a block uses a buffer in training that every micro-batch changes."
                )
        alike.append(str(size))
    if not alike:
        return ""
    return f"; micro-batches of {' and '.join(alike)} give the same losses within {close:g} (sums are added in another order)"


_CLOSE, _CLOSE_NARROW, _CLOSE_EVALUATION = (1e-5, 1e-3), (5e-3, 5e-2), 1e-4
"""Tolerances of losses, of the first and of later ones. Updates amplify rounding; bfloat16 rounds at 4e-3; an evaluation starts
from equal weights."""


def _near(one: float, other: float, close: float) -> bool:
    return math.isclose(one, other, rel_tol=close, abs_tol=1e-6 * close)


# --- what is refused ----------------------------------------------------------------------------------------------


def _refuse(steps: int, reference: str, sweep: int, options: dict[str, Any]) -> None:
    if steps < 1:
        raise OptionError(f"--steps: expected a number of updates from 1 up; found {steps}.")
    refuse_ranks("verify", "Start one.")
    if sweep < 0:
        raise OptionError(f"--sweep: expected a number of plans from 0 up; found {sweep}.")
    if options.get("compile"):
        raise OptionError("--compile is not verified: the plain loop that is compared runs layers as written. Leave it out.")
    exact = [method.name for method in EXACT]
    if reference not in exact:
        raise OptionError(f"--reference: expected one of {', '.join(exact)}; found {reference!r}.")
    asked = options.get("method")
    if method := METHODS.get(asked) if isinstance(asked, str) else None:
        if not method.exact:
            raise OptionError(
                f"--method {method.name} is approximate: its bits are not those of full training. Verify streamed or "
                "checkpointed."
            )
        if method.unverified:
            raise OptionError(method.unverified)
    if options.get("trace") or options.get("log"):
        raise OptionError("--trace and --log: verify runs training several times. Give them to the training itself.")
    if options.get("unfreeze"):
        raise OptionError("--unfreeze: verify compares the first updates, in which nothing begins to learn. Leave it out.")
    if options.get("output_dir") or options.get("overwrite"):
        raise OptionError("--output-dir and --overwrite: verify keeps no results. --offload-dir says where its files may be.")


def _refuse_plan(limited: Variant, steps: int, reference: str, reuse: Plan | None) -> None:
    plan, phases = limited.prepared.plan, limited.prepared.phases
    if reuse is not None and Answers.of(plan) != Answers.of(reuse):
        raise OptionError(
            f"--plan: that plan ({Answers.of(reuse)}) was made for {format_size(reuse.limit)}, and would not be carried out as "
            f"it is under {format_size(plan.limit)} ({Answers.of(plan)}). Give --mem-limit {format_limit(reuse.limit)} or more."
        )
    if len(plan.partitions) == 1:
        raise OptionError(
            f"the network fits {format_size(plan.limit)} as one partition, which is full training already: there is nothing to "
            "verify. Give a smaller --mem-limit, or --method streamed --partitions 2."
        )
    if plan.method == reference:
        raise OptionError(f"--reference {reference} is what is to be verified. Give another one, or another --method.")
    updates = sum(times * phase.updates for phase, times in counted(phases) if phase.kind is PhaseKind.TRAIN)
    if steps > updates:
        raise OptionError(f"--steps {steps}: training has {updates} update(s) in all. Give at most that, or more --epochs.")


def _whole(limited: Variant) -> dict[str, Any]:
    """Returns the settings of the reference: the same micro-batches, with all available memory."""
    device, plan = limited.planner.device, limited.prepared.plan
    available = min(device.total_memory(), MemoryUsage(device).read() + device.free_memory())
    return {"mem_limit": available, "micro_batch_size": plan.micro_batch, "partitions": "auto", "loss_chunks": plan.loss_chunks}


def _reference(limited: Variant, trainer: Trainer, train: Split) -> Variant:
    """Returns the reference. Raises DoesNotFit if there is no room for it."""
    try:
        found = Variant.planned("reference", trainer, train)
    except DoesNotFit as error:
        needs = "more" if error.smallest is None else format_size(error.smallest)
        settings = trainer.settings
        raise DoesNotFit(
            f"verify compares with {settings.method} training, which needs {needs}, and has "
            f"{format_size(int(settings.mem_limit))} here (micro-batch {settings.micro_batch_size}). What is compared must "
            "run, whatever --mem-limit is. Verify a model of fewer or narrower blocks of the same kinds, with a smaller "
            "--micro-batch-size, or on a machine with more memory"
            + ("; or take --reference checkpointed, which needs less." if settings.method == "full" else "."),
            smallest=error.smallest,
        ) from None
    # What the plan needs, and a little: it is not the limit of the reference that is to be proven.
    found.limit = max(limited.limit, min(found.limit, limit_for(found.prepared.plan.peak) * 11 // 10))
    return found


# --- messages -----------------------------------------------------------------------------------------------------


def _announced(limited: Variant, other: Variant, steps: int) -> str:
    plan = limited.prepared.plan
    count, micro_batch = len(plan.partitions), plan.partitions[0].micro_batch
    kept, stays = len(plan.keeps), f", of which {len(plan.stays)} stay" if plan.stays else ""
    return (
        f"verify: {steps} update(s) of {limited.method} under {format_size(limited.limit)} ({count} partitions{stays}, "
        f"micro-batch {micro_batch}, {plan.slots} slot(s), boundaries on {tiers_in_words(plan.tiers)}, {kept + 1} graphs "
        f"kept), then with a wrong replay, then of {other.method} under {format_size(other.limit)}"
    )


def _difference_in_words(limited: Variant, other: Variant, key: Key, first: Digests, again: Digests) -> str:
    """Describes the difference, its size, and whether the model is repeatable at all."""
    if again.seen.get(key) == first.seen.get(key):
        cause = (
            f"{limited.method} gave the same bits when it was run again: what is computed a second time is not what was "
            "computed first. Does a block keep state that is neither parameter nor buffer? If none does, report this."
        )
    else:
        cause = (
            f"{limited.method} gave other bits when it was run again: the model is not deterministic. Does a block draw "
            "random numbers that are not torch's, keep state that is neither parameter nor buffer, or use kernels that add in "
            "any order?"
        )
    return f"{limited.method} and {other.method} differ, first in {key} {key.when(first.steps)}: {again.difference}.\n  {cause}"
