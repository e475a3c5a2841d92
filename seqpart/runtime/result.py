"""The results of a run and of an evaluation: a run whose phases are passes over the test rows, which leaves no files."""

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
from seqpart.fields import values_of
from seqpart.model.metrics import Metrics
from seqpart.model.weight_files import write_adapter, write_pretrained
from seqpart.plan.plan import Plan
from seqpart.report.reporter import figures
from seqpart.runtime.run import Run
from seqpart.schedule.steps import Position
from seqpart.settings import Settings
from seqpart.store.atomic import write_text
from seqpart.store.scratch import AVERAGE, PLAN, RESULT, WEIGHTS
from seqpart.units import now


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run. `accuracy` is None for a regression, and `test_loss` too without a test set. A loss that sums is
    given as its mean over the rows."""

    weights: Path
    """A safetensors file with the model's own parameter names."""
    test_loss: float | None
    accuracy: float | None
    train_losses: tuple[float, ...]
    """Mean loss of every training pass, in order."""
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """Values of compute_metrics on the test rows."""
    best_update: int | None = None
    """Updates before the best evaluation; None if there was only one evaluation. With keep_best, weights, test loss, accuracy
    and metrics are those of the best."""
    proof: Proof
    proofs: tuple[Proof, ...] = ()
    """With torchrun, the proof of every rank."""
    plan: Plan
    seconds: float
    final_micro_batch: int
    average: Path | None = None
    """With `ema`, a file like `weights` with their exponential moving average, and the same buffers."""
    average_loss: float | None = None
    """Loss of the averaged weights on the test rows."""
    average_accuracy: float | None = None
    average_metrics: dict[str, MetricValue] = field(default_factory=dict)
    """Values of compute_metrics for the averaged weights."""
    config: Any = field(default=None, repr=False, compare=False)
    """The configuration of a transformers model, which `save_pretrained` writes."""

    model: Any = field(default=None, repr=False, compare=False)
    """The model, if it is a peft model, whose adapter `save_adapter` writes."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the trained model's tensors by name, on the CPU, as `load_state_dict` of the whole model takes them.

        All of them are in memory at once, outside any limit: as many bytes as the file `weights` has. Raises StoreError if
        that file is gone or damaged.
        """
        try:
            return load_file(self.weights)
        except OSError as error:
            raise StoreError(f"{self.weights} cannot be read: {error.strerror or error}.") from None
        except SafetensorError as error:
            raise CorruptFile(f"{self.weights} is damaged: {error}.", self.weights) from None

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes what `from_pretrained(folder)` reads: model.safetensors (a hard link to `weights` where possible), and for a
        transformers model its configuration, and the files other than weights of the folder it was loaded from, such as a
        tokenizer.

        Raises StoreError if that cannot be written, OptionError if the folder has other weights already.
        """
        write_pretrained(Path(folder), self.weights, self.config)

    def save_adapter(self, folder: str | Path, *, average: bool = False) -> None:
        """Writes only the adapter of a peft model, as its own save_pretrained does: adapter_model.safetensors and
        adapter_config.json. average: write its moving average, from a run with `ema`.

        Raises OptionError for another model, or without an average; StoreError if that cannot be written.
        """
        if average and self.average is None:
            raise OptionError("save_adapter: the run had no average of its weights. Give --ema, such as 0.999.")
        write_adapter(Path(folder), self.average if average and self.average is not None else self.weights, self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of `Trainer.evaluate`."""

    loss: float
    """Mean loss over the rows."""
    accuracy: float | None
    """Fraction of right answers, from 0 to 1; None for a regression."""
    proof: Proof
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """Values of compute_metrics."""


_NOT_TOLD = {"config", "model", "proofs", "average", "average_loss", "average_accuracy", "average_metrics"}
"""Fields of Result that result.json leaves out: those that are not JSON, and those that only some runs have."""


def carry_out(session: Run, began: float) -> Result:
    """Runs `session` to its end and writes its results. began: the start of its `seconds`, by time.perf_counter()."""
    directory = session.directory
    with directory.interruptible():
        with session.limited():
            with directory.resumable(session.reporter.add_note, lambda: session.saving.error_noted), session.interrupts:
                with _weights_kept(session):
                    session.run_stages()
                if session.settings.averages and session.ranks.leads:
                    session.homes.export(directory.result(AVERAGE), averages=True)
                session.take_best()
                session.homes.collect(everywhere=True)
                if session.ranks.leads:
                    session.homes.export(directory.result(WEIGHTS))
                session.saving.obey(Position(len(session.prepared.phases)), Metrics())
                session.interrupts.hold()
            session.homes.give_back()
        return _conclude(session, time.perf_counter() - began)


