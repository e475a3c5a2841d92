"""A file of options: TOML, or YAML by its name."""

import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from seqpart.errors import OptionError
from seqpart.text import read_text, refuse_unusable, short

_YAML = (".yaml", ".yml")


def read_config(path: Path) -> dict[str, Any]:
    """Returns the file's table. Raises OptionError if it cannot be read, or does not match its suffix."""
    refuse_unusable("--config", path)
    kind, parse = ("YAML", _from_yaml) if path.suffix.lower() in _YAML else ("TOML", tomllib.loads)
    try:
        return parse(read_text(path))
    except OSError as error:
        raise OptionError(f"--config: cannot read {path}: {error.strerror}.") from None
    except ModuleNotFoundError:
        raise OptionError(f"--config: {path} is YAML, which PyYAML reads. pip install pyyaml, or write it as TOML.") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError and those of _from_yaml are such
        raise OptionError(f"--config: {path} is not {kind}: {error}.") from None
    except RecursionError:
        raise OptionError(f"--config: {path} is not {kind} that we can read: it is nested too deeply.") from None


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
