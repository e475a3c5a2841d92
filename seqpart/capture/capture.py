"""Turns any nn.Module into a chain of blocks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from seqpart.capture import own_loss
from seqpart.capture.cutting import Cutter, blocks_of
from seqpart.capture.head import head_of
from seqpart.capture.inputs import Form, described, refuse_misfit, takes_a_dict, unpacked
from seqpart.capture.outputs import OtherRows, Outputs
from seqpart.capture.own_loss import LABELS, Labels, OwnLoss
from seqpart.capture.program import Differs, Program, by_name, following, generalised, leaves, mapped, needed_for, other_inside
from seqpart.capture.recorder import Inside, Recorder
from seqpart.capture.sources import learned_through
from seqpart.capture.unrecorded import HiddenPath, extremes, refuse_memory
from seqpart.errors import ModelError
from seqpart.model.blocks import Chain, as_chain, fake_like, refuse_without_values
from seqpart.model.inspection import cure_of_tokens, cure_of_types, is_listened_to, left_as_they_are, listed, remembered
from seqpart.model.loss_probe import generators_left_alone
from seqpart.model.losses import LossFunction, label_dtype
from seqpart.model.packs import ROWS
from seqpart.model.reductions import name_of
from seqpart.model.tensors import tensors_of, with_tensors
from seqpart.model.tiling import Score, tile_of
from seqpart.profile.fake_mode import FakeMode, quiet_log, quiet_random

Row = Callable[[], torch.Tensor] | None
_ROWS, _OTHER_ROWS = 4, 6
"""Rows of the two recorded batches: comparing the runs shows which numbers follow the rows."""
_DRAWING = {"apply_spec_augment": "False", "layerdrop": "0.0", "encoder_layerdrop": "0.0", "decoder_layerdrop": "0.0"}
"""Random draws that configurations of transformers turn on (wav2vec2, HuBERT and their kin), and the value that turns each
off."""


def chain_of(
    model: object, shape: tuple[int, ...], dtype: torch.dtype, form: Form = (), autocast: torch.dtype | None = None,
    outputs: Outputs | None = None, *, in_chunks: bool = False, row: Row = None,
) -> Chain:  # fmt: skip
    """Returns a list of blocks or an nn.Sequential as a chain (see as_chain); traces any other module, and one with tiles.

    shape, dtype: of one row. form: how several inputs are packed in it. autocast: the type of the run's autocast, under which a
    model may differ: a peft adapter casts its sum to its base's type. outputs: joins several outputs of a traced model, for a
    loss that takes them all. in_chunks: True if the chain is to end before the head, see `Chain`. row: returns a row of the
    data, (1, *shape), for modules whose shapes depend on values.

    Raises ModelError if a model cannot be cut, with the module and the line that prevent it.
    """
    if torch.is_anomaly_enabled():
        raise ModelError(
            "anomaly detection is on (torch.autograd.set_detect_anomaly): it looks at the values of every gradient, and a "
            "model is measured on tensors without values. Turn it off: a run ends with a message if a loss is not finite."
        )
    if _has_a_forward(model) or (isinstance(model, nn.Module) and (form or in_chunks or tile_of(model) > 0 or _repeats(model))):
        return _traced(_Asked(model, shape, dtype, form, None, autocast, outputs, in_chunks, row))[0]
    if in_chunks:
        raise ModelError("--loss-chunks goes with an nn.Module; found a list of blocks. Give nn.Sequential(*blocks).")
    if form:
        raise ModelError(
            f"a list of blocks takes one tensor, and a row has a {'tuple' if form[0].name is None else 'dict'} of "
            f"{described(form)}. Give the tensor itself, (x, y), or an nn.Module that takes them."
        )
    chain = as_chain(model)
    parts = [block.alive for block in chain if block.alive is not None]
    layers = model if isinstance(model, nn.Sequential) else nn.Sequential(*parts)
    asked = _Asked(layers, shape, dtype, (), None, autocast, outputs, False, row)
    if len(parts) == len(chain) and _pass_more(replace(asked, outputs=None)):
        return _traced(asked)[0]
    return chain


def _has_a_forward(model: object) -> TypeGuard[nn.Module]:
    """True if the model has its own forward; a list of blocks has none, and no parameters, modes or hooks of its own."""
    if not isinstance(model, nn.Module) or not isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return isinstance(model, nn.Module)
    kind, plain = type(model), nn.Sequential if isinstance(model, nn.Sequential) else nn.Module
    if any(getattr(kind, name) is not getattr(plain, name) for name in ("forward", "__call__", "train")):
        return True
    return bool(model._parameters or model._buffers) or is_listened_to(model)


def _repeats(model: nn.Module) -> bool:
    """True for an nn.Sequential of which two layers have a buffer in common."""
    layers = list(model._modules.values()) if isinstance(model, nn.Sequential) else []
    buffers = [id(buffer) for part in layers if part is not None for buffer in part.buffers()]
    return len(set(buffers)) < len(buffers)


def chain_and_loss(
    model: object, shape: tuple[int, ...], dtype: torch.dtype, form: Form, labels: torch.Tensor | None,
    autocast: torch.dtype | None = None, *, in_chunks: bool = False, loss: LossFunction | None = None, row: Row = None,
) -> tuple[Chain, OwnLoss]:  # fmt: skip
    """Returns the model as a chain, and the loss that it computes itself when it gets labels (rows, ...) such as these.

    labels: None if it needs none. in_chunks: as in `chain_of`; the loss is that of the head's output nevertheless. loss: a
    function to be recorded in the place of the model's own.

    Raises ModelError if it computes none, or one that needs a parameter of the model.
    """
    if not isinstance(model, nn.Module) or (loss is None and not _has_a_forward(model)):
        raise ModelError('loss="model": a list of blocks computes no loss. Give an nn.Module that does, or a function.')
    inputs = {one.name for one in form} | {getattr(model, "main_input_name", None)}
    given = Labels("", (), torch.int64)
    if labels is not None:
        name = own_loss.name_of_labels(model, inputs) if loss is None else ""
        given = Labels(name, tuple(labels.shape[1:]), label_dtype(labels), loss)
    outputs = Outputs(None, None, given.shape, given.dtype, nullcontext)
    chain, *programs = _traced(_Asked(model, shape, dtype, form, given, autocast, outputs, in_chunks, row))
    train, evaluation = (program.loss for program in programs)
    assert train is not None and evaluation is not None
    return chain, OwnLoss(train, evaluation, model, outputs, '"model"' if loss is None else name_of(loss))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model to be recorded, the rows that it takes, and what is recorded with it."""

    model: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: Form
    labels: Labels | None
    autocast: torch.dtype | None
    outputs: Outputs | None
    in_chunks: bool
    row: Row


