"""Losses by the name of a session's step, for networks that take turns, such as the two of a GAN."""

from collections.abc import Mapping
from functools import partial, reduce
from operator import add
from typing import Any

import torch

from seqpart.capture.capture import reached
from seqpart.data.items import needs_labels
from seqpart.data.splits import Split
from seqpart.errors import OptionError
from seqpart.model.reductions import total_of
from seqpart.text import short


class StepLosses:
    """Losses {name of a step: (what the model returns, labels) -> loss}, of which a step computes its own.

    While a plan is made, and in evaluations, they are all computed, and summed.
    """

    def __init__(self, losses: Mapping[Any, Any]) -> None:
        for name, loss in losses.items():
            if not isinstance(name, str) or not callable(loss) or isinstance(loss, type):
                raise OptionError(
                    "loss: expected functions by the names of a session's steps, such as {'d': d_loss, 'g': g_loss}; found "
                    f"{short({name: loss})}."
                )
        if not losses:
            raise OptionError("loss: expected functions by the names of a session's steps; found an empty dict.")
        self._losses = {name: (loss, needs_labels(loss)) for name, loss in losses.items()}
        self.__qualname__ = f"of the steps {', '.join(losses)} together"
        self.labelled = any(labelled for _, labelled in self._losses.values())
        self.step: str | None = None
        """Name of the step that is being made."""

    def __call__(self, output: Any, labels: torch.Tensor) -> Any:
        totals, found, summed = list[Any](), dict[str, Any](), True
        for step in self._losses if self.step is None else (self.step,):
            loss, labelled = self._losses[step]
            value = loss(output, labels) if labelled else loss(output)
            if isinstance(value, tuple | list):
                raise OptionError(
                    f"loss: expected a scalar, or a dict of them, from the loss of step {step!r}; found a "
                    f"{type(value).__name__}. Return a mean over rows, or a sum."
                )
            parts = value if isinstance(value, Mapping) else {}
            found |= {f"{step}/{name}": one for name, one in parts.items() if name != "loss"} or {step: value}
            totals.append(parts["loss"] if "loss" in parts else reduce(add, parts.values()) if parts else value)
            summed = summed and "loss" not in parts
        return found if summed else {"loss": reduce(add, totals), **found}

    def scores(self, output: Any, labels: torch.Tensor) -> None:
        """There is no accuracy of several losses."""

    def reached(self, model: object, rows: Split, autocast: torch.dtype | None) -> dict[str, set[str]]:
        """Returns the names of the parameters that each step's loss has a gradient for; nothing where that is not known. In a
        plain loop the others have none, and an optimizer leaves them alone."""

        def total(step: str, found: Any, count: int) -> Any:
            labels = torch.zeros((count, *rows.labels.shape[1:]), dtype=rows.label_type)
            self.step = step
            return total_of(self(found, labels))

        try:
            losses = {step: partial(total, step) for step in self._losses}
            return reached(model, rows.shape, rows.dtype, rows.form, autocast, losses)
        finally:
            self.step = None

    def checked(self, step: object) -> str:
        """Returns the name of a step. Raises OptionError for one that has no loss."""
        if not isinstance(step, str) or step not in self._losses:
            raise OptionError(f"step: expected {' or '.join(map(repr, self._losses))}; found {short(step)}.")
        return step

    def refuse_strangers(self, learns: Mapping[str, Any]) -> None:
        """Raises OptionError unless `learns` has the steps that have a loss, each once."""
        if learns.keys() != self._losses.keys():
            raise OptionError(
                f"learns: expected what learns in each of the steps {', '.join(self._losses)}; found {', '.join(learns)}."
            )
