"""The ways to train for `verify`: some updates and an evaluation, by a run or a plain loop, recorded as digests."""

import copy
import gc
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

import torch
from torch import nn

from seqpart.capture.capture import run_on_rows, scored_output
from seqpart.data.reader import Batch, open_reader
from seqpart.data.splits import Split
from seqpart.device.sampler import Sampler
from seqpart.device.usage import MemoryUsage
from seqpart.errors import DataError, DoesNotFit, ModelError, OutOfMemory, VerifyMismatch
from seqpart.intake import tested_on_first
from seqpart.methods import methods_named
from seqpart.methods.method import PartitionLoss, TrueLoss
from seqpart.model.gradient_hooks import call_hooks, hooks_put_off
from seqpart.model.live_modules import modules_of
from seqpart.model.optimizers import Adopted
from seqpart.model.reductions import LossValue, share_of_update
from seqpart.plan.plan import Plan
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.plan.problem import starts_of
from seqpart.report.reporter import Reporter, WarningsAlone
from seqpart.runtime.executor import Executor
from seqpart.runtime.observer import Failure, Observer
from seqpart.runtime.run import Run
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.steps import Position, Verb
from seqpart.trainer import Trainer
from seqpart.units import format_size
from seqpart.verify.answers import STATE, VALUE, Answers, Digests, Key, Space

_EVALUATED = 256
"""Most rows of an evaluation: one that differs does so in its first rows."""


@dataclass(kw_only=True)
class Variant:
    """One planned way to train; each `run` starts from the model's initial weights."""

    name: str
    method: str
    planner: Planner
    prepared: ExecutionPlan
    limit: int
    """Limit of its runs in bytes: the user's, or more."""
    peak: int = 0
    """Measured peak of the last run."""

    @classmethod
    def planned(
        cls, name: str, trainer: Trainer, train: Split, *, reuse: Plan | None = None, loss_chunks: int | None = 1
    ) -> Self:
        """loss_chunks: see `Inputs`; those of the settings come first."""
        with closing(prepared_to_verify(trainer, train, reuse=reuse, loss_chunks=loss_chunks)) as planner:
            return cls.of(name, planner, planner.planned())

    @classmethod
    def of(cls, name: str, planner: Planner, prepared: ExecutionPlan) -> Self:
        plan = prepared.plan
        return cls(name=name, method=plan.method, planner=planner, prepared=prepared, limit=plan.limit)

    def run(self, digests: Digests, reporter: Reporter, *, falsify: bool = False) -> None:
        """Trains until `digests` has recorded enough. Leaves nothing on disk."""
        began, recorder = time.perf_counter(), _Recorder(digests, self.prepared.phases, self.limit)
        with self.session(recorder.observer, falsify=falsify) as session:
            recorder.record(session)
        word = "noticed" if falsify else "differs"
        seen = "" if digests.first is None else f"  {word} in {digests.first} {digests.first.when(digests.steps)}"
        self.report(reporter, time.perf_counter() - began, seen)

    def report(self, reporter: Reporter, seconds: float, seen: str) -> None:
        reporter.say(f"  {self.name:<9}  {self.method:<12}  peak {format_size(self.peak):>8}  {seconds:6.1f} s{seen}")

    @contextmanager
    def session(self, observer: Observer | None = None, *, falsify: bool = False) -> Iterator[Run]:
        """Yields a run that has not started; afterwards its peak is known."""
        planner = self.planner
        prepared = replace(self.prepared, plan=replace(self.prepared.plan, limit=self.limit))
        sampler = Sampler(MemoryUsage(planner.device), limit=self.limit)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, planner.purpose.folder, ignore_errors=True)
            silent = stack.enter_context(closing(WarningsAlone()))
            stack.enter_context(planner.device.at_work())
            stack.enter_context(planner.device.own_random_state())
            sampler.start()
            stack.callback(sampler.stop)
            planner.live_modules.take()
            stack.callback(planner.close)
            yield Run(planner, prepared, silent, sampler, stack, observer=observer, falsify=falsify)
        self.peak = sampler.peak


def prepared_to_verify(trainer: Trainer, train: Split, *, reuse: Plan | None = None, loss_chunks: int | None = 1) -> Planner:
    gc.collect()  # what the variant before has left in cycles would count
    chunks = trainer.settings.chunks or loss_chunks
    return trainer.prepare(train, tested_on_first(train, _EVALUATED), reuse=reuse, loss_chunks=chunks)


