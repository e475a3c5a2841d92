"""Collects options from a config file, the resumed run, and the command line, which wins.

The parser's form is made from the fields, with every option under the heading of its group.
"""

import ast
import dataclasses
import inspect
import itertools
import shutil
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

import seqpart.checkpoint.manifest as manifests
from seqpart.checkpoint.marker import MARKER, latest
from seqpart.checkpoint.resume import as_state, refuse_finished
from seqpart.config import GROUPS, NO_LIMIT
from seqpart.errors import CorruptFile, OptionError, in_arguments, resuming
from seqpart.fields import as_text, checked_value, flags_of, metavar_of
from seqpart.files import opened
from seqpart.report.terminal import wrapped
from seqpart.schema import as_type
from seqpart.settings import hints_of
from seqpart.store.atomic import checked_body
from seqpart.store.scratch import JOB, has_checkpoint
from seqpart.text import read_table, refuse_unusable, short, with_suggestion

T = TypeVar("T")

_NOT_KEPT = {
    "config", "resume", "output_dir", "overwrite", "dry_run", "plan", "plan_out", "print_schedule", "trace", "quiet", "debug",
}  # fmt: skip
"""Options that a resumed run does not take over."""
_BF16 = "--bf16"
"""Short for --dtype bf16."""
_DEFAULT = " Default: "
Option = bool | int | float | str | None
"""An option's value in JSON."""
_YAML = (".yaml", ".yml")


def read_config(path: Path) -> dict[str, Any]:
    """Returns the file's table. Raises OptionError if it cannot be read, or does not match its suffix."""
    if path.suffix.lower() not in _YAML:
        others = "" if path.suffix.lower() == ".toml" else " (options are read from TOML, and from YAML in a .yaml file)"
        return read_table("--config", path, f"TOML{others}")
    try:
        return read_table("--config", path, "YAML", _from_yaml)
    except ModuleNotFoundError:
        raise OptionError(f"--config: {path} is YAML, which PyYAML reads. pip install pyyaml, or write it as TOML.") from None


def _from_yaml(text: str) -> dict[str, Any]:
    """Parses plain values only: no tags that build objects, no duplicate keys, no aliases, which can expand enormously."""
    import yaml

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"line {self.peek_event().start_mark.line + 1} has an alias, *{self.peek_event().anchor}")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            names = [key.value for key, _ in node.value]
            twice = [str(name) for at, name in enumerate(names) if name in names[:at]]
            if twice:
                raise ValueError(f"line {node.start_mark.line + 1} begins a table that has {short(twice[0])} twice")
            return dict(super().construct_mapping(node, deep))

    try:
        found = yaml.load(text, Plain)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError("expected a table of options, each as `name: value`")
    return {key: _as_list(value) for key, value in found.items()}


