"""Trainers whose classes build on transformers' (TRL's SFTTrainer, sentence-transformers', your own), under a memory limit:
`under_limit(SFTTrainer(...), mem_limit="8GB").train()`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from typing import Any, Unpack

import transformers
from torch.utils.data import DataLoader, Sampler, Subset
from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import TrainOutput

import seqpart.trainer
from seqpart.data.generators import generators_kept, seed_generators
from seqpart.data.padding import TOKENS, ZEROS, Padding
from seqpart.errors import DataError, OptionError
from seqpart.integrations import hf_data
from seqpart.integrations.hf import Trainer
from seqpart.integrations.hf_arguments import Lengths, text
from seqpart.options import Options

__all__ = ["under_limit"]


def under_limit(trainer: transformers.Trainer, *, padding: Padding | None = None, **options: Unpack[Options]) -> Trainer:
    """Returns a Trainer that trains the model of `trainer`, an instance of transformers' Trainer or of a class that builds on
    it, under a limit: with its rows in its order, its loss, optimizer, schedule, evaluations and callbacks.

    padding, options: as in `seqpart.integrations.hf.Trainer`. Raises OptionError for a class with methods that nobody calls.
    """
    return _Adopted(trainer, padding, options)


_SFT, _OF_SENTENCES = "trl.trainer.sft_trainer.SFTTrainer", "sentence_transformers.base.trainer.BaseTrainer"
_KNOWN = {_SFT, "trl.trainer.base_trainer._BaseTrainer", _OF_SENTENCES}
"""Classes whose methods do nothing that is missed here, but for what is refused by name."""
_CALLED = {"compute_loss", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler"}
"""Methods that are called here, or that those call."""


class _Adopted(Trainer):
    """Our Trainer, of what another one has."""

    def __init__(self, theirs: Any, padding: Padding | None, options: Options) -> None:
        kinds = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _kinds(theirs)}
        _refuse_unheard(type(theirs).__name__, {name: kind for name, kind in kinds.items() if name not in _KNOWN})
        owner = next((name for name, kind in kinds.items() if "compute_loss" in vars(kind)), None)
        self._theirs, self._of_sentences = theirs, _OF_SENTENCES in kinds
        self._words: dict[str, str] = {}
        """What batches of sentence-transformers have beside tensors."""
        self._own: Callable[..., Any] | None = None if owner in (None, _SFT) else theirs.compute_loss
        if self._of_sentences:
            _refuse_of_sentences(theirs)
        if _SFT in kinds:
            _refuse_of_sft(theirs)
        theirs.model.to("cpu")  # where its own class has put it on the device
        self._train_loader: Any = theirs.get_train_dataloader() if theirs.train_dataset is not None else None
        super().__init__(
            theirs.model, theirs.args, theirs.data_collator, getattr(self._train_loader, "dataset", None),
            eval_dataset=theirs.eval_dataset, processing_class=theirs.processing_class,
            compute_loss_func=theirs.compute_loss_func, compute_metrics=theirs.compute_metrics,
            callbacks=[one for one in theirs.callback_handler.callbacks if not _is_default(one)],
            optimizers=(theirs.optimizer, theirs.lr_scheduler), optimizer_cls_and_kwargs=theirs.optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=theirs.preprocess_logits_for_metrics, padding=padding, **options,
        )  # fmt: skip

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        theirs = self._theirs
        theirs.args, theirs._train_batch_size = self.args, self.args.train_batch_size
        theirs.data_collator, theirs.processing_class = self.data_collator, self.processing_class
        if self.train_dataset is not getattr(self._train_loader, "dataset", None):
            theirs.train_dataset = self.train_dataset
        if theirs.train_dataset is not None:
            self._train_loader = theirs.get_train_dataloader()
            self.train_dataset = self._train_loader.dataset
        return super().train(resume_from_checkpoint)

    def _trainer(self) -> seqpart.trainer.Trainer:
        if self.model is not self._theirs.model:
            raise OptionError("under_limit: the model is another one now. Make a Trainer of its own class for it.")
        self._theirs.compute_loss_func = self.compute_loss_func
        return super()._trainer()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: None = None
    ) -> Any:
        if self._own is None:
            return super().compute_loss(model, inputs, return_outputs)
        if self._of_sentences and "labels" in inputs:
            inputs["label"] = inputs.pop("labels")
        return self._own(model, {**inputs, **self._words}, return_outputs=return_outputs)

    @property
    def _overridden(self) -> bool:
        return self._own is not None or "compute_loss" in vars(self)

    def _own_fields(self) -> set[str]:
        """Fields of its own class of arguments, which its own class honours."""
        return {one.name for one in fields(self.args)} - {one.name for one in fields(transformers.TrainingArguments)}

    def _read(self, name: str, data: Any) -> tuple[Any, hf_data.Batches]:
        hf_data.refuse_unknown(data, name)
        found = {"eval_dataset": self._theirs.get_eval_dataloader, "test_dataset": self._theirs.get_test_dataloader}
        loader = found[name](data) if name in found else self._train_loader
        if loader.batch_sampler is None:
            raise DataError(f"{name}: the loader has batch_size=None, and its items are no rows. Give it a batch_size.")
        rows = loader.dataset
        with generators_kept():
            first = loader.collate_fn([rows[0]])
            if name in found:  # sentence-transformers shuffles these too, and has losses that compare the rows of a batch
                rows = Subset(rows, [number for batch in loader.batch_sampler for number in batch])
        if self._of_sentences:
            self._words = {one: value for one, value in first.items() if isinstance(value, str)}
        collator = _Tensors(loader.collate_fn, self._words, name)
        return rows, self._batches(name, collator, rows, columns=None, needs_labels=not self._of_sentences)

    def _padding_for(self, collator: Any, data: Any) -> Padding:
        """Returns the padding, also of inputs that have the name of their column before their own."""
        padding = super()._padding_for(collator, data)
        with generators_kept():
            names = list(collator([data[0]]))
        tokens = {name: padding.token or 0 for name in names if name.endswith(tuple(f"_{one}" for one in TOKENS))}
        zeros = {name: 0 for name in names if name.endswith(tuple(f"_{one}" for one in ZEROS))}
        return replace(padding, values={**tokens, **zeros, **padding.values})

    def _order(self, data: Any, lengths: Lengths) -> Sampler[int]:
        order = _Batched(self._train_loader, self.args.per_device_train_batch_size, lengths.rows)
        if not isinstance(getattr(self._train_loader.batch_sampler, "sampler", None), LengthGroupedSampler):
            order.refuse_drawn()  # group_by_length is told apart (docs/huggingface.md, Differences)
        return order


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A collator's batches without `words`, which are the same in all, and with labels that are called `labels`."""

    collator: Callable[[list[Any]], Mapping[str, Any]]
    words: Mapping[str, str]
    name: str
    """Name of the data set, for errors."""

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        found = dict(self.collator(items))
        for name, word in self.words.items():
            if (other := found.pop(name, None)) != word:
                raise DataError(f"{self.name}: {name} is {other!r} in one batch, and {word!r} in another. Train on one kind.")
        return {"labels" if name == "label" else name: value for name, value in found.items()}


