"""The loss that a model computes itself from `labels`: the part of its program that its layers do not need.

    loss, layers = everything from the scored output and the labels on, everything up to the scored output

The scored output is what the model returns as `logits` beside its loss; if it returns only the loss, the output of the last
layer before it. A loss that takes more of the layers (the mean and variance of a VAE, the balance of experts) gets all that it
needs and that does not follow the labels, joined. One that takes a parameter of the model is refused: that would have to be
loaded with the last partition.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.capture.outputs import Outputs
from seqpart.capture.program import Op, Own, Program, Ref, by_name, following, leaves, mapped, needed_for
from seqpart.capture.recorder import Recorder
from seqpart.capture.segment import Segment, Steps
from seqpart.errors import ModelError
from seqpart.model.loss_chunks import Head, LossInChunks
from seqpart.model.losses import LossFunction, scores_of
from seqpart.model.tensors import tensors_of

LABELS = 1
"""The number of the labels in a program that was recorded with labels."""
_NAMES = ("labels", "label", "targets", "target")


class Labels(NamedTuple):
    """The labels that a model takes: their name, and the shape and type of one row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    loss: LossFunction | None = None
    """A function that takes them instead, with the model's logits; it is recorded as if the model computed it."""


def name_of_labels(model: nn.Module, inputs: Iterable[str | None]) -> str:
    """Returns the forward's name of the labels. inputs: names of the row's inputs. Raises ModelError if it takes no labels."""
    under: Any = getattr(model, "get_base_model", None)  # peft's, whose forward may take anything
    forwards = [model.forward, *([] if under is None else [under().forward])]
    found = [name for forward in forwards for name in inspect.signature(forward).parameters if name in _NAMES]
    if not found:
        raise ModelError(
            f'loss="model": the forward of {type(model).__name__} takes no `labels` (or `targets`), so it has no loss of its '
            "own. Give a function (output, labels) -> loss."
        )
    if found[0] in inputs:
        raise ModelError(f'loss="model": {found[0]} is among the inputs of a row. Give it as y, in (x, y).')
    return found[0]


def split_off(
    recorder: Recorder, model: nn.Module, found: Any, total: torch.Tensor, outputs: Outputs | None
) -> tuple[list[torch.Tensor] | None, Program]:
    """Returns (what the loss takes beside the labels, the loss as a program of that and the labels), of a run that returned
    `found`, with the loss `total`. None in the place of the first: the scored output is enough."""
    loss, one = recorder.known(total), _scored(found)
    with_labels = following({LABELS}, recorder.ops)
    scored, taken = recorder.known(one) if one is not None else _last_given(recorder, loss), None
    numbers: tuple[int, ...] = () if scored is None else (scored,)

    def of_the_rest() -> tuple[tuple[Op, ...], set[int], bool]:
        """(ops of the loss, numbers that they lack, true if the loss is no function of `numbers` and the labels)."""
        ops, free = needed_for({loss}, recorder.ops, {*numbers, LABELS})
        layers = (model.get_submodule(str(op.function)) for op in ops if op.is_module)
        return ops, free, not numbers or bool(free) or any(True for layer in layers for _ in layer.parameters())

    ops, free, lacks = of_the_rest()
    if lacks:
        taken = _frontier(recorder, loss, one, with_labels)
        if outputs is not None:
            taken = _with_sources(taken, one, recorder, outputs)
        numbers = tuple(recorder.known(tensor) for tensor in taken)
        ops, free, lacks = of_the_rest()
    owned = set().union(*(op.owned for op in ops))
    if any(op.changes_own and (op.uses & with_labels or op.owned & owned) for op in recorder.ops):
        raise ModelError(
            f'loss="model": the loss of {type(model).__name__} goes with a buffer that its forward changes, and is in no '
            "partition. Give a function (output, labels) -> loss."
        )
    if lacks:
        where = next((op.where for op in ops if op.uses & free), model.__class__.__name__)
        raise ModelError(
            f'loss="model": the loss of {type(model).__name__} takes more than its output and the labels, in {where}. Let it '
            "take these alone, or give a function (output, labels) -> loss."
        )
    return taken, Program(ops=ops, output=loss, shapes=recorder.shapes, learns=frozenset(recorder.learns), takes=numbers)


