"""Train one network of the study by one way, in plain PyTorch with the rows in memory; prints one JSON line.

python -m benchmarks.objectives.run residual --way sil --idea prototype --partitions 4 --data-dir DIR
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.objectives.ideas import IDEAS, Idea, Objective
from benchmarks.objectives.tasks import TASKS, Rows, Task, true_loss
from benchmarks.peers.networks import build_all
from seqpart.device.device import keyed_seed

EVAL = 500


def optimizer_of(parameters: list[nn.Parameter], options: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=options.weight_decay)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=options.weight_decay)


def train(
    module: nn.Module, loss: Any, rows: Rows, epochs: int, lr: float, options: argparse.Namespace, task: Task, *,
    key: object, idea: Idea | None = None, first: bool = True, behind: Any = None,
) -> None:  # fmt: skip
    """`epochs` passes; cosine learning rate unless it is to be constant. `behind` is called after each."""
    x, y = rows
    parameters = [
        p for p in [*module.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else [])] if p.requires_grad
    ]
    if not parameters or not epochs:
        return
    optimizer = optimizer_of(parameters, options, lr)
    updates = epochs * -(-len(x) // task.batch)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: 1.0 if options.constant else 0.5 * (1 + torch.cos(torch.tensor(3.141593 * step / updates)).item()),
    )
    generator = torch.Generator().manual_seed(keyed_seed(options.seed, "order", str(key)))
    deviation = x.std(0, keepdim=True) if idea and idea.noise and x.is_floating_point() else None
    for _ in range(epochs):
        module.train()
        order = torch.arange(len(x)) if options.in_order else torch.randperm(len(x), generator=generator)
        for chosen in order.split(task.batch):
            rows_, labels = x[chosen], y[chosen]
            if idea is not None and (idea.first_too or not first):
                rows_, labels = _changed(idea, rows_, labels, deviation, task, generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
                output = module(rows_)
            output = output.float()
            value = loss(output, labels, rows_) if isinstance(loss, Objective) else loss(output, labels)
            value.backward()
            optimizer.step()
            cosine.step()
        if behind is not None:
            behind()


def _changed(idea: Idea, x: torch.Tensor, y: torch.Tensor, deviation: Any, task: Task, generator: torch.Generator) -> Rows:
    if idea.noise and deviation is not None:
        x = x + idea.noise * deviation * torch.randn(x.shape, generator=generator)
    if idea.mixup and x.is_floating_point() and not task.tokens:
        share = float(torch.distributions.Beta(idea.mixup, idea.mixup).sample())
        other = torch.randperm(len(x), generator=generator)
        hot = F.one_hot(y, task.classes).float()
        x, y = share * x + (1 - share) * x[other], share * hot + (1 - share) * hot[other]
    return x, y


def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.eval()
    with torch.no_grad():
        return torch.cat([module(part) for part in x.split(EVAL)])


def judged(output: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    output, labels = output.flatten(0, -2), labels.flatten()
    return {
        "accuracy": round(100 * float((output.argmax(1) == labels).float().mean()), 3),
        "loss": round(float(F.cross_entropy(output, labels)), 5),
    }


def scored(model: nn.Module, task: Task) -> dict[str, dict[str, float]]:
    return {name: judged(forward(model, x), y) for name, (x, y) in (("validation", task.validation), ("test", task.test))}


def parts_of(task: Task, options: argparse.Namespace, idea: Idea) -> list[tuple[int, int, int, int]]:
    """Of each partition: first block, last (not included), last that is trained along (not included), epochs."""
    starts, count = task.starts[options.partitions], len(task.blocks)
    epochs = [int(n) for n in options.epochs.split(",")]
    return [
        (start, stop, count if stop == count else min(stop + idea.overlap, count - 1), epochs[min(p, len(epochs) - 1)])
        for p, (start, stop) in enumerate(zip(starts, [*starts[1:], count], strict=True))
    ]


def sil(task: Task, options: argparse.Namespace, idea: Idea, told: dict[str, Any]) -> nn.Module:
    blocks = build_all(task.blocks, options.seed)
    rates = [float(n) for n in options.lr.split(",")]
    x, held = task.train[0], task.validation[0]
    parts = []
    told["local"], told["local_train"] = [], []
    for p, (start, stop, trained, epochs) in enumerate(parts_of(task, options, idea)):
        part, learns = nn.Sequential(*blocks[start:stop]), nn.Sequential(*blocks[start:trained])
        final = stop == len(blocks)
        with torch.no_grad():
            learns.eval()
            shape = tuple(learns(x[:2]).shape[1:])
        inputs = x.shape[-1] if task.tokens else x[0].numel()
        torch.manual_seed(keyed_seed(options.seed, "head", p))
        loss = true_loss if final else Objective(idea, shape, task.classes, options.seed, p, tokens=task.tokens, inputs=inputs)
        train(learns, loss, (x, task.train[1]), epochs, rates[min(p, len(rates) - 1)], options, task,
              key=p, idea=idea, first=p == 0)  # fmt: skip
        if not final:
            loss.eval()
            for name, (rows, labels) in {"local": (held, task.validation[1]), "local_train": (x[:5000], task.train[1])}.items():
                scores = loss.scores(forward(learns, rows))
                told[name].append(None if scores is None else judged(scores, labels[: len(rows)])["accuracy"])
        x, held = forward(part, x), forward(part, held)
        parts.append(part)
    return nn.Sequential(*parts)


def run(options: argparse.Namespace) -> dict[str, Any]:
    task = TASKS[options.task](options.data_dir)
    if options.rows:
        task.train = (task.train[0][: options.rows], task.train[1][: options.rows])
    told: dict[str, Any] = {}
    began = time.perf_counter()
    if options.way == "full":
        model = nn.Sequential(*build_all(task.blocks, options.seed))
        _curve(model, task, options, int(options.epochs), float(options.lr), told)
    else:
        model = sil(task, options, idea_of(options), told)
        if options.recovery:
            told["before"] = scored(model, task)
            _curve(model, task, options, options.recovery, options.recovery_lr, told)
    each = macs(task)
    told["macs"] = round(_work(task, options, each) / (3 * sum(each) * options.full_epochs), 3)
    told |= scored(model, task)
    told["seconds"] = round(time.perf_counter() - began, 1)
    return told


def macs(task: Task) -> list[int]:
    """Multiply-accumulates of one row forward through each block."""
    x, counted = task.train[0][:2], []
    for block in build_all(task.blocks, 0):
        block.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            x = block(x)
        counted.append(counter.get_total_flops() // 4)
    return counted


def _work(task: Task, options: argparse.Namespace, each: list[int]) -> float:
    """Multiply-accumulates of the training, for a row: three forward passes an epoch, and one to cache each boundary."""
    if options.way == "full":
        return 3 * sum(each) * int(options.epochs)
    work = 3.0 * sum(each) * options.recovery
    for start, stop, trained, epochs in parts_of(task, options, idea_of(options)):
        work += 3 * sum(each[start:trained]) * epochs + (sum(each[start:stop]) if stop < len(each) else 0)
    return work


def idea_of(options: argparse.Namespace) -> Idea:
    return replace(IDEAS[options.idea], **json.loads(options.change or "{}"))


def _curve(model: nn.Module, task: Task, options: argparse.Namespace, epochs: int, lr: float, told: dict[str, Any]) -> None:
    idea = Idea(mixup=options.mixup, first_too=True) if options.mixup else None
    told["curve"] = []

    def note() -> None:
        told["curve"].append(judged(forward(model, task.validation[0]), task.validation[1]))

    train(model, true_loss, task.train, epochs, lr, options, task, key="full", behind=note, idea=idea)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--way", choices=["full", "sil"], default="sil")
    parser.add_argument("--idea", choices=list(IDEAS), default="prototype")
    parser.add_argument("--change", help="JSON: fields of the idea that differ")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--epochs", default="8")
    parser.add_argument("--full-epochs", type=int, default=8, help="of the full training that MACs are compared with")
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--constant", action="store_true", help="the learning rate stays as it is")
    parser.add_argument("--bfloat16", action="store_true", help="compute in it by autocast; weights stay float32")
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--recovery", type=int, default=0)
    parser.add_argument("--recovery-lr", type=float, default=1e-3)
    parser.add_argument("--mixup", type=float, default=0.0, help="of full training and of recovery")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, required=True)
    return parser


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(run(options)))


if __name__ == "__main__":
    main()
