"""The losses of a run: the true one after the network, and those of partitions that are trained alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import torch

from seqpart.capture.own_loss import OwnLoss
from seqpart.data.classes import are_mixed, count_classes
from seqpart.data.labels import loss_for, parts_of
from seqpart.data.splits import Split
from seqpart.device.device import Device
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.methods.method import Method, PartitionLoss, Targets
from seqpart.model.blocks import Chain
from seqpart.model.loss_chunks import LossInChunks
from seqpart.model.loss_probe import BY_NAME, judging
from seqpart.model.loss_trials import LabelValues, reduction_of, refuse_other_labels
from seqpart.model.losses import LossFunction, refuse_unlike
from seqpart.model.reductions import LossValue, ignored_label, name_of, name_with_settings
from seqpart.plan.plan import PlanRequest
from seqpart.profile.blocks import BlockCost, measure_loss
from seqpart.profile.fake_mode import quiet_log
from seqpart.profile.partition import LossCost
from seqpart.settings import Settings


class RunLosses:
    """The losses of a run, the number of classes among its labels, and how losses of micro-batches add up."""

    def __init__(
        self, given: LossFunction | None, settings: Settings, train: Split, test: Split, chain: Chain, device: Device,
        *, learns: bool, why_not: str,
    ) -> None:  # fmt: skip
        """given: the user's. learns: True if the weights are trained on all rows that there will be. why_not: why the loss gets
        one tensor of those that the model returns."""
        self._settings, self._train, self._test, self._chain, self._device = settings, train, test, chain, device
        self._why_not, method = why_not, settings.methods[0]
        ignored = ignored_label(given)
        of_its_own = ignored is None and not method.alone  # the user's loss decides what labels mean
        contrasts = given is not None and method.exact
        self.classes = count_classes(train, test, ignored, learns=learns and not of_its_own, contrasts=contrasts)
        method.refuse_model(chain, self.classes, (train, test), given)
        mixes = bool(settings.mixup or settings.cutmix)
        name = settings.loss_name or ("cross-entropy" if mixes or are_mixed(train, test) else None)
        if settings.label_smoothing and given is not None:
            raise OptionError(
                "--label-smoothing goes with a loss that has a name; found a loss of your own. Let that smooth labels, as "
                "torch.nn.CrossEntropyLoss(label_smoothing=0.1) does."
            )
        self.final = loss_for(given, name, train.labels, train.label_form, self.classes, settings.label_smoothing)
        self.name = name_with_settings(self.final)
        """Identifies the loss, as far as that can be seen."""
        self._measured = cache(self._measure)
        self._label_values: list[LabelValues] = []

    def find_reduction(self, last: BlockCost, batch: int, sizes: set[int], *, whole: bool) -> None:
        """Finds how the losses of micro-batches add up. last: the last block's cost; batch: rows of the largest update; sizes:
        rows of all; whole: True if there will be no other rows. Raises OptionError for batches that cannot be divided."""
        train, test, micro = self._train, self._test, self._settings.micro_batch_size
        shape, dtype = self._input_shape(last), last.output_dtype
        found = reduction_of(
            self.final, shape, dtype, train.labels, test.labels, batch=None if sizes == {micro} else batch,
            chosen=micro is not None, complete=(whole and train.has_all_labels, test.has_all_labels),
        )  # fmt: skip
        # A loss with a head is a cross-entropy, whose outputs are not held.
        self._reduction = found if self._chain.head is None else replace(found, tried=False)

    def look_at_labels(self, labels: torch.Tensor, last: BlockCost) -> None:
        """Raises OptionError for labels of a batch that is divided, if values that none had before change how losses add up.

        last: the last block's cost.
        """
        if not self._reduction.tried:
            return
        known = self._label_values or [*map(LabelValues.of, parts_of(self._train.labels, self._train.label_form))]
        found = [*map(LabelValues.of, parts_of(labels, self._train.label_form))]
        if not all(old.holds(new) for old, new in zip(known, found, strict=True)):
            refuse_other_labels(self.final, self._reduction, self._input_shape(last), last.output_dtype, labels)
        self._label_values = [old.with_others(new) for old, new in zip(known, found, strict=True)]

    def _input_shape(self, last: BlockCost) -> tuple[int, ...]:
        """Shape of one row of what the loss takes: the chain's output, or that of the head behind it."""
        head = self._chain.head
        return last.output_shape if head is None else (*last.output_shape[:-1], head.shape[1])

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds to errors of a loss that gets one tensor how it failed on all that the model returns."""
        try:
            yield
        except (DataError, OptionError) as error:
            if not self._why_not:
                raise
            if BY_NAME in error.with_flags:
                raise ModelError(f"the loss fails on what the model returns: {self._why_not}") from error
            raise type(error)(f"{error.with_flags} On all that the model returns it failed too: {self._why_not}") from error

    def of_partition(
        self, method: Method, label_bytes: int, partition: int, output_shape: tuple[int, ...], ends: bool, device: torch.device,
        loss_chunks: int, *, measured: bool = False,
    ) -> PartitionLoss | None:  # fmt: skip
        """Builds the loss of `partition`. ends: True if the network ends with it. measured: for fake tensors, without values to
        count."""
        return method.loss(
            Targets(
                partition=partition, partitions=partition + (1 if ends else 2), output_shape=output_shape,
                label_shape=tuple(self._train.labels.shape[1:]), classes=self.classes, seed=self._settings.seed,
                most=label_bytes, device=device, final_loss=self._in_chunks(loss_chunks),
                reduction=None if measured else self._reduction, config=self._settings,
            )
        )  # fmt: skip

    def _in_chunks(self, loss_chunks: int) -> LossFunction:
        head, loss = self._chain.head, self.final
        if head is None:
            return loss
        if isinstance(loss, OwnLoss):
            return loss.in_chunks(head, loss_chunks)
        smoothing = loss.keywords["label_smoothing"] if isinstance(loss, partial) else 0.0
        return LossInChunks(head, torch.flatten, loss_chunks, smoothing=smoothing)  # a cross-entropy of positions

    def cost(
        self, request: PlanRequest, costs: Sequence[BlockCost], micro_batch: int, can_cut_after: Callable[[BlockCost], bool]
    ) -> LossCost:
        """Returns a function from a block to (peak, targets), bytes of the loss after it: the true loss after the last block, a
        partition's own after others.

        costs: of all blocks at `micro_batch` rows. can_cut_after: True for a block that may be followed by a partition's own.
        """
        lasts = [costs[end - 1] for end in self._chain.ends]

        def cost(block: BlockCost) -> tuple[int, int]:
            is_last = any(block is last for last in lasts)
            if not is_last and not can_cut_after(block):
                return 0, 0  # no partition's loss follows this block, and none may suit its shape
            return self._measured(
                request.methods[0], request.label_bytes, micro_batch, block.output_shape, block.output_dtype, is_last,
                request.loss_chunks,
            )  # fmt: skip

        refuse_unlike(self.final, self._input_shape(lasts[0]), self.classes, self._train.labels)
        return cost

    def _measure(
        self, method: Method, label_bytes: int, micro_batch: int, shape: tuple[int, ...], dtype: torch.dtype, final: bool,
        loss_chunks: int,
    ) -> tuple[int, int]:  # fmt: skip
        labels = torch.zeros((micro_batch, *self._train.labels.shape[1:]), dtype=self._train.label_type)
        targets = 0

        def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """Computes the loss as the executor does: scores are computed while the loss still holds its graph."""
            nonlocal targets
            device = torch.device("cpu")
            loss = self.of_partition(method, label_bytes, 0, shape, final, device, loss_chunks, measured=True)  # may be large
            assert loss is not None
            targets = loss.nbytes
            with Device().autocast(self._settings.autocast):
                value = loss(output, labels)
            with torch.no_grad():
                loss.scores(output.detach(), labels)
            return value.loss if isinstance(value, LossValue) else value

        against = f" against {self.classes or 'float'} {'classes' if self.classes else 'labels'}"
        block = None if self._chain.head is None else self._chain[-1]
        with judging(name_of(self.final), shape, against, values=False), quiet_log():
            peak = measure_loss(loss_of, shape, micro_batch, self._device.granule, dtype, [labels], block)
        return max(0, peak - targets), targets
