"""Inputs of a plan: the model, the settings, the shape of the data and the machine, checked and measured."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seqpart.capture.capture import Row, chain_and_loss, chain_of
from seqpart.capture.inputs import Form
from seqpart.capture.outputs import Outputs
from seqpart.capture.own_loss import OwnLoss
from seqpart.data.classes import are_mixed, count_classes
from seqpart.data.labels import LossOfSeveral, loss_for, parts_of
from seqpart.data.reading import Reading
from seqpart.data.row_packs import RowPacks
from seqpart.data.splits import Split, refuse_mismatch
from seqpart.device.device import Device, host_memory_free
from seqpart.device.limit import any_plan_fits, enforced, limit_for, limit_of, margin_of, warm_up
from seqpart.device.ranks import ALONE, Ranks
from seqpart.errors import DataError, DoesNotFit, ModelError, OptionError, first_line
from seqpart.fields import as_text, per_partition, values_of
from seqpart.methods.method import Method, PartitionLoss, Targets
from seqpart.model.blocks import Block, Chain
from seqpart.model.inspection import nothing_learns
from seqpart.model.live_modules import LiveModules, MetaTensors
from seqpart.model.loss_chunks import Head, LossInChunks
from seqpart.model.loss_probe import BY_NAME, judging
from seqpart.model.losses import LossFunction, LossSource, refuse_unlike
from seqpart.model.optimizers import (
    Optimizer,
    choose,
    refuse_joint,
    refuse_unknown,
    refuse_unlike_pieces,
    refuse_unrounded,
    rounding,
    scheduled,
)
from seqpart.model.reductions import (
    LabelValues,
    LossValue,
    Reduction,
    ignored_label,
    name_of,
    name_with_settings,
    reduction_of,
    refuse_other_labels,
)
from seqpart.model.scheduler import Whole, refuse_unfit
from seqpart.model.tiling import starts_of
from seqpart.plan.plan import Plan, PlanRequest
from seqpart.plan.unfreezing import late_parameters
from seqpart.profile.blocks import BlockCost, measure_chain, measure_loss, refuse_lost_gradients
from seqpart.profile.fake_mode import FakeMode, quiet_log
from seqpart.profile.initial_weights import initial_weights
from seqpart.profile.machine import MEASURED, existing
from seqpart.profile.partition import LossCost
from seqpart.profile.trials import Trials
from seqpart.schedule.best import criterion_of
from seqpart.schedule.lengths import AT_THE_END, Length, length_of, refuse_endless_warmup
from seqpart.settings import Settings
from seqpart.store.layout import TensorSpec
from seqpart.units import format_limit, format_size

T = TypeVar("T", int, float, str)

_TO_PLAN = 64 << 20
"""Allowance in bytes for measuring a model, beside what the process holds, in a refusal."""
_LEFT_LYING = 4 << 20
"""Garbage bytes of measuring a model's costs above which a collection (0.1 s) is worth its time."""
_KEPT = 1 << 20
"""Growth in bytes above which a collection is made before the growth counts as permanent."""


