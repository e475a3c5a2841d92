"""seqpart on the same network, rows and initial weights: --limit SIZE, method streamed by default, no checkpoints.

With --seconds it needs --updates, which the runner reckons from the speed that it measured: a run's length is fixed when
it begins. What it prints of `seconds` are the updates' own.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.common import parser, refuse, show, task_of
from benchmarks.peers.networks import mean_loss


def watching() -> Any:
    """A reporter that notes when each update ended."""
    from seqpart.report.reporter import Reporter
    from seqpart.schedule.phase import PhaseKind
    from seqpart.schedule.steps import StepDone, Verb

    class Watch(Reporter):
        def __init__(self) -> None:
            super().__init__(quiet=True)
            self.ends: list[float] = []

        def begin(self, phases: Any, *rest: Any) -> None:
            self.phases = phases
            self.ends.append(time.perf_counter())
            super().begin(phases, *rest)

        def listen(self, event: Any) -> None:
            if isinstance(event, StepDone) and self.phases[event.step.phase].kind is PhaseKind.TRAIN:
                last = event.step.verb is Verb.UPDATE and event.step.partition == 0
                if last:
                    self.ends.append(time.perf_counter())
                    print(f"update {len(self.ends) - 1}: {self.ends[-1] - self.ends[-2]:.3f} s", file=sys.stderr, flush=True)
            super().listen(event)

    return Watch()


def noting(losses: list[float], rows: int) -> Any:
    """The same loss, which also notes its values: those of `rows` rows each, since planning tries a loss on fewer."""
    from torch._subclasses.fake_tensor import FakeTensor

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = mean_loss(output, labels)
        if len(labels) == rows and not isinstance(found, FakeTensor):
            losses.append(found.item())
        return found

    return loss


def fit(options: argparse.Namespace, began: float) -> None:
    from seqpart import Trainer

    task = task_of(options)
    rows = task.update_rows(0, options.updates)
    test = task.rows["test_x"], task.rows["test_y"].long()
    if not options.seconds:
        test = test[0][: task.batch], test[1][: task.batch]
    losses: list[float] = []
    watch = watching()
    extra: dict[str, Any] = {"micro_batch_size": options.micro} if options.micro else {}
    home = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        trainer = Trainer(
            task.blocks, noting(losses, options.micro or options.batch) if options.note_losses else None,
            mem_limit=options.limit,
            method=options.method, epochs=1, batch_size=task.batch, lr=task.rate, shuffle=False,
            output_dir=home / "run", save_every="never", seed=options.seed, quiet=True, device=options.device, **extra,
        )  # fmt: skip
        result = trainer.fit(rows, (task.inputs(test[0]), test[1]), reporter=watch)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    show(
        seconds=[after - before for before, after in itertools.pairwise(watch.ends)], losses=losses[: options.updates],
        mean_loss=result.train_losses[-1], accuracy=result.accuracy if options.seconds else None,
        setup_s=watch.ends[0] - began, method=result.plan.method, micro_batch=result.final_micro_batch,
        partitions=len(result.plan.partitions), peak=result.proof.peak, violations=result.proof.violations,
    )  # fmt: skip


def main() -> None:
    began = time.perf_counter()
    made = parser(__doc__)
    made.add_argument("--limit", required=True)
    made.add_argument("--method", default="streamed", choices=["streamed", "checkpointed", "full", "auto"])
    made.add_argument("--micro", type=int, help="rows at once; default: what the plan takes")
    made.add_argument("--device", default="cpu")
    made.add_argument("--note-losses", action="store_true", help="print every update's loss, for the comparison of the arms")
    options = made.parse_args()
    try:
        import seqpart.errors
    except ImportError as missing:
        refuse(str(missing))
    try:
        fit(options, began)
    except seqpart.errors.DoesNotFit as error:
        show(smallest=error.smallest)
        refuse(str(error).splitlines()[0])


if __name__ == "__main__":
    main()