def _pass_more(asked: _Asked) -> bool:
    """True if layers of an nn.Sequential pass each other tensors beside the one that goes through all, as by an attribute."""
    layers = {layer: path for path, layer in asked.model.named_children()}
    try:
        for training in (True, False):
            _recorded(asked, layers, _ROWS, training=training)
    except Exception as error:  # any other error is raised where the layers are measured
        return isinstance(error.__cause__, HiddenPath)
    return False


def _traced(asked: _Asked) -> tuple[Chain, Program, Program]:
    """Returns the model as a chain, and its programs in training and in evaluation mode."""
    model, form, labels = asked.model, asked.form, asked.labels
    refuse_without_values({type(model).__name__: model})
    refuse_misfit(model, form, labels.name if labels is not None else "")
    whole: set[nn.Module] = {module for module in model.modules() if isinstance(module, Score)}  # each is a partition
    reasons: dict[nn.Module, str] = {}
    first: Inside | None = None
    while True:
        try:
            blocks = blocks_of(model, whole)
            program, evaluation = (_in_mode(asked, blocks, training=training) for training in (True, False))
            return Cutter(model).chain(program, evaluation, tuple(reasons.values())), program, evaluation
        except OtherRows:
            continue
        except Inside as error:
            # The module cannot be cut inside: it may work as one block, and so may the model, without labels.
            module = error.module or model
            first = first or (error if module is model else None)
            never = labels is not None or model._backward_hooks or model._backward_pre_hooks or _without_draws(model)
            if module in whole or (module is model and never):
                raise _uncut(first or error, error, asked) from error
            inside = set(module.modules())
            reasons = {one: why for one, why in reasons.items() if one not in inside}
            whole |= {one for one in model.modules() if type(one) is type(module)} if error.alike else {module}
            cure = _without_draws(model).removesuffix(".") if "random number" in error.why else ""
            where = error.where or error.path or type(model).__name__
            reasons[module] = f"{error.why}, in {where}{'. ' if cure else ''}{cure}"


