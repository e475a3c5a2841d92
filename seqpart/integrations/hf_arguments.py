"""Translates transformers' TrainingArguments to seqpart's settings, and to the optimizer and schedule that they mean."""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Adafactor, TrainerState

from seqpart.errors import OptionError
from seqpart.model.optimizer_trials import Build


def _each(names: str, reason: str = "") -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


HONOURED = frozenset(
    _each(
        "output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate "
        "lr_scheduler_type lr_scheduler_kwargs warmup_steps optim weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "max_grad_norm bf16 tf32 seed data_seed full_determinism train_sampling_strategy dataloader_drop_last "
        "dataloader_num_workers remove_unused_columns label_names eval_strategy eval_steps eval_on_start "
        "per_device_eval_batch_size prediction_loss_only load_best_model_at_end metric_for_best_model greater_is_better "
        "logging_strategy logging_steps logging_first_step report_to disable_tqdm save_strategy save_steps use_cpu "
        "label_smoothing_factor neftune_noise_alpha length_column_name"
    )
)
WITHOUT_EFFECT: Mapping[str, str] = {
    **_each(
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
        "torch_empty_cache_steps auto_find_batch_size",
        "the plan decides what memory holds",
    ),
    "eval_accumulation_steps": "predictions wait in files",
    **_each(
        "local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "ddp_timeout average_tokens_across_devices eval_use_gather_object log_on_each_node log_level_replica save_on_each_node",
        "one process trains",
    ),
    **_each(
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order",
        "seqpart starts and feeds the processes that read rows",
    ),
    **_each(
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", "nothing is pushed to the hub"
    ),
    **_each("do_train do_eval do_predict resume_from_checkpoint", "only scripts read them"),
    **_each(
        "save_total_limit save_only_model enable_jit_checkpoint",
        "checkpoints are seqpart's: two are kept, whole, and a signal leaves one",
    ),
    "log_level": "messages go to logging.getLogger('seqpart')",
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
}
"""Fields without effect, and why."""
CURES: Mapping[str, str] = {
    "fp16": "bf16=True is there",
    "skip_memory_metrics": "trainer.result.proof says what memory was taken",
    "use_cache": "a forward pass in training keeps no cache",
    "optim_args": "give optimizer_cls_and_kwargs to the Trainer",
    "run_name": "trackers call a run by its directory",
    "push_to_hub": "push what save_model wrote",
}
"""What to do instead, by refused field."""


_SAMPLING, _REPORTS = ("random", "sequential", "group_by_length"), ("tensorboard", "wandb")


@dataclass(frozen=True)
class Lengths:
    """Length of a training: rows of an epoch and of an update, and the number of updates."""

    rows: int
    batch: int
    per_epoch: int
    updates: int
    batches: int
    """Batches of an epoch, of which an update has `accumulated`."""
    accumulated: int

    def epochs_after(self, update: int) -> float:
        """Returns the epochs that are over after so many updates, as transformers counts them: by batches."""
        epochs, updates = divmod(update, self.per_epoch)
        return epochs + updates * self.accumulated / self.batches


def lengths_of(arguments: Any, count: int) -> Lengths:
    """Returns the lengths for `count` items; with dataloader_drop_last an incomplete last batch is left out."""
    size = arguments.per_device_train_batch_size
    rows = count - count % size if arguments.dataloader_drop_last else count
    accumulated = arguments.gradient_accumulation_steps
    batch = size * accumulated
    per_epoch = max(1, math.ceil(rows / batch))
    steps = arguments.max_steps
    updates = steps if steps > 0 else math.ceil(arguments.num_train_epochs * per_epoch)
    return Lengths(rows, batch, per_epoch, updates, math.ceil(rows / size), accumulated)


def refuse_what_is_not_taken(arguments: Any, *, but: Iterable[str] = ()) -> None:
    """Raises OptionError, naming every field that was set to another value than its default and cannot be honoured.

    but: names of fields that somebody else honours.
    """
    taken = {*HONOURED, *WITHOUT_EFFECT, *but}
    wrong = [name for name in _set_fields(arguments) if name not in taken]
    if wrong:
        cures = "; ".join(f"{name}: {CURES[name]}" for name in wrong if name in CURES)
        raise OptionError(
            f"TrainingArguments: {', '.join(wrong)}: not taken here. Leave {'it' if len(wrong) == 1 else 'them'} out"
            f"{f' ({cures})' if cures else ''}; docs/huggingface.md says what is taken."
        )
    if arguments.world_size > 1:
        raise OptionError(f"TrainingArguments: one process trains here, and {arguments.world_size} were started.")
    if arguments.label_names not in (None, ["labels"]):
        raise OptionError(
            "TrainingArguments: label_names: expected ['labels'], from which the model computes its loss; found "
            f"{arguments.label_names}."
        )
    _one_of("train_sampling_strategy", arguments.train_sampling_strategy, _SAMPLING)
    if text(arguments.save_strategy) == "best" and not (
        arguments.load_best_model_at_end and text(arguments.eval_strategy) != "no"
    ):
        raise OptionError(
            "TrainingArguments: save_strategy best keeps the weights of the best evaluation for the end of the training. Give "
            "load_best_model_at_end=True and an eval_strategy, or another save_strategy."
        )
    _one_of("lr_scheduler_type", arguments.lr_scheduler_type, None, but=("reduce_lr_on_plateau", "greedy"))
    for name in arguments.report_to or ():
        _one_of("report_to", name, _REPORTS)


