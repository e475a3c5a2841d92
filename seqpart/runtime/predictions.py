"""Collects what a model returns for all rows of a pass, in unnamed files: it may be more than the limit."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqpart.capture.program import leaves, mapped
from seqpart.errors import ModelError


class Predictions:
    """What a model returns for rows that come micro-batch by micro-batch: a metric object with update, compute and reset."""

    without_loss = True

    def __init__(self, folder: Path) -> None:
        self._folder, self._files, self._form = folder, list[RowFile](), None

    def update(self, outputs: Any, labels: torch.Tensor) -> None:
        """Adds the outputs of a micro-batch, a tensor (rows, ...) or a tree of them. Raises ModelError for others."""
        every = [*leaves(outputs)]
        found = [leaf for leaf in every if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in every if not isinstance(leaf, torch.Tensor)]
        if self._form is not None and others != self._others:
            raise ModelError(
                f"predict: expected the same of all rows beside tensors; found {self._others} and {others} from the model, of "
                "two micro-batches. Return such numbers as tensors (rows,), or leave them out."
            )
        self._others = others
        if odd := [tuple(one.shape) for one in found if one.shape[:1] != labels.shape[:1]]:
            raise ModelError(f"predict: expected tensors of {len(labels)} rows from the model; found one of shape {odd[0]}.")
        self._form = outputs if self._form is None else self._form
        self._files = self._files or [RowFile(self._folder) for _ in found]
        for file, tensor in zip(self._files, found, strict=True):
            file.add(tensor)

    def compute(self) -> dict[str, Any]:
        """There are no figures."""
        return {}

    def tree(self) -> Any:
        """Returns the outputs of all rows as the model returns them, mapped from their files, which last as long."""
        arrays = iter([torch.from_numpy(file.array()) for file in self._files])
        return mapped(self._form, lambda leaf: next(arrays) if isinstance(leaf, torch.Tensor) else leaf)

    def close(self) -> None:
        """Closes the files; mapped tensors remain valid."""
        while self._files:
            self._files.pop().close()

    reset = close


def of_no_loss(outputs: Any) -> torch.Tensor:
    """A loss of 0, whatever the model returns."""
    found = [leaf for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)]
    if not found:
        raise ModelError("predict: expected tensors of the rows from the model; found none.")
    of_numbers = [leaf.flatten()[:0].abs().sum() for leaf in found if leaf.is_floating_point() or leaf.is_complex()]
    return sum(of_numbers[1:], of_numbers[0]) if of_numbers else found[0].new_zeros((), dtype=torch.float32, requires_grad=True)


class RowFile:
    """Tensors that differ only in their number of rows, appended to an unnamed file."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by close)
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)

    def add(self, tensor: torch.Tensor) -> None:
        """Adds rows. Raises ModelError for rows of another shape than those before."""
        if self._rows and tensor.shape[1:] != self._shape:
            raise ModelError(
                f"predict: expected rows of one shape from the model; found {self._shape} and {tuple(tensor.shape[1:])}, of "
                "two micro-batches. Pad what it returns to one length, or predict such rows apart."
            )
        tensor = tensor.detach()
        plain = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        self._shape, self._dtype = plain.shape[1:], plain.dtype
        self._rows += len(plain)
        self._file.write(np.ascontiguousarray(plain).tobytes())

    def array(self) -> np.ndarray[Any, Any]:
        self._file.flush()
        shape = (self._rows, *self._shape)
        # A shared mapping: a private one counts against the limit that a session is under, though it is a file.
        return np.memmap(self._file, self._dtype, "r+", shape=shape) if math.prod(shape) else np.zeros(shape, self._dtype)

    def close(self) -> None:
        self._file.close()
