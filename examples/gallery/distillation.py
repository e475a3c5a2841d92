"""Distillation: a frozen teacher and a student in one module, under one limit."""

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


class TeacherAndStudent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.student(x), self.teacher(x)


def loss(output: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    student, teacher = output
    soft = F.kl_div(F.log_softmax(student / 2, 1), F.softmax(teacher / 2, 1), reduction="batchmean")
    return F.cross_entropy(student, labels) + 4 * soft


model = TeacherAndStudent
x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))


def plain(both: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in both.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        for rows, labels in zip(x.split(64), y.split(64), strict=True):
            optimizer.zero_grad()
            loss(both(rows), labels).backward()
            optimizer.step()


def limited(both: nn.Module) -> None:
    trainer = Trainer(both, loss, mem_limit="2GB", method="streamed", epochs=2, batch_size=64, lr=1e-3, shuffle=False)
    trainer.fit((x, y))


if __name__ == "__main__":
    limited(model())
