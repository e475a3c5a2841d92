"""Losses of transformers' Trainer that a model does not compute itself, and the noise of NEFTune."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import TrainerState

from seqpart.errors import ModelError, OptionError
from seqpart.integrations.hf_data import base_of, logits_of

Loss = Callable[[Any, Any], torch.Tensor]
"""(what the model returns, labels (rows, ...)) -> mean loss, with `counts`: labels -> what its mean is divided by."""


def loss_of(arguments: Any, model: nn.Module, given: Callable[..., Any] | None) -> Loss | None:
    """Returns the loss of the Trainer: compute_loss_func if it is given, else smoothed labels if the arguments say so, else
    None: the model's own. Raises OptionError."""
    if given is not None:
        return _counted(functools.partial(_called, given), shifted=_is_shifted(model))
    if not arguments.label_smoothing_factor:
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        raise OptionError(
            "label_smoothing_factor: a row of a multi-label classification has several classes, so there is nothing to "
            "smooth, and transformers leaves it out. Leave it out."
        )
    smoother = LabelSmoother(epsilon=arguments.label_smoothing_factor)
    shifted = base_of(model)._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def loss(outputs: Any, labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = smoother({"logits": logits_of(outputs)}, labels, shift_labels=shifted)
        return found

    return _counted(loss, shifted=shifted)


def _called(given: Callable[..., Any], outputs: Any, labels: torch.Tensor, count: torch.Tensor) -> Any:
    return given(outputs, labels, num_items_in_batch=count)


def _counted(loss: Callable[[Any, torch.Tensor, torch.Tensor], Any], *, shifted: bool) -> Loss:
    """Returns the loss of a batch as one that says how many labels it counts. shifted: without the first of each row."""

    def counts(labels: torch.Tensor) -> torch.Tensor:
        return (labels[..., 1:] if shifted else labels).ne(-100).sum()

    def counted(outputs: Any, labels: torch.Tensor) -> Any:
        outputs = _in_32_bits(outputs)
        with torch.autocast(labels.device.type, enabled=False):  # the model alone computes in 16 bits
            return loss(outputs, labels, counts(labels))

    counted.counts = counts  # type: ignore[attr-defined]
    counted.__qualname__ = getattr(loss, "__qualname__", "compute_loss_func")
    return counted


def _in_32_bits(outputs: Any) -> Any:
    """Returns what a model gave under autocast as transformers' Trainer hands it to a loss: in float32."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return outputs
    narrow = (torch.bfloat16, torch.float16)
    return tree_map_only(torch.Tensor, lambda one: one.float() if one.dtype in narrow else one, outputs)


def _is_shifted(model: nn.Module) -> bool:
    """True if transformers counts the labels of this model without the first of each row."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base: Any = base_of(model)
    causal = LOSS_MAPPING.get(getattr(base, "loss_type", "")) is ForCausalLMLoss
    return causal and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


@contextmanager
def with_compute_loss(model: nn.Module, compute_loss: Callable[..., Any]) -> Iterator[None]:
    """A context in which `model`, given a batch by name, returns the loss that a Trainer's compute_loss finds for it, and the
    logits."""
    own, inside = model.forward, False

    def forward(*args: Any, **inputs: Any) -> Any:
        nonlocal inside
        if inside:  # called by compute_loss
            return _in_32_bits(own(*args, **inputs))
        inside = True
        try:
            with patch.multiple(TrainerState, **_READ):
                found = compute_loss(model, inputs, return_outputs=True)
        finally:
            inside = False
        loss, outputs = found if isinstance(found, tuple) else (found, None)
        return {"loss": loss, "logits": logits_of(outputs)} if outputs else {"loss": loss}

    forward.__signature__ = _BY_NAME  # type: ignore[attr-defined]
    with patch.object(model, "forward", forward):
        yield


def _refuse_state(name: str, _: object) -> None:
    raise ModelError(
        f"compute_loss: it reads state.{name}, which changes in training. It is called when that is planned, and what it reads "
        "then would hold for all steps. Write that loop yourself, with a session of seqpart.Trainer."
    )


_CHANGING = ("global_step", "epoch", "log_history", "best_metric", "best_global_step", "num_input_tokens_seen", "total_flos")
_READ: Any = {name: property(functools.partial(_refuse_state, name)) for name in _CHANGING}
"""What changes in a TrainerState from step to step, as attributes that cannot be read."""


_BY_NAME = inspect.Signature(
    [
        inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None),
        inspect.Parameter("inputs", inspect.Parameter.VAR_KEYWORD),
    ]
)
"""Any inputs by name, and labels."""


@contextmanager
def noise(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """A context in which NEFTune adds noise to the model's embeddings in training. alpha None: none."""
    if alpha is None:
        yield
        return
    from transformers.integrations.neftune import activate_neftune, deactivate_neftune

    hook = activate_neftune(model, alpha)
    try:
        yield
    finally:
        deactivate_neftune(model, hook)
