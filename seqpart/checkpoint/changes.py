"""What a resumed run may change, its position in the phases then, and the digests of what must be the same: rows and layers.

What a partition has learned stays as it is; new values hold from the next update on. The number of epochs may change only
while that training goes on: a finished partition of `sil` is what the later ones have learned from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import xxhash

from seqpart.data.splits import Split, converted
from seqpart.errors import OptionError
from seqpart.fields import flag_of
from seqpart.methods import METHODS
from seqpart.model.blocks import Block
from seqpart.model.inspection import digest_of, settings_of
from seqpart.profile.fake_mode import FakeMode
from seqpart.schedule.lengths import interval_of
from seqpart.schedule.phases import Phases
from seqpart.schedule.steps import Position
from seqpart.settings import Settings

FREE = {
    "mem_limit", "ram_limit", "optimizer_on", "offload_dir", "output_dir", "overwrite", "save_every", "partitions",
    "micro_batch_size",
    "weights", "weights_partial", "trace", "workers", "log",
}  # fmt: skip
"""Settings that may differ when a run goes on. The cut and the micro-batch are the checkpoint's, unless they differ."""
TUNED = {
    "lr", "recovery_lr", "lr_schedule", "warmup_updates", "clip_grad_norm", "weight_decay", "epochs", "recovery_epochs",
    "early_stopping",
}  # fmt: skip
"""Settings that may differ and change what is learned from there on."""
OF_RECOVERY = {"recover", "recovery_batch_size"}
"""Settings that may differ until recovery has begun."""
_FIRST = 16 << 20
"""Bytes of first rows that are digested of data that is read in order, as files are; at least one piece."""
_MOST = 12
"""Most settings that a message names."""
Layers = list[tuple[str, str]]
"""For each block its type, and a digest of its modules, their settings and the functions between them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A position that stays valid for another number of epochs."""

    stretch: int
    """Number of the stretch of phases: a partition's training, the whole network's, or recovery."""
    epochs: int
    """Epochs that are over in the stretch."""
    following: int | None
    """Number of the phase after these epochs; None: another epoch."""
    over: bool
    """True if the training of the stretch is over."""
    recovers: bool
    """True if recovery has begun."""

    @classmethod
    def of(cls, phases: Phases, at: Position) -> "Place":
        which, epochs, following = phases.stands(at.phase)
        stretch = phases.stretches[which]
        begun = bool(epochs or at.updates)
        over = following is not None and epochs == stretch.epochs
        return cls(which, epochs, following, over, stretch.train.stage == 1 and begun)

    @property
    def done(self) -> int:
        """Number of stretches whose training is over."""
        return self.stretch + self.over

    def position(self, phases: Phases, updates: int) -> Position:
        """Returns its position in `phases`, which may have more or fewer epochs. Raises OptionError if it is beyond them."""
        option = "--recovery-epochs" if self.recovers else "--epochs"
        begun, epochs = self.epochs + bool(updates), 0
        if self.stretch < len(phases.stretches):
            epochs = phases.stretches[self.stretch].epochs
        if begun > epochs:
            raise OptionError(f"--resume: {option} {epochs}: {begun} epoch(s) are done or under way. Give at least {begun}.")
        if self.stretch == len(phases.stretches):  # there was to be recovery, and it has not begun
            return Position(len(phases))
        following = 0 if self.following is None and self.epochs == epochs else self.following
        return Position(phases.number_of(self.stretch, self.epochs, following), updates)


def different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name, value in before.items() if not _same(value, str(now.get(name))))


def _same(one: str, other: str) -> bool:
    """True if two settings are equal, as numbers if possible: 1e-3 is 0.001. Older versions kept them as typed, with spaces."""
    ones, others = ([part.strip() for part in text.split(",")] for text in (one, other))
    try:
        return ones == others or [float(part) for part in ones] == [float(part) for part in others]
    except ValueError:
        return False


