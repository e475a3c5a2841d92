"""`package.module:function`, as the command line names a model or a data set of the user's own."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seqpart.errors import OptionError


def imported(name: str, option: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; the current directory is searched too.

    Raises OptionError, naming `option`, where there is none.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise OptionError(f"{option} {name}: no module named {error.name!r} here or among the installed packages.") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise OptionError(
            f"{option} {name}: {module_name} has no function {function_name!r}. It has {', '.join(public[:8]) or 'none'}."
        )
    return function  # type: ignore[no-any-return]
