"""The methods by name."""

from seqpart.errors import OptionError
from seqpart.methods.exact import FULL
from seqpart.methods.method import Method
from seqpart.methods.synthetic import SIL

METHODS: dict[str, Method] = {method.name: method for method in (SIL, FULL)}


def method_named(name: str) -> Method:
    """Raises OptionError for a name that is not in METHODS."""
    if name not in METHODS:
        raise OptionError(f"--method: expected one of {', '.join(METHODS)}; found {name!r}.")
    return METHODS[name]
