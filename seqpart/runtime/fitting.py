"""A fit: a run to its end, its weights written, and given back to modules that were alive, and its results published."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from seqpart.device.device import describe_versions
from seqpart.errors import shown
from seqpart.model.metrics import Metrics
from seqpart.report.reporter import figures
from seqpart.runtime.result import Evaluation, Result
from seqpart.runtime.session import Session
from seqpart.schedule.steps import Position
from seqpart.store.atomic import write_text
from seqpart.store.scratch import AVERAGE, PLAN, RESULT, WEIGHTS
from seqpart.units import now

_NOT_TOLD = {"config", "model", "average", "average_loss", "average_accuracy", "average_metrics"}
"""Of a result: what is no JSON, and what only some runs have."""


def carry_out(session: Session, began: float) -> Result:
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
def _weights_kept(session: Session) -> Iterator[None]:
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


def _conclude(session: Session, seconds: float) -> Result:
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
