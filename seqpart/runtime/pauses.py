"""The model while the user's code runs: in a callback, and between two steps of a session.

Its weights are then in a slot, in a file, or in both, depending on the method and the limit. So that user code does not depend
on these, parameters and buffers of modules that were passed built have only shapes and types there; and requires_grad of a
parameter can be changed, which holds from the next update on.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import torch
from torch import nn

from seqpart.errors import DataError, Interrupted, ModelError, OptionError
from seqpart.methods.ist.parts import JointChain
from seqpart.model.blocks import Block, Chain
from seqpart.model.inspection import held_in, left_as_they_are, stays
from seqpart.model.live_modules import modules_of
from seqpart.model.tensors import tensors_of
from seqpart.profile.blocks import BlockCost
from seqpart.runtime.attributes import Attributes, looks_of_data
from seqpart.schedule.best import LoopState
from seqpart.store.layout import TensorSpec
from seqpart.text import short

_SAID = {"__get__": {"grad", "grad_fn", "is_leaf", "requires_grad", "names"}, "__set__": {"requires_grad"}}
"""Attributes that a tensor answers itself while its values are away."""
_OF_SHAPE = {
    "shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "is_meta", "is_sparse", "is_cuda", "is_quantized",
    "numel", "size", "dim", "ndimension", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "__len__",
}  # fmt: skip
"""Attributes and methods that need only a tensor's shape and type."""
_known: dict[int, TensorSpec] = {}
"""Name, shape and type at home of each tensor whose values are away now, by its id."""