def _set_fields(arguments: Any) -> list[str]:
    from transformers import TrainingArguments

    # Otherwise accelerate's state of the process would be reset, and Trainers that exist could not go on.
    defaults: Any = TrainingArguments(output_dir=arguments.output_dir, accelerator_config={"use_configured_state": True})
    defaults.accelerator_config.use_configured_state = False
    found = []
    for field in fields(arguments):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if getattr(arguments, field.name, default) != getattr(defaults, field.name, default):
            found.append(field.name)
    return found


def text(choice: Any) -> str:
    """Returns the text of a transformers enumeration's member, or of a string."""
    return str(getattr(choice, "value", choice))


def _one_of(name: str, choice: Any, known: tuple[str, ...] | None, but: tuple[str, ...] = ()) -> None:
    if text(choice) in but or (known is not None and text(choice) not in known):
        expected = f"one of {', '.join(known)}" if known else f"another one than {', '.join(but)}"
        raise OptionError(f"TrainingArguments: {name}: expected {expected}; found {text(choice)}.")


# --- settings ---------------------------------------------------------------------------------------------------------


def options_of(arguments: Any, lengths: Lengths, sets: Collection[str]) -> dict[str, Any]:
    """Returns options of `seqpart.Trainer`, without optimizer and schedule. sets: names of those to evaluate on in training."""
    options: dict[str, Any] = {
        "output_dir": Path(arguments.output_dir) / RUN, "overwrite": True, "batch_size": lengths.batch,
        "clip_grad_norm": arguments.max_grad_norm or None, "seed": arguments.seed,
        "dtype": "bf16" if arguments.bf16 else "fp32", "save_every": _saving(arguments, lengths),
    }  # fmt: skip
    if arguments.max_steps > 0:
        options["max_steps"] = arguments.max_steps
    else:
        options["epochs"] = float(arguments.num_train_epochs)
    if arguments.use_cpu:
        options["device"] = "cpu"
    if arguments.report_to:
        options["log"] = tuple(arguments.report_to)
    return options | (_evaluations(arguments, lengths.updates, sets) if sets else {})


RUN = "seqpart"
"""The directory of the run, in output_dir."""


def _steps(count: float | None, updates: int) -> int:
    """Returns a number of updates that is given as such or as a fraction of all. None: eval_strategy was set afterwards."""
    if count is None:
        return TrainerState.eval_steps
    return math.ceil(count * updates) if count < 1 else int(count)


def _saving(arguments: Any, lengths: Lengths) -> str | int:
    strategy, steps = text(arguments.save_strategy), arguments.save_steps
    if strategy == "best":  # which is kept beside the checkpoints
        strategy, steps = text(arguments.eval_strategy), arguments.eval_steps
    if strategy == "steps":
        return _steps(steps, lengths.updates)
    return lengths.per_epoch if strategy == "epoch" else "never"


def _evaluations(arguments: Any, updates: int, sets: Collection[str]) -> dict[str, Any]:
    epochs = text(arguments.eval_strategy) == "epoch"
    found: dict[str, Any] = {"eval_every": "1 epoch" if epochs else _steps(arguments.eval_steps, updates)}
    if arguments.load_best_model_at_end:
        larger = bool(arguments.greater_is_better)
        by = f"{'max' if larger else 'min'}:{'/'.join(filter(None, wanted_of(arguments, sets)))}"
        found |= {"keep_best": True, "best_by": "loss" if by == "min:loss" else by}
    return found


def wanted_of(arguments: Any, sets: Collection[str]) -> tuple[str, str]:
    """Returns the set, "" for all of them, and the metric that select the best weights."""
    name = str(arguments.metric_for_best_model or "loss").removeprefix("eval_")
    if not arguments.load_best_model_at_end:
        name = "loss"
    own = max((one for one in sets if one and name.startswith(f"{one}_")), key=len, default="")
    return own, name.removeprefix(f"{own}_")


OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {}),
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
}
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters that do not decay, as in transformers' Trainer."""

OwnOptimizer = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
"""An optimizer class, and its keyword arguments."""
Given = tuple[torch.optim.Optimizer | None, LRScheduler | None]
"""Optimizer and scheduler of the whole model."""
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def of_arguments(arguments: Any, model: nn.Module, updates: int, own: OwnOptimizer | None) -> tuple[Build, Schedule]:
    """Returns the optimizer function for `arguments`. own: used instead of the named one. Raises OptionError."""
    kind, keywords = own if own is not None else _named(arguments)
    decaying = _decaying(model)

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        known = {id(module._parameters[leaf]): decays for module, leaf, decays in decaying}
        # Parameters that are tried before there is a partition are no one's.
        groups = [[one for one in parameters if known.get(id(one), True) is decays] for decays in (True, False)]
        return kind(
            [{"params": groups[0], "weight_decay": arguments.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
            **keywords,
        )  # fmt: skip

    build.__name__ = kind.__name__
    return build, schedule_of(arguments, updates)


def schedule_of(arguments: Any, updates: int) -> Schedule:
    """Returns a function that builds transformers' scheduler for the given number of updates."""
    warmup = arguments.get_warmup_steps(updates)

    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        from transformers import get_scheduler

        found: LRScheduler = get_scheduler(
            arguments.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=updates,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )  # fmt: skip
        return found

    return schedule


def _named(arguments: Any) -> OwnOptimizer:
    name = text(arguments.optim)
    if name not in OPTIMIZERS:
        raise OptionError(
            f"TrainingArguments: optim: expected one of {', '.join(OPTIMIZERS)}; found {name}. Give another as "
            "optimizer_cls_and_kwargs, such as (torch.optim.Adagrad, {'lr': 1e-3})."
        )
    kind, keywords = OPTIMIZERS[name]
    adam = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    return kind, {"lr": arguments.learning_rate, **keywords, **(adam if name.startswith("adamw") else {})}


def _decaying(model: nn.Module) -> list[tuple[nn.Module, str, bool]]:
    """Returns by parameter its module, its name there, and whether it decays."""
    from transformers.trainer_pt_utils import get_parameter_names

    names = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    found: dict[int, tuple[nn.Module, str, bool]] = {}
    for place, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:  # one that is shared goes by its first name
                found.setdefault(id(parameter), (module, leaf, f"{place}.{leaf}".removeprefix(".") in names))
    return list(found.values())


# --- given ------------------------------------------------------------------------------------------------------------


def as_given(given: Given, model: nn.Module, default: Schedule) -> tuple[Build, Schedule]:
    """Returns functions that rebuild an optimizer and a scheduler of the whole model. default: if there is no scheduler.

    Raises OptionError if they have stepped, or cannot be rebuilt.
    """
    optimizer, scheduler = given
    if optimizer is None:
        raise OptionError(
            "optimizers: a scheduler belongs to an optimizer. Give both, or lr_scheduler_type in TrainingArguments."
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise OptionError("optimizers: the scheduler belongs to another optimizer than the one beside it.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise OptionError("optimizers: the model's weights are still in files. Give optimizer_cls_and_kwargs.")
    if optimizer.state:
        raise OptionError("optimizers: the optimizer has stepped, and its state would be lost. Give a new one.")
    places = {id(one): place for place, group in enumerate(optimizer.param_groups) for one in group["params"]}
    lacking = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in places]
    if lacking:
        raise OptionError(f"optimizers: {lacking[0]} learns and is in no group. Add it, or freeze it: requires_grad_(False).")
    kind = type(optimizer)
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    known = set(inspect.signature(kind).parameters)
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[list[nn.Parameter]] = [[] for _ in options]
        for parameter in parameters:  # those that are tried before there is a partition are no one's
            groups[places.get(id(parameter), 0)].append(parameter)
        made = kind([{"params": group} for group in groups], **defaults)
        _take_options(made, options)
        return made

    build.__name__ = kind.__name__
    return build, default if scheduler is None else _copied(scheduler, options)


def _take_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(copy.deepcopy(own))


def _copied(scheduler: LRScheduler, options: list[dict[str, Any]]) -> Schedule:
    """Returns a function that copies `scheduler`, in its state, for another optimizer."""

    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        LambdaLR(optimizer, lambda _: 1.0)  # lets the optimizer count its steps, which schedulers look at
        _take_options(optimizer, options)
        return copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})

    return schedule
