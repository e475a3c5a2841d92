"""The facade: `Trainer(model, mem_limit="2GB", method="auto").fit(train, test)`. What it does is in runtime/."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from seqpart.arguments import read_options, refuse_no_modules
from seqpart.callbacks import callers
from seqpart.data.padding import Padding, as_padding
from seqpart.errors import OptionError
from seqpart.fields import checked_value
from seqpart.model.losses import LossChoice, LossFunction
from seqpart.model.metrics import ComputeMetrics
from seqpart.model.optimizer_trials import Build
from seqpart.options import Options
from seqpart.plan.plan import Plan
from seqpart.report.reporter import Reporter
from seqpart.runtime.evaluation import evaluate, predict
from seqpart.runtime.fitting import fit
from seqpart.runtime.observer import BeforeUpdate, Observer
from seqpart.runtime.result import Evaluation, Result
from seqpart.runtime.setup import Setup
from seqpart.runtime.training_session import TrainingSession, open_session
from seqpart.settings import Settings

__all__ = ["Result", "Trainer"]


class Trainer(Setup):
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
        chosen = read_options(model, loss, optimizer, settings, {**options})
        super().__init__(model, *chosen, as_padding(padding), quiet)

    def plan(self, train: object, test: object = None, *, reuse: Plan | None = None) -> Plan:
        """Returns the plan, without writing a file or training. Raises what `fit` would raise before training."""
        with self.planned(train, test, reuse=reuse, dry=True) as (_, prepared):
            return prepared.plan

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
        if self.steps is not None:
            raise OptionError("fit: expected one loss; found one for each step of a session. Make the steps in `session`.")
        callers(callbacks)  # raises what is wrong with them, before anything is planned
        place: Path | None = checked_value("resume", resume, Path | None)
        observer = Observer(callbacks=callbacks)
        observer = observer if before_update is None else replace(observer, before_update=before_update)
        return fit(self, train, test, observer, compute_metrics, reuse, place, reporter, job)

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
        return evaluate(self, data, weights, compute_metrics)

    def predict(self, data: object, *, weights: str | Path | None = None) -> Any:
        """Returns what the model returns for rows, in order, in evaluation mode and under the limit.

        data: rows as `fit` takes them, with or without labels, which are left out: x alone, a dict of inputs by name,
            ((a, b),) in order, or several sets by name. weights: as for `evaluate`.

        The tensors (rows, ...) are mapped from an unnamed file beside the run's, which goes when they are freed; those of
        bfloat16 are float32.

        Raises what `evaluate` raises, and ModelError for a model that returns other tensors than a row's.
        """
        return predict(self, data, weights)

    def session(
        self, example: object, *, learns: Mapping[str, str | Sequence[str]] | None = None, resume: str | Path | None = None
    ) -> AbstractContextManager[TrainingSession]:
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
        return open_session(self, example, learns=learns, resume=resume)
