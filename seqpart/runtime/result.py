"""What a run leaves, and what an evaluation finds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from seqpart.callbacks import MetricValue
from seqpart.device.sampler import Proof
from seqpart.errors import CorruptFile, OptionError, StoreError
from seqpart.model.adapter import write_adapter
from seqpart.model.pretrained import write_pretrained
from seqpart.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run left. `accuracy` is None for a regression, and `test_loss` too where there was no test set. A loss that sums
    is given as its mean over the rows."""

    weights: Path
    """A safetensors file with the model's own parameter names."""
    test_loss: float | None
    accuracy: float | None
    train_losses: tuple[float, ...]
    """Mean loss of every training pass, in order."""
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """What compute_metrics found on the test rows."""
    best_update: int | None = None
    """Updates before the evaluation that was the best; None where there was one evaluation alone. With keep_best, weights, test
    loss, accuracy and metrics are those of it."""
    proof: Proof
    plan: Plan
    seconds: float
    final_micro_batch: int
    average: Path | None = None
    """With `ema`, a file like `weights` with their exponential moving average, and buffers as they are in `weights`."""
    average_loss: float | None = None
    """On the test rows, of these."""
    average_accuracy: float | None = None
    average_metrics: dict[str, MetricValue] = field(default_factory=dict)
    """What compute_metrics found of it."""
    config: Any = field(default=None, repr=False, compare=False)
    """The configuration of a model of transformers, which `save_pretrained` writes."""

    model: Any = field(default=None, repr=False, compare=False)
    """The model, where it is one of peft, whose adapter `save_adapter` writes."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The trained model's tensors by name, on the CPU, as `load_state_dict` of the whole model takes them.

        All of them are in memory at once, outside any limit: as many bytes as the file `weights` has. Raises StoreError where
        that file is gone or damaged.
        """
        try:
            return load_file(self.weights)
        except OSError as error:
            raise StoreError(f"{self.weights} cannot be read: {error.strerror or error}.") from None
        except SafetensorError as error:
            raise CorruptFile(f"{self.weights} is damaged: {error}.", self.weights) from None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `from_pretrained(folder)` reads: model.safetensors (one file with `weights` where a file may have two
        names), and for a model of transformers its configuration, and what else but weights lies where it was loaded from: a
        tokenizer.

        Raises StoreError where that cannot be written, OptionError where there are other weights already.
        """
        write_pretrained(Path(folder), self.weights, self.config)

    def save_adapter(self, folder: str | Path, *, average: bool = False) -> None:
        """Write the adapter of a model of peft alone, as its own save_pretrained does: adapter_model.safetensors and
        adapter_config.json. average: its moving average, of a run with `ema`.

        Raises OptionError for another model, and where there is no average; StoreError where that cannot be written.
        """
        if average and self.average is None:
            raise OptionError("save_adapter: the run had no average of its weights. Give --ema, such as 0.999.")
        write_adapter(Path(folder), self.average if average and self.average is not None else self.weights, self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What `Trainer.evaluate` found."""

    loss: float
    """Mean over the rows."""
    accuracy: float | None
    """Share of right answers, from 0 to 1; None for a regression."""
    proof: Proof
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """What compute_metrics found."""