class Inputs:
    """Inputs of a plan: model, settings and data, each checked on its own and against the others, and measured."""

    def __init__(
        self, model: object, settings: Settings, train: Split, test: Split, device: Device,
        *, final_loss: LossSource = None, optimizer: Optimizer | None = None, folder: Path, dry: bool = False,
        reuse: Plan | None = None, trains: bool = True, whole: bool = True, resumes: bool = False, trained: Path | None = None,
        loss_chunks: int | None = 1, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """reuse: a plan whose choices are reused. trains: True if weights are trained; whole: on all rows there will be.
        resumes: weights come from a checkpoint. trained: a file with weights of modules not alive, or with shapes alone.
        loss_chunks: chunks of positions that the loss is computed over; None: more than one, the fewest that fit.
        ranks: processes that share each update's rows."""
        refuse_mismatch(train, test)
        self.model, self.ranks, self.whole = model, ranks, whole
        self.settings, self.train, self.test, self.device, self.epoch_rows = settings, train, test, device, train.epoch_rows
        self.reading = Reading(train, test, settings.workers, device)
        self._scheduled = cache(partial(scheduled, settings.lr_schedule))
        self._wholes_of: dict[Optimizer, Whole] = {}
        self._why_not = ""
        """Why the loss gets one tensor of those that the model returns."""
        self.loss_chunks = loss_chunks
        own = None if optimizer is None else self._finished(replace(optimizer, average=settings.ema))
        self._optimizer, self._reuse, self.folder, self.dry = own, reuse, folder, dry
        with ExitStack() as undo:
            meta = MetaTensors(model if resumes or trained or settings.weights else None)
            undo.callback(meta.give_back)
            row, cast, in_chunks = (train.shape, train.dtype, train.form), settings.autocast, loss_chunks != 1
            example = self.reading.first_row
            if in_chunks:
                refuse_whole(settings, train)
            if final_loss == "model":
                labels = train.one_label() if train.labelled else None
                self.chain, final_loss = chain_and_loss(model, *row, labels, cast, in_chunks=in_chunks, row=example)
            elif in_chunks and final_loss is not None:
                self.chain, final_loss = chain_and_recorded_loss(final_loss, model, *row, train.one_label(), cast, example)
            else:
                outputs = None if final_loss is None else outputs_for(final_loss, train, cast)
                self.chain = chain_of(model, *row, cast, outputs, in_chunks=in_chunks, row=example)
                if outputs is not None:
                    final_loss, self._why_not = outputs.joined or final_loss, outputs.why_not
            self.chain.row = example
            self._starts = starts_of(model, len(self.chain))
            self.live_modules = LiveModules(self.chain, existing(folder), meta)
            self._begin(final_loss, trains)
            costs, chain, live = self.costs_at(self.full_batch), self.chain.whole, self.live_modules
            self.initial_weights = None if resumes else initial_weights(settings, trained, chain, costs[: len(chain)], live)
            undo.callback(self.close)
            self.live_modules.take()
            self.reading.start(self.limit, device)
            with self.under_limit():
                self._measure_machine()
            undo.pop_all()

    def _begin(self, final_loss: LossFunction | None, trains: bool) -> None:
        settings, train, test, device = self.settings, self.train, self.test, self.device
        self.methods, self.late = settings.methods, dict[str, int]()
        """late: {name of a parameter that is frozen at first: number of updates before it learns}."""
        self.groups_by_identity = False
        """True if the user's optimizer has groups by which objects parameters are, so that others cannot stand for them."""
        self.exact, self.alone = self.methods[0].exact, self.methods[0].alone
        if settings.partitions not in ("auto", 1):  # `auto` takes a method that can
            self.methods = tuple(method for method in self.methods if method.cuts)
        if self.ranks.count > 1:
            self._refuse_ranks()
        ignored = ignored_label(final_loss)
        of_its_own = ignored is None and not self.alone  # the user's loss decides what labels mean
        learns, contrasts = trains and self.whole and not of_its_own, final_loss is not None and self.exact
        self.classes = count_classes(train, test, ignored, learns=learns, contrasts=contrasts)
        self.methods[0].refuse_model(self.chain, self.classes, (train, test), final_loss)
        self.limit = limit_of(settings.mem_limit, device)
        mixes = bool(settings.mixup or settings.cutmix)
        name = settings.loss_name or ("cross-entropy" if mixes or are_mixed(train, test) else None)
        if settings.label_smoothing and final_loss is not None:
            raise OptionError(
                "--label-smoothing goes with a loss that has a name; found a loss of your own. Let that smooth labels, as "
                "torch.nn.CrossEntropyLoss(label_smoothing=0.1) does."
            )
        smoothing = settings.label_smoothing
        self._final_loss = loss_for(final_loss, name, train.labels, train.label_form, self.classes, smoothing)
        longest = self.length(max(values_of(settings.epochs)), self.full_batch).epochs
        self.rows_per_pass = self.methods[0].rows_per_pass(
            self._final_loss, (train, test), batch=self.full_batch, epochs=longest,
            key=(settings.seed, "order") if settings.shuffles else None,
        )  # fmt: skip
        self.counted_at = cache(self._measure if trains else self._measure_to_evaluate)
        self._measured_loss = cache(self._measure_loss)
        self.trials = Trials(self.chain, self.counted_at, device, settings.autocast)
        if settings.compile:
            self._let_compile()
        self.costs_at = cache(self.trials.refined)
        self.row_pack = RowPacks(self.counted_at, self.full_batch, settings.cache_type if self.alone else None)
        if (micro := settings.micro_batch_size) is not None and micro > self.largest_batch:
            raise OptionError(f"--micro-batch-size {micro} is more than the batch of {self.largest_batch}. Give at most that.")
        warm_up(device)  # threads that start later would have their stacks charged to the limit
        with self.under_limit(), self._explained():
            self._check_model(trains)

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

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to errors of a loss that gets one tensor how it failed on all that the model returns."""
        try:
            yield
        except (DataError, OptionError) as error:
            if not self._why_not:
                raise
            if BY_NAME in error.with_flags:
                raise ModelError(f"the loss fails on what the model returns: {self._why_not}") from error
            raise type(error)(f"{error.with_flags} On all that the model returns it failed too: {self._why_not}") from error

    @property
    def request(self) -> PlanRequest:
        return PlanRequest(
            methods=self.methods, limit=self.limit, label_bytes=self.limit // 10, saved=self._reuse,
            loss_chunks=self.loss_chunks or 2,
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

    def _check_model(self, trains: bool) -> None:
        self._refuse_giants()
        rows, whole = self.full_batch, self.chain.whole
        costs = self.costs_at(rows)[: len(whole)]
        if trains and not any(cost.trainable for cost in costs):
            raise nothing_learns(sum(cost.frozen for cost in costs))
        refuse_lost_gradients(whole, costs, self.train.shape, rows, self.settings.autocast)
        self._reduction = self._found_reduction()
        self._label_values: list[LabelValues] = []
        if trains:
            self._try_optimizers()
            length, frozen = self.length(max(values_of(self.settings.epochs)), self.full_batch), self.settings.frozen
            per_epoch = -(-self.epoch_rows // self.full_batch)
            self.late = late_parameters(whole, costs, frozen, per_epoch, length.updates)
        self._refuse_unfit_schedule()

    def _refuse_ranks(self) -> None:
        """Raises OptionError for batches that several processes cannot share."""
        settings, count = self.settings, self.ranks.count
        if self.trains_independently:
            if settings.tests != AT_THE_END:
                raise OptionError(
                    f"--eval-every needs the whole network, whose partitions {count} processes train at the same time with "
                    "--sil-inputs synthetic. Leave one of the two out, or start one process."
                )
            return
        least = min(values_of(settings.batch_size), default=1)
        if least < count or (settings.micro_batch_size or 1) > self.shared(least):
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
        self.runtime += sum(cost.held for cost in self.costs_at(min(self.largest_batch, self.train.count)))
        # Read once: a second plan, after a failed allocation, is made when the host pool has taken its share.
        self.host_free = host_memory_free()
        rows = min(self.largest_batch, self.train.count)
        if self.chain.head is not None:
            rows *= prod(self.train.one_label().shape[1:])  # each position is a row of the head
        rows = min(rows, 256)  # a rate, and not the memory of a whole batch
        optimizer, autocast = self.possible_optimizers()[0], self.settings.autocast
        self.speeds = MEASURED.speeds(self.device, optimizer, rows, self.folder, self.dry, autocast)

    def _measure(self, micro_batch: int) -> tuple[BlockCost, ...]:
        before, narrows = self.trials.held(), not self.device.shares_memory
        with ExitStack() as emptied:
            costs = measure_chain(
                self.chain, self.train.shape, micro_batch, granule=self.device.granule, dtype=self.train.dtype,
                autocast=self.settings.autocast, narrows=narrows, real_run=partial(self._real_run, emptied),
            )  # fmt: skip
        if self.chain.head is not None:
            costs = (*costs[:-1], with_head(costs[-1], self.chain.head))
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

    def _found_reduction(self) -> Reduction:
        """Finds how the losses of micro-batches add up. Raises OptionError for a loss whose batches cannot be divided."""
        last, batch = self.costs_at(self.full_batch)[-1], self.settings.micro_batch_size
        sizes = {*values_of(self.settings.batch_size), self.settings.recovery_batch_size or self.largest_batch}
        divided = None if {min(size, self.train.count) for size in sizes} == {batch} else self.full_batch
        shape, dtype, labels = self._loss_input_shape(last), last.output_dtype, self.train.labels
        found = reduction_of(
            self._final_loss, shape, dtype, labels, self.test.labels, batch=divided, chosen=batch is not None,
            complete=(self.whole and self.train.has_all_labels, self.test.has_all_labels),
        )  # fmt: skip
        return found if self.chain.head is None else replace(found, tried=False)  # a cross-entropy, whose outputs are not held

    def look_at_labels(self, labels: torch.Tensor) -> None:
        """Raises OptionError for labels of a batch that is divided, if values that none had before change how losses add up."""
        if not self._reduction.tried:
            return
        known = self._label_values or [*map(LabelValues.of, parts_of(self.train.labels, self.train.label_form))]
        found = [*map(LabelValues.of, parts_of(labels, self.train.label_form))]
        if not all(old.holds(new) for old, new in zip(known, found, strict=True)):
            last = self.costs_at(self.full_batch)[-1]
            refuse_other_labels(self._final_loss, self._reduction, self._loss_input_shape(last), last.output_dtype, labels)
        self._label_values = [old.with_others(new) for old, new in zip(known, found, strict=True)]

    def _loss_input_shape(self, last: BlockCost) -> tuple[int, ...]:
        """Shape of one row of what the loss takes: the chain's output, or that of the head behind it."""
        head = self.chain.head
        return last.output_shape if head is None else (*last.output_shape[:-1], head.shape[1])

    def _refuse_giants(self) -> None:
        """Raises DoesNotFit for a block too large for this machine, before the loss is measured (slow for wide blocks)."""
        costs, total = self.costs_at(self.full_batch), self.device.total_memory()
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
            cost = self.costs_at(self.full_batch)[start - 1]
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

    def _try_optimizers(self) -> None:
        """Tries the optimizers on every kind of trainable parameter."""
        learns: dict[str, TensorSpec] = {}
        for block, spec in self._learning():
            name = block.exported(spec.name)
            learns[name if name not in learns else f"{name} of {block}"] = spec
        divided_by = self.settings.divides_weights
        if self.settings.no_decay:
            refuse_unknown(self.settings.no_decay, {name: len(spec.shape) for name, spec in learns.items()})
            if divided_by:
                raise OptionError(f"--no-decay tells weights by name, and {divided_by} divides them. Leave it out.")
        every = learns | self._wholes(learns) if divided_by else learns
        with quiet_log():
            for optimizer in self.possible_optimizers():
                optimizer.try_on(every)
                refuse_unrounded(optimizer, learns.values())
                if divided_by:
                    refuse_unlike_pieces(optimizer, every, divided_by)
                late = self.settings.unfreeze is not None and optimizer.found.counts
                if (optimizer.found.joint or late) and self.settings.partitions != 1:
                    self.methods = tuple(method for method in self.methods if not method.cuts)
                    refuse_joint(optimizer, self.methods, late=late)
            if self._optimizer is not None and (self.settings.ram_limit or not self.device.shares_memory):
                given = (
                    (b.exported(s.name), b.alive.get_parameter(s.name)) for b, s in self._learning() if b.alive is not None
                )
                self.groups_by_identity = any(self._optimizer.groups_by_identity(*one) for one in given)

    def whole_optimizer(self, optimizer: Optimizer) -> Whole:
        """Returns an optimizer with the groups of all parameters that learn at any time, in the model's order. The user's is
        built once, of the model's own parameters, before they leave it: its groups may be by which objects these are."""
        if optimizer not in self._wholes_of:
            found = list[tuple[str, nn.Parameter]]()
            for block, spec in sorted(self._learning(), key=lambda one: one[0].places.get(one[1].name, one[0].number)):
                if optimizer is self._optimizer and block.alive is not None:
                    parameter = block.alive.get_parameter(spec.name)
                else:
                    parameter = nn.Parameter(torch.zeros((), dtype=spec.dtype).expand(spec.shape))
                found.append((block.exported(spec.name), parameter))
            self._wholes_of[optimizer] = Whole(optimizer.build, found)
        return self._wholes_of[optimizer]

    def _learning(self) -> Iterator[tuple[Block, TensorSpec]]:
        """Yields each parameter that learns at any time, with its block."""
        for block, cost in zip(self.chain, self.costs_at(self.full_batch), strict=True):
            yield from ((block, spec) for spec in cost.layout.specs if spec.name in cost.trainable)

    def _wholes(self, learns: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The larger parameters that some of `learns` are rows of."""
        found: dict[str, TensorSpec] = {}
        for name, spec in learns.items():
            if spec.shape and (whole := self.chain.wholes.get(name, name)) != name:
                rows = found[whole].shape[0] if whole in found else 0
                found[whole] = replace(spec, shape=(rows + spec.shape[0], *spec.shape[1:]))
        return found

    def _refuse_unfit_schedule(self) -> None:
        """Raises OptionError for a warmup or schedule that is unfit for the run: partitions and recovery each warm up anew."""
        epochs, batches = values_of(self.settings.epochs), values_of(self.settings.batch_size)
        if len(epochs) != len(batches):
            epochs, batches = epochs * len(batches), tuple(batch for batch in batches for _ in epochs)
        runs = {"a partition" if len(set(epochs)) > 1 else "the run": min(map(self._updates, epochs, batches))}
        if self.settings.recovery_epochs:
            runs["recovery"] = self._updates(self.settings.recovery_epochs, self.recovery_batch)
        refuse_endless_warmup(self.settings.warmup_updates, runs)
        tested = self.exact and self.settings.tests != AT_THE_END
        optimizers = ((self.whole_optimizer(one), one.is_bare) for one in self.possible_optimizers())
        refuse_unfit(
            self.settings.lr_schedule, runs.values(), optimizers, tested=tested,
            larger=criterion_of(self.settings.best_by).larger,
        )  # fmt: skip

    def _updates(self, epochs: float, batch: int) -> int:
        return self.length(epochs, batch).updates

    def length(self, epochs: float, batch: int) -> Length:
        """Length of a training for so many epochs, with updates of at most `batch` rows."""
        return length_of(epochs, self.settings.max_steps, -(-self.epoch_rows // min(batch, self.epoch_rows)))

    @property
    def functions(self) -> dict[str, str]:
        """Identifies the loss, and an optimizer that was given as a function, as far as that can be seen."""
        optimizer = "of the settings" if self._optimizer is None else f"{self._optimizer.name} {self._optimizer.options}"
        return {"optimizer": optimizer, "loss": name_with_settings(self._final_loss)}

    @property
    def tuned(self) -> str:
        """Options of an optimizer given as a function that a resumed run may change; "" for one of the settings."""
        return self._optimizer.tuned if self._optimizer is not None else ""

    @property
    def largest_batch(self) -> int:
        return max(values_of(self.settings.batch_size))

    @property
    def full_batch(self) -> int:
        """Rows of the largest update."""
        return min(self.largest_batch, self.epoch_rows)

    @property
    def the_batch(self) -> int | None:
        """Rows of an update; None where partitions differ in it, since a block's partition is not known yet."""
        sizes = {min(size, self.epoch_rows) for size in values_of(self.settings.batch_size)}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def recovery_batch(self) -> int:
        return min(self.settings.recovery_batch_size or self.largest_batch, self.train.count)

    @property
    def trains_independently(self) -> bool:
        """True if each of several processes trains subnets or partitions of its own."""
        return self.ranks.count > 1 and self.settings.methods[0].trains_independently(self.settings)

    def shared(self, rows: int, *, independent: bool = True) -> int:
        """Returns the most rows of these that one process takes. independent: False for a pass that all share."""
        return rows if independent and self.trains_independently else -(-rows // self.ranks.count)

    def optimizers(self, count: int, *, recovery: bool = False) -> tuple[Optimizer, ...]:
        """One optimizer for each of `count` partitions; in recovery the learning rate may differ."""
        if self._optimizer is not None:
            return (self._optimizer,) * count
        settings = self.settings
        names = self.values("--optimizer", settings.optimizer, count)
        rates = self.values("--lr", settings.lr, count)
        if recovery and settings.recovery_lr is not None:
            rates = (settings.recovery_lr,) * count
        if settings.momentum and "sgd" not in names:
            raise OptionError("--momentum goes with --optimizer sgd; the others keep moments of their own.")
        decay = {"weight_decay": settings.weight_decay, "no_decay": settings.no_decay}
        return tuple(self._named(name, lr=rate, **decay) for name, rate in zip(names, rates, strict=True))

    def _named(self, name: str, **options: Any) -> Optimizer:
        """Returns the optimizer of that name with the settings' momentum, which goes with sgd alone, and moving average."""
        momentum = self.settings.momentum if name == "sgd" else 0.0
        return self._finished(replace(choose(name, momentum=momentum, **options), average=self.settings.ema))

    def _finished(self, optimizer: Optimizer) -> Optimizer:
        moments = self.settings.rounded_moments
        return self._scheduled(optimizer if moments is None else rounding(optimizer, moments))

    def values(self, name: str, setting: T | tuple[T, ...], count: int) -> tuple[T, ...]:
        """One value for each partition; an exact method trains the network as one, with one value."""
        if self.alone:
            return per_partition(name, setting, count)
        values = values_of(setting)
        if len(values) > 1:
            raise OptionError(f"{name} {as_text(values)}: values for each partition go with --method sil only. Give one value.")
        return values * count

    def possible_optimizers(self) -> list[Optimizer]:
        """All optimizers of the settings: until the cut is known, any partition may get any of them."""
        if self._optimizer is not None:
            return [self._optimizer]
        return [self._named(name, lr=1.0) for name in values_of(self.settings.optimizer)]

    def loss_for(
        self, method: Method, label_bytes: int, partition: int, output_shape: tuple[int, ...], ends: bool, device: torch.device,
        loss_chunks: int, *, measured: bool = False,
    ) -> PartitionLoss | None:  # fmt: skip
        """Builds the loss of `partition`. ends: True if the network ends with it. measured: for fake tensors, without values to
        count."""
        settings = self.settings
        return method.loss(
            Targets(
                partition=partition, partitions=partition + (1 if ends else 2), output_shape=output_shape,
                label_shape=tuple(self.train.labels.shape[1:]), classes=self.classes, seed=settings.seed,
                most=label_bytes, device=device, final_loss=self._in_chunks(loss_chunks),
                reduction=None if measured else self._reduction, config=settings,
            )
        )  # fmt: skip

    def _in_chunks(self, loss_chunks: int) -> LossFunction:
        head, loss = self.chain.head, self._final_loss
        if head is None:
            return loss
        if isinstance(loss, OwnLoss):
            return loss.in_chunks(head, loss_chunks)
        smoothing = loss.keywords["label_smoothing"] if isinstance(loss, partial) else 0.0
        return LossInChunks(head, torch.flatten, loss_chunks, smoothing=smoothing)  # a cross-entropy of positions

    def loss_cost(self, request: PlanRequest, micro_batch: int, *, true: bool = False) -> LossCost:
        """Returns a function from a block to (peak, targets), bytes of the loss after it: the true loss after the last block, a
        partition's own after others.

        true: only the end of the network has a loss.
        """
        costs, inner = self.costs_at(micro_batch), self.alone and not true
        lasts, method, label_bytes = [costs[end - 1] for end in self.chain.ends], request.methods[0], request.label_bytes

        def cost(block: BlockCost) -> tuple[int, int]:
            is_last = any(block is last for last in lasts)
            if not is_last and not (inner and self.can_cut_after(block)):
                return 0, 0  # no partition's loss follows this block, and none may suit its shape
            return self._measured_loss(
                method, label_bytes, micro_batch, block.output_shape, block.output_dtype, is_last, request.loss_chunks
            )

        refuse_unlike(self._final_loss, self._loss_input_shape(lasts[0]), self.classes, self.train.labels)
        return cost

    def _measure_loss(
        self, method: Method, label_bytes: int, micro_batch: int, shape: tuple[int, ...], dtype: torch.dtype, final: bool,
        loss_chunks: int,
    ) -> tuple[int, int]:  # fmt: skip
        labels = torch.zeros((micro_batch, *self.train.labels.shape[1:]), dtype=self.train.label_type)
        targets = 0

        def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """Computes the loss as the executor does: scores are computed while the loss still holds its graph."""
            nonlocal targets
            device = torch.device("cpu")
            loss = self.loss_for(method, label_bytes, 0, shape, final, device, loss_chunks, measured=True)  # may be large
            assert loss is not None
            targets = loss.nbytes
            with Device().autocast(self.settings.autocast):
                value = loss(output, labels)
            with torch.no_grad():
                loss.scores(output.detach(), labels)
            return value.loss if isinstance(value, LossValue) else value

        against = f" against {self.classes or 'float'} {'classes' if self.classes else 'labels'}"
        block = None if self.chain.head is None else self.chain[-1]
        with judging(name_of(self._final_loss), shape, against, values=False), quiet_log():
            peak = measure_loss(loss_of, shape, micro_batch, self.device.granule, dtype, [labels], block)
        return max(0, peak - targets), targets


def refuse_whole(settings: Settings, train: Split) -> None:
    """Raises ModelError where a loss cannot be computed over chunks of positions, whatever the model."""
    why = ""
    if not settings.is_exact:
        why = f"goes with --method auto, full, checkpointed or streamed; found {settings.method}"
    elif train.label_form or train.labels.is_floating_point() or (train.labels.ndim < 2 and train.labelled):
        why = "goes with labels that are classes of positions, (rows, positions)"
    elif settings.loss_name not in (None, "cross-entropy"):
        why = f"goes with cross-entropy; found --loss {settings.loss_name}"
    if why:
        raise ModelError(f"--loss-chunks: {why}. Leave it out.")


def with_head(cost: BlockCost, head: Head) -> BlockCost:
    """Returns the cost of the last block together with the head behind it, except for the memory of the loss."""
    flops = 2 * prod(cost.gives[-1].shape[:-1]) * prod(head.shape)
    # The head's gradient is there already when the block's own are computed.
    return replace(cost, backward_peak=cost.backward_peak + cost.gradients, head_flops=flops)


def chain_and_recorded_loss(
    loss: LossFunction, model: object, shape: tuple[int, ...], dtype: torch.dtype, form: Form, labels: torch.Tensor,
    autocast: torch.dtype | None, row: Row,
) -> tuple[Chain, OwnLoss]:  # fmt: skip
    """Returns the model as a chain that ends before its head, and the user's loss, recorded. Raises ModelError."""
    try:
        return chain_and_loss(model, shape, dtype, form, labels, autocast, in_chunks=True, loss=loss, row=row)
    except Exception as error:
        if isinstance(error, ModelError) and error.with_flags.startswith("--loss-chunks"):
            raise
        reason = first_line(error).rstrip(".")
        raise ModelError(
            f"--loss-chunks: the loss {name_of(loss)} could not be looked into, to see whether it takes the logits position by "
            f"position: {reason}. Let it return torch's cross_entropy of the logits, or leave --loss-chunks out."
        ) from error


def outputs_for(loss: LossFunction, train: Split, autocast: torch.dtype | None) -> Outputs:
    """Returns what joins the outputs of a model for a user's loss."""
    tried = LossOfSeveral(loss, train.label_form) if train.label_form else loss
    return Outputs(loss, tried, train.labels.shape[1:], train.label_type, partial(Device().autocast, autocast))
