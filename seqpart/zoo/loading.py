"""`package.module:function`, as the command line names a model or a data set of the user's own."""

import importlib
import sys
from pathlib import Path
from typing import Any

from seqpart.errors import OptionError, SeqpartError


def called(name: str, option: str) -> Any:
    """What the function that `package.module:function` names returns; the current directory is searched too.

    Raises OptionError, naming `option`, where there is none and where the user's code fails.
    """
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise OptionError(f"{option}: expected package.module:function; found {name!r}.")
    module = _module(module_name, f"{option} {name}")
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise OptionError(
            f"{option} {name}: {module_name} has no function {function_name!r}. It has {', '.join(public[:8]) or 'none'}."
        )
    try:
        return function()
    except SeqpartError:
        raise
    except Exception as error:
        raise OptionError(
            f"{option} {name}: calling {function_name}() failed: {_short(error)}. "
            "It must run without arguments; --debug shows where it failed."
        ) from error


def _module(name: str, asked: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise OptionError(f"{asked}: no module named {error.name!r} here or among the installed packages.") from None
    except Exception as error:
        raise OptionError(f"{asked}: importing {name} failed: {_short(error)}. --debug shows where it failed.") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
