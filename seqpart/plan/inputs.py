"""Inputs of a plan: the model, the settings, the shape of the data and the machine, checked and measured."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqpart.data.reading import Reading
from seqpart.data.row_packs import RowPacks
from seqpart.data.splits import Split, refuse_mismatch
from seqpart.device.device import Device, host_memory_free
from seqpart.device.limit import any_plan_fits, enforced, limit_for, limit_of, margin_of, warm_up
from seqpart.device.ranks import ALONE, Ranks
from seqpart.errors import DoesNotFit, ModelError, OptionError
from seqpart.fields import values_of
from seqpart.model.inspection import nothing_learns, refuse_left_out
from seqpart.model.live_modules import LiveModules, MetaTensors
from seqpart.model.losses import LossFunction, LossSource
from seqpart.model.optimizers import (
    Optimizer,
    refuse_joint,
)
from seqpart.model.scheduler import refuse_unfit
from seqpart.model.tiling import starts_of
from seqpart.plan.captured import captured
from seqpart.plan.losses import RunLosses
from seqpart.plan.optimizers import RunOptimizers
from seqpart.plan.plan import Plan, PlanRequest
from seqpart.plan.unfreezing import late_parameters
from seqpart.plan.updates import Updates
from seqpart.profile.blocks import BlockCost, measure_chain, refuse_lost_gradients
from seqpart.profile.fake_mode import FakeMode
from seqpart.profile.initial_weights import initial_weights
from seqpart.profile.machine import MEASURED, existing
from seqpart.profile.partition import LossCost
from seqpart.profile.trials import Trials
from seqpart.schedule.best import criterion_of
from seqpart.schedule.lengths import AT_THE_END, refuse_endless_warmup
from seqpart.settings import Settings
from seqpart.units import format_limit, format_size

T = TypeVar("T", int, float, str)

_TO_PLAN = 64 << 20
"""Allowance in bytes for measuring a model, beside what the process holds, in a refusal."""
_LEFT_LYING = 4 << 20
"""Garbage bytes of measuring a model's costs above which a collection (0.1 s) is worth its time."""
_KEPT = 1 << 20
"""Growth in bytes above which a collection is made before the growth counts as permanent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """What a plan is made for: a whole training, a session, an evaluation, or to be looked at."""

    folder: Path
    """The directory for homes and boundary rows."""
    ranks: Ranks = ALONE
    """Processes that share each update's rows."""
    trains: bool = True
    """True if weights are trained."""
    whole: bool = True
    """True if the rows given are all that there will be."""
    dry: bool = False
    """True if no named file is made."""
    reuse: Plan | None = None
    """A plan whose choices are reused."""
    resumes: bool = False
    """True if weights come from a checkpoint."""
    trained: Path | None = None
    """A file with weights of modules not alive, or with shapes alone."""
    loss_chunks: int | None = 1
    """Chunks of positions that the loss is computed over; None: more than one, the fewest that fit."""


