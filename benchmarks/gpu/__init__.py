"""What only a GPU can tell: smoke.sh, contract.sh and speed.sh, and the programs that they run."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps

from seqpart.errors import OptionError

Main = Callable[[Sequence[str] | None], int]


def refusing_in_words(main: Main) -> Callable[..., int]:
    """`main`, which prints an OptionError as one sentence and returns its exit code."""

    @wraps(main)
    def run(words: Sequence[str] | None = None) -> int:
        try:
            return main(words)
        except OptionError as error:
            print(f"refused: {error.with_flags}", file=sys.stderr)
            return error.exit_code

    return run
