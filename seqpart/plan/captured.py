"""The model of a run as a chain, together with the loss that follows it."""

from functools import partial

import torch

from seqpart.capture.capture import Row, chain_and_loss, chain_of
from seqpart.capture.outputs import Outputs
from seqpart.capture.own_loss import OwnLoss
from seqpart.data.labels import LossOfSeveral
from seqpart.data.splits import Split
from seqpart.device.device import Device
from seqpart.errors import ModelError, first_line
from seqpart.model.blocks import Chain
from seqpart.model.losses import LossFunction, LossSource
from seqpart.model.reductions import name_of
from seqpart.settings import Settings


def captured(
    model: object, loss: LossSource, settings: Settings, train: Split, row: Row, *, in_chunks: bool
) -> tuple[Chain, LossFunction | None, str]:
    """Returns the model as a chain, its loss, and why that gets one tensor of those that the model returns, or "".

    loss: None for the settings' loss, "model" for the model's own, or the user's. row: the first of `train`. in_chunks: true
    if the loss is over chunks of positions; the chain then ends before its head. Raises ModelError.
    """
    shapes, cast, why_not = (train.shape, train.dtype, train.form), settings.autocast, ""
    if in_chunks:
        _refuse_whole(settings, train)
    if loss == "model":
        labels = train.one_label() if train.labelled else None
        chain, loss = chain_and_loss(model, *shapes, labels, cast, in_chunks=in_chunks, row=row)
    elif in_chunks and loss is not None:
        chain, loss = _chain_and_recorded_loss(loss, model, train, cast, row)
    else:
        outputs = None if loss is None else _outputs_for(loss, train, settings)
        chain = chain_of(model, *shapes, cast, outputs, in_chunks=in_chunks, row=row)
        if outputs is not None:
            loss, why_not = outputs.joined or loss, outputs.why_not
    chain.row = row
    return chain, loss, why_not


def _refuse_whole(settings: Settings, train: Split) -> None:
    """Raises ModelError where a loss cannot be computed over chunks of positions, whatever the model."""
    why = ""
    if not settings.is_exact:
        why = f"goes with --method auto, full, checkpointed or streamed; found {settings.method}"
    elif train.label_form or train.labels.is_floating_point() or (train.labels.ndim < 2 and train.labelled):
        why = "goes with labels that are classes of positions, (rows, positions)"
    elif settings.loss_name not in (None, "cross-entropy"):
        why = f"goes with cross-entropy; found --loss {settings.loss_name}"
    if why:
        raise ModelError(f"--loss-chunks: {why}. Leave it out.")


def _chain_and_recorded_loss(
    loss: LossFunction, model: object, train: Split, cast: torch.dtype | None, row: Row
) -> tuple[Chain, OwnLoss]:
    """Returns the model as a chain that ends before its head, and the user's loss, recorded. Raises ModelError."""
    try:
        return chain_and_loss(
            model, train.shape, train.dtype, train.form, train.one_label(), cast, in_chunks=True, loss=loss, row=row
        )
    except Exception as error:
        if isinstance(error, ModelError) and error.with_flags.startswith("--loss-chunks"):
            raise
        reason = first_line(error).rstrip(".")
        raise ModelError(
            f"--loss-chunks: the loss {name_of(loss)} could not be looked into, to see whether it takes the logits position by "
            f"position: {reason}. Let it return torch's cross_entropy of the logits, or leave --loss-chunks out."
        ) from error


def _outputs_for(loss: LossFunction, train: Split, settings: Settings) -> Outputs:
    """Returns what joins the outputs of a model for a user's loss."""
    tried = LossOfSeveral(loss, train.label_form) if train.label_form else loss
    return Outputs(loss, tried, train.labels.shape[1:], train.label_type, partial(Device().autocast, settings.autocast))
