"""Turns transformers' data sets and collators into loaders whose batches have one shape."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler

from seqpart.data.generators import generators_kept
from seqpart.data.loaders import spanned
from seqpart.data.padding import LABELS, TOKENS, ZEROS, Key, Padding, Sizes, sizes_of, tokenizer_says
from seqpart.errors import DataError, OptionError
from seqpart.runtime import predictions
from seqpart.text import short

COLUMNS = ("labels", "label", "label_ids")
"""Names of label columns."""
_PADDED = {*TOKENS, *ZEROS, LABELS}
"""Names of tensors that are padded for every model."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A collate_fn for an update: joins the batches of the user's collator, padded to one length."""

    collator: Callable[[list[Any]], Mapping[str, Any]]
    name: str
    """Name of the data set, for errors."""
    size: int
    """Items per batch of the collator."""
    columns: frozenset[str] | None
    """Columns that are kept; None: all."""
    padding: Padding
    """Lengths and values for padding."""
    needs_labels: bool = True
    pads: bool = True
    """False if the model's loss may count places that are padded: a softmax over the positions of an answer."""
    like: Mapping[str, torch.Tensor] | None = None
    """A batch whose labels serve as a model for missing ones; None: none are missing."""

    def __call__(self, items: list[Any]) -> dict[str, torch.Tensor]:
        """Returns tensors (rows, ...) by name, with `labels`. Raises DataError."""
        batches = [self._padded(self.batch(items[at : at + self.size])) for at in range(0, len(items), self.size)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def batch(self, items: list[Any]) -> dict[str, torch.Tensor]:
        """Returns the collator's batch, unpadded. Raises DataError."""
        found = self._collated(items)
        if "labels" not in found and self.like is not None:
            found = {**found, "labels": _stand_in(found, self.like)}
        if "labels" not in found and self.needs_labels:
            raise DataError(
                f"{self.name}: the collator returned a batch without labels, only {', '.join(map(str, found)) or 'nothing'}. A "
                "causal language model needs DataCollatorForLanguageModeling(tokenizer, mlm=False), or labels in the data set."
            )
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                raise DataError(f"{self.name}: {name} is a {type(value).__name__} in the collator's batch; expected tensors.")
        return dict(found)

    def _collated(self, items: list[Any]) -> Mapping[str, Any]:
        if self.columns is not None and isinstance(items[0], Mapping):
            items = [{name: value for name, value in item.items() if name in self.columns} for item in items]
            if not items[0]:
                raise DataError(
                    f"{self.name}: no column has the name of an argument of the model's forward. Rename them, or give "
                    "remove_unused_columns=False."
                )
        found = self.collator(items)
        if not isinstance(found, Mapping):
            raise DataError(f"{self.name}: expected the collator to return a dict; found {type(found).__name__}.")
        return found

    def labelled(self, data: Any) -> bool:
        """True if the collator returns labels for the first row."""
        with generators_kept():
            return "labels" in self._collated([data[0]])

    def with_labels_like(self, data: Any) -> "Batches":
        """Returns a copy that adds labels like those of `data` to rows without. Raises DataError."""
        if data is None:
            raise DataError(f"{self.name} has no labels, and there is no train_dataset that shows their kind.")
        with generators_kept():
            return replace(self, like=self.batch([data[0]]))

    def _padded(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.padding.of_batch(batch, self.name)
        self.refuse_unpadded(
            [name for name in batch if found[name].shape != batch[name].shape], has_mask="attention_mask" in batch
        )
        return found

    def refuse_unpadded(self, short: Iterable[Key], *, has_mask: bool) -> None:
        """Raises DataError if an input of `short`, whose batches differ in length, cannot be padded."""
        short = list(short)
        if short and not self.pads:
            raise DataError(
                f"{self.name}: batches differ in length, in {short[0]}, and the model finds its loss without labels that say "
                "which places count. Pad all to one length: padding='max_length' in the tokenizer, or in the collator."
            )
        self.padding.refuse_unknown(short, self.name)
        if "input_ids" in short and not has_mask:
            raise DataError(
                f"{self.name}: batches differ in length, and have no attention_mask that tells which tokens only fill them. "
                "Let the tokenizer return it, or pad all to one length."
            )


def _stand_in(batch: Mapping[str, Any], like: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns zero labels for `batch`: one per token if those of `like` are."""
    rows, labels, tokens = len(next(iter(batch.values()))), like["labels"], like.get("input_ids")
    by_token = tokens is not None and labels.shape == tokens.shape and "input_ids" in batch
    return labels.new_zeros(batch["input_ids"].shape if by_token else (rows, *labels.shape[1:]))


def padded_alike(several: Sequence[tuple[Any, Batches]]) -> list[tuple[Any, Batches]]:
    """Returns each (data set, batches) with the sizes that all are padded to: the largest.

    Takes a pass over the data, unless the first batch shows that they are no sequences. Raises DataError.
    """
    first = several[0][1]
    if first.padding.length != "longest":
        return list(several)
    largest, short = spanned(sizes for data, batches in several for sizes in _sizes(batches, data))
    first.refuse_unpadded(short, has_mask="attention_mask" in largest)
    return [(data, replace(batches, padding=replace(batches.padding, length=largest))) for data, batches in several]


def _sizes(batches: Batches, data: Any) -> Iterator[Sizes]:
    """Yields the size of each batch's longest row, in order."""
    with generators_kept():
        for at in range(0, len(data), batches.size):
            batch = batches.batch([data[number] for number in range(at, min(at + batches.size, len(data)))])
            names = (name for name in batch if name != LABELS or batch[LABELS].dim() > 1)  # of a captioner only these are texts
            if not any(name in _PADDED or name in batches.padding.values for name in names):
                return
            yield sizes_of(batch)


class Order(Sampler[int]):
    """Row order of transformers' Trainer: a permutation per epoch, with its own seed."""

    def __init__(
        self, count: int, rows: int, seed: int | None, alike: Callable[[torch.Generator], list[int]] | None = None
    ) -> None:
        """rows: number of rows used of `count`. seed None: in order. alike: draws an order of rows that are grouped."""
        self._count, self._rows, self._seed, self._alike, self._epoch = count, rows, seed, alike, 1

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from 1."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        if self._seed is None:
            yield from range(self._rows)
            return
        generator = torch.Generator().manual_seed(self._seed + self._epoch - 1)
        order = self._alike(generator) if self._alike else torch.randperm(self._count, generator=generator).tolist()
        yield from order[: self._rows]


def order_of(data: Any, arguments: Any, rows: int, batch: int, tokenizer: Any) -> Order:
    """Returns the row order of transformers' Trainer. rows: per epoch; batch: per update."""
    seed = torch.initial_seed() if arguments.data_seed is None else arguments.data_seed  # set by Trainer, or since
    strategy = arguments.train_sampling_strategy
    alike = None
    if strategy == "group_by_length":
        lengths = _lengths(data, arguments.length_column_name, getattr(tokenizer, "model_input_names", ["input_ids"])[0])
        alike = functools.partial(_alike, lengths, batch)
    return Order(len(data), rows, None if strategy == "sequential" else seed, alike)


def _lengths(data: Any, column: str, name: str) -> list[int]:
    """Returns the length of each row: from its column, or of its input of that name. Raises DataError."""
    if column in getattr(data, "column_names", ()):
        return list(data[column])
    with generators_kept():
        if not isinstance(data[0], Mapping) or name not in data[0]:
            raise DataError(
                f"train_sampling_strategy group_by_length: expected rows with {name}, whose length is looked at; found "
                f"{short(data[0])}. Give another strategy."
            )
        return [len(data[number][name]) for number in range(len(data))]


def _alike(lengths: list[int], batch: int, generator: torch.Generator) -> list[int]:
    """Returns an order in which rows of about the same length follow each other."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    found: list[int] = get_length_grouped_indices(lengths, batch, generator=generator)
    return found


def refuse_unknown(data: Any, name: str) -> None:
    """Raises DataError for anything but a data set with len() and [i]."""
    if data is None:
        raise DataError(f"{name} is missing.")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{name}: expected a data set with len() and [i]; found {type(data).__name__}. seqpart.Trainer takes streams."
        )
    if not len(data):
        raise DataError(f"{name} is empty. Give at least one row.")


def columns_of(model: nn.Module) -> frozenset[str]:
    """Returns the names of the forward's arguments, and of labels."""
    return frozenset(inspect.signature(base_of(model).forward).parameters) | set(COLUMNS)


def base_of(model: nn.Module) -> nn.Module:
    """Returns the model that an adapter of peft is on; the model itself if there is none."""
    of_peft: Any = getattr(model, "get_base_model", None)
    found: nn.Module = of_peft() if of_peft is not None else model
    return found


def logits_of(outputs: Any) -> torch.Tensor:
    """Returns the logits of what a model of transformers returned."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return found


def collator_of(given: Any, processing_class: Any) -> Callable[[list[Any]], Mapping[str, Any]]:
    """Returns the user's collator, or transformers' default. Raises OptionError."""
    from transformers import DataCollatorWithPadding, default_data_collator

    if given is None:
        pads = hasattr(processing_class, "pad") and hasattr(processing_class, "model_input_names")
        return DataCollatorWithPadding(processing_class) if pads else default_data_collator
    if not callable(given):
        raise OptionError(f"data_collator: expected a function of a list of items; found {type(given).__name__}.")
    return given  # type: ignore[no-any-return]


def padding_of(given: Padding | None, collator: Any, processing_class: Any, config: Any) -> Padding:
    """Returns the given padding, with token and side from the tokenizer or the configuration if they were not given."""
    token, side = tokenizer_says(getattr(collator, "tokenizer", None) or processing_class)
    if token is None:
        token = getattr(config, "pad_token_id", None)
    return (given or Padding("longest")).or_else(token, side)


class Predictions(predictions.Predictions):
    """Collects outputs and labels of an evaluation in files.

    compute_metrics: transformers', of an EvalPrediction; first: preprocess_logits_for_metrics; folder: for the files;
    wanted: name of the loss, or of a metric that it must return.
    """

    def __init__(
        self, compute_metrics: Callable[[Any], Mapping[str, Any]] | None,
        first: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None, folder: Path, wanted: str = "loss",
    ) -> None:  # fmt: skip
        super().__init__(folder)
        self.without_loss = False
        self._compute_metrics, self._first, self._wanted = compute_metrics, first, wanted
        self.names = set[str]()
        """The names of all metrics that were found."""

    def update(self, outputs: Any, labels: torch.Tensor, dims: object = ()) -> None:
        """Adds the logits (rows, ...) of outputs, and labels (rows, ...), of one micro-batch."""
        outputs = logits_of(outputs)
        super().update((outputs if self._first is None else self._first(outputs, labels), labels), labels)

    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns (predictions, labels), mapped from their files."""
        found, labels = self.tree()
        return found.numpy(), labels.numpy()

    def compute(self) -> dict[str, Any]:
        """Returns the metrics. Raises OptionError."""
        if self._compute_metrics is None:
            return {}
        from transformers import EvalPrediction

        outputs, labels = self.arrays()
        found = self._compute_metrics(EvalPrediction(predictions=outputs, label_ids=labels))
        named = {name.removeprefix("eval_"): value for name, value in found.items()}
        self.names.update(named)
        if self._wanted not in {"loss", *named}:
            raise OptionError(
                f"metric_for_best_model: compute_metrics found no {self._wanted}; it found {', '.join(named) or 'nothing'}."
            )
        return named
