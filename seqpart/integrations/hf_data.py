"""transformers' data sets and collators as loaders of ours, whose batches have one shape."""

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from seqpart.data.draws import generators_kept
from seqpart.data.loaders import spanned
from seqpart.data.padding import LABELS, TOKENS, ZEROS, Key, Padding, Sizes, sizes_of_batch, tokenizer_says
from seqpart.errors import DataError, OptionError

COLUMNS = ("labels", "label", "label_ids")
"""Of labels."""
_PADDED = {*TOKENS, *ZEROS, LABELS}
"""Names of what every model takes padded."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A collate_fn for an update: the user's collator makes its batches, which are padded to one length and put together."""

    collator: Callable[[list[Any]], Mapping[str, Any]]
    name: str
    """Of the data set, for errors."""
    size: int
    """Items of a batch of the collator."""
    columns: frozenset[str] | None
    """What is left of an item; None: all of it."""
    padding: Padding
    """What is padded, to which length and with what."""
    like: Mapping[str, torch.Tensor] | None = None
    """A batch with labels of the kind that stand in for those that there are not; None: all have some."""

    def __call__(self, items: list[Any]) -> dict[str, torch.Tensor]:
        """Tensors (rows, ...) by name, with `labels`. Raises DataError."""
        batches = [self._padded(self.batch(items[at : at + self.size])) for at in range(0, len(items), self.size)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def batch(self, items: list[Any]) -> dict[str, torch.Tensor]:
        """Of the collator, as it is. Raises DataError."""
        found = self._collated(items)
        if "labels" not in found and self.like is not None:
            found = {**found, "labels": _stand_in(found, self.like)}
        if "labels" not in found:
            raise DataError(
                f"{self.name}: a batch has no labels behind the collator, only {', '.join(map(str, found)) or 'nothing'}. A "
                "causal language model needs DataCollatorForLanguageModeling(tokenizer, mlm=False), or labels in the data set."
            )
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                raise DataError(f"{self.name}: {name} is a {type(value).__name__} behind the collator; expected tensors.")
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
        """Whether the first row has labels behind the collator."""
        with generators_kept():
            return "labels" in self._collated([data[0]])

    def with_labels_like(self, data: Any) -> "Batches":
        """The same for rows without labels, where labels of the kind that `data` has are wanted. Raises DataError."""
        if data is None:
            raise DataError(f"{self.name} has no labels, and there is no train_dataset that tells of what kind they would be.")
        with generators_kept():
            return replace(self, like=self.batch([data[0]]))

    def _padded(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.padding.of_batch(batch, self.name)
        self.refuse_unpadded(
            [name for name in batch if found[name].shape != batch[name].shape], has_mask="attention_mask" in batch
        )
        return found

    def refuse_unpadded(self, short: Iterable[Key], *, has_mask: bool) -> None:
        """short: inputs of which some batches are shorter than others. Raises DataError where they cannot be padded."""
        self.padding.refuse_unknown(short, self.name)
        if "input_ids" in short and not has_mask:
            raise DataError(
                f"{self.name}: batches differ in length, and have no attention_mask that tells which tokens only fill them. "
                "Let the tokenizer return it, or pad all to one length."
            )


def _stand_in(batch: Mapping[str, Any], like: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Labels of zeros for `batch`: one for each token where those of `like` are so."""
    rows, labels, tokens = len(next(iter(batch.values()))), like["labels"], like.get("input_ids")
    by_token = tokens is not None and labels.shape == tokens.shape and "input_ids" in batch
    return labels.new_zeros(batch["input_ids"].shape if by_token else (rows, *labels.shape[1:]))


def padded_alike(several: Sequence[tuple[Batches, Any]]) -> list[Batches]:
    """(batches, data set) of each, with the sizes that all of them are padded to: the largest.

    It takes a pass over the data, unless a first batch shows that they are no sequences. Raises DataError.
    """
    if several[0][0].padding.length != "longest":
        return [batches for batches, _ in several]
    largest, short = spanned(sizes for batches, data in several for sizes in _sizes(batches, data))
    several[0][0].refuse_unpadded(short, has_mask="attention_mask" in largest)
    return [replace(batches, padding=replace(batches.padding, length=largest)) for batches, _ in several]


def _sizes(batches: Batches, data: Any) -> Iterator[Sizes]:
    """Of each batch, in order: that of its longest row."""
    with generators_kept():
        for at in range(0, len(data), batches.size):
            batch = batches.batch([data[number] for number in range(at, min(at + batches.size, len(data)))])
            if not any(name in _PADDED and name != LABELS for name in batch):
                return
            yield sizes_of_batch(batch)


class Order(Sampler[int]):
    """The numbers of the rows as transformers' Trainer has them: in each epoch a permutation by its own seed."""

    def __init__(self, count: int, rows: int, seed: int | None) -> None:
        """rows: so many of `count`, the others are dropped. seed: None: in order."""
        self._count, self._rows, self._seed, self._epoch = count, rows, seed, 1

    def set_epoch(self, epoch: int) -> None:
        """They count from 1."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        if self._seed is None:
            yield from range(self._rows)
            return
        generator = torch.Generator().manual_seed(self._seed + self._epoch - 1)
        yield from torch.randperm(self._count, generator=generator)[: self._rows].tolist()


def training_loader(data: Any, batches: Batches, arguments: Any, rows: int, batch: int) -> "DataLoader[Any]":
    """rows: of an epoch; batch: of an update."""
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    order = Order(len(data), rows, seed if arguments.train_sampling_strategy == "random" else None)
    return DataLoader(
        data, batch_size=batch, sampler=order, collate_fn=batches, num_workers=arguments.dataloader_num_workers
    )  # fmt: skip


def evaluation_loader(data: Any, batches: Batches) -> "DataLoader[Any]":
    return DataLoader(data, batch_size=batches.size, collate_fn=batches)


def refuse_unknown(data: Any, name: str) -> None:
    """Raises DataError for what is no data set with numbers."""
    if data is None:
        raise DataError(f"{name} is missing.")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{name}: expected a data set with len() and [i]; found {type(data).__name__}. seqpart.Trainer takes streams."
        )
    if not len(data):
        raise DataError(f"{name} is empty. Give at least one row.")


def columns_of(model: nn.Module) -> frozenset[str]:
    """What the model's forward takes by name, and labels."""
    of_peft: Any = getattr(model, "get_base_model", None)
    base = of_peft() if of_peft is not None else model
    return frozenset(inspect.signature(base.forward).parameters) | set(COLUMNS)


def collator_of(given: Any, processing_class: Any) -> Callable[[list[Any]], Mapping[str, Any]]:
    """The user's, or the one that transformers' Trainer takes. Raises OptionError."""
    from transformers import DataCollatorWithPadding, default_data_collator

    if given is None:
        pads = hasattr(processing_class, "pad") and hasattr(processing_class, "model_input_names")
        return DataCollatorWithPadding(processing_class) if pads else default_data_collator
    if not callable(given):
        raise OptionError(f"data_collator: expected a function of a list of items; found {type(given).__name__}.")
    return given  # type: ignore[no-any-return]


def padding_of(given: Padding | None, collator: Any, processing_class: Any, config: Any) -> Padding:
    """What was given, and else what the tokenizer and the configuration say of token and side."""
    token, side = tokenizer_says(getattr(collator, "tokenizer", None) or processing_class)
    if token is None:
        token = getattr(config, "pad_token_id", None)
    return (given or Padding("longest")).or_else(token, side)


class Predictions:
    """Outputs and labels of a pass over the evaluation rows: an object with update, compute and reset, as `compute_metrics` of
    our Trainer takes it.

    judge: transformers' compute_metrics, of an EvalPrediction; first: preprocess_logits_for_metrics; folder: of the files;
    wanted: what judge has to find.
    """

    def __init__(
        self, judge: Callable[[Any], Mapping[str, Any]] | None,
        first: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None, folder: Path, wanted: str | None = None,
    ) -> None:  # fmt: skip
        self._judge, self._first, self._folder, self._wanted = judge, first, folder, wanted
        self._files: list[_Rows] = []

    def reset(self) -> None:
        self.close()
        self._files = [_Rows(self._folder), _Rows(self._folder)]

    def close(self) -> None:
        """Arrays that were mapped stay."""
        while self._files:
            self._files.pop().close()

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """outputs (rows, ...), labels (rows, ...) of one micro-batch."""
        if self._first is not None:
            outputs = self._first(outputs, labels)
        for file, tensor in zip(self._files, (outputs, labels), strict=True):
            file.add(tensor)

    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(predictions, labels), mapped from their files; what is written into them stays in memory."""
        predictions, labels = (file.array() for file in self._files)
        return predictions, labels

    def compute(self) -> dict[str, Any]:
        """Raises OptionError."""
        if self._judge is None:
            return {}
        from transformers import EvalPrediction

        predictions, labels = self.arrays()
        found = self._judge(EvalPrediction(predictions=predictions, label_ids=labels))
        named = {name.removeprefix("eval_"): value for name, value in found.items()}
        if self._wanted is not None and self._wanted not in named:
            raise OptionError(
                f"metric_for_best_model: compute_metrics found no {self._wanted}; it found {', '.join(named) or 'nothing'}."
            )
        return named


class _Rows:
    """Tensors of one shape but for their rows, one behind the other in an unnamed file."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by close)
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)

    def add(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        plain = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        self._shape, self._dtype = plain.shape[1:], plain.dtype
        self._rows += len(plain)
        self._file.write(np.ascontiguousarray(plain).tobytes())

    def array(self) -> np.ndarray[Any, Any]:
        self._file.flush()
        shape = (self._rows, *self._shape)
        return np.memmap(self._file, self._dtype, "c", shape=shape) if self._rows else np.zeros(shape, self._dtype)

    def close(self) -> None:
        self._file.close()
