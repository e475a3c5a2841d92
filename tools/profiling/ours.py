"""A child process: one method of seqpart, under the limit. `python -m profiling.ours WAY FOLDER [options of a job]`"""

if __name__ == "__main__":
    from seqpart.launch import prepare

    prepare()  # before torch is loaded

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from profiling import answer
from profiling.question import job_of, parsed, way_named
from profiling.trace import StepLog
from seqpart.cli.job import opened
from seqpart.errors import DoesNotFit, LimitExceeded, OutOfMemory, SeqpartError
from seqpart.plan.plan import Plan
from seqpart.report.reporter import Reporter
from seqpart.schedule.phase import PhaseKind
from seqpart.schedule.steps import Step, StepDone, Verb
from seqpart.trainer import Result


class Tracing(Reporter):
    """Says nothing, and writes down every step."""

    def __init__(self, log: StepLog) -> None:
        super().__init__(quiet=True)
        self._trace, self._phases = log, ()
        self.traffic = {"bytes_read": 0, "bytes_written": 0, "to_device": 0, "from_device": 0}
        """Bytes that training steps brought and sent: of the disk, and over the bus of a GPU."""
        self._changed: set[int] = set()

    def plan(self, plan: Plan) -> None:
        self._parts = plan.partitions

    def begin(self, phases: Any, first: int, limit: int, used: Any) -> None:
        self._phases = phases
        self._trace.start()

    def listen(self, event: Any) -> None:
        if not isinstance(event, StepDone):
            return
        trains = self._phases[event.step.phase].kind is not PhaseKind.TEST
        self._trace.note(str(event.step), trains=trains)
        if trains:
            self.traffic["bytes_read"] += event.bytes_read
            self.traffic["bytes_written"] += event.bytes_written
            self._count_bus(event.step)

    def _count_bus(self, step: Step) -> None:
        part = self._parts[step.partition]
        if step.verb is Verb.LOAD:
            self.traffic["to_device"] += part.weights + (part.state if step.more else 0)
        elif step.verb is Verb.UPDATE:
            self._changed.add(step.partition)
        elif step.verb is Verb.DROP and step.partition in self._changed:
            self._changed.remove(step.partition)
            self.traffic["from_device"] += part.weights + part.state


def main() -> None:
    name, folder, *arguments = sys.argv[1:]
    way, place = way_named(name), Path(folder)
    log = StepLog(place / "steps.log")
    reporter = Tracing(log)
    try:
        job = job_of(parsed(arguments), way)
        with ExitStack() as stack:
            job, trainer, train, test = opened(job, reporter, stack)
            result = trainer.fit(train, test, reporter=reporter)
    except DoesNotFit as error:
        answer.write(place / "answer.json", answer.NO_ROOM, asked=error.smallest, message=error.with_flags)
    except (LimitExceeded, OutOfMemory) as error:
        answer.write(place / "answer.json", answer.OUT_OF_MEMORY, asked=None, message=error.with_flags)
    except SeqpartError as error:
        answer.write(place / "answer.json", answer.REFUSED, asked=None, message=error.with_flags)
    else:
        answer.write(place / "answer.json", answer.DONE, **_told(result, trainer.device.kind, reporter, log))
    finally:
        log.close()


def _told(result: Result, kind: str, reporter: Tracing, log: StepLog) -> dict[str, Any]:
    proof, plan = result.proof, result.plan
    return {
        "predicted": plan.peak, "runtime": proof.runtime, "allocator_peak": proof.allocator_peak, "granted": proof.host,
        "pinned": 0 if kind == "cpu" else proof.host, "simulated": kind == "sim",
        "violations": proof.violations, "inside": proof.peak,
        "source": proof.source, "method": plan.method, "partitions": len(plan.partitions), "slots": plan.slots,
        "micro_batch": result.final_micro_batch, "training_seconds": log.training, "train_losses": list(result.train_losses),
        "test_loss": result.test_loss, "accuracy": result.accuracy, **reporter.traffic,
    }  # fmt: skip


if __name__ == "__main__":
    main()
