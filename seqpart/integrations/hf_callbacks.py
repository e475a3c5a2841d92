"""Passes a run's events to transformers' callbacks and TrainerState."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from seqpart.callbacks import BeginEvent, EpochEvent, EvalEvent, StepEvent
from seqpart.errors import OptionError
from seqpart.integrations.hf_arguments import Lengths
from seqpart.schedule.best import Evaluated

CALLED = {
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_end", "on_evaluate",
    "on_predict", "on_log",
}  # fmt: skip
_WISHES = ("should_epoch_stop", "should_save", "should_evaluate")


class _Flow(DefaultFlowCallback):
    """Decides when to log; evaluations, checkpoints and the end are settings of the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        by_steps = args.logging_strategy == "steps" and state.global_step % state.logging_steps == 0
        control.should_log = control.should_log or by_steps or (state.global_step == 1 and args.logging_first_step)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_log = control.should_log or args.logging_strategy == "epoch"
        return control


class Relay:
    """A seqpart callback that calls those of transformers. Obeys `control.should_training_stop` and `should_log`; other
    controls are refused.

    Raises OptionError for a callback with methods that nobody calls here.
    """

    def __init__(self, arguments: Any, model: Any, processing_class: Any, callbacks: Iterable[Any]) -> None:
        self._arguments, self.control, self._losses, self._total = arguments, TrainerControl(), list[float](), 0.0
        self.steps, self._in_epoch = 0, False
        """steps: number of updates in this training."""
        self._sets: Collection[str] = ()
        self._metrics: Collection[str] = ()
        self._rate: float | None = None
        self._norm: float | None = None
        self.handler = CallbackHandler([_Flow], model, processing_class, None, None)
        for callback in callbacks:
            self.add(callback)
        self.state = self._new_state()
        self._call("on_init_end")

    def _new_state(self) -> TrainerState:
        return TrainerState(stateful_callbacks=[one for one in self.handler.callbacks if isinstance(one, ExportableState)])  # type: ignore[misc]

    def renew(self, arguments: Any, model: Any, processing_class: Any) -> None:
        """Takes what callbacks are given from now on."""
        self._arguments, self.handler.model, self.handler.processing_class = arguments, model, processing_class

    def add(self, callback: Any) -> None:
        kind = callback if isinstance(callback, type) else type(callback)
        names = (name for name in dir(TrainerCallback) if name.startswith("on_") and name not in CALLED)
        unheard = [name for name in names if getattr(kind, name, None) is not getattr(TrainerCallback, name)]
        if unheard:
            raise OptionError(
                f"callbacks: {kind.__name__} has {', '.join(unheard)}, which nobody calls here; expected some of "
                f"{', '.join(sorted(CALLED))}. Take {'it' if len(unheard) == 1 else 'them'} out."
            )
        self.handler.add_callback(callback)

    # --- a training -------------------------------------------------------------------------------------------------------

    def begin(self, lengths: Lengths, sets: Collection[str], metrics: Collection[str]) -> None:
        """Begins a training. sets: names of the evaluation sets, one alone has the name "". metrics: names of the user's."""
        self.state, self._sets, self._metrics, self._lengths = self._new_state(), sets, metrics, lengths
        self.state.compute_steps(self._arguments, lengths.updates)
        self.state.max_steps, self.state.epoch = lengths.updates, 0.0
        self.state.num_train_epochs = math.ceil(lengths.updates / lengths.per_epoch)
        self._losses, self._total, self.steps, self._in_epoch = [], 0.0, 0, False
        self._call("on_train_begin")

    def end(self, metrics: dict[str, Any]) -> None:
        self._epoch_ends()
        self.log(metrics)
        self._call("on_train_end")

    @property
    def loss(self) -> float:
        """Mean loss over the updates of this training."""
        return self._total / self.steps if self.steps else float("nan")

    def on_begin(self, event: BeginEvent) -> None:
        self._epoch_begins()

    def on_step(self, event: StepEvent) -> None:
        self._epoch_begins()  # of a run that goes on
        self.state.global_step, self.state.epoch = event.update, self._lengths.epochs_after(event.update)
        self._losses.append(event.loss)
        self._total, self.steps = self._total + event.loss, self.steps + 1
        self._rate, self._norm = event.learning_rate, event.gradient_norm
        self._call("on_step_end")
        self._log_losses()
        if event.epoch % 1 and (self.control.should_training_stop or event.update == self.state.max_steps):
            self._epoch_ends()  # which is not over: nobody else tells its end
        self._ends(event)

    def on_epoch(self, event: EpochEvent) -> None:
        self._epoch_begins()
        self.state.epoch = float(event.epoch)
        if not self._evaluates_by_steps or self.state.global_step % self.state.eval_steps:
            self._epoch_ends()  # else after the evaluation
        self._ends(event)
        if not self._in_epoch and self._arguments.eval_strategy != "epoch":
            self._next_epoch_begins()

    @property
    def _evaluates_by_steps(self) -> bool:
        return bool(self._arguments.eval_strategy == "steps")

    def on_eval(self, event: EvalEvent) -> None:
        self.state.global_step, self.state.epoch = event.update, self._lengths.epochs_after(event.update)
        whole: dict[str, Any] = {"eval_runtime": event.seconds, "eval_samples_per_second": event.rows_per_second}
        every: dict[str, Any] = {"eval_loss": event.loss}
        for found in self._by_sets(event):
            self.evaluated(found | whole)
            every |= found
        self._note_best(every)
        if not event.epoch % 1:
            self._epoch_ends()
        self._ends(event)
        if not event.epoch % 1:
            self._next_epoch_begins()

    def recall(self, earlier: Iterable[Evaluated]) -> None:
        """Takes in the evaluations before a resume: for the best metric, and for callbacks that keep a state of them."""
        for one in earlier:
            self.state.global_step, self.state.epoch = one.update, self._lengths.epochs_after(one.update)
            every: dict[str, Any] = {"eval_loss": one.loss}
            for found in self._by_sets(one):
                every |= found
                for callback in self.handler.callbacks:
                    if isinstance(callback, ExportableState):
                        callback.on_evaluate(self._arguments, self.state, self.control, metrics=found)  # type: ignore[attr-defined]
            self._note_best(every)

    def _by_sets(self, event: EvalEvent | Evaluated) -> Iterator[dict[str, Any]]:
        """Yields the metrics of each evaluation set."""
        for own in self._sets:
            if own:
                named = ((name, event.metrics.get(f"{own}/{name}")) for name in ("loss", *self._metrics))
                yield {f"eval_{own}_{name}": value for name, value in named if value is not None}
            else:
                yield {**{f"eval_{name}": value for name, value in event.metrics.items()}, "eval_loss": event.loss}

    def _epoch_begins(self) -> None:
        if not self._in_epoch:
            self._in_epoch = True
            self._call("on_epoch_begin")
            self.handler.model.train()

    def _next_epoch_begins(self) -> None:
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            self._epoch_begins()

    def _epoch_ends(self) -> None:
        if self._in_epoch:
            self._call("on_epoch_end")
            self._in_epoch = False
            self._log_losses()

    def _note_best(self, found: Mapping[str, Any]) -> None:
        """Updates the best metric after on_evaluate, where EarlyStoppingCallback compares with earlier evaluations."""
        if self._arguments.metric_for_best_model is None:
            return
        name = f"eval_{self._arguments.metric_for_best_model.removeprefix('eval_')}"
        if name not in found:  # refused beforehand where the best weights are asked for
            return
        value, larger = found[name], self._arguments.greater_is_better
        if self.state.best_metric is None:  # NaN is never the best
            self.state.best_metric = -math.inf if larger else math.inf
        if value > self.state.best_metric if larger else value < self.state.best_metric:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _ends(self, event: StepEvent | EpochEvent | EvalEvent) -> None:
        self.handler.model.train()  # as before every step of theirs, whatever a callback did
        if self.control.should_training_stop:
            event.stop("a callback of transformers")

    # --- what is logged ---------------------------------------------------------------------------------------------------

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self.log(metrics)
        self._call("on_evaluate", metrics=metrics)

    def predicted(self, metrics: dict[str, Any]) -> None:
        self._call("on_predict", metrics=metrics)

    def log(self, logs: dict[str, Any]) -> None:
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def _log_losses(self) -> None:
        wanted, self.control.should_log = self.control.should_log, False
        if not wanted or not self._losses:
            return
        logs = {"loss": sum(self._losses) / len(self._losses)}
        logs |= {} if self._norm is None else {"grad_norm": self._norm}
        logs |= {} if self._rate is None else {"learning_rate": self._rate}
        self._losses = []
        self.log(logs)

    def _call(self, event: str, **more: Any) -> None:
        call = getattr(self.handler, event)
        self.control = call(self._arguments, self.state, self.control, **more)
        wishes = [name for name in _WISHES if getattr(self.control, name)]
        if wishes:
            raise OptionError(
                f"callbacks: control.{wishes[0]} was set in {event}, which is not supported; should_training_stop and "
                "should_log are. Set it in TrainingArguments."
            )
