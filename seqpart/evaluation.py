"""An evaluation: a run whose phases are passes over the test rows, which leaves no files."""

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from seqpart.checkpoint.export import import_weights
from seqpart.data.reader import ReaderThread
from seqpart.memory.sampler import Sampler
from seqpart.methods.exact import EVALUATION
from seqpart.planning.preparation import Preparation, Prepared
from seqpart.report.reporter import Reporter
from seqpart.result import Evaluation
from seqpart.session import Session
from seqpart.settings import Settings, values_of


def evaluation_settings(settings: Settings, rows: int, folder: Path) -> Settings:
    """Those of `settings` that an evaluation of so many rows takes, with all files in `folder`.

    A plan has room for training. So it is made for the exact method and the optimizer that need least, and an update's rows.
    """
    batch = min(max(values_of(settings.batch_size)), rows)
    micro_batch = settings.micro_batch_size
    return Settings(
        mem_limit=settings.mem_limit, method="streamed", device=settings.device, ram_limit=settings.ram_limit,
        output_dir=folder / "run", batch_size=batch, micro_batch_size=None if micro_batch is None else min(micro_batch, batch),
        optimizer="sgd", dtype=settings.dtype, seed=settings.seed, save_every="never", epochs=1,
    )  # fmt: skip


class EvaluationInputs(Preparation):
    """A plan whose phases are those of an evaluation."""

    learns = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.methods = (EVALUATION,)


class _Done(Exception):
    """The rows have been judged: nothing is to be written."""


class EvaluationSession(Session):
    """A run that ends behind its last phase, leaves no results and gives the modules back as they came.

    weights: the file that blocks from factories take their tensors from; None: as the factories make them.
    """

    def __init__(
        self, preparation: Preparation, prepared: Prepared, sampler: Sampler, stack: ExitStack, weights: Path | None
    ) -> None:
        silent = Reporter(quiet=True)
        stack.callback(silent.close)
        super().__init__(preparation, prepared, silent, sampler, stack, resumed=None, job=None, before_update=None)
        self._weights = weights

    def evaluated(self) -> Evaluation:
        with suppress(_Done):
            self.carry_out(time.perf_counter())
        assert self._test is not None
        loss, accuracy = self._test
        return Evaluation(loss=loss, accuracy=accuracy, proof=self._proof())

    def _build_homes(self, *, keep: bool) -> None:
        super()._build_homes(keep=keep)
        if self._weights is not None:
            import_weights(self._weights, self._prepared.chain, self._prepared.costs, self._store)

    def _run_stages(self, thread: ReaderThread) -> None:
        super()._run_stages(thread)
        raise _Done
