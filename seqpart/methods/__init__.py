"""The methods by name. `register` makes one of your own known."""

from seqpart.config import GROUPS
from seqpart.errors import OptionError
from seqpart.methods.exact import CHECKPOINTED, FULL, STREAMED
from seqpart.methods.ist.method import IST
from seqpart.methods.method import Method
from seqpart.methods.separable import PSL
from seqpart.methods.sil import SIL

METHODS: dict[str, Method] = {method.name: method for method in (SIL, IST, STREAMED, CHECKPOINTED, FULL, PSL)}


EXACT = (FULL, CHECKPOINTED, STREAMED)
"""The methods that `auto` chooses from."""


def methods_named(name: str) -> tuple[Method, ...]:
    """Returns the method of that name; for `auto` all exact ones. Raises OptionError for another name."""
    if name == "auto":
        return EXACT
    if name not in METHODS:
        raise OptionError(f"--method: expected one of auto, {', '.join(METHODS)}; found {name!r}.")
    return (METHODS[name],)


def register(method: Method) -> None:
    """Makes a method known by its name, in this process.

    Raises OptionError for a name that another one has, and for options that no run has: they are groups of seqpart.config.
    """
    if not set(method.options) <= set(GROUPS):
        raise OptionError(f"method {method.name}: expected as options groups of seqpart.config; found {method.options}.")
    if method.name == "auto" or type(METHODS.get(method.name, method)) is not type(method):
        raise OptionError(f"there is a method {method.name} already. Give yours another name.")
    METHODS[method.name] = method
