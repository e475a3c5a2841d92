"""Finds the smallest limit for the command's own model, whose depth grows with the limit: one with which the command runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from seqpart.cli.job import Job, model_of
from seqpart.data.splits import Split
from seqpart.device.limit import RUNTIME_VARIES, limit_of, refused
from seqpart.errors import BadInput, DoesNotFit
from seqpart.plan.plan import Plan
from seqpart.report.reporter import Reporter
from seqpart.trainer import Trainer
from seqpart.units import format_limit, parse_size

_ATTEMPTS = 20
"""Limits that are tried, each with a plan. With three partitions, each of which grows by two thirds of a limit, 11 were."""

_STEPS = 4
"""After so many, limits that lead anywhere lack less."""


@contextmanager
def smallest_limit_named(job: Job, trainer: Trainer, train: Split, test: Split, reuse: Plan | None) -> Iterator[None]:
    """Inside, a refusal of `job` names a limit at which its model, rebuilt for that limit, has a plan; or says that there is
    none, and what to give instead.

    job: as it was asked for. trainer: of its model at the limit that was asked for.
    """
    try:
        yield
    except DoesNotFit as error:
        if job.model != "mlp" or job.depth is not None or error.smallest is None or error.with_flags == error.message:
            raise
        refusal = error.with_traceback(None)  # else its frames keep what was measured
        refusal.__context__ = refusal.__cause__ = None
    else:
        return
    raise _Search(job, trainer, train, test, reuse).refusal(refusal)


def _never_ends(lacks: Sequence[int], limit: int) -> bool:
    """True if larger limits lack ever more bytes. Depths are whole numbers, so a small step says little."""
    if len(lacks) > 1 and lacks[-2] > limit // 4 and lacks[-1] >= 1.5 * lacks[-2]:
        return True
    return len(lacks) > _STEPS and lacks[-1] >= lacks[-1 - _STEPS]


class _Search:
    """Searches upwards from the refused limit: each refusal names a limit for its own depth, in which no deeper model fits."""

    def __init__(self, job: Job, trainer: Trainer, train: Split, test: Split, reuse: Plan | None) -> None:
        self._job, self._trainer, self._rows, self._reuse = job, trainer, (train, test), reuse
        self._silent = Reporter(quiet=True)

    def refusal(self, first: DoesNotFit) -> DoesNotFit:
        """`first` with the least limit that was found for the same command, or with what to give where there is none."""
        before = limit_of(self._trainer.settings.mem_limit, self._trainer.device)
        depth, smallest, lacks = self._depth_at(before), first.smallest, list[int]()
        for _ in range(_ATTEMPTS):
            if smallest is None:
                break
            limit = parse_size(format_limit(smallest))
            lacks.append(limit - before)
            if _never_ends(lacks, limit):
                break
            before, smallest = limit, self._smallest_at(limit)
            if smallest is not None and smallest <= limit:
                grown = self._depth_at(limit)
                told = "" if grown == depth else f"\n  The model grows with the limit: that is for --depth {grown}."
                return refused(first.message + told, limit, first.rows)
        return DoesNotFit(
            f"{first.message}\n  no limit fits: the model grows with it, to a state of twice as much. Give --depth {depth}, as "
            f"it is, or less: for that {format_limit(first.smallest or 0)} are enough."
        )

    def _depth_at(self, limit: int) -> int | None:
        return self._made(limit)[1]

    def _made(self, limit: int) -> tuple[object, int | None]:
        return model_of(self._job, limit, *self._rows, self._silent)

    def _smallest_at(self, limit: int) -> int | None:
        """`limit`, where the model for it fits; else what its refusal names. None: it cannot be had."""
        trainer = self._trainer
        try:
            trainer.model, _ = self._made(limit)
            # Another process may have a larger runtime.
            trainer.settings = replace(trainer.settings, mem_limit=limit - RUNTIME_VARIES)
            trainer.plan(*self._rows, reuse=self._reuse)
        except BadInput:  # more than the device has, deeper than may be, another model than a saved plan is for
            return None
        except DoesNotFit as again:
            return None if again.smallest is None else max(again.smallest, limit + 1)
        return limit
