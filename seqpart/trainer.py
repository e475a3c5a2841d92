"""The facade: `Trainer(model, mem_limit="2GB", method="auto").fit(train, test)`. It assembles runs and schedules nothing."""

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from seqpart.arguments import refuse_no_loss, refuse_no_modules, refuse_optimizer, refuse_options_beside
from seqpart.callbacks import callers
from seqpart.checkpoint.resume import ResumePoint, refuse_unlike_ranks, resume_point_of
from seqpart.data.items import WithoutLabels, needs_labels, with_inputs, with_zeros, without_labels
from seqpart.data.loaders import for_data
from seqpart.data.padding import Padding, as_padding
from seqpart.data.row_types import in_type_of
from seqpart.data.splits import Split, first_rows
from seqpart.data.step_losses import StepLosses
from seqpart.data.test_sets import are_named
from seqpart.device.limit import limit_of, translate_oom
from seqpart.device.opening import open_device
from seqpart.device.ranks import begun_before, leads, leaving_on_error, per_machine, ranks_of, refuse_ranks
from seqpart.device.sampler import Proof, Sampler
from seqpart.device.usage import MemoryUsage
from seqpart.errors import DoesNotFit, Interrupted, OptionError
from seqpart.fields import checked_value, values_of
from seqpart.intake import largest_batch, rows_of, rows_of_a_window, rows_to_evaluate
from seqpart.interrupts import like_ctrl_c
from seqpart.methods.exact import EVALUATION
from seqpart.model.compiled import SAID, as_written, compiler_at_work, is_compiled, original
from seqpart.model.freezing import freezing
from seqpart.model.inspection import kept_modes
from seqpart.model.losses import LossChoice, LossFunction
from seqpart.model.metrics import ComputeMetrics, own_metrics
from seqpart.model.optimizer_trials import Build
from seqpart.model.optimizers import describe, example_of, refuse_divided, refuse_rateless
from seqpart.model.quantized import plain_tensors
from seqpart.model.tiling import first_that_fits, possible_tile, separating, sizes_to_try
from seqpart.model.weight_files import is_adapted
from seqpart.options import Options
from seqpart.plan.ist import SubnetPreparation
from seqpart.plan.plan import Plan
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.profile.fake_mode import FakeMode
from seqpart.profile.machine import existing
from seqpart.report.reporter import Reporter, WarningsAlone, figures, planning_shown
from seqpart.report.trackers import load
from seqpart.runtime.observer import BeforeUpdate, Observer
from seqpart.runtime.pauses import PlanAnew, let_learn
from seqpart.runtime.predictions import Predictions, of_no_loss
from seqpart.runtime.result import Evaluation, Result, carry_out, evaluated, evaluation_settings, with_average
from seqpart.runtime.run import Run
from seqpart.runtime.tracking import traced, tracked
from seqpart.runtime.training_session import TrainingSession, Turns, loop_settings
from seqpart.runtime.weight_store import refuse_taken_places
from seqpart.schedule.lengths import refuse_untested
from seqpart.settings import Settings
from seqpart.store.scratch import own_folder
from seqpart.units import format_limit, format_size

__all__ = ["Result", "Trainer"]