def _uncut(error: Inside, last: Inside, asked: _Asked) -> ModelError:
    model, dtype = asked.model, asked.dtype
    where = error.where or error.path or type(model).__name__
    floats = next((one.dtype for one in asked.form if one.dtype.is_floating_point), dtype)
    types = cure_of_types(model.parameters(), floats, asked.autocast)
    cure, draws = types or ("" if asked.form else cure_of_tokens(error.why, dtype)), _without_draws(model)
    cure = cure or (f"{draws} Or move" if draws else "Move") + " that into a module of its own" + (
        "." if asked.labels is None else ", or give a function (what the model returns, labels) -> loss."
    )
    beside = "" if last.why == error.why else f". As one block it fails too: {last.why}"
    return ModelError(f"the model cannot be cut into blocks: {error.why}, in {where}{beside}. {cure}")


def _in_mode(asked: _Asked, blocks: Mapping[nn.Module, str], *, training: bool) -> Program:
    try:
        one, other = (_recorded(asked, blocks, count, training=training) for count in (_ROWS, _OTHER_ROWS))
        return generalised(one, other, _ROWS, _OTHER_ROWS)
    except Differs as error:
        why = (
            f"it does other things with {_OTHER_ROWS} rows than with {_ROWS}: the calls between its layers must not depend on "
            "the number of rows, in evaluation on whether gradients are wanted, nor on a random number that it draws"
        )
        raise Inside.at(why, other_inside(one.ops, other.ops) or error.op, asked.model) from None


def _without_draws(model: nn.Module) -> str:
    """Returns the cure for a transformers model whose configuration makes it draw random numbers between its layers, or from
    numpy; "" if it does not."""
    config = getattr(model, "config", None)
    drawing = {name: off for name, off in _DRAWING.items() if getattr(config, name, None)}
    config = ", ".join(f"config.{name} = {off}" for name, off in drawing.items())
    return f"Its configuration asks for that: build the model with {config}." if config else ""


def _recorded(asked: _Asked, blocks: Mapping[nn.Module, str], count: int, *, training: bool) -> Program:
    """Records one run on `count` rows."""
    model, labels, autocast, outputs = asked.model, asked.labels, asked.autocast, asked.outputs
    with ExitStack() as stack:
        fakes = stack.enter_context(_on_fakes(model))
        model.train(training)
        rows = torch.zeros((count, *asked.shape), dtype=asked.dtype)
        paths, names = {m: path for path, m in model.named_modules()}, {id(f): n for n, f in fakes.items()}
        own_labels = [] if labels is None else [torch.zeros((count, *labels.shape), dtype=labels.dtype)]
        named = {labels.name: own_labels[0]} if labels is not None and labels.name else {}
        stack.enter_context(extremes(largest=count != _ROWS))
        # The second evaluation is without gradients, as in a run: code that asks for them shows by doing other things.
        stack.enter_context(torch.set_grad_enabled(training or count == _ROWS))
        stack.enter_context(torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False))
        inside = {part for block in blocks for part in block.modules()}
        outside = [part for part in model.modules() if part not in inside]
        buffers, before = {part: dict(part._buffers) for part in outside}, remembered(outside)

        def ran(*, again: bool = False) -> tuple[Recorder, Any]:
            recorder = Recorder(
                blocks, paths, names, autocast, training=training, largest=count != _ROWS, again=again, row=asked.row
            )
            numbers = [recorder.number(tensor) for tensor in (rows, *own_labels)]
            assert numbers == [ROWS, LABELS][: len(numbers)]
            return recorder, _recorded_by(recorder, partial(run_on_rows, model, rows, asked.form, named))

        recorder, found = ran()
        recorder.refuse_changes(buffers)
        refuse_memory(before, outside, lambda: ran(again=True), recorder.remembers)
        if labels is not None and (own := labels.loss) is not None:
            logits, given = scored_output(model, found), _taken(model, own, found, own_labels[0])
            found = {"loss": _recorded_by(recorder, partial(own, given, own_labels[0])), "logits": logits}
        total = None if labels is None else own_loss.loss_of(model, found)
        taken, loss = (found, None) if total is None else own_loss.split_off(recorder, model, found, total, outputs)
        if taken is None and outputs is not None and outputs.joined is not None:
            raise ModelError(
                f'loss="model": the loss of {type(model).__name__} takes more tensors in training than in evaluation. Let it '
                "take the same ones, or give a function (what the model returns, labels) -> loss."
            )
        join = None
        if outputs is not None and taken is not None:
            join = outputs.prepare(taken, recorder, total=total)
        if join is not None:
            found = _recorded_by(recorder, join)
        without = frozenset[int]() if labels is None else following({LABELS}, recorder.ops)
        if loss is None:
            number = recorder.known(scored_output(model, found, outputs.why_not if outputs else ""))
        else:
            number = recorder.known(found) if join else loss.takes[0]
        head = None
        if asked.in_chunks:
            head = head_of(model, recorder.ops, number if loss is None else own_loss.scores_in(loss), recorder.shapes)
            number = head.states
        ops, _ = needed_for({number}, recorder.ops, without=without)
        if loss is not None:
            own_loss.refuse_labels_in_layers(model, ops)
        return Program(
            ops=ops, output=number, shapes=recorder.shapes, learns=frozenset(recorder.learns), loss=loss, head=head,
            reads=frozenset(recorder.reads),
        )  # fmt: skip