def _of_a_tensor_that_is_away(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name, attribute = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name in ("requires_grad_", "register_hook") or attribute in _SAID.get(name, ()):
            return func(*args, **kwargs)
        spec = _known[id(args[0])] if args and id(args[0]) in _known else None
        if spec is not None and (attribute if name == "__get__" else name) in _OF_SHAPE:
            like = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            return func(like, *args[1:], **kwargs) if (name, attribute) != ("__get__", "device") else torch.device("cpu")
        if spec is not None and name == "__repr__":
            return f"<{spec.name}, {tuple(spec.shape)}, {spec.dtype}: in a file while a run has the model>"
    found = next((_known[id(one)].name for one in _flat(args) if id(one) in _known), "a weight")
    raise ModelError(
        f"{found} is not in the model while a run has it: in a callback, and between the steps of a session, its parameters "
        "have only shapes and requires_grad. A session's state_dict() and export(FILE) give the current weights. What is to be "
        "done to them at each step (a clamp, a norm) belongs in the model's forward: F.linear(x, self.weight.clamp(0, 1)), or "
        "torch.nn.utils.parametrize."
    )


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


class AwayTensor(torch.Tensor):
    """Class of the model's buffers during a pause."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _of_a_tensor_that_is_away(func, args, kwargs or {})


class AwayParameter(AwayTensor, nn.Parameter):
    """Class of the model's parameters during a pause."""


_AWAY: dict[type, type] = {nn.Parameter: AwayParameter, torch.Tensor: AwayTensor}
"""The class that replaces a tensor's class during a pause. Tensors of other classes, such as a library's, are left alone."""


@dataclass(slots=True)
class _Own:
    """A parameter of a module that the user passed built."""

    block: Block
    name: str
    parameter: torch.Tensor
    planned: bool
    """True if the plan has room for its gradient and its optimizer state."""

    @property
    def learns(self) -> bool:
        return self.block.learns.get(self.name, self.planned)

    @property
    def label(self) -> str:
        return self.block.exported(self.name)


def _options(optimizer: torch.optim.Optimizer) -> str:
    return repr([{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups])


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class PlanAnew(Interrupted):
    """Raised after the run was saved, to go on with a plan that has room for more trainable parameters."""


def let_learn(model: object, kept: LoopState) -> None:
    """Unfreezes the parameters of a model, or of a list of modules, that a checkpoint's plan has room to train."""
    names = {*kept.learns, *kept.frozen}
    parts = model if isinstance(model, list | tuple) else [model]
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters() if isinstance(part, nn.Module) else ():
            if (f"{number}.{name}" if part is not model else name) in names:
                parameter.requires_grad_(True)


class Pauses:
    """The pauses of one run, and what learns in it, which `Block.learns` has."""

    def __init__(
        self, chain: Sequence[Block], costs: Sequence[BlockCost], optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        kept: LoopState, counts: Callable[[], bool] = bool, late: Mapping[str, int] = {}, model: object = (),
        loss: object = None,
    ) -> None:  # fmt: skip
        """model: the one, or the list of modules, that the user gave. optimizers: those of the last visits of partitions that
        the user's code may still hold. counts: true once each of several partitions has an optimizer that has counted updates
        of its own. late: {name of a parameter that is frozen at first: number of updates before it learns}."""
        self._optimizers, self._since, self._counts, self.replans = optimizers, kept.learns, counts, False
        """replans: true if there may be another plan, with room for more trainable parameters."""
        self.kept: list[tuple[object, int]] = []
        """The user's data whose rows are read once and kept, with their number."""
        self._in_parts = isinstance(chain, JointChain)
        self._wholes: Mapping[str, str] = chain.wholes if isinstance(chain, Chain) else {}
        """{name of a tile: the parameter of the model that it is a part of}."""
        self._left_out = set[str]()
        """Names of parameters that do not learn because the loss of the step has no gradient for them."""
        self.unplanned: list[str] = []
        """Names of parameters that were unfrozen and that the plan has no room for."""
        self.changed = False
        """True if the set of trainable parameters differs from that of the last update."""
        self._blocks = [(block, cost) for block, cost in zip(chain, costs, strict=True) if block.alive is not None]
        alive = [block.alive for block, _ in self._blocks if block.alive is not None]
        modules = [module for one in alive for module in one.modules()]
        every, reads = [*modules_of(model)], chain.reads if isinstance(chain, Chain) else frozenset()
        between = [one for one in every if one not in {*modules}]
        self._fixed = self._left = held_in([*reads, *((one, name) for one in between for name in _HOOKS)])
        """What is in attributes that code between layers reads, as layers have set it, and as the user's code left it."""
        self.attributes = Attributes(model, loss, self._fixed)
        self._held: list[Mapping[str, Any]] = [held for one in every for held in (one._parameters, one._buffers, one._modules)]
        """The parameters, the buffers, or the modules in each module by name."""
        self._rows = {id(one._modules) for one in every if isinstance(one, nn.Sequential | nn.ModuleList | nn.ModuleDict)}
        """Ids of those in which a module that is added would run too."""
        with left_as_they_are(modules):
            for module in alive:
                module.train()
            self._modes = {one: one.training for one in modules}
        """True for each module that trains in training mode."""
        self._shown = self._modes
        """The modes that the user's code finds, and sets."""
        self._own: list[_Own] = []
        self._planned = {
            block.exported(name): (block, name)
            for block, cost in zip(chain, costs, strict=True)
            for name in (spec.name for spec in cost.layout.specs)
            if name in cost.trainable
        }
        """{name of a parameter that the plan has room to train: (block, name in it)}, also of modules that factories build."""
        for block, name in (self._planned[label] for label in kept.frozen if label in self._planned):
            block.learns[name] = False
        self._late = dict[int, list[str]]()
        for label, update in late.items():
            self._late.setdefault(update, []).append(label)
        for block, cost in self._blocks:
            assert block.alive is not None
            for name, parameter in block.own(dict(block.alive.named_parameters())).items():
                self._own.append(_Own(block, name, parameter, planned=name in cost.trainable))

    def unfreeze(self, update: int) -> None:
        """Lets the parameters learn whose time it is. update: number of finished updates."""
        for block, name in (self._planned[label] for label in self._late.pop(update, ())):
            self.changed = self.changed or not block.learns.get(name, True)
            block.learns[name] = True

    def let_learn(self, patterns: Sequence[str] | None, reached: Container[str] | None) -> None:
        """Lets those parameters learn that the plan has room for, that match one of the patterns, and that the loss has a
        gradient for. patterns: None: those that learn otherwise. reached: their names in the model; None: all."""
        for label, (block, name) in self._planned.items():
            of_model, learned = self._wholes.get(label, label), block.learns.get(name, True)
            learns = learned or label in self._left_out
            if patterns is not None:
                learns = any(fnmatchcase(of_model, pattern) for pattern in patterns)
            self._left_out.discard(label)
            if learns and reached is not None and of_model not in reached:
                learns = False
                self._left_out.add(label)
            self.changed = self.changed or learns != learned
            block.learns[name] = learns

    def are_in(self, names: Container[str]) -> bool:
        """True if all parameters that the plan has room to train have these names in the model."""
        return all(self._wholes.get(label, label) in names for label in self._planned)

    def refuse_strangers(self, learns: Mapping[str, Sequence[str]]) -> None:
        """Raises OptionError for a pattern that matches nothing. learns: {name of a step: patterns}."""
        names = [self._wholes.get(label, label) for label in self._planned]
        for step, patterns in learns.items():
            if strange := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]:
                raise OptionError(
                    f"learns: expected patterns that match parameters of the model that may learn, such as {names[0]}; found "
                    f"{short(', '.join(strange))} for step {step!r}."
                )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which the user's code runs. Raises ModelError if it unfroze parameters that the plan has no room for."""
        before = [own.parameter.requires_grad for own in self._own]
        parts = [(held, dict(held)) for held in self._held]
        for own in self._own:
            own.parameter.requires_grad_(own.learns)
        data = [looks_of_data(*one) for one in self.kept]
        away, options = [*self._taken()], [(one, _options(one)) for one in self._optimizers()]
        try:
            with self._as_left():
                yield
        except BaseException:
            with suppress(ModelError):
                self._obey(self._given_back(away, before))  # a run that goes on after the error must know it
            raise
        wanted = self._given_back(away, before)
        for held, part in parts:
            names = part.keys() | (held.keys() if id(held) in self._rows else ())
            for name in (name for name in names if held.get(name) is not part.get(name)):
                kind = "module" if isinstance(part.get(name, held.get(name)), nn.Module) else "tensor"
                raise ModelError(
                    f"another {kind} was put in the place of {name!r} during a run, or added by that name. It trains what the "
                    "model came with. Change the model before the run, or end a session, and begin another."
                )
        if [looks_of_data(*one) for one in self.kept] != data:
            raise DataError(
                "a tensor of the data was changed during a run, or another put in its place. Rows and labels are read once and "
                "kept, so this change would be lost: put them into a DataLoader, DataLoader(TensorDataset(x, y), batch_size)."
            )
        if any(_options(one) != then for one, then in options):
            raise OptionError(
                "the options of an optimizer (its param_groups) were changed during a run. An optimizer is rebuilt for each "
                "visit of a partition, so this change would be lost: give --lr-schedule a function from an optimizer to a "
                "torch.optim.lr_scheduler, such as a LambdaLR."
            )
        self._obey(wanted)

    @contextmanager
    def callback(self) -> Iterator[None]:
        """A pause after which the run goes on. Raises ModelError as `refuse_changes` does."""
        with self.pause():
            yield
        self.refuse_changes()

    def refuse_changes(self, *, trains: bool = True) -> None:
        """Raises ModelError if the user's code has changed attributes that code between layers reads, or modes. trains: False
        for an evaluation, which has a mode of its own."""
        if changed := [key for key, value in self._fixed.items() if self._left[key] != value]:
            module, name = changed[0]
            if name in _HOOKS:
                raise ModelError(
                    f"a hook of {type(module).__name__} was added or removed during a run. Its forward runs once, when the "
                    "model is cut into blocks. Register it on a layer, or before the run; or end a session, and begin another."
                )
            raise ModelError(
                f"{name} of {type(module).__name__} was changed during a run. Code between layers reads it, and runs once, "
                "when the model is cut into blocks. Read it inside a layer (a module of its own that gets the tensor), or keep "
                "a tensor there and change that in place (fill_); or end a session, and begin another."
            )
        if not trains:
            return
        if odd := [one for one, training in self._modes.items() if self._shown[one] is not training]:
            raise ModelError(
                f"the mode (train, eval) of some modules was changed during a run, of {type(odd[0]).__name__} first, which "
                f"trains in {'training' if self._modes[odd[0]] else 'evaluation'} mode to the end. Put it back before the next "
                "step: model.train(), and eval() of what came in evaluation. Call eval() before the run on what is to stay in "
                "evaluation; for other modes end a session, and begin another."
            )

    @contextmanager
    def _as_left(self) -> Iterator[None]:
        """A context in which modules have the modes that the user's code gave them. Notes what it changes."""
        found = held_in(self._fixed)
        self._fixed = {key: value if found[key] == self._left[key] else found[key] for key, value in self._fixed.items()}
        modes = {one: one.training for one in self._modes}
        trains = {one: vars(one).pop("train") for one in modes if stays(one)}
        for one, training in self._shown.items():
            vars(one)["training"] = training
        looks = self.attributes.looks()
        try:
            yield
        finally:
            self.attributes.note(looks)
            self._left, self._shown = held_in(self._fixed), {one: one.training for one in modes}
            for one, training in modes.items():
                vars(one)["training"] = training
            for one, train in trains.items():
                vars(one)["train"] = train

    def _given_back(self, away: Sequence[tuple[torch.Tensor, type]], before: Sequence[bool]) -> list[bool]:
        """Restores everything as it was before the pause. Returns the requires_grad that the user wants, per parameter."""
        for tensor, kind in away:
            tensor.__class__ = kind
            del _known[id(tensor)]
        wanted = [own.parameter.requires_grad for own in self._own]
        for own, learned in zip(self._own, before, strict=True):
            own.parameter.requires_grad_(learned)
        return wanted

    def _taken(self) -> Iterator[tuple[torch.Tensor, type]]:
        """Takes the tensors' values away: they answer only for their shapes from now on. Yields each with its former class."""
        for block, cost in self._blocks:
            assert block.alive is not None
            tensors = tensors_of(block.alive)
            for spec in cost.layout.specs:
                tensor = tensors.get(spec.name)
                if tensor is not None and type(tensor) in _AWAY:
                    _known[id(tensor)] = TensorSpec(name=block.exported(spec.name), shape=spec.shape, dtype=spec.dtype)
                    yield tensor, type(tensor)
                    tensor.__class__ = _AWAY[type(tensor)]

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that the plan has room to train, and that do not learn now."""
        return [label for label, (block, name) in self._planned.items() if not block.learns.get(name, True)]

    def noted_in(self, kept: LoopState) -> LoopState:
        """Returns `kept` with the parameters that are frozen and trained by now, and the attributes."""
        learns, attributes = self._since + self.unplanned, self.attributes.saved
        return msgspec.structs.replace(kept, frozen=self.frozen, learns=learns, attributes=attributes)

    def _obey(self, wanted: Sequence[bool]) -> None:
        """Applies the wanted requires_grad of each parameter. Raises ModelError if the run cannot."""
        unplanned = list[str]()
        for own, learns in zip(self._own, wanted, strict=True):
            if learns and not own.planned:
                unplanned.append(own.label)
            elif learns != own.learns:
                self.changed = True
                own.block.learns[own.name] = learns
        if self._in_parts and (self.changed or unplanned):
            raise ModelError(
                "--method ist trains copies of parts of the model, drawn again in every round: requires_grad cannot be changed "
                "while it does. Freeze before the run, or take an exact method."
            )
        if (self.changed or unplanned) and self._counts():
            raise ModelError(
                "requires_grad was changed during a run whose optimizer counts updates in its groups. Each partition has "
                "one of its own, which counts its own updates, so the counts would differ. Freeze before the run, or give "
                "--method full."
            )
        if unplanned and self.replans:
            self.changed, self.unplanned = True, unplanned
        elif unplanned:
            more = f" and {len(unplanned) - 3} more" if len(unplanned) > 3 else ""
            raise ModelError(
                f"{', '.join(unplanned[:3])}{more} did not learn when the run was planned, so there is no room for gradients "
                "and optimizer state. Call requires_grad_(True) before the run on all that is to learn at any time, and freeze "
                "it until then: in a session before its first step, or in on_begin of a callback."
            )
        if self.changed and not any(block.learns.get(name, True) for block, name in self._planned.values()):
            raise ModelError("nothing learns any more: every parameter of the model was frozen while it trained.")
