"""Other spellings of options: short ones, and those that other programs have."""

from seqpart.errors import OptionError
from seqpart.values import flag_of

SPELLINGS = {"mem_limit": ("-m",), "output_dir": ("-o",), "lr": ("--learning-rate",)}
"""By option, what the parser takes too."""
_BF16 = "--bf16"


def flags_of(name: str) -> tuple[str, ...]:
    """By which an option is given."""
    return (flag_of(name), *SPELLINGS.get(name, ()))


def spelled_out(arguments: list[str]) -> list[str]:
    """`arguments` with `--dtype bf16` in the place of `--bf16`. Raises OptionError where both are there and differ."""
    if _BF16 not in arguments:
        return arguments
    types = [after for word, after in zip(arguments, [*arguments[1:], ""], strict=True) if word == "--dtype"]
    types += [word.partition("=")[2] for word in arguments if word.startswith("--dtype=")]
    if others := [word for word in types if word != "bf16"]:
        raise OptionError(f"--bf16 is short for --dtype bf16; found --dtype {others[0]} beside it. Leave one of them out.")
    return ["--dtype=bf16" if word == _BF16 else word for word in arguments]


def one_spelling(table: dict[str, object], source: str) -> dict[str, object]:
    """Options of a file by the names that settings have: `learning_rate` is `lr`, and `bf16 = true` is `dtype = "bf16"`.

    Raises OptionError where an option stands there in two spellings.
    """
    names = {flag.lstrip("-").replace("-", "_"): name for name, flags in SPELLINGS.items() for flag in flags}
    found: dict[str, object] = {}
    for key, value in table.items():
        name = names.get(key.replace("-", "_"), key.replace("-", "_"))
        if name == "bf16":
            if not isinstance(value, bool):
                raise OptionError(f"{source}: {key} must be true or false; found {value!r}.")
            if not value:
                continue
            name, value = "dtype", "bf16"
        if name in found:
            raise OptionError(f"{source} says {name} twice, in two spellings. Leave one of them out.")
        found[name] = value
    return found
