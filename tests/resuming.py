"""Runs that are stopped again and again and go on, in this process, and what a run that was left alone ends with."""

import contextlib
import signal

from seqpart import Trainer
from seqpart.errors import Interrupted
from seqpart.executor import StepDone
from seqpart.report import Reporter
from tests.exactly import Trained


class Killed(BaseException):
    """Ends a run as a kill would: nothing more is saved."""


def interrupt():
    signal.raise_signal(signal.SIGINT)


def kill():
    raise Killed


class Stopping(Reporter):
    """Calls `how` after the run's `at`-th step; keeps the steps and what was said."""

    def __init__(self, at=None, how=interrupt):
        super().__init__(quiet=True)
        self._at, self._how = at, how
        self.steps, self.said = [], []

    def listen(self, event):
        super().listen(event)
        if isinstance(event, StepDone):
            self.steps.append(event.step)
            if len(self.steps) == self._at:
                self._how()

    def say(self, text):
        self.said.append(text)


class Arm(Trained):
    """Runs of one model on one data set, forced onto one way of training."""

    def __init__(self, monkeypatch, folder, how, model, data, **options):
        super().__init__(monkeypatch, folder, model, data, **options)
        self.how, self.root = how, folder / "stopped"
        self._force(how)

    def fit(self, name="stopped", *, reporter=None, resume=None, witness=None, **options):
        options = {"method": self.how.method, **self.options, **options}
        if self.how.relay == "host":
            options["ram_limit"] = "50MB"
        if self.how.method == "full":
            options.pop("partitions", None)
        if resume is None:
            options["output_dir"] = self._folder / name
        loss, optimizer = options.pop("loss", None), options.pop("optimizer", "sgd")
        trainer = Trainer(self._model(), loss, optimizer, quiet=True, **options)
        return trainer.fit(*self._data, resume=resume, reporter=reporter, witness=witness)

    def whole(self, **options):
        """What a run that nobody stops ends with, and its steps."""
        reporter = Stopping()
        return ended(self.fit("whole", reporter=reporter, **options)), reporter.steps

    def stopped(self, events, **options):
        """What a run ends with that is stopped by each of `events`, (steps, how), and goes on. Returns it and the stops."""
        result, stops = None, -1
        while result is None:
            stops += 1
            with contextlib.suppress(Interrupted, Killed):
                result = self.fit(resume=self.root if stops else None, reporter=Stopping(*next(events, ())), **options)
        return ended(result), stops


def ended(result):
    """Every bit that a run leaves."""
    return result.weights.read_bytes(), result.train_losses, result.test_loss, result.accuracy


def flip(path, byte=-1, bit=0):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)
