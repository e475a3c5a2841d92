"""The user's own training loop: the same plan, homes and executor, and one update for each batch that the user passes.

A batch is an epoch of one update, and its rows are boundary 0 during it; the executor pauses after it until the next batch
comes, with the partitions that stay still on the device. A batch with another number of rows, an evaluation, and an export
save everything to the homes first.
"""

from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from seqpart.capture.inputs import PADS
from seqpart.checkpoint.resume import resume_point_of
from seqpart.config import MOST, ON_CALL
from seqpart.data.boundary_cache import FedRows
from seqpart.data.items import with_zeros, without_labels
from seqpart.data.loaders import for_data
from seqpart.data.padding import Padding
from seqpart.data.row_types import in_type_of
from seqpart.data.splits import Split, form_of_labels, form_of_rows, write_rows
from seqpart.data.step_losses import StepLosses
from seqpart.data.test_sets import are_named
from seqpart.device.device import Device
from seqpart.device.limit import translate_oom
from seqpart.device.ranks import refuse_ranks
from seqpart.device.sampler import Proof
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.fields import checked_value, flag_of
from seqpart.intake import batch_rows, kept_rows, largest_batch, rows_of_a_window
from seqpart.interrupts import Interrupts
from seqpart.model.metrics import ComputeMetrics, Metrics, own_metrics
from seqpart.plan.inputs import Purpose
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.report.reporter import Reporter, WarningsAlone
from seqpart.runtime.observer import Observer
from seqpart.runtime.predictions import Predictions
from seqpart.runtime.result import Evaluation
from seqpart.runtime.run import Run
from seqpart.runtime.setup import Setup
from seqpart.runtime.weight_changes import change_weights
from seqpart.runtime.weight_store import refuse_taken_places
from seqpart.schedule.lengths import AT_THE_END
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import Position
from seqpart.settings import Settings
from seqpart.store.scratch import own_folder

_GOES_ON = "the step is done, and the session goes on: its export(FILE) and state_dict() give what was trained"
_OF_FIT = (
    "test_every", "eval_every", "early_stopping", "keep_best", "best_by", "shuffle", "ema", "trace", "log", "cache", "workers",
    "mixup", "cutmix", "export_every", "keep_exports",
)  # fmt: skip
"""Settings that only `fit` uses."""


def loop_settings(settings: Settings, folder: Path) -> Settings:
    """Returns the settings of a session, with all files in `folder` where there is no output directory. Raises OptionError for
    those it cannot honour."""
    if not settings.is_exact:
        raise OptionError(
            f"--method {settings.method}: a loop of your own takes exact methods, which make one update of each batch: auto, "
            "full, checkpointed or streamed."
        )
    if settings.compile:
        raise OptionError(
            "--compile: a loop of your own may bring batches of any size, and layers would be compiled for each in the middle "
            "of it. Leave it out."
        )
    given = [name for name in _OF_FIT if getattr(settings, name) not in (None, False, "auto")]
    given += ["epochs"] if settings.epochs != Settings.epochs else []
    given += ["save_every"] if settings.save_every not in (Settings.save_every, "never") else []
    if given:
        raise OptionError(f"{', '.join(map(flag_of, given))}: a loop of your own decides that itself. Leave it out.")
    if late := [f"{pattern}={time}" for pattern, time in settings.frozen.unfreeze.items() if time.unit != "update"]:
        raise OptionError(
            f"--unfreeze: a loop of your own has no epochs that it would tell: expected a time in updates; found {late[0]}."
        )
    if settings.lr_schedule in ("linear", "cosine") and settings.max_steps is None:
        raise OptionError(
            f"--lr-schedule {settings.lr_schedule} needs to know how many updates there will be: give --max-steps."
        )
    assert settings.tests == AT_THE_END
    return replace(
        settings, output_dir=settings.output_dir or folder / "run",
        save_every="never" if settings.output_dir is None else ON_CALL, epochs=settings.max_steps or MOST, max_steps=None,
        shuffle=False,
    )  # fmt: skip