class Inputs:
    """Inputs of a plan: model, settings and data, each checked on its own and against the others, and measured."""

    def __init__(
        self, model: object, settings: Settings, data: tuple[Split, Split], device: Device, loss: LossSource = None,
        optimizer: Optimizer | None = None, *, purpose: Purpose,
    ) -> None:  # fmt: skip
        """data: the training and test rows. loss: see `captured`. optimizer: the user's; None: those of the settings."""
        self.train, self.test = train, test = data
        refuse_mismatch(train, test)
        self.model, self.loss, self.settings, self.device, self.purpose = model, loss, settings, device, purpose
        self.ranks = purpose.ranks
        self.methods, self.exact, self.alone = settings.methods, settings.methods[0].exact, settings.methods[0].alone
        if settings.partitions not in ("auto", 1):  # `auto` takes a method that can
            self.methods = tuple(method for method in self.methods if method.cuts)
        self.late = dict[str, int]()
        """{name of a parameter that is frozen at first: number of updates before it learns}."""
        if purpose.trains:
            refuse_left_out(model)
        self.reading = Reading(train, test, settings.workers, device)
        self.optimizers = RunOptimizers(settings, optimizer)
        with ExitStack() as undo:
            has_weights = purpose.resumes or purpose.trained or settings.weights
            meta = MetaTensors(model if has_weights else None)
            undo.callback(meta.give_back)
            in_chunks = purpose.loss_chunks != 1
            self.chain, found, why_not = captured(model, loss, settings, train, self.reading.first_row, in_chunks=in_chunks)
            self._starts = starts_of(model, len(self.chain))
            self.live_modules = LiveModules(self.chain, existing(purpose.folder), meta)
            self._begin(found, why_not)
            costs, chain, live = self.costs_at(self.updates.largest), self.chain.whole, self.live_modules
            self.initial_weights = (
                None if purpose.resumes else initial_weights(settings, purpose.trained, chain, costs[: len(chain)], live)
            )
            undo.callback(self.close)
            self.live_modules.take()
            self.reading.start(self.limit, device)
            with self.under_limit():
                self._measure_machine()
            undo.pop_all()

    def _begin(self, loss: LossFunction | None, why_not: str) -> None:
        settings, train, test, device, method = self.settings, self.train, self.test, self.device, self.settings.methods[0]
        trains, whole = self.purpose.trains, self.purpose.whole
        self.updates = Updates(settings, self.ranks, train.count, self._rows_of_an_epoch())
        if self.ranks.count > 1:
            self._refuse_ranks()
        self.losses = RunLosses(loss, settings, train, test, self.chain, device, learns=trains and whole, why_not=why_not)
        self.limit = limit_of(settings.mem_limit, device)
        rows, longest = self.updates.largest, self.updates.longest()
        self.rows_per_pass = method.rows_per_pass(
            self.losses.final, (train, test), batch=rows, epochs=longest.epochs,
            key=(settings.seed, "order") if settings.shuffles else None,
        )  # fmt: skip
        self.counted_at = cache(self._measure if trains else self._measure_to_evaluate)
        self.trials = Trials(self.chain, self.counted_at, device, settings.autocast)
        if settings.compile:
            self._let_compile()
        self.costs_at = cache(self.trials.refined)
        self.row_pack = RowPacks(self.counted_at, rows, settings.cache_type if self.alone else None)
        if (micro := settings.micro_batch_size) is not None and micro > self.updates.largest_asked:
            raise OptionError(
                f"--micro-batch-size {micro} is more than the batch of {self.updates.largest_asked}. Give at most that."
            )
        warm_up(device)  # threads that start later would have their stacks charged to the limit
        with self.under_limit(), self.losses.explained():
            self._check_model(longest.updates)

    def _rows_of_an_epoch(self) -> int:
        return self.train.epoch_rows

    def _let_compile(self) -> None:
        """Lets all blocks run compiled. Raises OptionError where they cannot."""
        if not self.device.shares_memory or not self.trials.are_to_come:
            raise OptionError(
                f"--compile goes with the CPU, and a /proc that can be written to; found {self.device.name}. Leave it out."
            )
        found: dict[object, bool] = {}
        for block in self.chain:
            if block.same_as not in found:
                found[block.same_as] = bool(block.layers_of(block.fake(FakeMode())[0]))
            block.compiles = found[block.same_as]
        if not any(found.values()):
            raise OptionError(
                "--compile: expected layers that hold other modules; found none among the blocks. Leave it out, or give layers "
                "as modules of their own: nn.Sequential(nn.Linear(...), nn.ReLU()) is one."
            )

    @property
    def request(self) -> PlanRequest:
        return PlanRequest(
            methods=self.methods, limit=self.limit, label_bytes=self.limit // 10, saved=self.purpose.reuse,
            loss_chunks=self.purpose.loss_chunks or 2,
        )  # fmt: skip

    @contextmanager
    def under_limit(self) -> Iterator[None]:
        """A context for planning under the limit. Raises DoesNotFit where planning alone needs more.

        Modules that were given alive are granted on top until they are emptied. A process that already holds so much that no
        plan will fit goes on without the limit, so that the refusal can name one that fits.
        """
        alive, beside = self.live_modules.alive(self.device.kind), self.reading.held
        with ExitStack() as stack:
            if any_plan_fits(self.device, self.limit + alive, beside=beside):
                self.trials.grant = stack.enter_context(enforced(self.device, self.limit + alive, beside=beside))
            try:
                yield
            except Exception as error:
                if not self.device.ran_out_of_memory(error):
                    raise
                enough = max(self.limit * 3 // 2, limit_for(self.trials.held() + _TO_PLAN))  # held: by live modules too
                raise DoesNotFit(
                    f"the limit of {format_size(self.limit)} is too small to plan in: measuring the model block by block "
                    f"needs more memory. Give more, for example {format_limit(enough)}."
                ) from error

    @contextmanager
    def _real_run(self, emptied: ExitStack) -> Iterator[None]:
        """A context for measuring with real tensors within the limit. Modules that were given alive are empty until `emptied`
        ends: beside them a layer of experts would need more than the run does."""
        with ExitStack() as stack:
            if self.device.shares_memory:
                emptied.enter_context(self.live_modules.emptied())
            if self.device.shares_memory and any_plan_fits(self.device, self.limit, beside=self.reading.held):
                most = self.limit - margin_of(self.limit)
                stack.enter_context(enforced(self.device, most, beside=self.reading.held))
            yield

    def _check_model(self, updates: int) -> None:
        """Checks the model, its loss and the optimizers by its costs. updates: of the longest training of a partition."""
        self._refuse_giants()
        settings, rows, whole = self.settings, self.updates.largest, self.chain.whole
        every = self.costs_at(rows)
        costs = every[: len(whole)]
        if self.purpose.trains and not any(cost.trainable for cost in costs):
            raise nothing_learns(sum(cost.frozen for cost in costs))
        refuse_lost_gradients(whole, costs, self.train.shape, rows, settings.autocast)
        sizes = {*values_of(settings.batch_size), settings.recovery_batch_size or self.updates.largest_asked}
        sizes = {min(size, self.train.count) for size in sizes}
        self.losses.find_reduction(every[-1], rows, sizes, whole=self.purpose.whole)
        if self.purpose.trains:
            self._try_optimizers()
            self.late = late_parameters(whole, costs, settings.frozen, -(-self.updates.epoch_rows // rows), updates)
            self._refuse_unfit_schedule()

    def _try_optimizers(self) -> None:
        looks = bool(self.settings.ram_limit) or not self.device.shares_memory
        joint = self.optimizers.try_on(self.chain, self.costs_at(self.updates.largest), looks_at_groups=looks)
        if joint is not None and self.settings.partitions != 1:
            self.methods = tuple(method for method in self.methods if not method.cuts)
            refuse_joint(joint, self.methods, late=not joint.found.joint)

    def _refuse_ranks(self) -> None:
        """Raises OptionError for batches that several processes cannot share."""
        settings, count = self.settings, self.ranks.count
        if self.updates.independent:
            if settings.tests != AT_THE_END:
                raise OptionError(
                    f"--eval-every needs the whole network, whose partitions {count} processes train at the same time with "
                    "--sil-inputs synthetic. Leave one of the two out, or start one process."
                )
            return
        least = min(values_of(settings.batch_size), default=1)
        if least < count or (settings.micro_batch_size or 1) > self.updates.shared(least):
            found = f"--micro-batch-size {settings.micro_batch_size}" if least >= count else f"{count} processes"
            raise OptionError(
                f"--batch-size {least} is shared by {count} processes, each of which takes at least one micro-batch; "
                f"found {found}. Give a larger batch, or smaller micro-batches."
            )

    def close(self) -> None:
        """Restores modules that were given alive, except those that have been trained."""
        self.live_modules.give_back()
        self.reading.close()

    def _measure_machine(self) -> None:
        """Measures the runtime and the speeds with emptied modules, as they are during training."""
        self.live_bytes = self.live_modules.nbytes(self.device.kind)
        self.runtime = MEASURED.runtime(self.device)
        self._held = self.trials.held()
        self._check_partitions()
        self.runtime += sum(cost.held for cost in self.costs_at(min(self.updates.largest_asked, self.train.count)))
        # Read once: a second plan, after a failed allocation, is made when the host pool has taken its share.
        self.host_free = host_memory_free()
        rows = min(self.updates.largest_asked, self.train.count)
        if self.chain.head is not None:
            rows *= prod(self.train.one_label().shape[1:])  # each position is a row of the head
        rows = min(rows, 256)  # a rate, and not the memory of a whole batch
        optimizer, autocast = self.optimizers.possible()[0], self.settings.autocast
        self.speeds = MEASURED.speeds(self.device, optimizer, rows, self.purpose.folder, self.purpose.dry, autocast)

    def _measure(self, micro_batch: int) -> tuple[BlockCost, ...]:
        before, narrows = self.trials.held(), not self.device.shares_memory
        with ExitStack() as emptied:
            costs = measure_chain(
                self.chain, self.train.shape, micro_batch, granule=self.device.granule, dtype=self.train.dtype,
                autocast=self.settings.autocast, narrows=narrows, real_run=partial(self._real_run, emptied),
            )  # fmt: skip
        if self.trials.held() > before + _LEFT_LYING:  # graphs in cycles, and what fake tensors remember of every shape
            FakeTensorMode.cache_clear()
            gc.collect()
            self.device.release_cached()
        return costs

    def _measure_to_evaluate(self, micro_batch: int) -> tuple[BlockCost, ...]:
        """Measures one row as two where a block, such as BatchNorm, takes no single one in training."""
        try:
            return self._measure(micro_batch)
        except ModelError:
            if micro_batch > 1:
                raise
            return self._measure(2)

    def _refuse_giants(self) -> None:
        """Raises DoesNotFit for a block too large for this machine, before the loss is measured (slow for wide blocks)."""
        costs, total = self.costs_at(self.updates.largest), self.device.total_memory()
        number, giant = max(enumerate(costs), key=lambda pair: pair[1].weights)
        if giant.weights + giant.gradients > total:
            raise DoesNotFit(
                f"{self.chain[number]} alone has {format_size(giant.weights)} of weights and {format_size(giant.gradients)} of "
                f"gradients: more than the {format_size(total)} that the device has, so no limit would be enough. Split it "
                "into smaller blocks."
            )

    def try_blocks(self, wanted: Iterable[tuple[int, int, int]]) -> bool:
        """Runs the kinds of blocks in `wanted` (rows, first, last) for real that were not run yet and fit alone.

        Returns True if any was run; its cost is then in `costs_at`, and what libraries keep for good in `runtime`.
        """
        available = self.limit - margin_of(self.limit) - self.trials.held() - self.reading.held
        if available <= 0:
            return False
        self.trials.beside = self.reading.held
        fresh = [self.trials.run(rows, first, last, available) for rows, first, last in wanted]
        if not any(fresh):
            return False
        before, self._held = self._held, self.trials.held()
        if self._held > before + _KEPT:
            gc.collect()
            self._held = self.trials.held()
        self.runtime += max(0, self._held - before)
        self.costs_at = cache(self.trials.refined)
        return True

    def _check_partitions(self) -> None:
        starts = self.settings.partition_choice()[1]
        if starts and starts[-1] >= len(self.chain):
            raise OptionError(
                f"--partitions: block {starts[-1]} does not exist; the model has blocks 0..{len(self.chain) - 1}."
            )
        self.refuse_cuts("--partitions", starts or ())

    def refuse_cuts(self, option: str, starts: tuple[int, ...]) -> None:
        """Raises OptionError if a partition may not begin at one of `starts`, because of the block before it."""
        for start in starts[1:]:
            cost = self.costs_at(self.updates.largest)[start - 1]
            if why_not := self._why_no_cut_after(cost):
                raise OptionError(
                    f"{option}: {self.chain[start - 1]} returns rows of shape {cost.output_shape}, and {why_not}. Cut "
                    "elsewhere, or use --method auto."
                )

    def can_cut_after(self, cost: BlockCost) -> bool:
        """True if a partition may end with this block: its loss may need an output of some shape."""
        return not self._why_no_cut_after(cost)

    def _why_no_cut_after(self, cost: BlockCost) -> str:
        """Why a partition may not end with this block, in words; "" if it may."""
        if not self.alone:
            return ""
        label_shape = tuple(self.train.labels.shape[1:])
        return self.methods[0].why_no_cut_after(self.settings, self.row_pack(cost), cost.output_shape, label_shape)

    def _refuse_unfit_schedule(self) -> None:
        """Raises OptionError for a warmup or schedule that is unfit for the run: partitions and recovery each warm up anew."""
        settings, runs = self.settings, self.updates.runs()
        refuse_endless_warmup(settings.warmup_updates, runs)
        tested = self.exact and settings.tests != AT_THE_END
        optimizers = ((self.optimizers.whole(one), one.is_bare) for one in self.optimizers.possible())
        refuse_unfit(
            settings.lr_schedule, runs.values(), optimizers, tested=tested, larger=criterion_of(settings.best_by).larger
        )

    @property
    def functions(self) -> dict[str, str]:
        """Identifies the loss, and an optimizer that was given as a function, as far as that can be seen."""
        return {"optimizer": self.optimizers.name, "loss": self.losses.name}

    def look_at_labels(self, labels: torch.Tensor) -> None:
        """Raises OptionError for a batch's labels that change how losses add up: see `RunLosses`."""
        self.losses.look_at_labels(labels, self.costs_at(self.updates.largest)[-1])

    def loss_cost(self, request: PlanRequest, micro_batch: int, *, true: bool = False) -> LossCost:
        """Returns a function from a block to the bytes of the loss after it, see `RunLosses.cost`.

        true: only the end of the network has a loss.
        """
        inner = self.alone and not true
        return self.losses.cost(
            request, self.costs_at(micro_batch), micro_batch, lambda block: inner and self.can_cut_after(block)
        )
