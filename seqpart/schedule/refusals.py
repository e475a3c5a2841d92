"""What is asked of a run's length and of its evaluations, and does not go together."""

from collections.abc import Iterator
from typing import Protocol

from seqpart.schedule.best import criterion_of
from seqpart.schedule.lengths import AT_THE_END, interval_of


class Asked(Protocol):
    """The settings that matter here."""

    @property
    def method(self) -> str: ...
    @property
    def epochs(self) -> float | tuple[float, ...]: ...
    @property
    def max_steps(self) -> int | None: ...
    @property
    def eval_every(self) -> str | int | None: ...
    @property
    def test_every(self) -> int | None: ...
    @property
    def early_stopping(self) -> int | None: ...
    @property
    def keep_best(self) -> bool: ...
    @property
    def best_by(self) -> str | None: ...


def problems(asked: Asked, *, exact: bool, default_epochs: int) -> Iterator[str]:
    """In words. exact: whether the method is. default_epochs: where nothing is said.

    Raises OptionError for what cannot be read.
    """
    criterion_of(asked.best_by)
    if asked.eval_every is not None and asked.test_every is not None:
        yield "--eval-every and --test-every say the same of updates and of epochs. Leave one out"
    if asked.max_steps is not None and asked.max_steps < 1:
        yield f"--max-steps: expected a number above zero; found {asked.max_steps}"
    if asked.max_steps is not None and asked.epochs != default_epochs:
        yield "--max-steps comes in the place of --epochs: leave one out"
    if asked.early_stopping is not None and asked.early_stopping < 1:
        yield f"--early-stopping: expected evaluations, 1 or more; found {asked.early_stopping}"
    between = interval_of(asked.eval_every, asked.test_every)
    for flag, given in (("--early-stopping", asked.early_stopping is not None), ("--keep-best", asked.keep_best)):
        if given and exact and between == AT_THE_END:
            yield f"{flag} needs evaluations to compare: give --eval-every"
        elif given and not exact:
            yield f"{flag} goes with exact methods; found --method {asked.method}. Leave it out"
    if not exact:
        yield from _of_parts(asked)


def _of_parts(asked: Asked) -> Iterator[str]:
    """Of methods that train parts of the network for whole epochs."""
    epochs = asked.epochs if isinstance(asked.epochs, tuple) else (asked.epochs,)
    if asked.max_steps is not None:
        yield f"--max-steps goes with exact methods; method {asked.method} trains its parts for whole --epochs. Leave it out"
    if not all(float(number).is_integer() for number in epochs):
        yield f"--epochs: method {asked.method} trains its parts for whole epochs; found {', '.join(map(str, epochs))}"
    if interval_of(asked.eval_every, None).updates is not None:
        yield f"--eval-every: method {asked.method} is tested between epochs; give it as '1 epoch'"
