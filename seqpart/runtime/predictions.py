"""Collects what a model returns for all rows of a pass, in unnamed files: it may be more than the limit."""

import math
import tempfile
from collections.abc import Callable, Sequence
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
        self._folder, self._files = folder, list[RowFile | torch.Tensor]()
        self.close()

    def close(self) -> None:
        """Forgets all rows, and closes their files; mapped tensors remain valid."""
        for file in self._files:
            if isinstance(file, RowFile):
                file.close()
        self._files, self._form, self._others = [], None, list[Any]()

    reset = close

    def update(self, outputs: Any, labels: torch.Tensor, dims: Callable[[], Sequence[int | None]] = list) -> None:
        """Adds the outputs of a micro-batch, a tensor or a tree of them. dims: returns the rows' in each, None where it has
        none, or nothing where all are 0. Raises ModelError for what differs between micro-batches and is no rows."""
        every = [*leaves(outputs)]
        found = [leaf for leaf in every if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in every if not isinstance(leaf, torch.Tensor)]
        if self._form is None:
            places = dims() or [0] * len(found)
            self._form, self._others = outputs, others
            self._files = [
                leaf.detach().cpu().clone() if dim is None else RowFile(self._folder, dim)
                for leaf, dim in zip(found, places, strict=True)
            ]
        same = others == self._others
        for file, tensor in zip(self._files, found, strict=True):
            if isinstance(file, RowFile):
                file.add(tensor)
            else:
                same = same and torch.equal(file, tensor.cpu())
        if not same:
            raise ModelError(
                "predict: expected tensors of rows from the model, and otherwise the same for all rows; found numbers, or a "
                f"tensor without rows, that differ between micro-batches{f', {others}' if others else ''}. Return numbers "
                "of rows as tensors (rows,), or leave them out."
            )

    def compute(self) -> dict[str, Any]:
        """There are no figures."""
        return {}

    def tree(self) -> Any:
        """Returns the outputs of all rows as the model returns them, mapped from their files, which last as long."""
        tensors = iter([file.tensor() if isinstance(file, RowFile) else file for file in self._files])
        return mapped(self._form, lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf)


def of_no_loss(outputs: Any) -> torch.Tensor:
    """A loss of 0, whatever the model returns."""
    found = [leaf for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)]
    if not found:
        raise ModelError("predict: expected tensors of the rows from the model; found none.")
    of_numbers = [leaf.flatten()[:0].abs().sum() for leaf in found if leaf.is_floating_point() or leaf.is_complex()]
    return sum(of_numbers[1:], of_numbers[0]) if of_numbers else found[0].new_zeros((), dtype=torch.float32, requires_grad=True)


class RowFile:
    """Tensors that differ only in their number of rows, appended to an unnamed file. dim: the rows'."""

    def __init__(self, folder: Path, dim: int) -> None:
        self._file, self._dim = tempfile.TemporaryFile(dir=folder), dim  # noqa: SIM115 (closed by close)
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)

    def add(self, tensor: torch.Tensor) -> None:
        """Adds rows. Raises ModelError for rows of another shape than those before."""
        tensor = tensor.detach().movedim(self._dim, 0)
        if self._rows and tensor.shape[1:] != self._shape:
            raise ModelError(
                f"predict: expected rows of one shape from the model; found {self._shape} and {tuple(tensor.shape[1:])}, of "
                "two micro-batches. Pad what it returns to one length, or predict such rows apart."
            )
        plain = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy(force=True)
        self._shape, self._dtype = plain.shape[1:], plain.dtype
        self._rows += len(plain)
        self._file.write(np.ascontiguousarray(plain).tobytes())

    def tensor(self) -> torch.Tensor:
        """Returns all rows, mapped."""
        self._file.flush()
        shape = (self._rows, *self._shape)
        # A shared mapping: a private one counts against the limit that a session is under, though it is a file.
        found = np.memmap(self._file, self._dtype, "r+", shape=shape) if math.prod(shape) else np.zeros(shape, self._dtype)
        return torch.from_numpy(found).movedim(0, self._dim)

    def close(self) -> None:
        self._file.close()