def _frontier(recorder: Recorder, loss: int, scored: torch.Tensor | None, with_labels: set[int]) -> list[torch.Tensor]:
    """Returns the tensors that do not follow the labels, of those that a loss is computed from; the scored output first."""
    taken: dict[int, None] = {} if loss in with_labels else {loss: None}
    for op in needed_for({loss}, recorder.ops)[0]:
        if op.uses & with_labels:
            taken |= dict.fromkeys(sorted(op.uses - with_labels))
    found = [recorder.tensor(number) for number in taken]
    return found if scored is None else [scored, *(tensor for tensor in found if tensor is not scored)]


def _with_sources(
    taken: list[torch.Tensor], scored: torch.Tensor | None, recorder: Recorder, outputs: Outputs
) -> list[torch.Tensor]:
    """Returns `taken` with the tensors of rows that numbers of the batch are computed from in the place of these."""
    found: dict[int | str, torch.Tensor] = {}
    for tensor in taken:
        sources = None if tensor is scored else outputs.sources(tensor, recorder)
        found |= {recorder.name(one): one for one in ([tensor] if sources is None else map(recorder.tensor, sorted(sources)))}
    return list(found.values())


def refuse_labels_in_layers(model: nn.Module, ops: Iterable[Op]) -> None:
    """Raises ModelError if the scored output depends on the labels."""
    for op in ops:
        if LABELS in op.uses:
            raise ModelError(
                f'loss="model": {type(model).__name__} takes its labels into its layers too, in {op.where}. Give what they are '
                "made from as an input of its own (decoder_input_ids)."
            )


def loss_of(model: nn.Module, found: Any) -> torch.Tensor:
    """Returns the loss among what a model returned. Raises ModelError."""
    named = by_name(found).get("loss")
    scalars = [leaf for leaf in leaves(by_name(found) or found) if isinstance(leaf, torch.Tensor) and not leaf.ndim]
    if isinstance(named, torch.Tensor) and named.numel() == 1:
        return named
    if len(scalars) == 1:
        return scalars[0]
    raise ModelError(
        f'loss="model": {type(model).__name__}, given labels, returned a {type(found).__name__} in which the loss cannot be '
        "identified: expected one number, or a dict with it as loss."
    )


