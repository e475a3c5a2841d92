"""Sums over the rows of one pass. They stay on the device, since reading them would make it wait."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Metrics:
    loss: torch.Tensor | float = 0.0
    correct: torch.Tensor | float = 0.0
    judged: torch.Tensor | int = 0
    rows: int = 0
    weight: float = 0
    """What the sum of losses is to be divided by: rows, or what the loss counted."""

    def add(self, total: torch.Tensor, rows: int, judged: tuple[torch.Tensor, torch.Tensor] | None, *, weight: float) -> None:
        """`total` is the mean loss of `rows` rows times `weight`; `judged` scores (n, classes, ...) and labels (n, ...), of
        which those below 0 do not count, where there are classes."""
        self.loss = self.loss + total
        self.rows += rows
        self.weight += weight
        if judged is not None:
            scores, labels = judged
            self.correct = self.correct + (scores.detach().argmax(1) == labels).sum()
            self.judged = self.judged + (labels >= 0).sum()

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / (self.weight or 1)

    @property
    def accuracy(self) -> float | None:
        return float(self.correct) / float(self.judged) if self.judged else None

    def to_json(self) -> dict[str, Any]:
        dtype = str(self.loss.dtype).removeprefix("torch.") if isinstance(self.loss, torch.Tensor) else None
        return {
            "loss": float(self.loss), "dtype": dtype, "correct": float(self.correct), "judged": int(self.judged),
            "rows": self.rows, "weight": self.weight,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any], device: torch.device) -> "Metrics":
        """Exactly as it was: the type goes along, because later sums round in it."""
        loss: torch.Tensor | float = found["loss"]
        if found["dtype"] is not None:
            loss = torch.tensor(loss, dtype=getattr(torch, found["dtype"]), device=device)
        return cls(loss, found["correct"], found["judged"], found["rows"], found.get("weight", found["rows"]))
