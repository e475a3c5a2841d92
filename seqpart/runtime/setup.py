"""What the runs of one trainer have in common: the model, its loss, optimizer and settings, and the device."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from seqpart.checkpoint.resume import ResumePoint
from seqpart.data.decoder_inputs import with_decoder_inputs
from seqpart.data.items import WithoutLabels, needs_labels, with_inputs
from seqpart.data.padding import Padding
from seqpart.data.row_types import in_type_of
from seqpart.data.splits import Split
from seqpart.data.step_losses import StepLosses
from seqpart.device.limit import limit_of, translate_oom
from seqpart.device.opening import open_device
from seqpart.device.ranks import per_machine, ranks_of, refuse_ranks
from seqpart.device.sampler import Sampler
from seqpart.device.usage import MemoryUsage
from seqpart.errors import DoesNotFit, OptionError
from seqpart.intake import rows_of
from seqpart.interrupts import like_ctrl_c
from seqpart.model.compiled import SAID, as_written, compiler_at_work, is_compiled, original
from seqpart.model.freezing import freezing
from seqpart.model.inspection import kept_modes
from seqpart.model.losses import LossSource
from seqpart.model.optimizers import Optimizer
from seqpart.model.quantized import plain_tensors
from seqpart.model.tiling import first_that_fits, possible_tile, separating, sizes_to_try
from seqpart.plan.inputs import Purpose
from seqpart.plan.ist import SubnetPreparation
from seqpart.plan.plan import Plan
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.profile.fake_mode import FakeMode
from seqpart.report.reporter import Reporter
from seqpart.report.trackers import load
from seqpart.runtime.pauses import let_learn
from seqpart.schedule.lengths import refuse_untested
from seqpart.settings import Settings
from seqpart.units import format_limit, format_size


class Setup:
    """A model, its loss, optimizer, settings and device. Makes rows of data, planners, and plans that fit.

    loss: None for the default, "model" for the model's own, or losses of a session's steps by name.
    """

    def __init__(
        self, model: object, loss: LossSource, optimizer: Optimizer | None, settings: Settings, padding: Padding | None,
        quiet: bool,
    ) -> None:  # fmt: skip
        self.steps = loss if isinstance(loss, StepLosses) else None
        self.labelled = needs_labels(loss) if self.steps is None else self.steps.labelled
        """False if data may come without labels."""
        self.loss = loss if self.labelled or loss == "model" or self.steps is not None else WithoutLabels(loss)
        self.optimizer, self.padding, self.quiet = optimizer, padding, quiet
        self.model, self.compiled = original(model), is_compiled(model)
        if self.compiled and settings.compile:
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

    def rows(self, train: object, test: object = None) -> tuple[Split, Split]:
        """Returns the training and test rows; the settings take their loader's batch size and order."""
        with translate_oom(self.device, "the data were looked at"):
            asked = self._asked[1] if self._asked is not None and self._asked[0] is self.settings else self.settings
            train, test = self.with_inputs(train), self.with_inputs(test)
            rows, tests, self.settings = rows_of(train, test, asked, self.padding, labelled=self.labelled)
            self._asked = self.settings, asked
            rows = in_type_of(self.model, rows)
            return rows, in_type_of(rows, tests)

    def with_inputs(self, data: object) -> object:
        """Returns data, or a batch, with the inputs that the model makes of numbers or of labels."""
        return with_inputs(with_decoder_inputs(data, self.model) if self.loss == "model" else data, self.model, self.loss)

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
            yield self.plan_that_fits(stack, prepare, Planner.planned, reuse, in_pairs=self.in_pairs)

    def prepare(
        self, train: Split, test: Split, *, reuse: Plan | None = None, dry: bool = False, resumes: bool = False,
        model: object = None, loss_chunks: int | None = 1,
    ) -> Planner:  # fmt: skip
        """Checks and measures everything, ready to be planned. Modules passed built are empty until it is closed.

        train, test: see `rows`. resumes: weights come from a checkpoint. model: replaces the trainer's own. loss_chunks: see
        `Purpose`.
        """
        with translate_oom(self.device, "the model and the machine were measured"), self.device.own_random_state():
            refuse_untested(self.settings.between_tests, test.count)
            if self.in_pairs or self.settings.unfreeze is not None:
                option = f"--method {self.settings.method}" if self.settings.unfreeze is None else "--unfreeze"
                refuse_ranks(option, "Take another method than psl, without --unfreeze, or start one.")
            plans = SubnetPreparation if self.settings.methods[0].has_subnets else Planner
            purpose = Purpose(
                folder=self.scratch_parent, ranks=ranks_of(self.device), dry=dry, reuse=reuse, resumes=resumes,
                loss_chunks=loss_chunks,
            )  # fmt: skip
            model = self.model if model is None else model
            return plans(model, self.settings, (train, test), self.device, self.loss, self.optimizer, purpose=purpose)

    def plan_that_fits(
        self, stack: ExitStack, prepare: Callable[..., Planner], plan: Callable[[Planner], ExecutionPlan],
        again: Plan | None = None, *, in_pairs: bool = False, resumed: ResumePoint | None = None, whole_logits: bool = False,
    ) -> tuple[Planner, ExecutionPlan]:  # fmt: skip
        """Returns the planner of `prepare(model=..., loss_chunks=...)`, and the plan, with the loss over chunks or large layers
        in tiles if nothing fits without.

        stack: closes the planner. again, whole_logits: see `attempts`. in_pairs: true if the model is separated into scores.
        resumed: the checkpoint, with the parameters that were frozen or trained.
        """

        def attempted(attempt: ExitStack, model: object, loss_chunks: int | None) -> tuple[Planner, ExecutionPlan]:
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
        return first_that_fits(stack, model, self.attempts(again, whole_logits=whole_logits), attempted)

    def attempts(self, again: Plan | None = None, *, whole_logits: bool = False) -> list[tuple[int, int | None]]:
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
        whole = self.optimizer is not None or self.settings.whole_weights or self.settings.rounded_moments is not None
        return sizes_to_try(self.model) if streams and not (whole or self.settings.compile) else (0,)

    def plan_under_limit(self, sampler: Sampler, plan: Callable[[Planner], ExecutionPlan], planner: Planner) -> ExecutionPlan:
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

    def begin(self, stack: ExitStack, reporter: Reporter, random: ExitStack | None = None) -> Sampler:
        """Starts the sampler of a run's memory; `stack` stops it. random: ends the run's own random state before that."""
        gc.collect()  # a freed model that is part of a reference cycle would count
        stack.enter_context(self.device.running())
        if self.compiled:
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

    def count_from_start(self) -> None:
        """Starts the sampler in a process that does nothing else: memory held while libraries loaded counts too."""
        self._sampler = Sampler(MemoryUsage(self.device), limit=1 << 62)
        self._sampler.label = lambda: "start"
        if self.device.shares_memory:
            self._sampler.add_reading(self._held, "the import of libraries")
        self._sampler.start()

    @property
    def in_pairs(self) -> bool:
        return self.settings.methods[0].in_pairs

    @property
    def scratch_parent(self) -> Path:
        """The directory for homes and boundary rows during a run, or one above it."""
        return self.settings.offload_dir or self.settings.output_dir or Path("runs")
