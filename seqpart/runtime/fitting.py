"""One `fit`: rows, a plan, and the run from its beginning, or from a checkpoint, to its result; alone or on several ranks."""

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from seqpart.checkpoint.resume import ResumePoint, refuse_unlike_ranks, resume_point_of
from seqpart.device.limit import translate_oom
from seqpart.device.ranks import Ranks, begun_before, leads, leaving_on_error, ranks_of, refuse_ranks
from seqpart.errors import Interrupted
from seqpart.model.metrics import ComputeMetrics, own_metrics
from seqpart.model.weight_files import is_adapted
from seqpart.plan.plan import Plan
from seqpart.plan.planner import Planner
from seqpart.report.reporter import Reporter, planning_shown
from seqpart.runtime.evaluation import evaluate_rows
from seqpart.runtime.observer import Observer
from seqpart.runtime.pauses import PlanAnew
from seqpart.runtime.result import Result, carry_out, with_average
from seqpart.runtime.run import Run
from seqpart.runtime.setup import Setup
from seqpart.runtime.tracking import traced, tracked
from seqpart.runtime.weight_store import refuse_taken_places
from seqpart.store.scratch import own_folder


def fit(
    setup: Setup, train: object, test: object, observer: Observer, compute_metrics: ComputeMetrics, reuse: Plan | None,
    resume: Path | None, reporter: Reporter | None, job: dict[str, Any] | None,
) -> Result:  # fmt: skip
    """Trains and tests, with another plan where memory ran out or what learns has changed: see `Trainer.fit`."""
    resume = resume or begun_before(setup.settings.output_dir)
    with leaving_on_error(), ExitStack() as stack:
        own = setup if leads() else _follower(setup, stack)
        while True:
            try:
                began, metrics = time.perf_counter(), replace(observer, metrics=own_metrics(compute_metrics))
                with _begun(own, train, test, metrics, reuse, resume, reporter, job) as run:
                    result = carry_out(run, began)
                break
            except PlanAnew as saved:
                reuse, resume, reporter = None, saved.directory, None
                del run  # what it held counts against the limit
            except Interrupted as interrupted:
                raise interrupted.with_traceback(None) from None  # its reader could mend nothing where a signal came
        result = replace(result, config=getattr(own.model, "config", None), model=own.model if is_adapted(own.model) else None)
        tests = run.planner.test
        if result.average is not None and tests.count and run.ranks.leads:
            what = f"their moving average on the {tests.count} test rows"
            found = evaluate_rows(own, what, tests, result.average, compute_metrics, result.proof)
            result = with_average(result, found)
        result = _of_first_rank(run.ranks, result)
    setup.trained = result.weights
    return result


@contextmanager
def _begun(
    setup: Setup, train: object, test: object, observer: Observer, reuse: Plan | None, resume: Path | None,
    reporter: Reporter | None, job: dict[str, Any] | None,
) -> Iterator[Run]:  # fmt: skip
    """A context with a run that is planned and begun. Raises PlanAnew after it saved the run, to go on with another plan."""
    reporter, ranks = reporter or Reporter(quiet=setup.quiet), ranks_of(setup.device)
    with ExitStack() as stack:
        broadcasting = stack.enter_context(ExitStack())
        broadcasting.enter_context(ranks.broadcasting())
        if ranks.leads:
            refuse_taken_places(setup.settings.output_dir, resume, overwrite=setup.settings.overwrite)
        sampler = setup.begin(stack, reporter)
        observer = traced(setup.settings.trace, observer, sampler, reporter, stack)
        observer, tracking = tracked(setup.settings.trackers, observer, sampler, reporter, stack)
        if ranks.note:
            reporter.say(ranks.note)
        rows, tests = setup.rows(train, test)
        resumed: ResumePoint | None = None
        if not ranks.leads:
            reuse, resumed = ranks.receive()
            if resumed is not None and setup.settings.output_dir is not None:
                resumed = replace(resumed, root=setup.settings.output_dir)
        elif resume is not None:
            method = setup.settings.methods[0]
            if method.alone and not method.trains_independently(setup.settings):
                refuse_ranks("resuming a run of sil, whose rows between partitions one process has,", "Start one.")
            restarted = begun_before(setup.settings.output_dir) is not None
            resumed = resume_point_of(resume.absolute(), setup.settings, restarted=restarted)
        stack.enter_context(translate_oom(setup.device, "the run was planned, begun or ended"))
        resumes = resumed is not None and resumed.manifest is not None
        prepare = partial(setup.prepare, rows, tests, reuse=reuse, resumes=resumes)
        plan = partial(setup.plan_under_limit, sampler, Planner.planned if resumed is None else resumed.planned)
        earlier = resumed.plan if resumed is not None and ranks.leads else reuse
        with planning_shown(reporter):
            planner, prepared = setup.plan_that_fits(
                stack, prepare, plan, earlier, in_pairs=setup.in_pairs, resumed=resumed,
                whole_logits=observer.metrics is not None,
            )  # fmt: skip
        ranks.broadcast((prepared.plan, resumed and replace(resumed, manifest=None)))
        broadcasting.close()
        refuse_unlike_ranks(ranks, planner)
        run = Run(planner, prepared, reporter, sampler, stack, observer=observer, resumed=resumed, job=job)
        run.pauses.attributes.tell_lost(reporter)
        run.pauses.kept = [(given, read.count) for given, read in ((train, rows), (test, tests)) if read.source is None]
        fixed = prepared.method.in_pairs or setup.settings.averages or ranks.count > 1
        run.pauses.replans = prepared.method.exact and not fixed
        if tracking is not None:
            tracking.open(run.directory, prepared.phases, resumed, setup.settings)
        yield run


def _follower(setup: Setup, stack: ExitStack) -> Setup:
    """Returns the setup of a rank that shows and saves nothing: the first does. stack: removes its folder."""
    output, own = setup.settings.output_dir, copy.copy(setup)
    beside = setup.settings.offload_dir or (Path("runs") if output is None else output.parent)
    folder = stack.enter_context(own_folder(beside, "rank-"))
    own.quiet, own.settings = True, replace(
        setup.settings, output_dir=folder, overwrite=True, offload_dir=None, save_every="never", export_every=None,
        keep_exports=None, trace=None, log=None,
    )  # fmt: skip
    return own


def _of_first_rank(ranks: Ranks, result: Result) -> Result:
    """Returns the result of a run: other ranks than the first have its files and figures, and a proof of their own."""
    ranks.broadcast(replace(result, config=None, model=None))
    if ranks.leads:
        return result
    shared: Result = ranks.receive()
    return replace(shared, config=result.config, model=result.model, proof=result.proof)
