"""Turns transformers' optimizers and schedules, named in TrainingArguments or given, into functions that build them for each
visit of a partition."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from seqpart.errors import OptionError
from seqpart.integrations.hf_arguments import text

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {}),
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters that do not decay, as in transformers' Trainer."""

OwnOptimizer = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
"""An optimizer class, and its keyword arguments."""
Given = tuple[torch.optim.Optimizer | None, LRScheduler | None]
"""Optimizer and scheduler of the whole model."""
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
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
            "optimizer_cls_and_kwargs, such as (torch.optim.Adafactor, {'lr': 1e-3})."
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