def refuse_fixed(
    root: object, names: Sequence[str], before: Mapping[str, str], now: Mapping[str, str], *, recovers: bool
) -> None:
    """Raises OptionError for changed settings that must not change."""
    by_method = METHODS[before["method"]].fixed if before.get("method") in METHODS else frozenset[str]()
    tuned = TUNED - by_method
    if _in_pieces(before) or _in_pieces(now):
        tuned = tuned - {"epochs"}
    free = FREE | tuned | (set() if recovers else OF_RECOVERY)
    fixed = [name for name in names if name not in free]
    if not fixed:
        return
    found = ", ".join(f"{name} was {before[name]}, not {now.get(name)}" for name in fixed)
    if "epochs" in fixed and "epochs" in TUNED - tuned and "epochs" not in by_method:
        found += " (epochs cannot change where training is counted in updates: --max-steps, --eval-every N, parts of an epoch)"
    may = ", ".join(flag_of(field.name) for field in fields(Settings) if field.name in tuned)
    raise OptionError(
        f"--resume: the run in {root} has other settings: {found}. Give the same, or start a new run elsewhere. What may be "
        f"changed: {may}, limits and directories."
    )


def _in_pieces(settings: Mapping[str, str]) -> bool:
    """True if training is counted in updates: then positions depend on the number of epochs."""
    numbers = settings.get("epochs", "1").split(",")
    if settings.get("max_steps", "None") != "None" or not all(map(_is_whole, numbers)):
        return True
    every = settings.get("eval_every", "None")
    return every != "None" and interval_of(every, None).updates is not None


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return False


def in_words(names: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the changed settings that the run goes on with, as sentences for the user."""
    weights = now.get("weights", "None")
    unread = [f"--weights {weights} is not read, since the run has weights"] if "weights" in names and weights != "None" else []
    return unread + [f"{name} was {before[name]}, is {now[name]}" for name in names if name not in FREE]


def trained_epochs(place: Place, before: Sequence[float], changed: Sequence[str], *, exact: bool) -> tuple[float, ...]:
    """Returns the epochs of partitions whose training is over, as they were. Raises OptionError if a changed number of epochs
    would apply to nothing any more."""
    count = len(before)
    done = (count if place.over else 0) if exact else min(place.done, count)
    if "epochs" in changed and done == count:
        rest = "; --recovery-epochs says how long it recovers" if place.recovers else ""
        raise OptionError(
            f"--resume: --epochs cannot be changed any more: all of them are done ({_listed(before)}), and the optimizer "
            f"state of finished training is not kept{rest}. Give the same, or start a new run elsewhere."
        )
    if "recovery_epochs" in changed and place.recovers and place.over:
        raise OptionError("--resume: --recovery-epochs cannot be changed any more: all of them are done. Give the same.")
    return tuple(before[:done])


def kept_words(trained: Sequence[float], asked: Sequence[float]) -> list[str]:
    """Returns the message about partitions that keep their former epochs."""
    kept = [p for p, (had, want) in enumerate(zip(trained, asked, strict=False)) if had != want]
    return [f"partition(s) {_listed(kept)} are done and keep {_listed([trained[p] for p in kept])} epoch(s)"] if kept else []


def _listed(numbers: Sequence[Any]) -> str:
    return ", ".join(map(str, dict.fromkeys(numbers)))


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


def refuse_other_rows(root: Path, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Raises OptionError for rows that are not those of the run in `root`, if both digests are known. Returns what to say of
    those that have none."""
    found = []
    for name, digest in now.items():
        if not digest and before.get(name) == "":
            found.append(f"the {name} rows are others each time that they are read, and so are the bits of this run")
        if digest and before.get(name, "") not in ("", digest):
            raise OptionError(
                f"--resume: {root} was trained on other data: the {name} rows differ, though their labels are the same. "
                "Give the same --data, in the same order."
            )
    return found


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
                f"--resume: {root} holds another model: block {block.number} {what}. Give the same --model, or start again "
                "elsewhere."
            )
