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
      OtherRank           1   several processes: another one has ended
      ScheduleError       1   our own fault: a schedule broke the grammar
    Interrupted         130   no error: a KeyboardInterrupt that has left a checkpoint

A message says what was expected, what was found, and the cure. It is written with the command's flags (`--batch-size 8`);
`str` of an error has the arguments of Python in their place (`batch_size=8`), and the command prints `with_flags`.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

_WORDS = (
    "sil|ist|streamed|checkpointed|full|auto|mse|psl|cross-entropy|orthogonal|prototype|cached|synthetic|fp32|bf16|stochastic|never|adamw?|"
    "adafactor|sgd|lion|muon|schedulefree|adamw8bit|lion8bit|left|all|shard|keep|zero|cpu|rows|none|"
    "DIR|wandb|tensorboard|(?:cuda|xpu|mps|hip|rocm)(?::[0-9]+)?"
)
_PATH = r"[^\s,;]*/[^\s,;]*[\w/]"
_DATA = r"(?:imagefolder|folder|idx|npz|text|hf-text):[^\s,;)]*[\w/]"
_QUOTED = r"""'(?:[^']|'"'"')*'"""
_FLAG = re.compile(
    r"(?<![\w/=-])--([a-z]+(?:-[a-z]+)*)"
    rf"(?: (\d+(?:[.,]\d+)*(?:e-?\d+)?(?:[KMGT]i?B|min|s)?|(?:{_WORDS})|{_DATA}|{_QUOTED}|{_PATH})(?![\w/-]))?"
)
"""A flag, and the value behind it where that is a number, a size, a word that some option takes, a path with a slash, or
quoted as a shell has it."""
_NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")
_TWO_STOPS = re.compile(r"(?<=[\w)\]'\"])\.\.(?=\s|$)")
"""Two full stops: a library's sentence at the end of one of ours."""
_ARGUMENTS = {"plan": "reuse", "data": "train"}
"""Flags with another name in Python."""


def in_arguments(text: str) -> str:
    """`text` with the arguments of Python in place of flags."""
    return _FLAG.sub(lambda match: _argument(match[1], match[2]), text)


def shown(path: Path) -> str:
    """`path` for a message: from the present directory on, if that leads there."""
    with contextlib.suppress(OSError):  # there may be none any more
        here = Path.cwd()
        if path.is_relative_to(here) and path != here:
            return str(path.relative_to(here))
    return str(path)


def resuming(path: Path) -> str:
    """`--resume PATH` for a message: quoted where a shell, or `in_arguments`, would not take it as it is."""
    plain = shown(path)
    text = shlex.quote(plain)
    if text == plain and not re.fullmatch(_PATH, text):
        text = f"'{text}'"
    return f"--resume {text}"


def _argument(flag: str, value: str | None) -> str:
    name = _ARGUMENTS.get(flag, flag.replace("-", "_"))
    if value is None:
        return name
    if value.startswith("'"):
        (value,) = shlex.split(value)
    if flag == "data" and ":" in value:  # no argument of `fit`: what reads it is a function
        return f"seqpart.zoo.datasets.load({_text(value)})"
    if name == "resume":  # no setting: the trainer itself takes none
        return f"fit(..., resume={value if value == 'DIR' else _text(value)})"
    if _NUMBER.fullmatch(value):
        return f"{name}={value}"
    if re.fullmatch(r"\d+(,\d+)+", value):
        return f"{name}=({value.replace(',', ', ')})"
    return f"{name}={_text(value)}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class SeqpartError(Exception):
    """Root of the tree; `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(self, *values: object) -> None:
        super().__init__(*values)
        self._notes: list[str] = []

    def __str__(self) -> str:
        return in_arguments(self.with_flags)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def with_flags(self) -> str:
        """The message as the command prints it. Take this one where a message becomes part of another."""
        return _TWO_STOPS.sub(".", super().__str__())

    @property
    def notes_with_flags(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def add_note(self, note: str) -> None:
        self._notes.append(note)
        super().add_note(in_arguments(note))


@contextlib.contextmanager
def refusing(words: Callable[[Exception], SeqpartError]) -> Iterator[None]:
    """A context in which an error that is none of ours, as of the user's code or a library, is raised in `words`."""
    try:
        yield
    except SeqpartError:
        raise
    except Exception as error:
        raise words(error) from error


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
    """No plan keeps the limit. `smallest` is the least limit, in bytes, that would (None when no limit would help), and `rows`
    the micro-batch at which it does, where that is known."""

    exit_code = 3

    def __init__(self, message: str, smallest: int | None = None, named: str = "", rows: int | None = None) -> None:
        """`named`: how the message, which it follows, names that limit."""
        super().__init__(message + named)
        self.message, self.smallest, self.rows = message, smallest, rows


class LimitExceeded(SeqpartError):
    exit_code = 4


class OtherRank(SeqpartError):
    """Another process of a run under torchrun has ended."""


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
    """A signal (SIGINT, SIGTERM, SIGHUP) ended the run, and `directory` holds a checkpoint to go on from: call `fit` again
    with `resume=directory`. A KeyboardInterrupt, so that handlers of errors let it pass."""

    def __init__(self, directory: Path, cure: str | None = None) -> None:
        """cure: what goes on with it, where that is not `fit`."""
        super().__init__(f"the run is saved in {shown(directory)}. Resume with {cure or in_arguments(resuming(directory))}")
        self.directory = directory
