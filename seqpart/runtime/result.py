"""What a run leaves, and what an evaluation finds."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from seqpart.callbacks import MetricValue
from seqpart.device.device import describe_versions
from seqpart.device.sampler import Proof
from seqpart.errors import CorruptFile, OptionError, StoreError, shown
from seqpart.model.metrics import Metrics
from seqpart.model.weight_files import write_adapter, write_pretrained
from seqpart.plan.plan import Plan
from seqpart.report.reporter import figures
from seqpart.runtime.run import Run
from seqpart.schedule.steps import Position
from seqpart.store.atomic import write_text
from seqpart.store.scratch import AVERAGE, PLAN, RESULT, WEIGHTS
from seqpart.units import now


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run left. `accuracy` is None for a regression, and `test_loss` too where there was no test set. A loss that sums
    is given as its mean over the rows."""

    weights: Path
    """A safetensors file with the model's own parameter names."""
    test_loss: float | None
    accuracy: float | None
    train_losses: tuple[float, ...]
    """Mean loss of every training pass, in order."""
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """What compute_metrics found on the test rows."""
    best_update: int | None = None
    """Updates before the evaluation that was the best; None where there was one evaluation alone. With keep_best, weights, test
    loss, accuracy and metrics are those of it."""
    proof: Proof
    plan: Plan
    seconds: float
    final_micro_batch: int
    average: Path | None = None
    """With `ema`, a file like `weights` with their exponential moving average, and buffers as they are in `weights`."""
    average_loss: float | None = None
    """On the test rows, of these."""
    average_accuracy: float | None = None
    average_metrics: dict[str, MetricValue] = field(default_factory=dict)
    """What compute_metrics found of it."""
    config: Any = field(default=None, repr=False, compare=False)
    """The configuration of a model of transformers, which `save_pretrained` writes."""

    model: Any = field(default=None, repr=False, compare=False)
    """The model, where it is one of peft, whose adapter `save_adapter` writes."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The trained model's tensors by name, on the CPU, as `load_state_dict` of the whole model takes them.

        All of them are in memory at once, outside any limit: as many bytes as the file `weights` has. Raises StoreError where
        that file is gone or damaged.
        """
        try:
            return load_file(self.weights)
        except OSError as error:
            raise StoreError(f"{self.weights} cannot be read: {error.strerror or error}.") from None
        except SafetensorError as error:
            raise CorruptFile(f"{self.weights} is damaged: {error}.", self.weights) from None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `from_pretrained(folder)` reads: model.safetensors (one file with `weights` where a file may have two
        names), and for a model of transformers its configuration, and what else but weights lies where it was loaded from: a
        tokenizer.

        Raises StoreError where that cannot be written, OptionError where there are other weights already.
        """
        write_pretrained(Path(folder), self.weights, self.config)

    def save_adapter(self, folder: str | Path, *, average: bool = False) -> None:
        """Write the adapter of a model of peft alone, as its own save_pretrained does: adapter_model.safetensors and
        adapter_config.json. average: its moving average, of a run with `ema`.

        Raises OptionError for another model, and where there is no average; StoreError where that cannot be written.
        """
        if average and self.average is None:
            raise OptionError("save_adapter: the run had no average of its weights. Give --ema, such as 0.999.")
        write_adapter(Path(folder), self.average if average and self.average is not None else self.weights, self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What `Trainer.evaluate` found."""

    loss: float
    """Mean over the rows."""
    accuracy: float | None
    """Share of right answers, from 0 to 1; None for a regression."""
    proof: Proof
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """What compute_metrics found."""


_NOT_TOLD = {"config", "model", "average", "average_loss", "average_accuracy", "average_metrics"}
"""Of a result: what is no JSON, and what only some runs have."""


def carry_out(session: Run, began: float) -> Result:
    """began: the time from which its seconds count."""
    directory = session.places.directory
    with directory.interruptible():
        with session.limited():
            with directory.resumable(session.reporter.add_note, lambda: session.saving.told), session.interrupts:
                with _weights_kept(session):
                    session.run_stages()
                if session.averages:
                    session.homes.export(directory.result(AVERAGE), averages=True)
                session.take_best()
                session.homes.export(directory.result(WEIGHTS))
                session.saving.obey(Position(len(session.prepared.phases)), Metrics())
                session.interrupts.hold()
            session.homes.give_back()
        return _conclude(session, time.perf_counter() - began)


@contextmanager
def _weights_kept(session: Run) -> Iterator[None]:
    """An error behind all training, as of rows of the test that the model does not take, does not cost what was trained."""
    try:
        yield
    except Exception as error:
        if session.is_trained:
            weights = session.places.directory.result(WEIGHTS)
            session.homes.export(weights)
            session.homes.give_back()
            session.reporter.add_note(error, f"The training was over: its weights are in {weights}")
        raise


def with_average(result: Result, found: Evaluation) -> Result:
    """`result`, and its file, with what its averaged weights were found to be worth, and the proof of both."""
    path = result.weights.with_name(RESULT)
    of_average = {"average_loss": found.loss, "average_accuracy": found.accuracy, "average_metrics": found.metrics}
    told = {**json.loads(path.read_text()), **of_average, "proof": asdict(found.proof)}
    write_text(path, json.dumps(told, indent=1) + "\n")
    return replace(
        result, average_loss=found.loss, average_accuracy=found.accuracy, average_metrics=found.metrics, proof=found.proof
    )


def _conclude(session: Run, seconds: float) -> Result:
    directory, reporter, sampler, plan = session.places.directory, session.reporter, session.sampler, session.prepared.plan
    weights, proof = directory.root / WEIGHTS, session.proof()
    test_loss, accuracy = session.test or (None, None)
    result = Result(
        weights=weights, test_loss=test_loss, accuracy=accuracy, metrics=session.watch.metrics,
        best_update=session.watch.best_update,
        train_losses=tuple(session.losses), proof=proof, plan=plan,
        seconds=round(seconds, 2), final_micro_batch=plan.micro_batch,
        average=directory.root / AVERAGE if session.averages else None,
    )  # fmt: skip
    summary = {name: value for name, value in asdict(result).items() if name not in _NOT_TOLD}
    summary |= {"weights": str(weights), "peak at": sampler.peak_label, "plan": PLAN}
    if result.average is not None:
        summary["average"] = str(result.average)
    summary |= {"finished": now(), "settings": session.settings.to_json()}
    write_text(directory.result(RESULT), json.dumps({**summary, **describe_versions()}, indent=1) + "\n")
    directory.publish()
    reporter.record(
        "result",
        accuracy=result.accuracy,
        test_loss=result.test_loss,
        metrics=result.metrics,
        proof=asdict(proof),
        took=seconds,
    )
    reporter.say(f"{tested(result)}; {seconds:.1f} s; weights in {shown(weights)}")
    if result.average is not None:
        reporter.say(f"their moving average is in {result.average}")
    reporter.proof(proof)
    session.finish(f"the run is finished; its results are in {directory.root}.")
    return result


def tested(result: Result) -> str:
    """What the test rows said, in words."""
    if result.test_loss is None:
        return "not tested: there is no test set"
    return figures(result.test_loss, result.accuracy, result.metrics, "test ")
