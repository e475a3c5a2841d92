"""What a model predicts of the evaluation rows, as transformers' compute_metrics takes it: in files that no memory holds."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqpart.errors import OptionError


class Predictions:
    """Outputs and labels of a pass over the evaluation rows: an object with update, compute and reset, as `compute_metrics` of
    our Trainer takes it.

    judge: transformers' compute_metrics, of an EvalPrediction; first: preprocess_logits_for_metrics; folder: of the files;
    wanted: what judge has to find.
    """

    def __init__(
        self, judge: Callable[[Any], Mapping[str, Any]] | None,
        first: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None, folder: Path, wanted: str | None = None,
    ) -> None:  # fmt: skip
        self._judge, self._first, self._folder, self._wanted = judge, first, folder, wanted
        self._files: list[_Rows] = []

    def reset(self) -> None:
        self.close()
        self._files = [_Rows(self._folder), _Rows(self._folder)]

    def close(self) -> None:
        """Arrays that were mapped stay."""
        while self._files:
            self._files.pop().close()

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """outputs (rows, ...), labels (rows, ...) of one micro-batch."""
        if self._first is not None:
            outputs = self._first(outputs, labels)
        for file, tensor in zip(self._files, (outputs, labels), strict=True):
            file.add(tensor)

    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(predictions, labels), mapped from their files; what is written into them stays in memory."""
        predictions, labels = (file.array() for file in self._files)
        return predictions, labels

    def compute(self) -> dict[str, Any]:
        """Raises OptionError."""
        if self._judge is None:
            return {}
        from transformers import EvalPrediction

        predictions, labels = self.arrays()
        found = self._judge(EvalPrediction(predictions=predictions, label_ids=labels))
        named = {name.removeprefix("eval_"): value for name, value in found.items()}
        if self._wanted is not None and self._wanted not in named:
            raise OptionError(
                f"metric_for_best_model: compute_metrics found no {self._wanted}; it found {', '.join(named) or 'nothing'}."
            )
        return named


class _Rows:
    """Tensors of one shape but for their rows, one behind the other in an unnamed file."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by close)
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)

    def add(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        plain = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        self._shape, self._dtype = plain.shape[1:], plain.dtype
        self._rows += len(plain)
        self._file.write(np.ascontiguousarray(plain).tobytes())

    def array(self) -> np.ndarray[Any, Any]:
        self._file.flush()
        shape = (self._rows, *self._shape)
        return np.memmap(self._file, self._dtype, "c", shape=shape) if self._rows else np.zeros(shape, self._dtype)

    def close(self) -> None:
        self._file.close()
