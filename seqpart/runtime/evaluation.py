"""An evaluation: a run whose phases are passes over the test rows, which leaves no files."""

from pathlib import Path

from seqpart.device.sampler import Proof
from seqpart.fields import values_of
from seqpart.runtime.result import Evaluation
from seqpart.runtime.run import Run
from seqpart.settings import Settings


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
