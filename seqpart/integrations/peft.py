"""peft's get_peft_model for a base on the meta device: `from seqpart.integrations.peft import get_peft_model`."""

from collections.abc import Callable, Sequence
from typing import Any

import peft
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from seqpart.errors import ModelError, first_line

__all__ = ["get_peft_model"]


def get_peft_model(model: nn.Module, peft_config: Any, *arguments: Any, **options: Any) -> Any:
    """Returns what peft's own function returns, but with adapters in memory, with their initial values, if the base is on the
    meta device (`seqpart.parameters_on_meta`). peft would move them there, where they have no values.

    arguments, options: those of peft's function. Raises ModelError for adapters that start from the base's values (DoRA).
    """
    try:
        with _WithValues():
            return peft.get_peft_model(model, peft_config, *arguments, **options)
    except (RuntimeError, NotImplementedError) as error:
        if not any(parameter.is_meta for parameter in model.parameters()):
            raise
        raise ModelError(
            f"peft could not make this adapter for a base without values: {first_line(error)} Give an adapter whose "
            "initial values do not come from the base, or a base that is in memory."
        ) from error


class _WithValues(TorchFunctionMode):
    """Inside, a move to the meta device changes only the type of tensors that have values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and found.is_meta and not args[0].is_meta:
            return args[0].to(dtype=found.dtype)
        return found