class Turns:
    """The steps of a session. losses: by step; None: all steps are alike. learns: {step: patterns of what it trains}."""

    def __init__(
        self, losses: StepLosses | None, learns: Mapping[str, str | Sequence[str]] | None, reached: Mapping[str, Container[str]]
    ) -> None:  # fmt: skip
        """reached: {step: names of the parameters that its loss has a gradient for}, where that is known."""
        self._losses, self._reached = losses, reached
        given = {step: [one] if isinstance(one, str) else [*one] for step, one in (learns or {}).items()}
        self._learns = {step: [part.strip() for one in patterns for part in one.split(",")] for step, patterns in given.items()}
        if given and losses is None:
            raise OptionError("learns: it goes with losses by step, such as loss={'d': d_loss, 'g': g_loss}. Leave it out.")
        if given and losses is not None:
            losses.refuse_strangers(self._learns)

    def begin(self, run: Run) -> None:
        """Raises OptionError for patterns that match nothing, and for an optimizer that cannot take turns."""
        self._run = run
        run.pauses.refuse_strangers(self._learns)
        some = self._learns or not all(map(run.pauses.are_in, self._reached.values()))
        if some and any(one.found.counts for one in run.prepared.stages[0].optimizers):
            raise OptionError(
                "learns: the optimizer counts updates in its groups, and would count the updates of all steps. Take one that "
                "counts with each parameter, such as AdamW."
            )

    def batch_of(self, given: Sequence[object]) -> tuple[str | None, object]:
        """Returns (the step's name, its batch) of the arguments of `session.step`."""
        if self._losses is None:
            if len(given) != 1:
                raise DataError("step: expected one batch; found several arguments. Give x and y as one: step((x, y)).")
            return None, given[0]
        if len(given) != 2:
            raise DataError(f"step: expected the name of a step and a batch; found {len(given)} arguments: step('d', batch).")
        return self._losses.checked(given[0]), given[1]

    def take(self, step: str | None) -> None:
        """Makes `step` the one to be made next: its loss, and what learns in it. None: all losses are computed, and summed."""
        if self._losses is not None:
            self._losses.step = step
        if step is not None and (step in self._learns or step in self._reached):
            if self._learns and self._run.pauses.changed:
                raise ModelError(
                    "requires_grad was changed between the steps of a session whose `learns` says what each of them trains. "
                    "Leave one of them out."
                )
            self._run.pauses.let_learn(self._learns.get(step), self._reached.get(step))


