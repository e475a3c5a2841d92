"""The plain PyTorch loop to compare with, on a run's batches: the model's own forward pass, one optimizer of all parameters,
torch's clipping, and tensors allocated by torch.

`full` shares homes, slots and the executor with the verified run, so a mistake in these would be in both: a weight that was not
aligned to a cache line, norms of two types that were added up in another order.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from seqpart.capture.capture import judged_output, run_on_rows
from seqpart.data.reader import Batch, open_reader
from seqpart.device.compiler import take_step
from seqpart.device.pages import aligned
from seqpart.methods.method import PartitionLoss
from seqpart.model.blocks import Block
from seqpart.model.reductions import LossValue
from seqpart.model.scheduler import note_rates, tune
from seqpart.runtime.compute import share_of_update
from seqpart.runtime.run import Run
from seqpart.schedule.phase import Phase, PhaseKind


class Unlike(Exception):
    """A plain loop would train differently, for the reason in the message."""


def why_not(session: Run) -> str:
    """Returns why a run and a plain loop cannot be compared; "" if they can."""
    if session.prepared.chain.tile:
        return "layers in tiles have gradients that are added up in another order"
    return "" if len(session.prepared.plan.partitions) == 1 else "it takes as much memory as --reference full"


def train_plainly(session: Run, model: object, updates: int) -> dict[tuple[int, str], torch.Tensor]:
    """{(number of a block, name in it): tensor} behind so many updates of a plain loop. session: a run as one partition that
    has its homes filled, and has not begun. Raises Unlike where a plain loop is another training."""
    plain, tensors = _filled(session, model)
    learning = {id(tensors[n][name]) for n, cost in enumerate(session.prepared.costs) for name in cost.trainable}
    for parameter in plain.parameters():
        parameter.requires_grad_(id(parameter) in learning)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    stage, settings = session.prepared.stages[0], session.settings
    optimizer, rate = stage.optimizers[-1].build(trained), session.rate_of(stage)
    note_rates(optimizer)
    judge = session.prepared.loss(0)
    assert judge is not None
    left = updates
    for phase in session.prepared.phases:
        if phase.kind is not PhaseKind.TRAIN or not left:
            continue
        for number, batches in enumerate(_updates(session, phase)):
            scale = _back_propagate(session, plain, judge, batches)
            for parameter in trained:
                if scale != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(scale)
            if settings.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), settings.clip_grad_norm)
            tune(optimizer, rate(phase, number))
            take_step(optimizer)
            optimizer.zero_grad(set_to_none=True)
            left -= 1
            if not left:
                break
    return {(number, name): tensor for number, own in tensors.items() for name, tensor in own.items()}


def _filled(session: Run, model: object) -> tuple[nn.Module, dict[int, dict[str, torch.Tensor]]]:
    """Returns a copy of the model with the run's initial weights, and its tensors by block and name."""
    chain = session.prepared.chain
    plain: Any
    try:
        if isinstance(model, list | tuple):
            plain = nn.Sequential(*(copy.deepcopy(b.alive) if b.alive is not None else b.another() for b in chain))
        else:
            plain = copy.deepcopy(model)
    except Exception as error:
        raise Unlike(f"the model cannot be copied: {type(error).__name__}: {error}") from None
    assert isinstance(plain, nn.Module)
    own = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers(remove_duplicate=False))}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for block, values in zip(chain, _initial(session, chain), strict=True):
        found[block.number] = {}
        for name, value in values.items():
            tensor = own.get(block.exported(name))
            if tensor is None:
                raise Unlike(f"its tensor {block.exported(name)} has another name in a copy of the model")
            tensor.data = value
            found[block.number][name] = tensor
    return plain.to(session.device.torch).train(), found


def _initial(session: Run, chain: Sequence[Block]) -> Iterator[dict[str, torch.Tensor]]:
    """Yields copies of each block's initial tensors."""
    store = session.homes.store
    for block in chain:
        if block.home not in store:
            yield {}
            continue
        layout = store.layout(block.home)
        flat = aligned(layout.padded_nbytes)
        store.get(block.home, flat)
        yield {name: view.clone() for name, view in layout.views(flat).items()}


def _updates(session: Run, phase: Phase) -> Iterator[Iterator[Batch]]:
    """Yields the micro-batches of each update of a phase; consume those of one before the next."""
    boundaries = session.homes.boundaries
    rows = boundaries.entering(phase.enters, 0)
    with closing(
        open_reader(
            rows, boundaries.labels["train"], phase, session.device, session.reader_thread, seed=session.settings.seed,
            first_update=0,
        )
    ) as reader:  # fmt: skip

        def one() -> Iterator[Batch]:
            while True:
                batch = reader.take()
                yield batch
                reader.done(batch)
                if batch.span.ends_update:
                    return

        for _ in range(phase.updates):
            yield one()


def _back_propagate(session: Run, plain: nn.Module, judge: PartitionLoss, batches: Iterator[Batch]) -> float:
    """Computes the gradients of one update. Returns the factor that they are still to be multiplied by."""
    device, form, counted, rows = session.device, session.planner.train.form, 0.0, 1
    becomes = session.prepared.input_layout.becomes or session.prepared.input_layout.dtype
    for batch in batches:
        x = device.own(batch.x).to(becomes)
        labels = device.upload(batch.labels.clone()).to(session.homes.boundaries.label_types["train"])
        before = torch.get_rng_state()
        with device.autocast(session.settings.autocast):
            output = judged_output(plain, run_on_rows(plain, x, form))
            found: Any = judge(output, labels)
        if not torch.equal(torch.get_rng_state(), before):
            raise Unlike("the model draws random numbers (Dropout), of which a plain loop has others")
        verdict = found if isinstance(found, LossValue) else LossValue(found, len(output))
        part, count = share_of_update(verdict, batch.span)
        counted, rows = counted + count, batch.span.update_rows
        if verdict.loss.requires_grad:
            (verdict.loss if part == 1.0 else verdict.loss * part).backward()  # type: ignore[no-untyped-call]
    return rows / counted if counted else 1.0