def _as_list(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        raise ValueError("expected a value or a list of values; found a list in a list")
    if value is None:
        raise ValueError("a name without a value; leave it out for the default")
    return value


def options_of(kind: type[T], arguments: list[str], program: str) -> T:
    """Parses `gathered` arguments as a `kind`. Raises OptionError for invalid or unknown options."""
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    if not asks_for_help:
        _refuse_unparsable(kind, arguments)
    about = wrapped(inspect.getdoc(kind) or "", shutil.get_terminal_size().columns)
    form = _form_of(kind, help_of(kind) if asks_for_help else {})
    # All help is given here: to look for more in the source of each group takes half of the time to parse.
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
    filled = tyro.cli(form, args=arguments, prog=program, description=about, config=config)
    return kind(**{name: value for group in vars(filled).values() for name, value in vars(group).items()})


def groups_of(kind: Any) -> dict[str, list[str]]:
    """Returns the options of `kind` by heading of --help, in the order of the groups of Settings."""
    groups: dict[str, list[str]] = {group.heading: [] for group in GROUPS}
    names = [field.name for field in dataclasses.fields(kind)]
    for owner in reversed(kind.__mro__[:-1]):
        for name in inspect.get_annotations(owner):
            if name in names:  # and no override of a field that has its place
                names.remove(name)
                groups[owner.heading].append(name)
    return groups


def _form_of(kind: type[Any], help_text: dict[str, str]) -> type[Any]:
    """Returns a dataclass with one field per group, which holds that group's options. help_text: the help by option."""
    hints, defaults = hints_of(kind), {field.name: field.default for field in dataclasses.fields(kind)}
    groups = []
    for heading, names in groups_of(kind).items():
        asked = [_argument(name, hints[name], defaults[name], help_text.get(name, "")) for name in names]
        group = dataclasses.make_dataclass(heading.replace("-", "_"), asked, kw_only=True)
        group.__doc__ = ""
        groups.append((group.__name__, group))
    return dataclasses.make_dataclass(kind.__name__, groups, kw_only=True)


def _argument(name: str, hint: Any, default: Any, help_text: str) -> tuple[str, Any, Any]:
    """Returns (name, type, field) of one option. A default that is described in words is shown after the help, instead of
    `None`. (In the help itself it would leave a blank line where it fills the last one.)"""
    help_text, word, in_words = split_default(help_text, default)
    behaviour = f"{word.lstrip()}{in_words}" if default is None else None
    kind = bool if hint is bool else Annotated[
        Any,
        PrimitiveConstructorSpec(
            nargs=1, metavar=metavar_of(hint), instance_from_str=lambda words: _read(name, words[0], hint),
            is_instance=lambda _: True, str_from_instance=lambda value: [as_text(value)],
        ),
    ]  # fmt: skip
    conf = tyro.conf.arg(help=help_text, help_behavior_hint=behaviour, aliases=flags_of(name, hint)[1:])
    return name, Annotated[kind, conf], dataclasses.field(default=default)


def split_default(help_text: str, default: Any) -> tuple[str, str, str]:
    """Splits a help text from its last sentence "Default: ...", for an option whose default is only described there."""
    return help_text.rpartition(_DEFAULT) if default is None and _DEFAULT in help_text else (help_text, "", "")


def _read(name: str, text: str, hint: Any) -> Any:
    """Returns the value of `text`; or the error, which the options report together with all others."""
    try:
        return checked_value(name, text, hint, typed=True)
    except OptionError as error:
        return error


def help_of(kind: type[Any]) -> dict[str, str]:
    """Returns the help by option: the docstring under the field, in the source of its class or of one that it inherits from."""
    help_text = {}
    for owner in reversed([one for one in kind.__mro__ if dataclasses.is_dataclass(one)]):
        (body,) = (node.body for node in ast.parse(inspect.getsource(owner)).body if isinstance(node, ast.ClassDef))
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                help_text[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return help_text


def _refuse_unparsable(kind: type[Any], arguments: list[str]) -> None:
    """Raises OptionError for unknown flags, missing required ones, and words that belong to no flag, before the parser prints
    an error of its own."""
    flags = {field: flags_of(field.name, field.type) for field in dataclasses.fields(kind)}
    required = {flag for field in flags if field.default is dataclasses.MISSING for flag in flags[field]}
    switches = {flag for field in flags if field.type is bool for flag in flags[field]}
    known = [flag for several in flags.values() for flag in several]
    given = {(flag := word.partition("=")[0]): flag.replace("_", "-") for word in arguments if word.startswith("-")}
    negated = {flag.replace("--", "--no-", 1) for flag in switches}
    unknown = [flag for flag, word in given.items() if flag[:2] == "--" != flag and word not in negated | {*known}]
    if unknown:
        raise OptionError(f"unknown option(s): {with_suggestion(unknown, known)} --help shows all.")
    takes_next = ""
    for word in [*arguments, "--"]:
        flag = word.replace("_", "-")
        if takes_next and word[:2] == "--":
            raise OptionError(f"{takes_next}: expected a value after it; found none. --help shows what it takes.")
        if not takes_next and not word.startswith("-"):
            raise OptionError(f"found {short(word)}, which belongs to no option. Give --NAME VALUE; --help shows all.")
        takes_next = flag if not takes_next and flag in known and flag not in switches else ""
    if required.isdisjoint(given.values()) and not any(word[:2] in required for word in given):  # -m2GB
        raise OptionError(NO_LIMIT)


def has_flag(arguments: list[str], flag: str) -> bool:
    """True if `flag` is among `gathered` arguments."""
    return any(word.partition("=")[0] == flag for word in arguments)


def gathered(arguments: list[str], kind: type[Any]) -> list[str]:
    """Returns `arguments` after those of `--config FILE` or of the run of `--resume DIR`. kind: the options' dataclass."""
    known = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("config", "resume")}
    config, resume = _given(arguments, "--config"), _given(arguments, "--resume")
    if resume is not None and config is not None:
        raise OptionError("--resume goes on with the run's own options: leave --config out.")
    table, source = {}, ""
    if config is not None:
        table, source = read_config(Path(config)), f"--config: {config}"
    elif resume is not None:
        table, source = _kept(Path(resume)), f"--resume: {resume}"
    arguments, table = _spelled_out(arguments), _one_spelling(table, source, known.values())
    if resume is not None and "max_steps" in table and _given(arguments, "--epochs") is not None:
        raise OptionError(
            f"--epochs: the run in {resume} has its length in updates, --max-steps {table['max_steps']}. Leave it out."
        )
    unknown = sorted(key for key in table if key not in known)
    if unknown:
        raise OptionError(
            f"{source} has unknown option(s) {with_suggestion(unknown, known)} Its keys are the flags of --help without dashes."
        )
    found = [
        word
        for key, value in table.items()
        for word in _as_arguments(source, key.replace("_", "-"), value, known[key].type is bool)
    ]
    return [*found, *arguments]


def _spelled_out(arguments: list[str]) -> list[str]:
    """Replaces `--bf16` with `--dtype bf16`. Raises OptionError if both are given and differ."""
    if _BF16 not in arguments:
        return arguments
    if (dtype := _given(arguments, "--dtype")) not in (None, "bf16"):
        raise OptionError(f"--bf16 is short for --dtype bf16; found --dtype {dtype} beside it. Leave one of them out.")
    return ["--dtype=bf16" if word == _BF16 else word for word in arguments]


def _one_spelling(table: dict[str, Any], source: str, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Returns a file's options by field name: `learning_rate` becomes `lr`, `bf16 = true` becomes `dtype = "bf16"`.

    Raises OptionError if an option is given in two spellings.
    """
    names = {flag.lstrip("-").replace("-", "_"): field.name for field in fields for flag in flags_of(field.name, field.type)}
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        name = names.get(name, name)
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


def kept_options(job: Any) -> dict[str, Any]:
    """Returns a job's options that `--resume` needs, as JSON."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field in dataclasses.fields(job)
        if field.name not in _NOT_KEPT and (value := getattr(job, field.name)) != field.default
    }


def _given(arguments: list[str], flag: str) -> str | None:
    found = [b for a, b in itertools.pairwise(arguments) if a == flag]
    found += [word.partition("=")[2] for word in arguments if word.startswith(f"{flag}=")]
    return found[-1] if found else None


def _kept(path: Path) -> dict[str, Any]:
    """Reads the job of the run in `path` from its checkpoint, or from job.json if there is none yet.

    Raises CorruptFile if that is damaged: a changed digit would train another job.
    """
    refuse_unusable("--resume", path)
    if not path.is_dir() or has_checkpoint(path):
        job, found = path, as_state(manifests.load(path)).job
        if found is None:
            raise OptionError(
                f"--resume: the run in {path} was started from Python. Resume it there: {in_arguments(resuming(path))}."
            )
    else:
        job = latest(path, JOB)
        try:
            with open(opened(job), "rb") as file:
                found = checked_body("job", file.read().decode())
        except (OSError, ValueError) as error:
            refuse_finished(path)
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is damaged: {error}"
            if isinstance(error, OSError) and not (path / MARKER).is_file():
                raise OptionError(f"--resume: {path} is not the directory of a run: {job} {why}.") from None
            raise CorruptFile(
                f"--resume: {job} {why}. It was not used. Nothing was saved there yet: give the run's options again, with "
                f"--output-dir {path} instead of --resume.", job,
            ) from None  # fmt: skip
    try:
        options = as_type(dict[str, Option | list[Option]], found)
        if others := _NOT_KEPT.intersection(options):
            raise ValueError(f"{min(others)} is none of them")
    except ValueError as error:
        raise CorruptFile(f"--resume: {job} names no options that a run keeps ({error}). It was not used.", job) from None
    return options


def _as_arguments(source: str, name: str, value: Any, switch: bool) -> list[str]:
    if switch:
        if not isinstance(value, bool):
            raise OptionError(f"{source}: {name} must be true or false; found {value!r}.")
        return [f"--{name}"] if value else []
    if isinstance(value, dict):
        raise OptionError(f"{source}: {name} must be a value or a list of values; found a table.")
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return [f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]
