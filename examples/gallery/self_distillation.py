"""Learning without labels from a teacher that follows its student by a moving average, as BYOL and DINO do."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


class StudentAndTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(32, 32)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.predictor(self.student(one)), self.teacher(other)


def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return 2 - 2 * F.cosine_similarity(*output, dim=1).mean()


model = StudentAndTeacher
x = torch.randn(256, 64)
views = [{"one": rows + 0.1 * torch.randn(64, 64), "other": rows + 0.1 * torch.randn(64, 64)} for rows in x.split(64)]


def plain(both: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in both.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0, fused=True)
    for batch in views:
        optimizer.zero_grad()
        loss(both(**batch)).backward()
        optimizer.step()
        with torch.no_grad():
            for teacher, student in zip(both.teacher.parameters(), both.student.parameters(), strict=True):
                teacher.lerp_(student, 0.01)


def limited(both: nn.Module) -> None:
    trainer = Trainer(both, loss, mem_limit="2GB", method="streamed", batch_size=64, micro_batch_size=64, lr=1e-3)
    with trainer.session(views[0]) as session:
        for batch in views:
            session.step(batch)
            session.change_weights(lambda teacher, student: teacher.lerp_(student, 0.01), "teacher", "student")


if __name__ == "__main__":
    limited(model())
