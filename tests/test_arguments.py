"""What plain PyTorch takes and `Trainer` does not is refused where it is given, with what to give: each ended in a message
about something else, in a traceback, or in a limit that was passed."""

import functools

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import ModelError, OptionError


def trainer(model=None, **options):
    return Trainer(nn.Sequential(nn.Linear(4, 3)) if model is None else model, mem_limit="2GB", method="full", **options)


class Proxies(nn.Module):
    """It has a gradient in a plain loop too, and learns where its owner gives it to the optimizer."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 3))

    def forward(self, output, labels):
        return (output - self.centers[labels]).square().mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, "found the class CrossEntropyLoss. Give CrossEntropyLoss()."),
        (nn.MSELoss, "Give MSELoss()."),
        (3, "a dict of functions by the names of a session's steps; found 3."),
        (Proxies(), "found Proxies with the parameter centers, which no optimizer would train"),
        (nn.CrossEntropyLoss()(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)), "found tensor("),
    ],
)
def test_a_loss_that_cannot_judge_is_refused_with_what_can(loss, words):
    with pytest.raises(OptionError) as refused:
        trainer(loss=loss)
    assert words in str(refused.value)


def test_a_loss_whose_parameters_stay_as_they_are_is_taken():
    trainer(loss=Proxies().requires_grad_(False))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "lambda parameters: torch.optim.SGD(parameters, lr=0.1)."),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)."),
        (torch.optim.AdamW, {}, "torch.optim.AdamW(parameters)."),
        (type("Mine", (torch.optim.SGD,), {}), {"lr": 0.1}, "Give lambda parameters: Mine(parameters"),
    ],
)
def test_an_optimizer_that_has_its_parameters_is_refused_with_the_function_that_makes_one(kind, options, words):
    model = nn.Linear(4, 3)
    with pytest.raises(OptionError) as refused:
        trainer(model, optimizer=kind(model.parameters(), **options))
    assert words in str(refused.value)


def test_the_class_of_an_optimizer_makes_one_and_takes_its_options_in_a_function():
    assert trainer(optimizer=torch.optim.AdamW).plan((torch.zeros(6, 4), torch.arange(6) % 3)).method == "full"
    with pytest.raises(OptionError, match=r"lr: the optimizer .*; give lambda parameters: SGD\(parameters, lr=\.\.\.\)\."):
        trainer(optimizer=torch.optim.SGD, lr=0.1)
    with pytest.raises(OptionError, match=r"lr: the optimizer .*; leave them out here\."):
        trainer(optimizer=functools.partial(torch.optim.SGD, lr=0.1), lr=0.1)


def test_a_scheduler_that_has_its_optimizer_is_refused_with_what_may_be_given():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 1)
    with pytest.raises(OptionError, match=r"lr_schedule: .* a function from an optimizer to one of torch's schedulers"):
        trainer(lr_schedule=scheduler)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear, "found the class Linear. Give what it returns: Linear(...)."),
        (lambda: trainer, "found the function trainer. Give what it returns: trainer(...)."),
    ],
)  # fmt: skip
def test_what_is_no_module_as_it_was_built_is_refused_with_the_one_that_is(model, words):
    with pytest.raises(ModelError) as refused:
        trainer(model())
    assert words in str(refused.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused_as_one():
    scripted = torch.jit.script(nn.Linear(4, 3))
    with pytest.raises(ModelError, match="found a ScriptModule, which cannot be cut at its layers"):
        trainer(scripted)


def test_a_module_of_torch_export_is_refused_as_one():
    """It was a NotImplementedError of torch: calling train() is not supported."""
    exported = torch.export.export(nn.Linear(4, 3), (torch.zeros(2, 4),)).module()
    with pytest.raises(ModelError, match=r"found one of torch\.export, which has one mode"):
        trainer(exported)