@contextmanager
def _weights_kept(session: Run) -> Iterator[None]:
    """A context in which an error after all training, as in a test, still saves the trained weights."""
    try:
        yield
    except Exception as error:
        if session.is_trained:
            weights = session.directory.result(WEIGHTS)
            if session.ranks.leads:
                session.homes.export(weights)
                session.reporter.add_note(error, f"The training was over: its weights are in {weights}")
            session.homes.give_back()
        raise


def with_average(result: Result, found: Evaluation) -> Result:
    """Adds the evaluation of the averaged weights, and the proof of both runs, to `result` and its file."""
    path = result.weights.with_name(RESULT)
    of_average = {"average_loss": found.loss, "average_accuracy": found.accuracy, "average_metrics": found.metrics}
    written = {**json.loads(path.read_text()), **of_average, "proof": asdict(found.proof)}
    write_text(path, json.dumps(written, indent=1) + "\n")
    return replace(
        result, average_loss=found.loss, average_accuracy=found.accuracy, average_metrics=found.metrics, proof=found.proof
    )


def _conclude(session: Run, seconds: float) -> Result:
    directory, reporter, sampler, plan = session.directory, session.reporter, session.sampler, session.prepared.plan
    weights, proof = directory.root / WEIGHTS, session.proof()
    test_loss, accuracy = session.test or (None, None)
    proofs = tuple(session.ranks.gather(proof)) if session.ranks.count > 1 else ()
    result = Result(
        weights=weights, test_loss=test_loss, accuracy=accuracy, metrics=session.watch.metrics,
        best_update=session.watch.best_update,
        train_losses=tuple(session.losses), proof=proof, proofs=proofs, plan=plan,
        seconds=round(seconds, 2), final_micro_batch=plan.micro_batch,
        average=directory.root / AVERAGE if session.settings.averages else None,
    )  # fmt: skip
    summary = {name: value for name, value in asdict(result).items() if name not in _NOT_TOLD}
    summary |= {"weights": str(weights), "peak at": sampler.peak_label, "plan": PLAN}
    if result.average is not None:
        summary["average"] = str(result.average)
    if proofs:
        summary["proofs"] = [asdict(one) for one in proofs]
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
    for rank, other in enumerate(proofs[1:], start=1):
        reporter.say(f"rank {rank}: {other}")
    session.finish(f"the run is finished; its results are in {directory.root}.")
    return result


def tested(result: Result) -> str:
    """Returns the test loss, accuracy and metrics in words."""
    if result.test_loss is None:
        return "not tested: there is no test set"
    return figures(result.test_loss, result.accuracy, result.metrics, "test ")


def evaluation_settings(settings: Settings, rows: int, folder: Path, weights: str | Path | None = None) -> Settings:
    """Returns the settings for an evaluation of `rows` rows, with all files in `folder`. weights: a file that replaces the
    model's own.

    A plan has room for training, so it is made for the exact method and the optimizer that need least, and one update's rows.
    """
    batch = min(max(values_of(settings.batch_size)), rows)
    micro_batch = settings.micro_batch_size
    return Settings(
        mem_limit=settings.mem_limit, method="streamed", device=settings.device, ram_limit=settings.ram_limit,
        output_dir=folder / "run", batch_size=batch, micro_batch_size=None if micro_batch is None else min(micro_batch, batch),
        loss_chunks=settings.loss_chunks, compile=settings.compile, loss=settings.loss_name,
        label_smoothing=settings.label_smoothing, optimizer="sgd", dtype=settings.dtype,
        seed=settings.seed, save_every="never", epochs=1,
        weights=settings.weights if weights is None else Path(weights), cache=settings.cache, workers=settings.workers,
        weights_partial=settings.weights_partial and weights is None,
    )  # fmt: skip


def evaluated(session: Run, before: Proof | None = None) -> Evaluation:
    """Runs the evaluation, which leaves no results and the modules as they were. before: the proof of a run that it belongs
    to; the returned proof is then of both."""
    with session.limited(), session.interrupts:
        session.run_stages()
    assert session.test is not None
    (loss, accuracy), proof = session.test, session.proof()
    proof = proof if before is None else before.and_then(proof)
    return Evaluation(loss=loss, accuracy=accuracy, proof=proof, metrics=session.watch.metrics)