class _Batched(Sampler[int]):
    """The row order of a loader of theirs."""

    def __init__(self, loader: "DataLoader[Any]", size: int, rows: int) -> None:
        """size: rows of its batches; rows: of an epoch."""
        self._loader, self._size, self._rows = loader, size, rows

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from 1."""
        if hasattr(self._loader, "set_epoch"):  # as transformers asks: a plain DataLoader's own sampler is told nothing
            self._loader.set_epoch(epoch - 1)

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[int]:
        expected = [min(self._size, self._rows - at) for at in range(0, self._rows, self._size)]
        batches = [list(batch) for batch in islice(self._loader.batch_sampler or (), len(expected) + 1)]
        if (found := [len(batch) for batch in batches]) != expected:
            raise DataError(
                f"train_dataset: expected {self._rows} rows in batches of {self._size}, as per_device_train_batch_size and "
                f"dataloader_drop_last say; the loader gives {sum(found)} rows or more, in batches of {max(found, default=0)}. "
                "Let the arguments say what the loader does, and its sampler give as many rows as there are."
            )
        yield from chain.from_iterable(batches)

    def refuse_drawn(self) -> None:
        """Raises DataError for an order that no epoch's number decides."""
        orders = []
        with generators_kept():
            for seed in range(2):
                seed_generators(seed)
                self.set_epoch(1)
                orders.append(list(self))
        if orders[0] != orders[1]:
            raise DataError(
                "train_dataset: the loader's sampler draws an order from random numbers that go on from epoch to epoch, and a "
                "killed run could not resume. Give one whose order an epoch's number decides (by set_epoch, in a loader of "
                "accelerator.prepare), or leave get_train_dataloader to transformers."
            )


