"""The facade: `Trainer(model, mem_limit="2GB").fit(train, test)`. It wires rooms together and schedules nothing."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from seqpart.device import open_device
from seqpart.errors import OptionError
from seqpart.gauge import Gauge
from seqpart.ingest import as_split
from seqpart.losses import LossFunction
from seqpart.meter import Sampler
from seqpart.optimizers import Build, describe
from seqpart.plan import Plan
from seqpart.preparation import Preparation
from seqpart.progress import Progress, progress_of
from seqpart.report import Reporter
from seqpart.run import Result, Run, Witness
from seqpart.settings import Settings

__all__ = ["Result", "Trainer"]


class Trainer:
    """Trains `model` under a memory limit.

    model: an nn.Sequential, a list of modules, or a list of factories that each return a module (then the model never
        exists whole). Modules given alive are emptied while the run lasts and get their trained weights at the end.
    loss: (output, labels) -> mean loss, for the end of the network; default cross-entropy (for each position where rows
        have several labels), or mean squared error for float labels.
    optimizer: `adam`, `adamw`, `sgd`, or a function from a list of parameters to a torch optimizer.
    options: the fields of Settings; `mem_limit` is required. A list gives each partition its own value.

    Raises OptionError or ModelError for what cannot be honoured.
    """

    def __init__(
        self, model: object, loss: LossFunction | None = None, optimizer: str | Build | None = None,
        *, quiet: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self._optimizer = None
        if callable(optimizer):
            clash = sorted({"lr", "recovery_lr", "weight_decay", "momentum"} & set(options))
            if clash:
                raise OptionError(f"{', '.join(clash)}: the optimizer function sets these itself; leave them out here.")
            self._optimizer = describe(getattr(optimizer, "__name__", "optimizer"), optimizer)
        elif optimizer is not None:
            options["optimizer"] = optimizer
        self.settings = Settings.of(**options)
        self.model, self._loss, self._quiet = model, loss, quiet
        self.device = open_device(self.settings.device)
        self.device.settle()

    def plan(self, train: object, test: object, *, reuse: Plan | None = None) -> Plan:
        """The plan, and nothing else: no file is written, nothing is trained. Raises what `fit` would raise of it."""
        return self.prepare(train, test, reuse=reuse).planned().plan

    def prepare(self, train: object, test: object, *, reuse: Plan | None = None) -> Preparation:
        """Everything checked and measured, ready to be planned."""
        with self.device.own_random_state():
            return Preparation(
                self.model, self.settings, as_split(train, "training"), as_split(test, "test"), self.device,
                final_loss=self._loss, optimizer=self._optimizer, folder=self.scratch_parent, reuse=reuse,
            )  # fmt: skip

    @property
    def scratch_parent(self) -> Path:
        """Where homes and boundary rows go while a run lasts, or a directory above it."""
        return self.settings.offload_dir or self.settings.output_dir or Path("runs")

    def fit(
        self, train: object, test: object, *, reuse: Plan | None = None, resume: str | Path | None = None,
        reporter: Reporter | None = None, job: dict[str, Any] | None = None, witness: Witness | None = None,
    ) -> Result:  # fmt: skip
        """Train on `train` and evaluate on `test`: pairs (x, y) or data sets of (x, y) items.

        resume: the directory of a run that ended early, or one of its checkpoint files; it goes on to the bits that it
            would have reached. Model, data and settings must be the same (but for limits and the like).
        job: JSON that is kept in the run directory, for who starts the run again. witness: sees gradients; see `Hooks`.

        Raises DoesNotFit before anything is trained, LimitExceeded when the limit was passed, StoreError for disks and
        damaged checkpoints, Interrupted when a signal came and the run was saved.
        """
        sampler = Sampler(Gauge(self.device), limit=1 << 62)
        reporter = reporter or Reporter(quiet=self._quiet)
        began = time.perf_counter()
        with ExitStack() as stack:
            stack.callback(reporter.close)
            stack.enter_context(self.device.own_random_state())
            sampler.start()
            stack.callback(sampler.stop)
            progress: Progress | None = progress_of(Path(resume), self.settings) if resume is not None else None
            preparation = self.prepare(train, test, reuse=reuse)
            sampler.limit = preparation.limit
            prepared = progress.planned(preparation) if progress is not None else preparation.planned()
            run = Run(preparation, prepared, reporter, sampler, stack, progress=progress, job=job, witness=witness)
            return run.carry_out(began)
