"""transformers' Trainer, under a memory limit: `from seqpart.integrations.hf import Trainer` in place of transformers'.

Supported arguments work as in transformers; others are refused by name (docs/huggingface.md). An update has
per_device_train_batch_size * gradient_accumulation_steps rows, however many fit at once.
"""

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments, enable_full_determinism, set_seed
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import PredictionOutput, TrainOutput, align_special_tokens, speed_metrics

import seqpart.checkpoint.manifest as manifests
import seqpart.trainer
from seqpart.checkpoint.resume import as_state
from seqpart.data.padding import Padding
from seqpart.errors import Interrupted, OptionError
from seqpart.integrations import hf_arguments, hf_data, hf_losses
from seqpart.integrations.hf_callbacks import Relay
from seqpart.integrations.hf_data import Predictions, base_of
from seqpart.model.losses import LossSource
from seqpart.model.optimizer_trials import Build
from seqpart.options import Options
from seqpart.runtime.result import Result
from seqpart.store.scratch import has_checkpoint

__all__ = ["Trainer"]


class Trainer:
    """Trains a transformers model, which computes its loss from `labels`, under `mem_limit`.

    model, args, data_collator, train_dataset, eval_dataset, processing_class, model_init, compute_loss_func, compute_metrics,
        callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as in transformers.
    padding: a `seqpart.Padding`. None: batches are padded to the longest row of the data, which are read for that.
    options: of `seqpart.Trainer`, where TrainingArguments have no word for them: mem_limit (default: what is free), method
        (default: auto), micro_batch_size, ram_limit, offload_dir, partitions, ema, trace and others.

    What is set after it was made, in `args` too, holds from the next train() or evaluate() on; but bf16 and
    label_smoothing_factor, as in transformers, are those it was made with.

    Raises OptionError for arguments that cannot be honoured.
    """

    log_metrics, metrics_format, save_metrics, save_state = log_metrics, metrics_format, save_metrics, save_state

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None, compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None, optimizers: hf_arguments.Given = (None, None),
        optimizer_cls_and_kwargs: hf_arguments.OwnOptimizer | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *, padding: Padding | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        if (model is None) is (model_init is None):
            raise OptionError("model: give a model, or model_init: a function that returns one.")
        self.args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs, self.compute_loss_func = optimizer_cls_and_kwargs, compute_loss_func
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.neftune_noise_alpha, self.model_init = self.args.neftune_noise_alpha, model_init
        self._early = {name: getattr(self.args, name) for name in ("bf16", "label_smoothing_factor")}
        self._options, self._padding = options, padding
        self._refuse()
        self._seed()
        self.model: nn.Module = model if model_init is None else model_init()
        self.data_collator = hf_data.collator_of(data_collator, processing_class)
        self._relay = Relay(self.args, self.model, processing_class, callbacks or ())
        self._ours: seqpart.trainer.Trainer | None = None
        """The one of the last training."""
        self._empty = False
        self.result: Result | None = None
        """The result of the last training, with the proof of the limit."""
        self._trainer()  # what is wrong with settings is raised here

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises OptionError for what transformers' Trainer has and obeys, and this one would not."""
        from transformers import Trainer as Theirs

        if name in _UNHEARD or (hasattr(Theirs, name) and name not in _OURS):
            raise OptionError(
                f"trainer.{name}: nobody reads it here. What may be set is what the Trainer is made of (args, data sets, "
                "optimizer, ...), and compute_loss."
            )
        super().__setattr__(name, value)

    def __init_subclass__(cls) -> None:
        """Raises OptionError for overridden methods of transformers' Trainer that would not be called."""
        from transformers import Trainer as Theirs

        unheard = sorted(
            name for name in vars(cls) if not name.startswith("__") and hasattr(Theirs, name) and name not in _OURS
        )
        if unheard:
            raise OptionError(
                f"{cls.__name__}: {', '.join(unheard)}: nobody calls {'it' if len(unheard) == 1 else 'them'} here. A loss of "
                "your own goes into compute_loss, a loop of your own to the session of seqpart.Trainer(model, loss)."
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"seqpart's Trainer for transformers has no {name}: docs/huggingface.md lists what it has.")

    @property
    def state(self) -> Any:
        """transformers' TrainerState: global_step, epoch, log_history, best_metric."""
        return self._relay.state

    def is_world_process_zero(self) -> bool:
        return True

    is_local_process_zero = is_world_process_zero

    # --- what it does -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains. resume_from_checkpoint: the output_dir of a run that ended early, or True for this one's.

        Raises what `seqpart.Trainer.fit` raises.
        """
        self._refuse_empty("train")
        self._refuse()
        if self.model_init is not None:
            self._seed()
            self._ours = None
            self.model = self.model_init()
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        if hasattr(tokenizer, "pad_token_id") and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)  # a classifier looks for the last token before the padding
        trainer, lengths = self._trainer(), self._lengths()
        train, tests = self._loaders(lengths)
        place = self._output_dir if resume_from_checkpoint is True else resume_from_checkpoint
        resume = Path(place) if place else None
        if resume is not None and (resume / hf_arguments.RUN).is_dir():
            resume /= hf_arguments.RUN
        began = time.time()
        with self._collecting(hf_arguments.wanted_of(self.args, self._sets)[1]) as collector:
            self._relay.begin(lengths, self._sets, collector.names if collector is not None else ())
            if resume is not None and has_checkpoint(resume):
                self._relay.recall(as_state(manifests.load(resume)).loop.evaluations.all)
            if self.args.eval_on_start:
                self.evaluate()
            self.model.train()  # all of it, as theirs does
            with self._empty_model("train"):
                try:
                    self.result = trainer.fit(
                        train, tests, resume=resume, callbacks=[self._relay], compute_metrics=collector if self._tests else None
                    )
                except Interrupted as interrupted:
                    raise Interrupted(interrupted.directory, "train(resume_from_checkpoint=True)") from None
        self._ours = trainer
        rows = lengths.updates * lengths.batch if self.args.max_steps > 0 else lengths.rows * self.args.num_train_epochs
        steps = self._relay.steps  # those of this call: a callback may have ended it, or it went on with a run
        metrics = speed_metrics("train", began, num_samples=rows * steps / lengths.updates, num_steps=steps)
        metrics["train_loss"] = self._relay.loss
        self._relay.end(metrics)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: None = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Returns the loss and the metrics, each with the prefix; for a dict of data sets also with their names.

        eval_dataset: a data set, a dict of them, or the name of one of the Trainer's own.
        """
        if isinstance(eval_dataset, str) and eval_dataset not in self._sets:
            known = ", ".join(filter(None, self._sets)) or "a data set: the Trainer has no dict of them"
            raise OptionError(f"eval_dataset: expected {known}; found the name {eval_dataset!r}.")
        given = self._sets[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        data = given if given is not None else self.eval_dataset
        if isinstance(data, dict):
            parts = (self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}") for name, one in data.items())
            return {name: value for part in parts for name, value in part.items()}
        with self._collecting() as collector:
            data, batches = self._read("eval_dataset", data)
            metrics = self._evaluated(data, batches, ignore_keys, metric_key_prefix, collector)
        self._relay.evaluated(metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: None = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Returns predictions and labels, mapped from files, and metrics; for rows without labels only predictions."""
        test_dataset, batches = self._read("test_dataset", test_dataset)
        if (labelled := batches.labelled(test_dataset)) or not self._labelled:
            collecting = self._predictions()
        else:
            batches = batches.with_labels_like(self.train_dataset)
            collecting = Predictions(None, self.preprocess_logits_for_metrics, self._folder())
        with closing(collecting) as collector:
            metrics = self._evaluated(test_dataset, batches, ignore_keys, metric_key_prefix, collector)
            predictions, labels = collector.arrays()
        if not labelled:
            del metrics[f"{metric_key_prefix}_loss"]
        self._relay.predicted(metrics)
        return PredictionOutput(predictions, labels if labelled else None, metrics)

    def save_model(self, output_dir: str | None = None) -> None:
        """Saves the current model for `from_pretrained`, and the tokenizer."""
        place = Path(output_dir or self._output_dir)
        self._refuse_empty("save_model")
        if any(parameter.is_meta for parameter in self.model.parameters()):
            if self.result is None:
                raise OptionError("save_model: the model's weights are in files, and nothing was trained yet.")
            self.result.save_pretrained(place)
        elif callable(save := getattr(self.model, "save_pretrained", None)):
            save(place)
        else:
            raise OptionError(
                f"save_model: {type(self.model).__name__} has no save_pretrained. trainer.result.weights has all."
            )
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: None = None
    ) -> Any:
        """Returns the loss of a batch, with `return_outputs` (loss, outputs). A subclass may override it: it is called when the
        training is planned, with tensors that have no values, and what it does with them is done in every micro-batch."""
        labels = inputs.pop("labels") if self._loss is not None else None
        outputs = model(**inputs)
        if self._loss is not None:
            loss = self._loss(outputs, labels)
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss, outputs) if return_outputs else loss

    def add_callback(self, callback: Any) -> None:
        self._relay.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._relay.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self._relay.handler.remove_callback(callback)

    # --- how it does it -----------------------------------------------------------------------------------------------

    @contextmanager
    def _empty_model(self, what: str) -> Iterator[None]:
        """Inside, the model is empty. Raises OptionError if its weights are in use already."""
        self._refuse_empty(what)
        self._empty = True
        try:
            with self._own_loss(), hf_losses.noise(self.model, self.neftune_noise_alpha):
                yield
        finally:
            self._empty = False

    def _own_loss(self) -> AbstractContextManager[None]:
        """A context in which the model computes the loss of a compute_loss that is overridden."""
        return hf_losses.with_compute_loss(self.model, self.compute_loss) if self._overridden else nullcontext()

    def _own_fields(self) -> set[str]:
        """Names of arguments that somebody else honours."""
        return set()

    @property
    def _overridden(self) -> bool:
        return "compute_loss" in vars(self) or type(self).compute_loss is not Trainer.compute_loss

    def _refuse_empty(self, what: str) -> None:
        if self._empty:
            raise OptionError(f"{what}: the model is empty during training and evaluation, so no callback can do that.")

    @property
    def _output_dir(self) -> Path:
        assert self.args.output_dir is not None  # transformers sees to that
        return Path(self.args.output_dir)

    @property
    def _tests(self) -> bool:
        """True if there are evaluations during training."""
        return hf_arguments.text(self.args.eval_strategy) != "no"

    @property
    def _sets(self) -> dict[str, Any]:
        """The evaluation sets by name; one alone has the name ""."""
        return self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}

    def _lengths(self) -> hf_arguments.Lengths:
        hf_data.refuse_unknown(self.train_dataset, "train_dataset")
        lengths = hf_arguments.lengths_of(self.args, len(self.train_dataset))
        if not lengths.rows:
            raise OptionError(
                f"dataloader_drop_last: {len(self.train_dataset)} rows make no whole batch of "
                f"{self.args.per_device_train_batch_size}, and nothing is left of them."
            )
        return lengths

    def _trainer(self) -> "seqpart.trainer.Trainer":
        """Returns a Trainer for what is set now. Raises OptionError."""
        args = copy.copy(self.args)
        vars(args).update(self._early)
        self._loss = hf_losses.loss_of(args, self.model, self.compute_loss_func)
        takes = inspect.signature(base_of(self.model).forward).parameters
        self._labelled = self._loss is not None or self._overridden or "labels" in takes
        if (config := getattr(self.model, "config", None)) is not None:
            config.use_cache = False
        self._relay.renew(self.args, self.model, self.processing_class)
        lengths = self._lengths() if self.train_dataset is not None else hf_arguments.lengths_of(args, 1)
        options = hf_arguments.options_of(args, lengths, self._sets if self._tests else ())
        options["optimizer"], options["lr_schedule"] = self._optimizer(lengths.updates)
        clash = sorted(set(options) & set(self._options))
        if clash:
            raise OptionError(f"{', '.join(clash)}: TrainingArguments say it. Leave {'it' if len(clash) == 1 else 'them'} out.")
        given: Options = {"mem_limit": "auto", "method": "auto", **self._options}
        loss: LossSource = "model" if self._overridden or self._loss is None else self._loss
        made = seqpart.trainer.Trainer(self.model, loss, quiet=bool(args.disable_tqdm), **{**options, **given})
        if self._ours is not None and self._ours.model is made.model:
            made.trained = self._ours.trained
        return made

    def _optimizer(self, updates: int) -> tuple[Build, hf_arguments.Schedule]:
        given = self.optimizer, self.lr_scheduler
        if given != (None, None):
            return hf_arguments.as_given(given, self.model, hf_arguments.schedule_of(self.args, updates))
        return hf_arguments.of_arguments(self.args, self.model, updates, self.optimizer_cls_and_kwargs)

    def _seed(self) -> None:
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)

    def _refuse(self) -> None:
        """Raises OptionError for arguments that cannot be honoured, or contradict each other."""
        args, sets = self.args, self._sets
        hf_arguments.refuse_what_is_not_taken(args, but=self._own_fields())
        if self.optimizer_cls_and_kwargs is not None and (self.optimizer, self.lr_scheduler) != (None, None):
            raise OptionError("optimizers: optimizer_cls_and_kwargs says it too. Leave one out.")
        if self._tests and all(one is None for one in sets.values()):
            raise OptionError(
                f"eval_strategy {hf_arguments.text(args.eval_strategy)}: eval_dataset is missing. Give one, or "
                "eval_strategy='no'."
            )
        if (wanted := hf_arguments.wanted_of(args, sets)[1]) != "loss" and self.compute_metrics is None:
            raise OptionError(f"metric_for_best_model {wanted}: compute_metrics is missing, which has to find it.")

    def _read(self, name: str, data: Any) -> tuple[Any, hf_data.Batches]:
        """Returns the rows of a data set, and what makes batches of them. Raises DataError."""
        hf_data.refuse_unknown(data, name)
        columns = hf_data.columns_of(self.model) if self.args.remove_unused_columns else None
        return data, self._batches(name, self.data_collator, data, columns=columns)

    def _batches(self, name: str, collator: Any, data: Any, **more: Any) -> hf_data.Batches:
        training = name == "train_dataset"
        size = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        padding = self._padding_for(collator, data)
        more.setdefault("needs_labels", self._labelled)
        return hf_data.Batches(collator=collator, name=name, size=size, padding=padding, pads=self._labelled, **more)

    def _padding_for(self, collator: Any, data: Any) -> Padding:
        config = getattr(self.model, "config", None)
        return hf_data.padding_of(self._padding, collator, self.processing_class, config)

    def _order(self, data: Any, lengths: hf_arguments.Lengths) -> Any:
        return hf_data.order_of(data, self.args, lengths.rows, lengths.batch, self.processing_class)

    def _loaders(self, lengths: hf_arguments.Lengths) -> tuple[Any, Any]:
        """Returns the loaders of the training rows and, if there are evaluations, of their rows: all padded to one length."""
        several = [self._read("train_dataset", self.train_dataset)]
        if self._tests:
            several += [self._read("eval_dataset", one) for one in self._sets.values()]
        (data, train), *rest = hf_data.padded_alike(several)
        loader = DataLoader(
            data, batch_size=lengths.batch, sampler=self._order(data, lengths), collate_fn=train,
            num_workers=self.args.dataloader_num_workers,
        )  # fmt: skip
        tests = {name: _in_order(*one) for name, one in zip(self._sets, rest, strict=False)}
        return loader, tests if isinstance(self.eval_dataset, dict) and tests else tests.get("")

    def _evaluated(
        self, data: Any, batches: hf_data.Batches, ignore_keys: object, prefix: str, collector: Predictions | None
    ) -> dict[str, Any]:
        """Returns the metrics of an evaluation."""
        if ignore_keys is not None:
            raise OptionError("ignore_keys: only the model's logits are evaluated. Leave it out.")
        began = time.time()
        ((data, batches),) = hf_data.padded_alike([(data, batches)])
        with self._empty_model("evaluate"):
            found = self._trainer().evaluate(_in_order(data, batches), compute_metrics=collector)
        metrics: dict[str, Any] = {f"{prefix}_{one}": value for one, value in found.metrics.items()}
        metrics[f"{prefix}_loss"] = found.loss
        steps = math.ceil(len(data) / batches.size)
        metrics |= speed_metrics(prefix, began, num_samples=len(data), num_steps=steps)
        return metrics

    def _collecting(self, wanted: str = "loss") -> AbstractContextManager[Predictions | None]:
        """Returns the collector of predictions for compute_metrics, if there is one."""
        if self.compute_metrics is None or self.args.prediction_loss_only:
            return nullcontext()
        return closing(self._predictions(wanted))

    def _predictions(self, wanted: str = "loss") -> Predictions:
        if not self._labelled:
            raise OptionError(
                f"predict, compute_metrics: the forward of {type(self.model).__name__} takes no `labels` that they could give. "
                'Leave them out: evaluate() finds its loss, and seqpart.Trainer(model, "model").predict(rows) what it returns.'
            )
        return Predictions(self.compute_metrics, self.preprocess_logits_for_metrics, self._folder(), wanted)

    def _folder(self) -> Path:
        """Returns an existing directory on the run's disk."""
        place = self._output_dir.absolute()
        return next(folder for folder in (place, *place.parents) if folder.is_dir())


_OURS = {"train", "evaluate", "predict", "save_model", "add_callback", "compute_loss"}
_UNHEARD = {
    "accelerator", "callback_handler", "can_return_loss", "control", "current_flos", "deepspeed", "gather_function",
    "hp_name", "hp_search_backend", "hub_model_id", "is_deepspeed_enabled", "is_distributed_loading_by_transformers",
    "is_fsdp_enabled", "is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled", "is_in_train",
    "is_model_parallel", "label_names", "label_smoother", "model_accepts_loss_kwargs", "model_wrapped",
    "place_model_on_device", "state",
}  # fmt: skip
"""Attributes of transformers' Trainer that nobody reads here."""


def _in_order(data: Any, batches: hf_data.Batches) -> "DataLoader[Any]":
    return DataLoader(data, batch_size=batches.size, collate_fn=batches)