class _Recorder:
    """Passes a run's updates, and its final state, to `digests`."""

    def __init__(self, digests: Digests, phases: Sequence[Phase], limit: int) -> None:
        self._digests, self._phases, self._limit = digests, phases, limit
        self._goes_on = True
        """True if another update would follow."""

    @property
    def observer(self) -> Observer:
        return Observer(before_update=self._digests.before_update, at_rest=self._at_rest, failed=self._failed)

    def _at_rest(self, executor: Executor) -> bool:
        if executor.step.verb is not Verb.UPDATE:  # a pass over the test rows
            return True
        self._goes_on = self._phases[executor.position.phase].kind is PhaseKind.TRAIN
        return self._digests.at_rest(executor)

    def _failed(self, failure: Failure) -> None:
        if failure.keeps_heap:
            before = [phase for phase in self._phases[: failure.at.phase] if phase.kind is PhaseKind.TRAIN]
            self._digests.go_back(sum(phase.updates for phase in before) + failure.at.updates)
            return
        raise OutOfMemory(
            f"memory ran out in {failure.step} at micro-batch {failure.micro_batch}, inside the limit of "
            f"{format_size(self._limit)}: {failure.text}. Training would go on with half of it; to verify that, give "
            f"--micro-batch-size {max(1, failure.micro_batch // 2)}."
        )

    def record(self, session: Run) -> None:
        """Runs until its digests are complete, and then evaluates some rows."""
        with session.limited(), session.interrupts:
            session.run_stages()
            if not self._digests.found:  # nothing is loaded any more: there is room to read the homes
                self._see_homes(session)
                self._digests.miss()
            if not self._digests.found:
                trained = max(number for number, phase in enumerate(self._phases) if phase.kind is PhaseKind.TRAIN)
                session.run_stages(Position(trained + 1))
                self._digests.evaluation = session.test

    def _see_homes(self, session: Run) -> None:
        """Records the final homes; there is no optimizer state if no update would follow."""
        store = session.homes.store
        for block in session.prepared.chain:
            for home, kind in ((block.home, VALUE), (block.state_home, STATE))[: 2 if self._goes_on else 1]:
                for name, tensor in (store.read(home) if home in store else {}).items():
                    self._digests.see(Key(self._digests.steps, kind, block.number, f"{block.name}.{name}"), tensor)


_REFUSALS = 10
"""Draws per wanted plan: some are refused by the model, or equal known ones."""


def drawn_plans(limited: Variant, trainer: Trainer, train: Split, count: int) -> tuple[Variant, ...]:
    """Returns up to `count` ways to train whose answers differ from `limited` and from each other, within the memory of
    `trainer`. They are drawn with the run's seed, and so are repeatable."""
    with closing(prepared_to_verify(trainer, train)) as planner:
        found = enumerate(_drawn(limited.prepared.plan, planner, count), 1)
        return tuple(Variant.of(f"plan {number}", planner, prepared) for number, prepared in found)


def _drawn(plan: Plan, planner: Planner, count: int) -> Iterator[ExecutionPlan]:
    space = _space(plan, planner)
    random, known, left = Random(planner.settings.seed), [Answers.of(plan)], count
    for _ in range(_REFUSALS * count):
        answers = space.draw(random, known) if left else None
        if answers is None:
            return
        known.append(answers)
        asked = replace(planner.request, saved=answers.asked(plan, len(planner.chain)))
        try:
            prepared = planner.planned(asked)
        except (DoesNotFit, ModelError, DataError):
            continue
        carried_out = Answers.of(prepared.plan)  # what the model refuses is left out of it
        if carried_out == answers or carried_out not in known:
            known.append(carried_out)
            left -= 1
            yield prepared


def _space(plan: Plan, planner: Planner) -> Space:
    problem = planner.problem(replace(planner.request, micro_batch=plan.micro_batch, saved=None))
    machine = problem.machine
    return Space(
        starts=tuple(starts_of(problem)), tiers=tuple(dict.fromkeys((*machine.boundary_tiers, "disk"))),
        graph_tiers=machine.graph_tiers, heap=machine.may_keep_heap, streams=not methods_named(plan.method)[0].stays,
    )  # fmt: skip


def agreed(first: Digests, other: Variant, reporter: Reporter, differ: str, where: str) -> Digests:
    """Runs `other` and returns its digests. Raises VerifyMismatch if a bit differs from the first run's: says which two runs
    `differ`, and `where` a block may behave differently."""
    digests = Digests(first.steps, expected=first.seen)
    other.run(digests, reporter)
    if digests.first is not None:
        key = digests.first
        raise VerifyMismatch(f"{differ}, first in {key} {key.when(first.steps)}: a block behaves differently where {where}")
    return digests


class Unlike(Exception):
    """A plain loop would train differently, for the reason in the message."""


def why_not(session: Run) -> str:
    """Returns why a run and a plain loop cannot be compared; "" if they can."""
    if session.prepared.chain.tile:
        return "layers in tiles have gradients that are added up in another order"
    if session.prepared.chain.head is not None:
        return "the loss is computed over chunks of positions"
    return "" if len(session.prepared.plan.partitions) == 1 else "it takes as much memory as --reference full"


