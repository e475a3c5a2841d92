"""Evaluations and predictions outside a run: a plan without training, and one pass over the rows."""

import copy
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from seqpart.data.items import WithoutLabels, without_labels
from seqpart.data.row_types import in_type_of
from seqpart.data.splits import Split, first_rows
from seqpart.data.test_sets import are_named
from seqpart.device.limit import translate_oom
from seqpart.device.sampler import Proof
from seqpart.fields import values_of
from seqpart.intake import rows_to_evaluate
from seqpart.methods.exact import EVALUATION
from seqpart.model.metrics import ComputeMetrics, own_metrics
from seqpart.plan.inputs import Purpose
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.profile.machine import existing
from seqpart.report.reporter import Reporter, WarningsAlone, figures
from seqpart.runtime.observer import Observer
from seqpart.runtime.predictions import Predictions, of_no_loss
from seqpart.runtime.result import Evaluation, evaluated, evaluation_settings
from seqpart.runtime.run import Run
from seqpart.runtime.setup import Setup
from seqpart.store.scratch import own_folder


def evaluate(setup: Setup, data: object, weights: str | Path | None, metrics: ComputeMetrics) -> Evaluation:
    """Evaluates the model on `data`: see `Trainer.evaluate`."""
    data = setup.with_inputs(data)
    split = in_type_of(setup.model, rows_to_evaluate(data, setup.settings, setup.padding, labelled=setup.labelled))
    return evaluate_rows(setup, f"evaluation of {split.count} rows", split, weights, metrics)


def predict(setup: Setup, data: object, weights: str | Path | None) -> Any:
    """Returns what the model returns for the rows of `data`: see `Trainer.predict`."""
    if are_named(data):
        return {name: predict(setup, part, weights) for name, part in data.items()}
    data, setup = without_labels(setup.with_inputs(data)), copy.copy(setup)
    setup.loss, setup.labelled, setup.steps = WithoutLabels(of_no_loss), False, None
    setup.settings = replace(setup.settings, loss=None, label_smoothing=0.0, loss_chunks="auto")
    split = in_type_of(setup.model, rows_to_evaluate(data, setup.settings, setup.padding))
    with closing(Predictions(existing(setup.scratch_parent))) as found:
        evaluate_rows(setup, f"predictions for {split.count} rows", split, weights, found)
        return found.tree()


def evaluate_rows(
    setup: Setup, what: str, split: Split, weights: str | Path | None, metrics: ComputeMetrics, before: Proof | None = None
) -> Evaluation:
    """Evaluates the model on `split`. what: what is evaluated, for the user. before: see `evaluated`."""
    reporter = Reporter(quiet=setup.quiet)
    with ExitStack() as stack:
        sampler = setup.begin(stack, reporter)
        folder = stack.enter_context(own_folder(setup.scratch_parent, "evaluate-"))
        settings = evaluation_settings(setup.settings, split.count, folder, weights)
        stack.enter_context(translate_oom(setup.device, "the evaluation was planned, begun or ended"))

        def prepare(model: object, loss_chunks: int | None) -> Planner:
            purpose = Purpose(folder=folder, trains=False, trained=None if weights else setup.trained, loss_chunks=loss_chunks)
            data = first_rows(split, max(values_of(settings.batch_size))), split
            return Planner(model, settings, data, setup.device, setup.loss, purpose=purpose)

        def plan(planner: Planner) -> ExecutionPlan:
            return planner.planned(replace(planner.request, methods=(EVALUATION,)))

        planner, prepared = setup.plan_that_fits(
            stack, prepare, partial(setup.plan_under_limit, sampler, plan), whole_logits=metrics is not None
        )
        silent, observer = stack.enter_context(closing(WarningsAlone())), Observer(metrics=own_metrics(metrics))
        found = evaluated(Run(planner, prepared, silent, sampler, stack, observer=observer), before)
        words = "" if isinstance(metrics, Predictions) else f": {figures(found.loss, found.accuracy, found.metrics)}"
        reporter.say(f"{what}{words}")
        reporter.proof(found.proof)
    return found
