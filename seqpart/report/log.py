"""The logger `seqpart`: whatever the library says goes there, and handlers that a program has set up take it."""

import contextlib
import logging
from collections.abc import Iterator

LOGGER = logging.getLogger("seqpart")
LOGGER.addHandler(logging.NullHandler())  # else Python prints warnings by itself where nobody has set logging up


def is_heard(level: int) -> bool:
    """Whether a handler of the program's own takes records of that level: then nothing of them is printed beside it."""
    if not LOGGER.isEnabledFor(level):
        return False
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(handler.level <= level and not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Inside, what is said is printed, and not given to handlers that the user's model or data set up: for the command."""
    before, LOGGER.propagate = LOGGER.propagate, False
    try:
        yield
    finally:
        LOGGER.propagate = before
