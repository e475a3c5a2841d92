"""One way to train for `verify`: some updates and an evaluation, seen by digests, and nothing that stays."""

import shutil
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace

from seqpart.data.reader import ReaderThread
from seqpart.data.splits import as_split, first_rows
from seqpart.errors import OutOfMemory
from seqpart.execution.executor import Executor
from seqpart.files.direct import aligned
from seqpart.memory.sampler import Sampler
from seqpart.memory.usage import MemoryUsage
from seqpart.planning.preparation import Preparation, Prepared
from seqpart.report.reporter import Reporter
from seqpart.schedule.steps import PhaseKind, Position
from seqpart.session import Session
from seqpart.trainer import Trainer
from seqpart.units import format_size
from seqpart.verify.digests import STATE, VALUE, Digests, Enough, Key

_EVALUATED = 256
"""Rows, at most: an evaluation that differs does so in its first rows."""


@dataclass(kw_only=True)
class Variant:
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
    def planned(cls, name: str, trainer: Trainer, train: object) -> "Variant":
        split = as_split(train, "training")
        with closing(trainer.prepare(split, first_rows(split, _EVALUATED))) as preparation:
            prepared = preparation.planned()
        plan = prepared.plan
        return cls(name=name, method=plan.method, preparation=preparation, prepared=prepared, limit=plan.limit)

    def run(self, digests: Digests, reporter: Reporter, *, falsify: bool = False) -> None:
        """Train until `digests` have seen enough. Nothing stays on the disk."""
        preparation, began = self.preparation, time.perf_counter()
        preparation.falsify = falsify
        prepared = replace(self.prepared, plan=replace(self.prepared.plan, limit=self.limit))
        sampler = Sampler(MemoryUsage(preparation.device), limit=self.limit)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, preparation.folder, ignore_errors=True)
            silent = Reporter(quiet=True)
            stack.callback(silent.close)
            stack.enter_context(preparation.device.own_random_state())
            sampler.start()
            stack.callback(sampler.stop)
            preparation.live_modules.take()
            stack.callback(preparation.close)
            with suppress(Enough):
                _RecordedSession(preparation, prepared, silent, sampler, stack, digests).carry_out(began)
        self.peak = sampler.peak
        word = "noticed" if falsify else "differs"
        seen = "" if digests.first is None else f"  {word} in {digests.first} {digests.first.when(digests.steps)}"
        seconds = time.perf_counter() - began
        reporter.say(f"  {self.name:<9}  {self.method:<12}  peak {format_size(self.peak):>8}  {seconds:6.1f} s{seen}")


class _RecordedSession(Session):
    """A run that ends where its digests have seen enough, leaves no results, and gives weights back as they came."""

    def __init__(
        self,
        preparation: Preparation,
        prepared: Prepared,
        reporter: Reporter,
        sampler: Sampler,
        stack: ExitStack,
        digests: Digests,
    ) -> None:
        super().__init__(
            preparation, prepared, reporter, sampler, stack, resumed=None, job=None, before_update=digests.before_update
        )
        self._digests, self._goes_on, self._evaluating = digests, True, False

    def _at_rest(self, executor: Executor) -> None:
        self._interrupts.check()
        if self._evaluating:
            return
        self._goes_on = self._prepared.phases[executor.position.phase].kind is PhaseKind.TRAIN
        self._digests.at_rest(executor)

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
        if not self._digests.found:  # nothing is loaded any more: there is room to read the homes
            self._see_homes()
            self._digests.miss()
        if not self._digests.found:
            self._evaluate(thread)
        raise Enough

    def _evaluate(self, thread: ReaderThread) -> None:
        """Some rows in evaluation, with the weights that the last update left."""
        self._evaluating = True
        phases, stage = self._prepared.phases, self._prepared.stages[-1]
        first = 1 + max(number for number, phase in enumerate(phases) if phase.kind is PhaseKind.TRAIN)
        failed, _, _ = self._run_stage(stage, Position(first), None, thread)
        if failed is not None:
            self._halve_micro_batch(*failed)
        self._digests.evaluation = self._test

    def _see_homes(self) -> None:
        """What the last update left. Of optimizer state nothing is kept where no update would follow."""
        for block in self._prepared.chain:
            for home, kind in ((block.home, VALUE), (block.state_home, STATE))[: 2 if self._goes_on else 1]:
                if home not in self._store:
                    continue
                layout = self._store.layout(home)
                flat = aligned(layout.padded_nbytes)
                self._store.get(home, flat)
                for name, tensor in layout.views(flat).items():
                    self._digests.see(Key(self._digests.steps, kind, block.number, f"{block.name}.{name}"), tensor)
