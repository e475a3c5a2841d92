"""A child process: what the job is, and what this machine does per second. `python -m profiling.survey FOLDER [options]`"""

import dataclasses
import sys
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from profiling import answer
from profiling.question import parsed
from seqpart.cli.job import opened
from seqpart.device.device import describe_versions
from seqpart.errors import SeqpartError
from seqpart.fields import as_text, values_of
from seqpart.model.blocks import as_chain
from seqpart.model.optimizers import choose
from seqpart.plan.inputs import limit_of
from seqpart.profile.blocks import measure_chain
from seqpart.profile.machine import measure_speeds, seconds_of
from seqpart.report.reporter import Reporter

_ROWS, _WIDTH = 256, 2048


def main() -> None:
    folder, *arguments = sys.argv[1:]
    place = Path(folder)
    try:
        with ExitStack() as stack:
            answer.write(place / "answer.json", answer.DONE, **_facts(arguments, place, stack))
    except SeqpartError as error:
        answer.write(place / "answer.json", answer.REFUSED, message=error.with_flags, exit_code=error.exit_code)


def _facts(arguments: list[str], place: Path, stack: ExitStack) -> dict[str, Any]:
    job, trainer, train, _ = opened(parsed(arguments), Reporter(quiet=True), stack)
    device, chain = trainer.device, as_chain(trainer.model)
    batch = min(values_of(job.batch_size)[0], train.count)
    costs = measure_chain(chain, train.shape, batch, dtype=train.dtype, autocast=job.autocast)
    parameters = sum(prod(spec.shape) for cost in costs for spec in cost.gradient_layout.specs)
    optimizer = choose(values_of(job.optimizer)[0], lr=1.0)
    rates = measure_speeds(device, optimizer, min(batch, _ROWS), job.offload_dir or place)
    on_gpu, updates = device.kind == "cuda", -(-train.count // batch)
    flops = 3 * sum(cost.flops for cost in costs) / batch * train.count
    rate = _matrix_rate(device.torch, job.autocast or train.dtype if train.dtype.is_floating_point else torch.float32)
    return {
        "limit": limit_of(job.mem_limit, device), "device": device.kind, "device_name": device.name, "rows": train.count,
        "parameters": parameters, "blocks": len(chain), "epochs": as_text(job.epochs), "batch_size": as_text(job.batch_size),
        "compute_seconds": flops / rate + updates * parameters / rates.optimizer, "flops_per_second": rate,
        "read": rates.read, "write": rates.write, "to_device": rates.up if on_gpu else None,
        "from_device": rates.down if on_gpu else None, "versions": describe_versions(),
        "options": {key: as_text(value) for key, value in dataclasses.asdict(job).items() if value is not None},
    }  # fmt: skip


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of a matrix product in the type that the job computes in."""
    a = torch.ones(_ROWS, _WIDTH, device=device, dtype=dtype)
    b = torch.ones(_WIDTH, _WIDTH, device=device, dtype=dtype)
    times = 50 if device.type == "cuda" else 4

    def work() -> None:
        for _ in range(times):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    return times * 2 * _ROWS * _WIDTH**2 / seconds_of(work, repeats=5)


if __name__ == "__main__":
    main()