def _scored(found: Any) -> torch.Tensor | None:
    """Returns the tensor beside the loss: the logits, or the only other tensor."""
    named = by_name(found).get("logits")
    others = [leaf for leaf in leaves(by_name(found) or found) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return named if isinstance(named, torch.Tensor) else others[0] if len(others) == 1 else None


def _last_given(recorder: Recorder, loss: int) -> int | None:
    """Returns the output of the layer that the loss is computed from; None if it is computed from several."""
    layers = {number for op in recorder.ops if op.is_module for number in op.makes} - following({LABELS}, recorder.ops)
    ops, _ = needed_for({loss}, recorder.ops, layers | {LABELS})
    found = {number for op in ops for number in op.uses & layers}
    return found.pop() if len(found) == 1 else None


class OwnLoss:
    """The model's own loss (output, labels) -> scalar. For a cross-entropy, `counts(labels)` is the number of labels in its
    mean."""

    def __init__(self, program: Program, evaluation: Program, model: nn.Module, outputs: Outputs, called: str) -> None:
        """evaluation: the loss in evaluation mode, computed where no gradients are. outputs: the tensors that it takes, where
        they are several. called: its name in messages.

        Raises ModelError if it uses a parameter of the model.
        """
        self._joined = outputs.joined
        if self._joined is not None:
            self.example = self._joined.example
            self.of_batch, self.from_layers = self._joined.of_batch, self._joined.from_layers
        self.called = called
        every = (*program.ops, *evaluation.ops)
        paths = dict.fromkeys(str(op.function) for op in every if op.is_module)
        self._modules = {path: copy.deepcopy(model.get_submodule(path)) for path in paths}
        tensors = tensors_of(model)

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, Own):
                return leaf
            if isinstance(tensors[leaf.name], nn.Parameter) or tensors[leaf.name].is_meta:
                raise ModelError(f'loss="model": the loss takes {leaf.name}, which is the model\'s. Give a function instead.')
            return tensors[leaf.name].detach().clone()  # its home is with the block that has it

        def steps(program: Program, number: int, *, from_labels: bool = False) -> Steps:
            takes = (LABELS,) if from_labels else (*program.takes, LABELS)
            ops = needed_for({number}, program.ops, set(takes))[0]
            own = tuple(replace(op, args=mapped(op.args, kept), kwargs=mapped(op.kwargs, kept)) for op in ops)
            return Steps(own, takes, (number,), 0 if takes[0] in program.follows else len(takes) - 1)

        def part(train: Steps, evaluate: Steps | None = None) -> Segment:
            return Segment(self._modules, {}, train, evaluate or train, "the model's own loss")

        self._writes = any(LABELS in op.changed or LABELS in (old for _, old in op.rebinds) for op in every)
        self._loss = part(steps(program, program.output), steps(evaluation, evaluation.output))
        self._targets: Segment | None = None
        asked, in_tests = cross_entropy_of(program), cross_entropy_of(evaluation)
        if asked is not None:
            scores, labels, self._ignored, smoothing = asked
            self._smoothing = smoothing, smoothing if in_tests is None else in_tests[3]
            if not needed_for({labels}, program.ops, {LABELS})[1] and labels in following({LABELS}, program.ops):
                self._targets = part(steps(program, labels, from_labels=True))
                self._scores = part(steps(program, scores))
                self.counts = self._counted

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self._modules:
            self._loss.to(output.device)
        self._loss.train(torch.is_grad_enabled())
        loss: torch.Tensor = self._loss(*self._values(output), self._own(labels))[0]
        return loss

    def _values(self, output: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the tensors that the loss takes, of the chain's output."""
        return self._joined.returned(output) if self._joined is not None else (output,)

    def scored(self, output: torch.Tensor) -> torch.Tensor:
        """Returns the scored output, from the chain's output."""
        return self._values(output)[0]

    def _own(self, labels: torch.Tensor) -> torch.Tensor:
        return labels.clone() if self._writes else labels

    def targets(self, labels: torch.Tensor) -> torch.Tensor | None:
        """Returns the labels that its cross-entropy takes, if they depend only on `labels`; else None."""
        if self._targets is None:
            return None
        found: torch.Tensor = self._targets(self._own(labels))[0]
        return found

    def in_chunks(self, head: Head, chunks: int) -> LossInChunks:
        """Returns the same loss of the states before the head. Raises ModelError if its labels depend on more than labels."""
        if self._targets is None:
            raise ModelError("--loss-chunks: the labels of its cross-entropy are made from more than `labels`. Leave it out.")
        return LossInChunks(head, self.targets, chunks, self._ignored, *self._smoothing)

    def _counted(self, labels: torch.Tensor) -> torch.Tensor:
        targets = self.targets(labels)
        assert targets is not None
        return (targets != self._ignored).sum()

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the scores and labels of its cross-entropy, also if shifted, see `PartitionLoss.scores`. Without a
        cross-entropy only labels of whole rows are known to be classes."""
        targets = self.targets(labels)
        if targets is None:
            return scores_of(self.scored(output), labels) if labels.ndim == 1 else None
        (scores,) = self._scores(*self._values(output), self._own(labels))
        if scores.ndim != 2 or targets.ndim != 1:
            return None
        return scores, targets.where(targets != self._ignored, -1)


def scores_in(program: Program) -> int:
    """Returns the number of the scores that a loss is the cross-entropy mean of. Raises ModelError if it is none."""
    found = cross_entropy_of(program)
    if found is None:
        raise ModelError(
            "--loss-chunks: the loss is not torch's cross_entropy, a mean without weights of classes, so it may take the "
            "logits as a whole. Leave --loss-chunks out."
        )
    return found[0]


def cross_entropy_of(program: Program) -> tuple[int, int, int, float] | None:
    """Returns (scores, labels, ignored label, smoothing) of a loss that ends with a cross-entropy mean that weighs all classes
    equally; else None."""
    op = program.ops[-1] if program.ops else None
    if op is None or program.output not in op.makes or op.function is not F.cross_entropy:
        return None
    given = inspect.signature(F.cross_entropy).bind(*op.args, **op.kwargs).arguments
    plain = given.get("weight") is None and given.get("size_average") is None and given.get("reduce") is None
    if not plain or given.get("reduction", "mean") != "mean":
        return None
    scores, labels = given["input"], given["target"]
    if not isinstance(labels, Ref):
        return None
    return scores.number, labels.number, given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