def train_plainly(session: Run, model: object, updates: int) -> dict[tuple[int, str], torch.Tensor]:
    """{(number of a block, name in it): tensor} after so many updates of a plain loop. session: a run as one partition that
    has its homes filled, and has not begun. Raises Unlike where a plain loop is another training."""
    plain, tensors = _filled(session, model)
    learning = {id(tensors[n][name]) for n, cost in enumerate(session.prepared.costs) for name in cost.trainable}
    for parameter in plain.parameters():
        parameter.requires_grad_(id(parameter) in learning)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    stage, settings = session.prepared.stages[0], session.settings
    choice, rate = stage.optimizers[-1], session.rate_of(stage)
    names = {
        id(tensor): block.exported(name) for block in session.prepared.chain for name, tensor in tensors[block.number].items()
    }
    adopted = Adopted(choice, choice.build(trained, [names[id(parameter)] for parameter in trained]), names)
    loss_fn = session.prepared.loss(0)
    assert loss_fn is not None
    left = updates
    for phase in session.prepared.phases:
        if phase.kind is not PhaseKind.TRAIN or not left:
            continue
        for number, batches in enumerate(_updates(session, phase)):
            with hooks_put_off(trained if phase.micro_batches_per_update > 1 else ()):
                scale = _back_propagate(session, plain, loss_fn, batches)
            for parameter in trained:
                if scale != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(scale)
            if phase.micro_batches_per_update > 1:
                call_hooks(trained)
            if settings.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), settings.clip_grad_norm)
            adopted.tune(rate(phase, number))
            adopted.step(settings.seed, phase.stage, phase.share_of(number)[0])
            adopted.optimizer.zero_grad(set_to_none=True)
            left -= 1
            if not left:
                break
    return {(number, name): tensor for number, own in tensors.items() for name, tensor in own.items()}


def _filled(session: Run, model: object) -> tuple[nn.Module, dict[int, dict[str, torch.Tensor]]]:
    """Returns a copy of the model with the run's initial weights, and its tensors by block and name."""
    chain = session.prepared.chain
    plain: Any
    copies = dict[int, Any]()
    try:
        if isinstance(model, list | tuple):
            plain = nn.Sequential(*(copy.deepcopy(b.alive, copies) if b.alive is not None else b.another() for b in chain))
        else:
            plain = copy.deepcopy(model, copies)
    except Exception as error:
        raise Unlike(f"the model cannot be copied: {type(error).__name__}: {error}") from None
    assert isinstance(plain, nn.Module)
    for parameter in dict.fromkeys(one for module in modules_of(model) for one in module.parameters(recurse=False)):
        for hook in (parameter._backward_hooks or {}).values():  # which a copy does not have
            copies[id(parameter)].register_hook(hook)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            copies[id(parameter)].register_post_accumulate_grad_hook(hook)
    own = {
        **dict(nn.Module.named_parameters(plain, remove_duplicate=False)),
        **dict(plain.named_buffers(remove_duplicate=False)),
    }
    found: dict[int, dict[str, torch.Tensor]] = {}
    store = session.homes.store
    for block in chain:
        found[block.number] = {}
        for name, value in (store.read(block.home) if block.home in store else {}).items():
            tensor = own.get(block.exported(name))
            if tensor is None:
                raise Unlike(f"its tensor {block.exported(name)} has another name in a copy of the model")
            tensor.data = value.clone()  # as a plain loop's own lie in memory
            found[block.number][name] = tensor
    return plain.to(session.device.torch).train(), found


def _updates(session: Run, phase: Phase) -> Iterator[Iterator[Batch]]:
    """Yields the micro-batches of each update of a phase; consume those of one before the next."""
    boundaries = session.homes.boundaries
    rows = boundaries.entering(phase.enters, 0)
    with closing(
        open_reader(
            rows, boundaries.labels["train"], phase, session.device, session.reader_thread, seed=session.settings.seed,
            first_update=0,
        )
    ) as reader:  # fmt: skip

        def one() -> Iterator[Batch]:
            while True:
                batch = reader.take()
                yield batch
                reader.done(batch)
                if batch.span.ends_update:
                    return

        for _ in range(phase.updates):
            yield one()


def _back_propagate(session: Run, plain: nn.Module, loss_fn: PartitionLoss, batches: Iterator[Batch]) -> float:
    """Computes the gradients of one update. Returns the factor that they are still to be multiplied by."""
    device, form, counted, rows = session.device, session.planner.train.form, 0.0, 1
    takes_all = isinstance(loss_fn, TrueLoss) and loss_fn.takes_all
    becomes = session.prepared.input_layout.becomes or session.prepared.input_layout.dtype
    for batch in batches:
        x = device.own(batch.x).to(becomes)
        labels = device.upload(batch.labels.clone()).to(session.homes.boundaries.label_types["train"])
        before = torch.get_rng_state()
        with device.autocast(session.settings.autocast):
            output = run_on_rows(plain, x, form)
            output = output if takes_all else scored_output(plain, output)
            found: Any = loss_fn(output, labels)
        if not torch.equal(torch.get_rng_state(), before):
            raise Unlike("the model draws random numbers (Dropout), and a plain loop draws others")
        value = found if isinstance(found, LossValue) else LossValue(found, len(labels))
        part, count = share_of_update(value, batch.span)
        counted, rows = counted + count, batch.span.update_rows
        if value.loss.requires_grad:
            (value.loss if part == 1.0 else value.loss * part).backward()  # type: ignore[no-untyped-call]
    return rows / counted if counted else 1.0
