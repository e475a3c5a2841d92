"""A fit: a run to its end, its weights written, and given back to modules that were alive, and its results published."""

import json
import time
from dataclasses import asdict

from seqpart.execution.metrics import Metrics
from seqpart.files.atomic import write_text
from seqpart.files.scratch import WEIGHTS
from seqpart.memory.device import describe_versions
from seqpart.report.reporter import single
from seqpart.result import Result
from seqpart.schedule.steps import Position
from seqpart.session.places import PLAN
from seqpart.session.session import Session

RESULT = "result.json"


def carry_out(session: Session, began: float) -> Result:
    """began: the time from which its seconds count."""
    directory = session.places.directory
    with directory.interruptible():
        with session.limited():
            with directory.resumable(), session.interrupts:
                session.run_stages()
                session.take_best()
                session.homes.export(directory.result(WEIGHTS))
                session.saving.obey(Position(len(session.prepared.phases)), Metrics())
                session.interrupts.hold()
            session.homes.give_back()
        return _conclude(session, time.perf_counter() - began)


def _conclude(session: Session, seconds: float) -> Result:
    directory, reporter, sampler, plan = session.places.directory, session.reporter, session.sampler, session.prepared.plan
    weights, proof = directory.root / WEIGHTS, session.proof()
    test_loss, accuracy = session.test or (None, None)
    result = Result(
        weights=weights, test_loss=test_loss, accuracy=accuracy, metrics=session.watch.metrics,
        best_update=session.watch.best_update,
        train_losses=tuple(session.losses), proof=proof, plan=plan,
        seconds=round(seconds, 2), final_micro_batch=plan.micro_batch,
    )  # fmt: skip
    summary = {**asdict(result), "weights": str(weights), "peak at": sampler.peak_label, "plan": PLAN}
    del summary["config"]
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
    reporter.say(f"{tested(result)}; {seconds:.1f} s; weights in {weights}")
    reporter.proof(proof)
    session.finish(f"the run is finished; its results are in {directory.root}.")
    return result


def tested(result: Result) -> str:
    """What the test rows said, in words."""
    if result.test_loss is None:
        return "not tested: there is no test set"
    accuracy = "" if result.accuracy is None else f"test accuracy {100 * result.accuracy:.2f} %, "
    more = "".join(f", {name} {value:.4f}" for name, value in single(result.metrics).items())
    return f"{accuracy}test loss {result.test_loss:.4f}{more}"
