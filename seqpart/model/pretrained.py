"""The directory that a library's `from_pretrained` reads, around weights that are there already."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

from seqpart.errors import OptionError
from seqpart.model.weight_files import INDEX, PICKLES, WeightFiles
from seqpart.store.direct import explained

MODEL = "model.safetensors"


def write_pretrained(folder: Path, weights: Path, config: Any) -> None:
    """`folder` with `weights` as model.safetensors, and for a model of transformers with its `config` and what lies beside the
    weights that it was loaded from. Raises StoreError, and OptionError where there are other weights already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(path.name for path in folder.iterdir() if _is_weights(path)):
            raise OptionError(f"{folder} holds weights already: {there[0]}. Give another directory, or remove them.")
        if hasattr(config, "save_pretrained"):
            _write_config(folder, weights, config)
        _link_or_copy(weights, folder / MODEL)  # last: with it the directory is whole
    except OSError as error:
        raise explained(error, folder) from None


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", *PICKLES) or path.name.endswith(INDEX)


def _write_config(folder: Path, weights: Path, config: Any) -> None:
    source = Path(getattr(config, "_name_or_path", "") or "nowhere")
    for path in sorted(source.iterdir()) if (source / "config.json").is_file() else ():
        if path.is_file() and not _is_weights(path):
            shutil.copyfile(path, folder / path.name)
    own = copy.deepcopy(config)
    types = {stored.spec.dtype for stored in WeightFiles(weights).tensors.values() if stored.spec.dtype.is_floating_point}
    if len(types) == 1:
        own.dtype = types.pop()
    own.save_pretrained(folder)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        part = target.with_name(target.name + ".part")
        shutil.copyfile(source, part)
        part.replace(target)
