"""A child process: a plain PyTorch program. `python -m profiling.plain WAY FOLDER CAP [options of a job]`

Of seqpart it takes what both sides must share to be comparable, the model with its initial weights, the rows and their
order, and nothing of how seqpart trains: no executor, no plan, no limit. PyTorch's own settings, whole model on the device.
"""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from profiling import answer
from profiling.question import Way, job_of, parsed, way_named
from profiling.trace import StepLog
from seqpart.cli.job import Job, data_of, model_of
from seqpart.data.classes import count_classes
from seqpart.data.reader import windows
from seqpart.data.splits import Split, write_rows
from seqpart.device.device import Device
from seqpart.device.opening import open_device
from seqpart.device.usage import read_process
from seqpart.errors import SeqpartError
from seqpart.fields import values_of
from seqpart.intake import rows_of
from seqpart.model.blocks import as_chain
from seqpart.model.losses import label_dtype, loss_named
from seqpart.model.metrics import Metrics
from seqpart.model.optimizers import choose
from seqpart.model.scheduler import rate_schedule
from seqpart.plan.inputs import limit_of
from seqpart.report.reporter import Reporter
from seqpart.store.row_file import RowLayout


class Rows:
    """Rows of one split in a file that is mapped: they cost pages of the file, not memory of the process."""

    def __init__(self, split: Split, path: Path, device: torch.device) -> None:
        self._layout, self._device, self.count = RowLayout(split.shape, split.dtype), device, split.count
        with open(path, "wb") as file:
            write_rows(split, lambda rows: file.write(rows.contiguous().numpy().tobytes()) and None)
        dtype = torch.empty(0, dtype=split.dtype).numpy().dtype
        self._x = np.memmap(path, dtype=dtype, mode="r", shape=(split.count, *split.shape))
        self._y = split.labels.to(label_dtype(split.labels))

    def order(self, key: tuple[int | str, ...] | None) -> np.ndarray:
        return np.concatenate([window.rows for window in windows(self.count, self._layout.chunk_rows, key)])

    def take(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self._x[numbers]).to(self._device), self._y[numbers].to(self._device)


class Program:
    def __init__(self, job: Job, way: Way, place: Path, log: StepLog) -> None:
        self._job, self._way, self._log = job, way, log
        device = open_device(job.device)
        self.device = device.torch
        train, test, _ = rows_of(*data_of(job), job)
        self._train = Rows(train, place / "train.rows", self.device)
        self._test = Rows(test, place / "test.rows", self.device)
        self._loss = loss_named(job.loss, train.labels, count_classes(train, test))
        model, _ = model_of(job, limit_of(job.mem_limit, device), train, test, Reporter(quiet=True))
        self.blocks = nn.ModuleList(block.build(Device(), job.seed) for block in as_chain(model)).to(self.device)
        (rate,), (name,) = values_of(job.lr), values_of(job.optimizer)  # one of each: the question refuses others
        self._chosen = choose(name, lr=rate, weight_decay=job.weight_decay, momentum=job.momentum)
        self._parameters = [parameter for parameter in self.blocks.parameters() if parameter.requires_grad]
        self._optimizer, self._rate = self._chosen.build(self._parameters), rate
        self._batch = min(max(values_of(job.batch_size)), train.count)
        self._micro = min(job.micro_batch_size or self._batch, self._batch)
        (self._epochs,) = values_of(job.epochs)
        self._factor = rate_schedule(job.lr_schedule, job.warmup_updates)

    def run(self) -> dict[str, Any]:
        self._log.start()
        losses = [self._epoch(number) for number in range(1, self._epochs + 1)]
        test = self._judge()
        return {
            "training_seconds": self._log.training, "train_losses": losses, "test_loss": test.mean_loss,
            "accuracy": test.accuracy, "micro_batch": self._micro, "partitions": 1, "method": self._way.method,
        }  # fmt: skip

    def _epoch(self, number: int) -> float:
        job, metrics, updates = self._job, Metrics(), -(-self._train.count // self._batch)
        order = self._train.order((job.seed, "order", 0, number) if job.shuffles else None)
        self.blocks.train()
        for done, start in enumerate(range(0, len(order), self._batch)):
            self._update(order[start : start + self._batch], metrics)
            factor = self._factor((number - 1) * updates + done, self._epochs * updates)
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * factor
            if job.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, job.clip_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._log.note("update", trains=True)
        return metrics.mean_loss

    def _update(self, numbers: np.ndarray, metrics: Metrics) -> None:
        for part in self._parts(numbers):
            x, y = self._train.take(part)
            with self._autocast():
                with self._saving():
                    output = self._forward(x)
                loss = self._loss(output, y)
            self._log.note("forward", trains=True)
            (loss * (len(part) / len(numbers)) if len(part) < len(numbers) else loss).backward()
            metrics.add(loss.detach().double() * len(part), len(part), None, weight=len(part))
            self._log.note("backward", trains=True)

    def _parts(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(numbers), self._micro):
            yield numbers[start : start + self._micro]

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._way.method == "checkpointed" else block(x)
        return x

    def _saving(self) -> AbstractContextManager[Any]:
        if self._way.method != "save_on_cpu":
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._job.autocast
        return torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext()

    def _judge(self) -> Metrics:
        metrics = Metrics()
        self.blocks.eval()
        with torch.no_grad(), self._autocast():
            for part in self._parts(np.arange(self._test.count)):
                x, y = self._test.take(part)
                for block in self.blocks:
                    x = block(x)
                judged = None if y.is_floating_point() else (x.flatten(0, -2), y.flatten())
                metrics.add(self._loss(x, y).double() * len(part), len(part), judged, weight=len(part))
                self._log.note("test", trains=False)
        return metrics


def bound(cap: int | None, device: torch.device) -> int | None:
    """Hold the program to `cap` bytes on a GPU; without one, on the CPU, to what is free: an error, and not a kill.

    Returns what the context took of the cap.
    """
    if device.type == "cuda":
        torch.empty(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        context = total - free - torch.cuda.memory_reserved(device)
        if cap is not None:
            torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, (cap - context) / total)), device)
        return context
    room = read_process().data + int(psutil.virtual_memory().available * 0.9)
    resource.setrlimit(resource.RLIMIT_DATA, (room, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return None


def main() -> None:
    name, folder, cap, *arguments = sys.argv[1:]
    way, place = way_named(name), Path(folder)
    log = StepLog(place / "steps.log")
    say: Callable[..., None] = lambda status, **values: answer.write(place / "answer.json", status, **values)  # noqa: E731
    try:
        job = job_of(parsed(arguments), way)
        device = open_device(job.device).torch
        context = bound(int(cap) if cap != "none" else None, device)
        now = read_process()
        runtime = context if context is not None else now.anon + now.shmem
        found = Program(job, way, place, log).run()
    except SeqpartError as error:
        say(answer.REFUSED, asked=None, message=error.with_flags)
    except (RuntimeError, MemoryError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
            raise
        say(answer.OUT_OF_MEMORY, asked=answer.requested(text), message=text)
    else:
        say(answer.DONE, runtime=runtime, **found, **_of_allocator(device))
    finally:
        log.close()


def _of_allocator(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"allocator_peak": None, "pinned": 0}
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return {"allocator_peak": torch.cuda.max_memory_reserved(device), "pinned": pinned}


if __name__ == "__main__":
    main()