def _recorded_by(recorder: Recorder, run: Callable[[], Any]) -> Any:
    """Returns what `run` returns. Raises Inside if it cannot be recorded."""
    with recorder.calls(), recorder:
        try:
            return run()
        except (Inside, ModelError):
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or not recorder._stack:
                raise
            raise recorder.failed(error) from error


def run_on_rows(
    model: nn.Module, rows: torch.Tensor, form: Form, labels: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> Any:
    """Runs a model on rows of that form. Models of transformers take them by name."""
    if form:
        args, kwargs = unpacked(rows, form)
        return model({**kwargs, **labels}) if takes_a_dict(model, form) else model(*args, **kwargs, **labels)
    name = getattr(model, "main_input_name", None)
    return model(**{name: rows}, **labels) if isinstance(name, str) else model(rows, **labels)


def _taken(model: nn.Module, loss: LossFunction, found: Any, labels: torch.Tensor) -> Any:
    """Returns what a loss takes of what a model returned: all of it, or one tensor where it fails on all."""
    try:
        with generators_left_alone():  # on copies, since it may write into them
            loss(mapped(found, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf), labels.clone())
    except (DataDependentOutputException, DynamicOutputShapeException):  # it came so far
        return found
    except Exception:
        return scored_output(model, found)
    return found


def scored_output(model: nn.Module, found: Any, why_not: str = "") -> torch.Tensor:
    """Returns the output tensor that the loss takes, from whatever the model returned. why_not: why it does not take all."""
    if isinstance(found, torch.Tensor):
        return found
    named = by_name(found)
    for name in ("logits", "out", "last_hidden_state"):
        if isinstance(one := named.get(name), torch.Tensor):
            return one
    tensors = [leaf for leaf in leaves(named or found) if isinstance(leaf, torch.Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    given = f"a {type(found).__name__}" + (f" with {', '.join(map(str, named))}" if named else "")
    raise ModelError(
        f"{type(model).__name__} returned {given}, of {len(tensors)} tensors, and it is not known which one the loss takes. "
        + (f"With all of them it failed: {why_not}" if why_not else "Give a function (what the model returns, labels) -> loss.")
    )


def reached(
    model: object, shape: tuple[int, ...], dtype: torch.dtype, form: Form, autocast: torch.dtype | None,
    losses: Mapping[str, Callable[[Any, int], Any]],
) -> dict[str, set[str]]:  # fmt: skip
    """Returns for each loss, of (what the model returns, number of rows), the names of the parameters that it has a gradient
    for; nothing for a list of blocks, whose losses reach all, and where they cannot be computed without values."""
    if not _has_a_forward(model):
        return {}
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    autocasting = torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False)
    try:
        with _on_fakes(model) as fakes, autocasting:
            found = run_on_rows(model.train(), torch.zeros((_ROWS, *shape), dtype=dtype), form)
            parameters = [fakes[name] for name in names]
            totals = {step: loss(found, _ROWS) for step, loss in losses.items()}
            return {
                step: set(compress(names, learned_through([total], parameters)))
                for step, total in totals.items()
                if total.requires_grad
            }
    except Exception:  # the plan says what is wrong with the model or the losses
        return {}


@contextmanager
def _on_fakes(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """A context in which the model has fake tensors, which it yields by name, and afterwards is as it was."""
    mode, own = FakeMode(), tensors_of(model)
    kept = left_as_they_are(model.modules())  # modes and attributes
    with without_key_caches(model), kept, quiet_random(_without_draws(model)), quiet_log():
        fakes = {name: fake_like(tensor, mode) for name, tensor in own.items()}
        alike = {id(tensor): fakes[name] for name, tensor in own.items()}
        with with_tensors(model, fakes), listed(model, alike), mode:
            yield fakes


@contextmanager
def without_key_caches(model: nn.Module) -> Iterator[None]:
    """A context in which language models, also one that is a part of `model`, do not fill their key caches."""
    configs: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