class Trainer:
    """Trains `model` under a memory limit.

    model: any nn.Module, which is cut at its layers; an nn.Sequential or a list of modules, whose entries are the blocks; or a
        list of factories that each return a module (then the model never exists whole). Modules passed built are emptied into
        a file during the run, and get their trained weights at the end; a run that ends early leaves them as they were.
    loss: (what the model returns, labels) -> loss, or a dict of losses to be summed, or the name of one: "cross-entropy", the
        default for classes (for each position where rows have several labels; labels of -100 do not count), "mse", the default
        for float labels of any shape, "bce" for yes-or-no labels, as many as outputs (binary cross-entropy of scores before
        their sigmoid), or "psl", `seqpart.model.losses.partially_separable`. A function gets labels as they were given, a dict
        or a tuple where a row has several. An update is that of the whole batch, whatever micro-batches it is divided into; so
        what a function divides by must be known. It may be
        - a mean over rows, or over equally many numbers of each row: micro-batches count by their rows;
        - torch's cross_entropy or nll_loss with ignore_index or weights of classes, as a module, a function or a
          functools.partial: micro-batches count by the labels, or the weights, that they are a mean of;
        - a function that returns (sum, count), two scalars; or a mean with an attribute `counts`, a function from labels
          to what a mean over them is divided by: micro-batches count by their count, and those of no count not at all;
        - a sum: micro-batches are added as they are.
        Losses that do not say which are tried on a small batch, whole and in two parts; one whose parts do not add up in
        any of these ways needs `micro_batch_size` = `batch_size`. "model" is the loss that the model computes itself when its
        forward is given `labels`: the y of (x, y), shaped and shifted as it expects them. A dict has a function for each
        step of a `session` by name.
    optimizer: `adamw` (the default), another name of docs/optimizers.md, or a function from a list of parameters to a torch
        optimizer, or to a list of several; one whose parameter is called `named_parameters` gets pairs (name, parameter).
    padding: how rows of several lengths are padded, in all data. None: all rows have one length.
    settings: a Settings, in place of options.
    options: the fields of Settings; `mem_limit` and `method` are required. With `sil` a list gives each partition its own
        value.

    Raises OptionError or ModelError for what cannot be honoured.
    """

    def __init__(
        self, model: object, loss: LossChoice | Mapping[str, LossFunction] = None, optimizer: str | Build | None = None,
        *, padding: Padding | None = None, settings: Settings | None = None, quiet: bool = False, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        refuse_no_modules(model)
        self._steps = steps = StepLosses(loss) if isinstance(loss, Mapping) else None
        one = cast(LossChoice, loss) if steps is None else steps
        refuse_no_loss(one)
        refuse_optimizer(optimizer)
        given: dict[str, Any] = {**options}
        self._optimizer = None
        if callable(optimizer):
            refuse_options_beside(optimizer, sorted({"lr", "recovery_lr", "weight_decay", "no_decay", "momentum"} & set(given)))
            self._optimizer = describe(getattr(optimizer, "__name__", ""), optimizer, example=example_of(model))
        elif optimizer is not None:
            given["optimizer"] = optimizer
        if isinstance(one, str) and one != "model":
            given["loss"], one = one, None
        if settings is not None and given:
            raise OptionError(f"settings brings every option with it: leave {', '.join(sorted(given))} out, or settings.")
        settings = (settings or Settings.of(**given)).placed()
        if self._optimizer is not None:
            refuse_divided(self._optimizer, settings.divides_weights)
            refuse_rateless(self._optimizer, settings.lr_schedule, settings.warmup_updates)
        if one is not None and settings.loss is not None:
            raise OptionError(f"loss: settings name one, {settings.loss}, and another was given. Leave one out.")
        self._labelled = needs_labels(one) if steps is None else steps.labelled
        """False if data may come without labels."""
        one = one if self._labelled or one == "model" or steps is not None else WithoutLabels(one)
        self.model, self._loss, self._quiet, self._padding = original(model), one, quiet, as_padding(padding)
        self._compiled = is_compiled(model)
        if self._compiled and settings.compile:
            raise OptionError("--compile: the model is compiled already. Give it as it was written, or leave --compile out.")
        self.device = open_device(settings.device)
        if str(settings.mem_limit).strip().lower() == "auto":  # what is free is looked at once: it changes all the time
            share = per_machine() if self.device.shares_memory else 1
            settings = replace(settings, mem_limit=limit_of(settings.mem_limit, self.device) // share)
        self.settings = settings
        load(settings.trackers)  # the plan is to see what they hold
        self._held = self.device.allocated_peak()
        self._sampler: Sampler | None = None
        self._asked: tuple[Settings, Settings] | None = None
        """The settings with the last loader's batch size and order, and without."""
        self.trained: Path | None = None
        """The file of weights of the last `fit`."""

    def plan(self, train: object, test: object = None, *, reuse: Plan | None = None) -> Plan:
        """Returns the plan, without writing a file or training. Raises what `fit` would raise before training."""
        with self.planned(train, test, reuse=reuse, dry=True) as (_, prepared):
            return prepared.plan

    @contextmanager
    def planned(
        self, train: object, test: object = None, *, reuse: Plan | None = None, dry: bool = False
    ) -> Iterator[tuple[Planner, ExecutionPlan]]:
        """Checks, measures and plans everything. Modules passed built are empty inside.

        dry: creates no named file, not even for a moment.
        """
        gc.collect()
        with self.device.running(), self.device.at_work(), ExitStack() as stack:
            prepare = partial(self.prepare, *self.rows(train, test), reuse=reuse, dry=dry)
            yield self._fitting(stack, prepare, Planner.planned, reuse, in_pairs=self._in_pairs)

    def prepare(
        self, train: Split, test: Split, *, reuse: Plan | None = None, dry: bool = False, resumes: bool = False,
        model: object = None, loss_chunks: int | None = 1,
    ) -> Planner:  # fmt: skip
        """Checks and measures everything, ready to be planned. Modules passed built are empty until it is closed.

        train, test: see `rows`. resumes: weights come from a checkpoint. model: replaces the trainer's own. loss_chunks: see
        `Inputs`.
        """
        with translate_oom(self.device, "the model and the machine were measured"), self.device.own_random_state():
            refuse_untested(self.settings.between_tests, test.count)
            if self._in_pairs or self.settings.unfreeze is not None:
                option = f"--method {self.settings.method}" if self.settings.unfreeze is None else "--unfreeze"
                refuse_ranks(option, "Take another method than psl, without --unfreeze, or start one.")
            plans = SubnetPreparation if self.settings.methods[0].has_subnets else Planner
            return plans(
                self.model if model is None else model, self.settings, train, test, self.device,
                final_loss=self._loss, optimizer=self._optimizer, folder=self.scratch_parent, dry=dry, reuse=reuse,
                resumes=resumes, loss_chunks=loss_chunks, ranks=ranks_of(self.device),
            )  # fmt: skip

    def rows(self, train: object, test: object = None) -> tuple[Split, Split]:
        """Returns the training and test rows; the settings take their loader's batch size and order."""
        with translate_oom(self.device, "the data were looked at"):
            asked = self._asked[1] if self._asked is not None and self._asked[0] is self.settings else self.settings
            train, test = self._with_inputs(train), self._with_inputs(test)
            rows, tests, self.settings = rows_of(train, test, asked, self._padding, labelled=self._labelled)
            self._asked = self.settings, asked
            rows = in_type_of(self.model, rows)
            return rows, in_type_of(rows, tests)

    def _with_inputs(self, data: object) -> object:
        return with_inputs(data, self.model, self._loss)

    def _fitting(
        self, stack: ExitStack, prepare: Callable[..., Planner], plan: Callable[[Planner], ExecutionPlan],
        again: Plan | None = None, *, in_pairs: bool = False, resumed: ResumePoint | None = None, whole_logits: bool = False,
    ) -> tuple[Planner, ExecutionPlan]:  # fmt: skip
        """Returns the planner of `prepare(model=..., loss_chunks=...)`, and the plan, with the loss over chunks or large layers
        in tiles if nothing fits without.

        stack: closes the planner. again, whole_logits: see `ways`. in_pairs: true if the model is separated into scores.
        resumed: the checkpoint, with the parameters that were frozen or trained.
        """

        def work(attempt: ExitStack, model: object, loss_chunks: int | None) -> tuple[Planner, ExecutionPlan]:
            planner = attempt.enter_context(closing(prepare(model=model, loss_chunks=loss_chunks)))
            return planner, planner.with_fewer_workers(partial(plan, planner))

        stack.enter_context(as_written(self.model))
        stack.enter_context(compiler_at_work(self.settings.compile))
        model = stack.enter_context(freezing(self.model, self.settings.frozen, FakeMode()))
        if resumed is not None and resumed.state is not None:
            let_learn(model, resumed.state.loop)
        model = stack.enter_context(kept_modes(stack.enter_context(plain_tensors(model, self.device.kind))))
        if in_pairs:
            model = stack.enter_context(separating(model, self.device, self.settings.seed))
        return first_that_fits(stack, model, self.ways(again, whole_logits=whole_logits), work)

    def ways(self, again: Plan | None = None, *, whole_logits: bool = False) -> list[tuple[int, int | None]]:
        """Returns what is to be tried in order until a plan fits: sizes of tiles, each with the chunks of the loss, 1, or None
        for the fewest that fit.

        again: see `tiles`. whole_logits: true if metrics take them. Raises OptionError if the settings contradict that.
        """
        asked = self.settings.chunks
        if again is not None and asked not in (None, again.loss_chunks):
            had = f"a loss over {again.loss_chunks} chunk(s)"
            raise OptionError(f"--loss-chunks: the plan to be carried out again has {had}. Leave it out.")
        if whole_logits and asked not in (None, 1):
            raise OptionError(
                "--loss-chunks: compute_metrics takes all logits of a micro-batch at once. Leave one of them out."
            )
        chunks: tuple[int | None, ...] = (1, None) if self.settings.is_exact and not whole_logits else (1,)
        if again is not None or asked is not None:
            chunks = (again.loss_chunks if again is not None else asked,)
        return [(size, count) for size in self.tiles(again) for count in chunks]

    def tiles(self, again: Plan | None = None) -> tuple[int, ...]:
        """Returns sizes in bytes of the tiles of large layers, to be tried in order until a plan fits; 0: no tiles.

        again: a plan that is to be used again, with its tiles. Raises OptionError if the settings have other tiles.
        """
        asked = self.settings.tile_bytes
        if again is not None and asked not in (None, again.tile):
            had = f"tiles of {format_size(again.tile)}" if again.tile else "no tiles"
            raise OptionError(f"--tile: the plan to be carried out again has {had}. Leave it out.")
        if again is not None or asked is not None:
            return (again.tile if again is not None else possible_tile(self.model, asked or 0),)
        streams = any(
            method.exact and method.cuts and not (method.stays or method.in_pairs) for method in self.settings.methods
        )
        # What a function returns may look at a weight as a whole.
        whole = self._optimizer is not None or self.settings.whole_weights or self.settings.rounded_moments is not None
        return sizes_to_try(self.model) if streams and not (whole or self.settings.compile) else (0,)

    def count_from_start(self) -> None:
        """Starts the sampler in a process that does nothing else: memory held while libraries loaded counts too."""
        self._sampler = Sampler(MemoryUsage(self.device), limit=1 << 62)
        self._sampler.label = lambda: "start"
        if self.device.shares_memory:
            self._sampler.add_reading(self._held, "the import of libraries")
        self._sampler.start()

    @property
    def _in_pairs(self) -> bool:
        return self.settings.methods[0].in_pairs

    @property
    def scratch_parent(self) -> Path:
        """The directory for homes and boundary rows during a run, or one above it."""
        return self.settings.offload_dir or self.settings.output_dir or Path("runs")

    def fit(
        self, train: object, test: object = None, *, reuse: Plan | None = None, resume: str | Path | None = None,
        reporter: Reporter | None = None, job: dict[str, Any] | None = None, before_update: BeforeUpdate | None = None,
        callbacks: Sequence[object] = (), compute_metrics: ComputeMetrics = None,
    ) -> Result:  # fmt: skip
        """Trains on `train` and evaluates on `test`: pairs (x, y), data sets of (x, y) items, streams of them or data loaders.
        Without `test` nothing is evaluated, and the result says so.

        Rows that stay the same when they are read twice are read once and kept; other data sets, streams and loaders are read
        anew in every epoch (docs/data.md).

        x is a tensor (rows, ...), or several: a dict of them, which the model takes by name, or a tuple, in order. An item may
        also be a dict with its `labels`.

        resume: the directory of a run that ended early, or one of its checkpoint files; the result is bit-identical to that
            of an uninterrupted run. Model, data and settings must be the same, except limits and places, and except learning
            rate, schedule, clipping, weight decay and epochs, which hold from there on.
        callbacks: objects with some of on_step(event), on_epoch(event) and on_eval(event), see `seqpart.callbacks`;
            event.stop() ends the training. An error in one ends the run, which is saved.
        compute_metrics: metrics of the test rows beside loss and accuracy: a function of (outputs, labels) that returns a
            dict, called for each micro-batch and averaged by rows; or an object with update, compute and reset (torchmetrics),
            or a dict of them. The plan does not know the memory that such an object keeps.
        job: JSON that is kept in the run directory, for whoever resumes the run. before_update: see `Hooks`.

        Raises DoesNotFit before anything is trained, LimitExceeded if the limit was exceeded, StoreError for disks and
        damaged checkpoints, Diverged if a loss is no longer finite, Interrupted when a signal (SIGINT, SIGTERM, SIGHUP;
        in the main thread) came and the run was saved.
        """
        if self._steps is not None:
            raise OptionError("fit: expected one loss; found one for each step of a session. Make the steps in `session`.")
        callers(callbacks)  # raises what is wrong with them, before anything is planned
        resume = checked_value("resume", resume, Path | None) or begun_before(self.settings.output_dir)
        with leaving_on_error(), ExitStack() as stack:
            trainer = self if leads() else self._follower(stack)
            while True:
                try:
                    result = trainer._fit(train, test, reuse, resume, reporter, job, before_update, callbacks, compute_metrics)
                    return self._of_first_rank(result)
                except PlanAnew as saved:
                    reuse, resume, reporter = None, saved.directory, None
                except Interrupted as interrupted:
                    raise interrupted.with_traceback(None) from None  # its reader could mend nothing where a signal came

    def _follower(self, stack: ExitStack) -> "Trainer":
        """Returns the trainer of a rank that shows and saves nothing: the first does. stack: removes its folder."""
        output, follower = self.settings.output_dir, copy.copy(self)
        beside = self.settings.offload_dir or (Path("runs") if output is None else output.parent)
        folder = stack.enter_context(own_folder(beside, "rank-"))
        follower._quiet, follower.settings = True, replace(
            self.settings, output_dir=folder, overwrite=True, offload_dir=None, save_every="never", export_every=None,
            keep_exports=None, trace=None, log=None,
        )  # fmt: skip
        return follower

    def _of_first_rank(self, result: Result) -> Result:
        """Returns the result of a run: other ranks than the first have its files and figures, and a proof of their own."""
        ranks = ranks_of(self.device)
        ranks.broadcast(replace(result, config=None, model=None))
        if not ranks.leads:
            result = replace(ranks.receive(), config=result.config, model=result.model, proof=result.proof)
        self.trained = result.weights
        return result

    def _fit(
        self, train: object, test: object, reuse: Plan | None, resume: Path | None, reporter: Reporter | None,
        job: dict[str, Any] | None, before_update: BeforeUpdate | None, callbacks: Sequence[object],
        compute_metrics: ComputeMetrics,
    ) -> Result:  # fmt: skip
        """Runs one `fit`. Raises PlanAnew after it saved the run, to go on with another plan."""
        reporter = reporter or Reporter(quiet=self._quiet)
        began, ranks = time.perf_counter(), ranks_of(self.device)
        with ExitStack() as stack:
            broadcasting = stack.enter_context(ExitStack())
            broadcasting.enter_context(ranks.broadcasting())
            if ranks.leads:
                refuse_taken_places(self.settings.output_dir, resume, overwrite=self.settings.overwrite)
            sampler = self._begun(stack, reporter)
            observer = Observer(callbacks=callbacks, metrics=own_metrics(compute_metrics))
            observer = observer if before_update is None else replace(observer, before_update=before_update)
            observer = traced(self.settings.trace, observer, sampler, reporter, stack)
            observer, tracking = tracked(self.settings.trackers, observer, sampler, reporter, stack)
            if ranks.note:
                reporter.say(ranks.note)
            rows, tests = self.rows(train, test)
            resumed: ResumePoint | None = None
            if not ranks.leads:
                reuse, resumed = ranks.receive()
                if resumed is not None and self.settings.output_dir is not None:
                    resumed = replace(resumed, root=self.settings.output_dir)
            elif resume is not None:
                method = self.settings.methods[0]
                if method.alone and not method.trains_independently(self.settings):
                    refuse_ranks("resuming a run of sil, whose rows between partitions one process has,", "Start one.")
                restarted = begun_before(self.settings.output_dir) is not None
                resumed = resume_point_of(resume.absolute(), self.settings, restarted=restarted)
            stack.enter_context(translate_oom(self.device, "the run was planned, begun or ended"))
            resumes = resumed is not None and resumed.manifest is not None
            prepare = partial(self.prepare, rows, tests, reuse=reuse, resumes=resumes)
            plan = partial(self._planned, sampler, Planner.planned if resumed is None else resumed.planned)
            earlier = resumed.plan if resumed is not None and ranks.leads else reuse
            with planning_shown(reporter):
                planner, prepared = self._fitting(
                    stack, prepare, plan, earlier, in_pairs=self._in_pairs, resumed=resumed,
                    whole_logits=compute_metrics is not None,
                )  # fmt: skip
            ranks.broadcast((prepared.plan, resumed and replace(resumed, manifest=None)))
            broadcasting.close()
            refuse_unlike_ranks(ranks, planner)
            run = Run(planner, prepared, reporter, sampler, stack, observer=observer, resumed=resumed, job=job)
            fixed = prepared.method.in_pairs or self.settings.averages or ranks.count > 1
            run.pauses.replans = prepared.method.exact and not fixed
            if tracking is not None:
                tracking.open(run.directory, prepared.phases, resumed, self.settings)
            adapted = self.model if is_adapted(self.model) else None
            result = replace(carry_out(run, began), config=getattr(self.model, "config", None), model=adapted)
        if result.average is None or not tests.count or not ranks.leads:
            return result
        what = f"their moving average on the {tests.count} test rows"
        return with_average(result, self._evaluated(what, tests, result.average, compute_metrics, result.proof))

    def evaluate(
        self, data: object, *, weights: str | Path | None = None, compute_metrics: ComputeMetrics = None
    ) -> Evaluation:
        """Returns loss and accuracy of the model on `data`, a pair (x, y) or a data set of (x, y) items, under the limit.

        weights: a safetensors file that replaces the model's weights, such as `result.average`; the model keeps its own.
        After `fit` the trained model is evaluated, before it the original one. Blocks from factories take their tensors from
        the file of weights of the last `fit` (a `session` leaves none: give what its `export` wrote as `weights`); tensors
        that a state_dict leaves out are as the factory makes them. Partitions run one after the other, as in the test of a
        streamed run. The plan is made as for training without optimizer state, which sets the least possible limit. Only a
        temporary folder is written.

        Raises what `fit` raises.
        """
        data = self._with_inputs(data)
        split = in_type_of(self.model, rows_to_evaluate(data, self.settings, self._padding, labelled=self._labelled))
        return self._evaluated(f"evaluation of {split.count} rows", split, weights, compute_metrics)

    def predict(self, data: object, *, weights: str | Path | None = None) -> Any:
        """Returns what the model returns for rows, in order, in evaluation mode and under the limit.

        data: rows as `fit` takes them, with or without labels, which are left out: x alone, a dict of inputs by name,
            ((a, b),) in order, or several sets by name. weights: as for `evaluate`.

        The tensors (rows, ...) are mapped from an unnamed file beside the run's, which goes when they are freed; those of
        bfloat16 are float32.

        Raises what `evaluate` raises, and ModelError for a model that returns other tensors than a row's.
        """
        if are_named(data):
            return {name: self.predict(part, weights=weights) for name, part in data.items()}
        trainer = copy.copy(self)
        trainer._loss, trainer._labelled, trainer._steps = WithoutLabels(of_no_loss), False, None
        trainer.settings = replace(self.settings, loss=None, label_smoothing=0.0, loss_chunks="auto")
        data = without_labels(self._with_inputs(data))
        split = in_type_of(self.model, rows_to_evaluate(data, trainer.settings, self._padding))
        with closing(Predictions(existing(self.scratch_parent))) as found:
            trainer._evaluated(f"predictions for {split.count} rows", split, weights, found)
            return found.tree()

    def _evaluated(
        self, what: str, split: Split, weights: str | Path | None, metrics: ComputeMetrics, before: Proof | None = None
    ) -> Evaluation:
        """Evaluates the model on `split`. what: what is evaluated, for the user. before: see `evaluated`."""
        reporter = Reporter(quiet=self._quiet)
        with ExitStack() as stack:
            sampler = self._begun(stack, reporter)
            folder = stack.enter_context(own_folder(self.scratch_parent, "evaluate-"))
            settings = evaluation_settings(self.settings, split.count, folder, weights)
            stack.enter_context(translate_oom(self.device, "the evaluation was planned, begun or ended"))

            def prepare(model: object, loss_chunks: int | None) -> Planner:
                return Planner(
                    model, settings, first_rows(split, max(values_of(settings.batch_size))), split, self.device,
                    final_loss=self._loss, folder=folder, trains=False, trained=None if weights else self.trained,
                    loss_chunks=loss_chunks,
                )  # fmt: skip

            def plan(planner: Planner) -> ExecutionPlan:
                return planner.planned(replace(planner.request, methods=(EVALUATION,)))

            planner, prepared = self._fitting(
                stack, prepare, partial(self._planned, sampler, plan), whole_logits=metrics is not None
            )
            silent, observer = stack.enter_context(closing(WarningsAlone())), Observer(metrics=own_metrics(metrics))
            found = evaluated(Run(planner, prepared, silent, sampler, stack, observer=observer), before)
            words = "" if isinstance(metrics, Predictions) else f": {figures(found.loss, found.accuracy, found.metrics)}"
            reporter.say(f"{what}{words}")
            reporter.proof(found.proof)
        return found

    @contextmanager
    def session(
        self, example: object, *, learns: Mapping[str, str | Sequence[str]] | None = None, resume: str | Path | None = None
    ) -> Iterator[TrainingSession]:
        """Opens your own loop under the limit: `with trainer.session(example) as session: loss = session.step(batch)`.

        example: (x, y), a data set or a loader, with rows like those of the batches; it, or a loader's first batch, has at
            least `batch_size` rows, the most that a batch may have. With `padding` "longest" its longest row sets the length.
        learns: for losses by step, {name of the step: patterns of the names of parameters that it trains}, such as
            {"d": "D.*", "g": "G.*"}: `session.step("d", batch)`. Without it each step trains all.
        resume: the directory of a session that was saved, or one of its checkpoint files: `session.updates` of its updates are
            done, and with the batches that come after them all bits are those of a session that went on. Model and settings
            must be the same, as for `fit`.

        The method is an exact one, whose step is bit-identical to a plain loop's. The plan is for these steps and
        `session.evaluate`. Memory that the loop itself holds counts against the limit; the plan knows only what it held before.
        `session.state_dict()` and `session.export(FILE)` give the current weights; modules passed built have them after the
        `with` block, also if an error of your loop left it. What factories build is not kept: the next session or `fit`
        begins with the initial weights, or with those of the setting `weights`. `session.save()` saves a checkpoint in
        `output_dir`; it does not know what your loop has read.

        Raises what `fit` raises; OptionError for settings that only `fit` uses.
        """
        refuse_ranks("a loop of your own", "Start one, or take `fit`.")
        with ExitStack() as stack:
            asked, at = self.settings, None if resume is None else checked_value("resume", resume, Path).absolute()
            asked = asked if at is None else replace(asked, output_dir=at if at.is_dir() else at.parent)
            beside = asked.output_dir.parent if asked.output_dir is not None else Path("runs")
            folder = stack.enter_context(own_folder(asked.offload_dir or beside, "session-"))
            settings, reporter = loop_settings(asked, folder), Reporter(quiet=self._quiet)
            refuse_taken_places(asked.output_dir, resume, overwrite=settings.overwrite)
            resumed = None if at is None else resume_point_of(at, settings, session=True)
            example = self._with_inputs(example)
            padding = for_data(self._padding, (with_zeros(example, self._labelled)[0],))
            rows = in_type_of(self.model, largest_batch(example, settings, padding, labelled=self._labelled))
            if learns and asked.unfreeze is not None:
                raise OptionError("--unfreeze: `learns` says what learns in each step of a session. Leave one of them out.")
            reached = {} if self._steps is None else self._steps.reached(self.model, rows, self.settings.autocast)
            turns, opening = Turns(self._steps, learns, reached), ExitStack()
            sampler = self._begun(stack, reporter, opening)

            def prepare(model: object, loss_chunks: int | None) -> Planner:
                return Planner(
                    model, settings, rows, rows_of_a_window(rows), self.device, final_loss=self._loss,
                    optimizer=self._optimizer, folder=folder, whole=False,
                    resumes=resumed is not None and resumed.manifest is not None, loss_chunks=loss_chunks,
                )  # fmt: skip

            with translate_oom(self.device, "the session was planned"):
                plan = partial(self._planned, sampler, Planner.planned if resumed is None else resumed.planned)
                planner, prepared = self._fitting(
                    stack, prepare, plan, resumed.plan if resumed is not None else None, resumed=resumed
                )
            reporter.plan(replace(prepared.plan, seconds=prepared.plan.update_seconds * (self.settings.max_steps or 1)))
            silent = stack.enter_context(closing(WarningsAlone()))
            loop = TrainingSession(self.device, folder, rows, asked, turns, padding, self._with_inputs)
            run = Run(planner, prepared, silent, sampler, stack, observer=loop.observer, resumed=resumed)
            silent.close()  # a log of every step would grow without end
            with run.limited(rows=False), closing(loop):
                loop.begin(run)
                opening.close()  # the loop draws the caller's random numbers
                try:
                    yield loop
                except BaseException as error:
                    loop.finish_after(error)
                    raise
                loop.finish()
            reporter.proof(run.proof())

    def _planned(self, sampler: Sampler, plan: Callable[[Planner], ExecutionPlan], planner: Planner) -> ExecutionPlan:
        """Returns what `plan` makes, under the limit: memory for planning counts, but is not part of the plan's prediction."""
        sampler.set_limit(planner.limit)
        prepared = plan(planner)
        if self.device.shares_memory:
            sampler.add_reading(planner.trials.peak)
        if sampler.violations:
            raise DoesNotFit(
                f"the limit of {format_size(planner.limit)} is too small to plan in: the process held "
                f"{format_size(sampler.peak)} in {sampler.violation_label}, with the model if it was given alive. Give more, "
                f"for example {format_limit(sampler.peak * 11 // 10)}."
            )
        sampler.known = sampler.peak
        return prepared

    def _begun(self, stack: ExitStack, reporter: Reporter, random: ExitStack | None = None) -> Sampler:
        """Starts the sampler of a run's memory; `stack` stops it. random: ends the run's own random state before that."""
        gc.collect()  # a freed model that is part of a reference cycle would count
        stack.enter_context(self.device.running())
        if self._compiled:
            reporter.say(SAID)
        sampler = self._sampler or Sampler(MemoryUsage(self.device), limit=1 << 62)
        self._sampler = None
        stack.enter_context(like_ctrl_c())
        stack.callback(reporter.close)
        stack.enter_context(self.device.at_work())
        random = stack.enter_context(random or ExitStack())
        random.enter_context(self.device.own_random_state())
        sampler.start()
        stack.callback(sampler.stop)
        return sampler
