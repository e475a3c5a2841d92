"""Every error that a user can meet, each with its exit code.

    SeqpartError
      BadInput            2   an option, a model or data that cannot be honoured
        OptionError           a setting: unknown, out of range, or not for this method
        ModelError            a model that cannot be cut into blocks
        DataError             a missing, malformed, empty or non-finite data set
        Diverged              a loss or a weight that is no longer finite
      DoesNotFit          3   planning: no partition fits the limit
      LimitExceeded       4   running: the measured memory passed the limit
      OutOfMemory         4   running: an allocation failed inside the limit and smaller micro-batches did not help
      VerifyMismatch      5   verify: two ways to train that should be equal differ, or the check is blind
      StoreError          6   files: damaged, torn, unusable
        CorruptFile           a checksum, a size or a header is wrong
        DiskFull              no room left for homes or boundary rows
        DirectoryUnusable     not writable, not ours, or in use by a live run
      ScheduleError       1   our own fault: a schedule broke the grammar
    Interrupted         130   no error: a KeyboardInterrupt that has left a checkpoint

A message says what was expected, what was found, and the cure.
"""

from pathlib import Path


class SeqpartError(Exception):
    """Root of the tree; `exit_code` is what the command line returns."""

    exit_code = 1


class BadInput(SeqpartError):
    exit_code = 2


class OptionError(BadInput):
    pass


class ModelError(BadInput):
    pass


class DataError(BadInput):
    pass


class Diverged(BadInput):
    pass


class DoesNotFit(SeqpartError):
    """No plan keeps the limit. `smallest` is the least limit, in bytes, that would (None when no limit would help)."""

    exit_code = 3

    def __init__(self, message: str, smallest: int | None = None, named: str = "") -> None:
        """`named`: how the message, which it follows, names that limit."""
        super().__init__(message + named)
        self.message, self.smallest = message, smallest


class LimitExceeded(SeqpartError):
    exit_code = 4


class OutOfMemory(SeqpartError):
    exit_code = 4


class VerifyMismatch(SeqpartError):
    exit_code = 5


class StoreError(SeqpartError):
    exit_code = 6


class CorruptFile(StoreError):
    """`path` is the damaged file; None where no single one is."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class DiskFull(StoreError):
    pass


class DirectoryUnusable(StoreError):
    pass


class ScheduleError(SeqpartError):
    pass


class Interrupted(KeyboardInterrupt):
    """A signal ended the run, and `directory` holds a checkpoint to go on from."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"interrupted; the run is saved: --resume {directory}")
        self.directory = directory