class TrainingSession:
    """Returned by `Trainer.session`. Its methods raise what `fit` raises; after an error there are no more steps.

    A signal (SIGINT, SIGTERM, SIGHUP; in the main thread) waits until a step or an evaluation is done. The KeyboardInterrupt
    that it then raises leaves the session as it is, so that the caller's handler can still export what was trained. A
    second signal ends the step at once, and the session with it.

    example: rows, as many as the largest batch has. with_inputs: makes numbers inputs of their own (data/items.py).
    """

    def __init__(
        self, device: Device, folder: Path, example: Split, settings: Settings, turns: Turns, padding: Padding | None,
        with_inputs: Callable[[object], object],
    ) -> None:  # fmt: skip
        self._device, self._folder, self._example, self._most = device, folder, example, settings.max_steps
        self._settings, self._padding, self._turns, self._with_inputs = settings, padding, turns, with_inputs
        self._steps: Generator[None, None, None] | None = None
        self._batch_rows = self.updates = 0
        """updates: number of finished updates."""
        self._stopping, self._ended, self._untouched, self._interrupts = False, False, False, Interrupts()
        self._pause = ExitStack()
        """Holds the pause of the run while the user's code runs."""

    @property
    def observer(self) -> Observer:
        """The observer that the run must be built with."""
        advice = "The session is as it was before: go on without these rows, or with a smaller learning rate."
        return Observer(at_rest=lambda _: not self._stopping, shaped=self._shaped, counts_updates=True, when_diverged=advice)

    def begin(self, session: Run) -> None:
        """Starts the session on a run whose homes are filled."""
        self._session, self._planned = session, session.prepared
        self.updates = session.resumed_at.phase  # each batch is a phase of its own
        self._rows = FedRows(session.prepared.input_layout, self._example.count, self._device)
        session.homes.boundaries.keep_in_memory(())  # an evaluation may have any number of rows
        self._rows.fed = self.updates
        session.homes.boundaries.passing["train"] = self._rows
        self._turns.begin(session)
        self._pause.enter_context(session.pauses.pause())

    def _shaped(self, planned: ExecutionPlan) -> ExecutionPlan:
        """Takes a new plan and returns it for batches of the current size."""
        self._planned = planned
        return self._with_updates()

    def _with_updates(self) -> ExecutionPlan:
        """Returns the plan with one epoch for each batch of `_batch_rows` rows."""
        whole, rows = self._planned.phases.stretches[0], self._batch_rows
        train = replace(whole.train, rows=rows, batch=rows, micro_batch=min(whole.train.micro_batch, rows))
        return self._with_phases(Epochs(train=train, epochs=whole.epochs, following=()))

    def _with_phases(self, first: Epochs, *others: Epochs) -> ExecutionPlan:
        """Returns the plan with these phases, to be run to the end of the first stretch."""
        stage = replace(self._planned.stages[0], end=len(first))
        return replace(self._planned, phases=Phases([first, *others]), stages=(stage,))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Inside, random numbers are seqpart's own, and a signal waits until the work is done. An error ends the session,
        unless the weights are still those of a finished update, as after an error in the rows."""
        if self._ended:
            raise OptionError("session: it has ended, by an error or with its `with` block.")
        try:
            self._pause.close()
            with self._at_work():
                yield
        finally:
            if not self._ended:
                self._pause.enter_context(self._session.pauses.pause())

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        try:
            with self._interrupts:
                try:
                    with self._device.own_random_state():
                        yield
                except BaseException as error:
                    untouched, self._untouched = self._untouched, False
                    at, self._session.failed_at = self._session.failed_at, None
                    self._ended = not isinstance(error, Exception) or not (untouched or at is not None)
                    done = self.updates
                    # Fewer updates are left if some partitions had made their step already, and others, or weights, stay
                    # on the device.
                    if at is not None:
                        self.updates = at.phase if self._steps is not None else done
                        self._steps, self._rows.fed = None, self.updates
                    if self.updates < done:
                        raise ModelError(
                            f"an error in the middle of update {done + 1}, of which some partitions had made their step "
                            f"({type(error).__name__}: {error}). The session went back to update {self.updates}, after which "
                            "everything was last saved to its home, as evaluate(), state_dict() and export() do."
                        ) from error
                    raise
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(str(interrupt) or ("" if self._ended else _GOES_ON)) from None

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Inside, rows or a place on the disk may be refused, and nothing is trained."""
        self._untouched = True
        yield
        self._untouched = False

    @torch.inference_mode(False)
    def step(self, *given: object) -> float:
        """Makes one update with the rows of a batch, (x, y) or a dict with `labels`, no more than the example had: step(batch),
        or step(name, batch) where losses have names. Returns its loss before the update: the mean over the rows, or over what
        the loss counted of them."""
        name, batch = self._turns.batch_of(given)
        batch, example = self._with_inputs(batch), self._example
        split = batch_rows(batch, padding=self._padding, form=example.form, labelled=example.labelled)
        split = in_type_of(example, split)
        self._refuse_unlike(split)
        if split.count > self._example.count:
            raise DataError(
                f"the batch has {split.count} rows, and the plan has room for {self._example.count}. Give an example as large "
                "as the largest batch, and --batch-size as large."
            )
        if self._most is not None and self.updates == self._most:
            raise OptionError(f"--max-steps {self._most}: all of them are done.")
        with self._working():
            with self._refusing():
                self._session.pauses.refuse_changes()
                if split.count > self._session.prepared.stages[0].micro_batch:
                    self._session.planner.look_at_labels(split.labels)
                self._rows.feed(split)
            self._turns.take(name)
            if self._steps is None or split.count != self._batch_rows or self._session.pauses.changed:
                self._bring_home()
                self._batch_rows = split.count
                self._session.prepared = self._with_updates()
                self._steps = self._session.stages(Position(self.updates))
            assert self._steps is not None
            next(self._steps)
            self.updates += 1
            self._session.pauses.unfreeze(self.updates)
            self._session.losses.clear()
            return self._session.heard.latest().mean_loss

    def _refuse_unlike(self, split: Split) -> None:
        """Raises DataError for rows or labels of another shape, type or form than the example's."""
        both = self._example, split
        rows = [(one.shape, one.dtype, one.form) for one in both]
        labels = [(tuple(one.labels.shape[1:]), one.labels.is_floating_point(), one.label_form) for one in both]
        for what, (expected, found), form in (("rows", rows, form_of_rows), ("labels", labels, form_of_labels)):
            if expected != found:
                raise DataError(
                    f"{split.name}: expected {what} as the example has, {form(self._example)}; found {form(split)}. Give them "
                    "as in the example, or open the session with an example of these."
                    + (f" {PADS}" if expected[0] != found[0] else "")
                )

    def _bring_home(self) -> None:
        """Saves everything to the homes; nothing stays on the device."""
        if self._steps is not None:
            self._stopping = True
            try:
                for _ in self._steps:
                    pass
            finally:
                self._stopping, self._steps = False, None

    @torch.inference_mode(False)
    def evaluate(self, data: object, *, compute_metrics: ComputeMetrics = None) -> Evaluation:
        """Returns loss and accuracy of the current model on `data`, as `Trainer.evaluate` does. Rows are kept: a loader is
        iterated once."""
        data, example = self._with_inputs(data), self._example
        split = kept_rows(data, self._settings, self._padding, labelled=example.labelled)
        return self._tested(in_type_of(example, split), compute_metrics)

    @torch.inference_mode(False)
    def predict(self, data: object) -> Any:
        """Returns what the loss gets from the current model for rows, with or without labels, as `Trainer.predict` does."""
        if are_named(data):
            return {name: self.predict(part) for name, part in data.items()}
        data, example = without_labels(self._with_inputs(data)), self._example
        split = in_type_of(example, kept_rows(data, self._settings, self._padding))
        labels = example.labels[:1].expand(split.count, *example.labels.shape[1:])  # any that the loss takes
        split = replace(split, labels=labels, label_form=example.label_form, labelled=example.labelled)
        with closing(Predictions(self._folder)) as found:
            self._tested(split, found)
            return found.tree()

    def _tested(self, split: Split, compute_metrics: ComputeMetrics) -> Evaluation:
        """Evaluates the current model on `split`."""
        session = self._session
        self._refuse_unlike(split)
        with self._working():
            self._bring_home()
            self._turns.take(None)
            boundaries = session.homes.boundaries
            boundaries.discard("test", 0)  # left by an evaluation that an error ended
            boundaries.labels["test"], boundaries.label_types["test"] = split.labels, split.label_type
            with self._refusing():
                session.pauses.refuse_changes(trains=False)
                rows = boundaries.create("test", 0, self._planned.input_layout, split.count)
                write_rows(split, rows.append)
                rows.finish()
            whole = self._planned.phases.stretches[0]
            assert isinstance(whole, Epochs)
            tests = tuple(replace(phase, rows=split.count) for phase in whole.following)
            # Training follows: optimizer state is needed again.
            tested = Epochs(train=whole.train, epochs=0, following=tests)
            session.prepared = self._with_phases(tested, replace(whole, following=()))
            session.heard.own, session.heard.sets = own_metrics(compute_metrics), split.sets
            session.run_stages(Position())
            boundaries.discard("test", 0)
            assert session.test is not None
            (found,) = session.watch.taken()
            return Evaluation(loss=found.loss, accuracy=found.accuracy, proof=session.proof(), metrics=found.metrics)

    def change_weights(self, rule: Callable[..., Any], *parts: str) -> None:
        """Calls rule(parameter, ...) for each parameter of a part of the model, by name ("teacher"; "" is the whole model), and
        with those of the same name in the other parts. It changes the first in place, without gradients, or returns its new
        value: change_weights(lambda t, s: t.lerp_(s, 0.01), "teacher", "student").

        Everything is saved to the homes first. Raises ModelError for parts that do not match."""
        if not parts:
            raise OptionError('change_weights: expected a rule and parts of the model by name, or "" for all of it.')
        with self._working():
            self._bring_home()
            self._untouched = True
            change_weights(self._session.prepared, self._session.homes.store, rule, parts, self._touched)

    def _touched(self) -> None:
        self._untouched = False

    def save(self) -> Path:
        """Saves a checkpoint in the trainer's output directory, to go on with `Trainer.session(example, resume=DIR)`. Returns
        the directory. The two latest are kept. Raises OptionError without an output directory."""
        if self._settings.output_dir is None:
            raise OptionError("save: expected a directory for checkpoints; found none. Give output_dir.")
        with self._working():
            self._bring_home()
            self._session.prepared = self._planned
            with self._refusing():
                self._session.saving.save(Position(self.updates), Metrics())
        return self._session.directory.root

    def export(self, weights: str | Path) -> Path:
        """Writes the current model as a safetensors file with its own parameter names. Returns its path."""
        path = Path(weights)
        if path.exists() and not path.is_file():
            raise OptionError(f"export: expected the name of a file for the weights; found {path}, a directory or a device.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._working():
            self._bring_home()
            with self._refusing():
                self._session.homes.export(path)
        return path

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the current model's tensors by name, on the CPU: all in memory at once, outside the plan."""
        return load_file(self.export(self._folder / "state.safetensors"))

    def proof(self) -> Proof:
        """Returns the memory measured until now. Raises LimitExceeded."""
        return self._session.proof()

    def finish(self) -> None:
        """Ends the loop and copies the trained weights into the modules that the user passed built."""
        with self._working():
            self._bring_home()
            self._session.homes.give_back()
            self._ended = True

    def finish_after(self, error: BaseException) -> None:
        """Ends a loop that was left by an error, as `finish` does, or notes in the error that the weights are lost."""
        try:
            self.finish()
        except Exception:
            error.add_note("Modules passed to the session have the weights from before it.")

    def close(self) -> None:
        """Closes the session, however it ended."""
        self._ended = True
        self._turns.take(None)
        with suppress(ModelError, OptionError):  # requires_grad no longer matters
            self._pause.close()
        if self._steps is not None:
            self._steps.close()
            self._steps = None


@contextmanager
def open_session(
    setup: Setup, example: object, *, learns: Mapping[str, str | Sequence[str]] | None = None, resume: str | Path | None = None
) -> Iterator[TrainingSession]:
    """Opens a session and closes it: see `Trainer.session`."""
    refuse_ranks("a loop of your own", "Start one, or take `fit`.")
    with ExitStack() as stack:
        asked, at = setup.settings, None if resume is None else checked_value("resume", resume, Path).absolute()
        asked = asked if at is None else replace(asked, output_dir=at if at.is_dir() else at.parent)
        beside = asked.output_dir.parent if asked.output_dir is not None else Path("runs")
        folder = stack.enter_context(own_folder(asked.offload_dir or beside, "session-"))
        settings, reporter = loop_settings(asked, folder), Reporter(quiet=setup.quiet)
        refuse_taken_places(asked.output_dir, resume, overwrite=settings.overwrite)
        resumed = None if at is None else resume_point_of(at, settings, session=True)
        example = setup.with_inputs(example)
        padding = for_data(setup.padding, (with_zeros(example, setup.labelled)[0],))
        rows = in_type_of(setup.model, largest_batch(example, settings, padding, labelled=setup.labelled))
        if learns and asked.unfreeze is not None:
            raise OptionError("--unfreeze: `learns` says what learns in each step of a session. Leave one of them out.")
        reached = {} if setup.steps is None else setup.steps.reached(setup.model, rows, setup.settings.autocast)
        turns, opening = Turns(setup.steps, learns, reached), ExitStack()
        sampler = setup.begin(stack, reporter, opening)

        def prepare(model: object, loss_chunks: int | None) -> Planner:
            saved = resumed is not None and resumed.manifest is not None
            purpose = Purpose(folder=folder, whole=False, resumes=saved, loss_chunks=loss_chunks)
            data = rows, rows_of_a_window(rows)
            return Planner(model, settings, data, setup.device, setup.loss, setup.optimizer, purpose=purpose)

        with translate_oom(setup.device, "the session was planned"):
            plan = partial(setup.plan_under_limit, sampler, Planner.planned if resumed is None else resumed.planned)
            planner, prepared = setup.plan_that_fits(
                stack, prepare, plan, resumed.plan if resumed is not None else None, resumed=resumed
            )
        reporter.plan(replace(prepared.plan, seconds=prepared.plan.update_seconds * (setup.settings.max_steps or 1)))
        silent = stack.enter_context(closing(WarningsAlone()))
        loop = TrainingSession(setup.device, folder, rows, asked, turns, padding, setup.with_inputs)
        run = Run(planner, prepared, silent, sampler, stack, observer=loop.observer, resumed=resumed)
        run.pauses.attributes.tell_lost(reporter)
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
