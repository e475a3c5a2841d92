"""Reads the arguments of `Trainer`, and refuses those that plain PyTorch would take: classes, optimizers, scripted modules.

Each would fail later, with a message about something else.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from seqpart.data.step_losses import StepLosses
from seqpart.errors import ModelError, OptionError
from seqpart.model.losses import LossChoice, LossFunction, LossSource
from seqpart.model.named_optimizers import IN_WORDS
from seqpart.model.optimizer_trials import Build
from seqpart.model.optimizers import Optimizer, describe, example_of, refuse_divided, refuse_rateless
from seqpart.settings import Settings
from seqpart.text import short


def read_options(
    model: object,
    loss: LossChoice | Mapping[str, LossFunction],
    optimizer: str | Build | None,
    settings: Settings | None,
    given: dict[str, Any],
) -> tuple[LossSource, Optimizer | None, Settings]:
    """Returns the loss and the optimizer where they are functions, and the settings, of which `given` are the options.

    Raises OptionError for options that contradict each other.
    """
    source = StepLosses(loss) if isinstance(loss, Mapping) else loss
    _refuse_no_loss(source)
    _refuse_optimizer(optimizer)
    made = None
    if callable(optimizer):
        _refuse_options_beside(optimizer, sorted({"lr", "recovery_lr", "weight_decay", "no_decay", "momentum"} & set(given)))
        made = describe(getattr(optimizer, "__name__", ""), optimizer, example=example_of(model))
    elif optimizer is not None:
        given["optimizer"] = optimizer
    if isinstance(source, str) and source != "model":
        given["loss"], source = source, None
    if settings is not None and given:
        raise OptionError(f"settings brings every option with it: leave {', '.join(sorted(given))} out, or settings.")
    settings = (settings or Settings.of(**given)).placed()
    if made is not None:
        refuse_divided(made, settings.divides_weights)
        refuse_rateless(made, settings.lr_schedule, settings.warmup_updates)
    if source is not None and settings.loss is not None:
        raise OptionError(f"loss: settings name one, {settings.loss}, and another was given. Leave one out.")
    return source, made, settings


def _refuse_no_loss(loss: object) -> None:
    """Raises OptionError where a loss is neither a name, nor None, nor to be called with an output and labels."""
    expected = "loss: expected a name, or a function or an object (output, labels) -> loss"
    if isinstance(loss, type):
        raise OptionError(f"{expected}; found the class {loss.__name__}. Give {loss.__name__}().")
    if loss is not None and not isinstance(loss, str) and not callable(loss):
        raise OptionError(f"{expected}, or a dict of functions by the names of a session's steps; found {short(loss)}.")
    if isinstance(loss, nn.Module) and (learn := [name for name, one in loss.named_parameters() if one.requires_grad]):
        raise OptionError(
            f"loss: expected one without trainable parameters; found {type(loss).__name__} with the parameter {learn[0]}, "
            "which no optimizer would train. Move it into the model, or call the loss's requires_grad_(False) first."
        )


def _refuse_optimizer(optimizer: object) -> None:
    """Raises OptionError for an optimizer that has its parameters already."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer)
        name = f"torch.optim.{kind.__name__}" if getattr(torch.optim, kind.__name__, None) is kind else kind.__name__
        raise OptionError(
            f"optimizer: expected {IN_WORDS}, or a function from a list of parameters to an optimizer; found "
            f"an optimizer that has its parameters ({name}), where here they come and go. Give lambda parameters: "
            f"{name}(parameters{_changed(optimizer)})."
        )


def _refuse_options_beside(optimizer: object, options: Sequence[str]) -> None:
    """Raises OptionError for options of the optimizers by name beside a function that makes one."""
    if not options:
        return
    cure = "leave them out here"
    if isinstance(optimizer, type):
        name = optimizer.__name__
        cure = f"give lambda parameters: {name}(parameters, {', '.join(f'{option}=...' for option in options)})"
    raise OptionError(f"{', '.join(options)}: the optimizer function sets these itself; {cure}.")


def _changed(optimizer: torch.optim.Optimizer) -> str:
    """Returns the optimizer's options that differ from its class's defaults."""
    usual = inspect.signature(type(optimizer)).parameters
    found = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in usual and isinstance(value, bool | int | float | tuple) and value != usual[name].default
    }
    return "".join(f", {name}={value}" for name, value in found.items())


def refuse_no_modules(model: object) -> None:
    """Raises ModelError for what makes a model, and for modules whose code torch has taken to another form."""
    if isinstance(model, type) or inspect.isroutine(model):
        name = getattr(model, "__name__", "model")
        kind = "the class" if isinstance(model, type) else "the function"
        raise ModelError(f"a model must be an nn.Module, or a list; found {kind} {name}. Give what it returns: {name}(...).")
    for path, module in _modules_in(model):
        where = f"model{path}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{where}: expected a module with its own code; found a ScriptModule, which cannot be cut at its layers. Give "
                "the module that was scripted."
            )
        if isinstance(module, torch.fx.GraphModule) and "train" in vars(module):  # one that refuses to be called
            raise ModelError(
                f"{where}: expected a module that trains and evaluates; found one of torch.export, which has one mode. Give "
                "the module that was exported."
            )


def _modules_in(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules, each with the expression that reaches it from the model."""
    if isinstance(model, list | tuple):
        for number, part in enumerate(model):
            for path, module in _modules_in(part):
                yield f"[{number}]{path}", module
    elif isinstance(model, nn.Module):
        for name, module in model.named_modules():
            yield "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in name.split(".") if word), module