def _kinds(theirs: Any) -> list[type]:
    """Returns the classes of a Trainer that are not transformers', the most special first. Raises OptionError."""
    if not isinstance(theirs, transformers.Trainer):
        raise OptionError(f"under_limit: expected an instance of transformers' Trainer; found {type(theirs).__name__}.")
    kinds = type(theirs).__mro__
    return list(kinds[: kinds.index(transformers.Trainer)])


def _refuse_unheard(name: str, kinds: Mapping[str, type]) -> None:
    known = {one for one in dir(transformers.Trainer) if not one.startswith("__")} - _CALLED
    unheard = sorted({one for kind in kinds.values() for one in vars(kind) if one in known})
    if unheard:
        raise OptionError(
            f"under_limit: {name} has {', '.join(unheard)} of its own, which nobody calls here. Take a class that overrides "
            "compute_loss alone, or your own loop with the session of seqpart.Trainer(model, loss)."
        )


def _refuse_of_sft(theirs: Any) -> None:
    if theirs.args.loss_type != "nll":
        raise OptionError(
            f"under_limit: SFTTrainer's loss_type {theirs.args.loss_type} takes the weights of the last layer apart from it. "
            "Give loss_type='nll'."
        )
    if theirs.padding_free:
        raise OptionError(
            "under_limit: padding_free (and packing by 'bfd') makes one row of a batch, and a plan divides batches by their "
            "rows. Give padding_free=False, and packing=False or packing_strategy='wrapped'."
        )


def _refuse_of_sentences(theirs: Any) -> None:
    if isinstance(theirs.loss, dict) or isinstance(theirs.train_dataset, dict):
        raise OptionError("under_limit: expected one data set with one loss; found several. Train on one after the other.")
    own = {id(one) for one in theirs.model.parameters()}
    learns = [name for name, one in theirs.loss.named_parameters() if id(one) not in own and one.requires_grad]
    if learns:
        raise OptionError(
            f"under_limit: {type(theirs.loss).__name__} has {learns[0]}, which learns and is not the model's. Take a loss "
            "without weights of its own."
        )
    if theirs.args.learning_rate_mapping:
        raise OptionError("under_limit: learning_rate_mapping is not taken. Give optimizers=(optimizer, None) with its groups.")
    if theirs.evaluator is not None and text(theirs.args.eval_strategy) != "no":
        raise OptionError(
            "under_limit: an evaluator runs the whole model, which is empty during training. Leave it out, and call it on the "
            "model afterwards: evaluator(model)."
        )


def _is_default(callback: Any) -> bool:
    """True for a callback that every Trainer has, or that its class adds."""
    kind = type(callback)
    added = kind.__module__.startswith(("transformers.integrations.", "sentence_transformers."))
    return added or kind in (*DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK, PrinterCallback)
