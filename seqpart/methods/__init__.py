"""The methods by name."""

from seqpart.errors import OptionError
from seqpart.methods.exact import CHECKPOINTED, FULL, STREAMED
from seqpart.methods.ist.method import IST
from seqpart.methods.method import Method
from seqpart.methods.separable import PSL
from seqpart.methods.sil import SIL

METHODS: dict[str, Method] = {method.name: method for method in (SIL, STREAMED, CHECKPOINTED, FULL, IST, PSL)}


EXACT = (FULL, CHECKPOINTED, STREAMED)
"""The methods that `auto` chooses from."""


def methods_named(name: str) -> tuple[Method, ...]:
    """Returns the method of that name; for `auto` all exact ones. Raises OptionError for another name."""
    if name == "auto":
        return EXACT
    if name not in METHODS:
        raise OptionError(f"--method: expected one of auto, {', '.join(METHODS)}; found {name!r}.")
    return (METHODS[name],)
