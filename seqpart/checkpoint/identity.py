"""Identifies a run's data and model, also among those with the same labels and tensor shapes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from seqpart.data.splits import Split, converted
from seqpart.errors import OptionError
from seqpart.model.blocks import Block
from seqpart.model.inspection import digest_of, settings_of
from seqpart.profile.fake_mode import FakeMode

_FIRST = 16 << 20
"""Bytes of first rows that are digested of data that is read in order, as files are; at least one piece."""

_MOST = 12
"""Most settings that a message names."""
Layers = list[tuple[str, str]]
"""For each block its type, and a digest of its modules, their settings and the functions between them."""


def row_digests(train: Split, test: Split) -> dict[str, str]:
    """Returns digests of rows of x spread over each split; "" if rows differ each time that they are read."""
    return {name: _digest(_some(split), split) for name, split in (("training", train), ("test", test)) if split.count}


def _digest(rows: Iterable[torch.Tensor], split: Split) -> str:
    digest, found = xxhash.xxh3_64(), False
    for some in rows:
        digest.update(converted(some, split).contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found = True
    return digest.hexdigest() if found else ""


def _some(split: Split) -> Iterable[torch.Tensor]:
    if split.some is not None:
        yield from split.some()
        return
    nbytes = 0
    for rows in split.open():
        yield rows
        nbytes += rows.nbytes
        if nbytes >= _FIRST:
            return


def refuse_other_rows(root: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises OptionError for rows that are not those of the run in `root`, if both digests are known."""
    for name, digest in now.items():
        if digest and before.get(name, "") not in ("", digest):
            raise OptionError(
                f"--resume: {root} was trained on other data: the {name} rows are others, though their labels are the same. "
                "Give the same --data, in the same order."
            )


def layers_of(chain: Iterable[Block]) -> Layers:
    """Returns the layers of a chain; they are equal for the same model in another process."""
    known: dict[object, tuple[str, str]] = {}
    mode = FakeMode()
    for block in chain:
        if block.same_as not in known:
            module, tensors = block.fake(mode)
            known[block.same_as] = str(getattr(module, "described", type(module).__name__)), digest_of(module, tensors)
    return [known[block.same_as] for block in chain]


def refuse_other_layers(root: Path, before: Layers, chain: Sequence[Block]) -> None:
    """Raises OptionError, naming the first block that differs from the run in `root`; does nothing if that is not known."""
    for block, was, found in zip(chain, before, layers_of(chain), strict=False):
        if was != found:
            what = f"is a {found[0]}, and was a {was[0]}"
            if was[0] == found[0]:
                settings = ", ".join(settings_of(block.fake(FakeMode())[0])[:_MOST]) or "none"
                what = f"({found[0]}) has another layer, setting, frozen weight or function than it had; found {settings}"
            raise OptionError(
                f"--resume: {root} holds another model: block {block.number} {what}. Give the same --model, or start anew "
                "elsewhere."
            )
