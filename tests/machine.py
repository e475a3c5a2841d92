"""A machine that plans are given, and do not measure, which takes most of so short a run."""

from seqpart.profile.machine import MEASURED, Speeds

SPEEDS = Speeds(flops=1e10, optimizer=1e8, read=1e9, write=1e9)


def known(patch):
    """One that nobody measures; `patch` is a monkeypatch, or `builtins` for good."""
    known_runtime(patch, 500 << 20)
    known_speeds(patch)


def known_runtime(patch, nbytes):
    patch.setattr(MEASURED, "runtime", lambda _: nbytes)


def known_speeds(patch, speeds=SPEEDS):
    measured_by(patch, lambda *_: speeds)


def measured_by(patch, measure):
    patch.setattr(MEASURED, "speeds", measure)
