"""A checkpoint is a manifest: one JSON file that names file versions in the homes and rows, and the trainer's state.

Saving copies nothing that is on the disk already. Files that the two latest manifests name are neither overwritten nor
deleted, so a killed run can be resumed at any moment:

    1. homes and rows are written to the disk                                          named and kept
    2. the new manifest and a copy of the latest are written beside, and synced        n-1, n-2
    3. checkpoint.previous.json is replaced                                            n-1, n-1
    4. checkpoint.json is replaced, and the directory synced                           n,   n-1
    5. files that only n-2 named may be overwritten
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from seqpart.data.boundary_cache import Boundaries
from seqpart.errors import CorruptFile, OptionError, resuming, shown
from seqpart.files import made, opened, remove
from seqpart.schema import Digest, PathText, Whole, as_type, matching, word_of
from seqpart.store.atomic import checked_body, with_checksum, write_synced
from seqpart.store.direct import explained, explaining, sync
from seqpart.store.layout import DTYPES, Layout
from seqpart.store.scratch import CHECKPOINT, HOME_FILES, PREVIOUS, ROW_FILES, ROWS
from seqpart.store.store import Store
from seqpart.text import path_fault, read_text

FORMAT = 2

RewriteRows = Callable[[str, CorruptFile], None]
"""Writes the rows of boundary 0 of a split again, because of that error."""


class _Home(msgspec.Struct):
    file: Annotated[str, matching(HOME_FILES)]
    """Matched, so that no name leads out of the scratch directory."""
    header: Digest


class _Rows(msgspec.Struct):
    file: Annotated[str, matching(ROW_FILES)]
    sums: Annotated[str, matching(ROW_FILES)]
    digest: Digest
    count: Whole
    shape: list[Whole]
    dtype: Annotated[str, word_of(*(str(dtype).removeprefix("torch.") for dtype in DTYPES.values()))]


class _Body(msgspec.Struct):
    format: int
    scratch: PathText
    state: dict[str, Any]
    """The trainer's state; not checked here."""
    homes: dict[str, _Home]
    rows: dict[Annotated[str, matching(ROWS)], _Rows]
    best: dict[str, _Home] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    path: Path
    """The file that it was read from."""
    scratch: Path
    """The directory of the homes and rows."""
    state: dict[str, Any]
    """The trainer's state."""
    homes: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, Mapping[str, Any]]
    best: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Homes as they were at the best evaluation, if they are kept."""

    @property
    def root(self) -> Path:
        return self.path.parent

    @property
    def home_files(self) -> set[str]:
        return {entry["file"] for homes in (self.homes, self.best) for entry in homes.values()}

    @property
    def row_files(self) -> set[str]:
        return _files_of(self.rows)

    @property
    def inputs(self) -> dict[str, Mapping[str, Any]]:
        """The rows of boundary 0, which can be made again from the data."""
        return {place: entry for place, entry in self.rows.items() if place.endswith("-0")}

    def to_json(self) -> str:
        # A scratch directory inside the run's own may be moved along with it.
        scratch = os.path.relpath(self.scratch.resolve(), self.root.resolve())
        body = {
            "format": FORMAT,
            "scratch": str(self.scratch.resolve()) if scratch.startswith("..") else scratch,
            "state": self.state,
            "homes": dict(self.homes),
            "rows": dict(self.rows),
            **({"best": dict(self.best)} if self.best else {}),
        }
        return with_checksum("checkpoint", body)


def save(
    root: Path, scratch: Path, state: dict[str, Any], store: Store, boundaries: Boundaries, *, instead: bool = False
) -> Manifest:
    """Makes the current state the run's latest checkpoint. instead: it replaces the latest, and the previous one stays.

    Nothing may be half done, and no put may be running.

    Raises DiskFull or another StoreError; then the checkpoints are unchanged, and files of the failed one take no space
    except as spare files.
    """
    new = Manifest(
        path=root / CHECKPOINT, scratch=scratch, state=state, homes=store.persist(), rows=boundaries.persist(),
        best=store.remembered,
    )  # fmt: skip
    latest, previous = _readable(root / CHECKPOINT), _readable(root / PREVIOUS)
    # Keep all three sets also if the following fails: it is then unknown which of the manifests is on the disk.
    _keep(store, boundaries, new, latest, previous)
    texts = {CHECKPOINT: new.to_json()}
    if latest is not None and not instead:  # a damaged one must not replace an intact one
        texts = {PREVIOUS: latest.to_json(), **texts}
    _replace(root, texts)
    _keep(store, boundaries, new, previous if instead else latest or previous)
    return new


def _replace(root: Path, texts: Mapping[str, str]) -> None:
    """Replaces files in the run directory, {name: text}, in that order, when all of them are on the disk."""
    parts = {root / f"{name}.part": text for name, text in texts.items()}
    try:
        for part, text in parts.items():
            write_synced(part, text)
        for part in parts:
            part.replace(part.with_suffix(""))
        sync(root)
    except OSError as error:
        raise explained(error, root / CHECKPOINT) from None
    finally:
        for part in parts:
            with contextlib.suppress(OSError):
                remove(part)


def load(path: Path) -> Manifest:
    """Reads the manifest at `path`, or the latest one in the run directory `path`.

    Raises OptionError if nothing was saved, CorruptFile, naming the file, if it is damaged.
    """
    if not path.exists() and path.name != CHECKPOINT:
        raise OptionError(
            f"--resume: {shown(path)} does not exist. Give the directory of a run, or one of its checkpoint files."
        )
    path = path / CHECKPOINT if path.is_dir() else path
    if not path.is_file():
        if (path.parent / PREVIOUS).is_file():
            raise CorruptFile(f"{path} is missing. {_cure(path)}")
        raise OptionError(f"--resume: nothing was saved in {path.parent}: there is no {path.name}. Start without --resume.")
    try:
        with explaining(path):
            body = checked_body("checkpoint", read_text(path))
    except ValueError as error:
        if not path.name.startswith("checkpoint"):
            raise OptionError(
                f"--resume: expected the directory of a run, or one of its checkpoint files; found {shown(path)}."
            ) from None
        raise CorruptFile(f"{path} is damaged: {error}. It was not used. {_cure(path)}", path) from None
    if isinstance(body, dict) and isinstance(version := body.get("format"), int) and version != FORMAT:
        raise OptionError(
            f"--resume: {path} was saved by another version of seqpart: its format is {version} and this one reads {FORMAT}. "
            "Resume it with that version."
        )
    try:
        as_type(_Body, body)
    except ValueError as error:
        raise no_checkpoint(path, str(error)) from None
    scratch = path.parent / body["scratch"]
    if (fault := path_fault(scratch)) is not None:
        raise no_checkpoint(path, f"scratch: {fault}")
    return Manifest(
        path=path, scratch=scratch, state=body["state"], homes=body["homes"], rows=body["rows"], best=body.get("best", {})
    )  # fmt: skip


def no_checkpoint(path: Path, why: str) -> CorruptFile:
    """Returns the error for a manifest whose checksum is right but whose content no run wrote."""
    return CorruptFile(f"{path} is no checkpoint that seqpart wrote ({why}). It was not used. {_cure(path)}", path)


def restore(manifest: Manifest, store: Store, boundaries: Boundaries, write_rows: RewriteRows | None = None) -> None:
    """Fills a new store and new boundaries, opened on the manifest's scratch directory, with the files that it names.

    Every file is read once. Raises CorruptFile, naming a damaged one; no file that a manifest names is touched then.
    Otherwise this manifest is the latest from now on: a damaged later one is replaced. Rows of boundary 0 are the same files
    in both checkpoints: when the previous one is restored, `write_rows` makes damaged ones again.
    """
    latest, previous = _readable(manifest.root / CHECKPOINT), _readable(manifest.root / PREVIOUS)
    _keep(store, boundaries, manifest, latest, previous)
    try:
        store.adopt(manifest.homes)
        store.verify()
        store.remembered = {name: dict(entry) for name, entry in manifest.best.items()}
        store.recall(check_only=True)
        boundaries.adopt({place: entry for place, entry in manifest.rows.items() if place not in manifest.inputs})
        boundaries.verify()
        for place, entry in manifest.inputs.items():
            _adopt_input(place, entry, boundaries, write_rows if manifest.path.name == PREVIOUS else None)
    except CorruptFile as error:
        raise CorruptFile(f"{error.with_flags} {_cure(manifest.path, error)}", error.path) from None
    if manifest.path.name == CHECKPOINT:
        _keep(store, boundaries, manifest, previous)
        return
    _replace(manifest.root, {CHECKPOINT: manifest.to_json()})
    _keep(store, boundaries, manifest)


def refuse_others(manifest: Manifest, store: Store, layouts: Mapping[str, Layout], needed: Set[str], best: Set[str]) -> None:
    """Raises CorruptFile if the homes in `store`, which the manifest named, are not those of this run. layouts: by name.
    needed: names of homes that must exist. best: names of homes that must be remembered from the best evaluation."""
    others = {name for name, layout in layouts.items() if name in store and store.layout(name) != layout}
    others |= (
        {name for name in needed if name not in store} | (best - manifest.best.keys()) | (manifest.best.keys() - layouts.keys())
    )
    for name in sorted(others):
        raise no_checkpoint(manifest.path, f"homes: {name} is missing, or holds other tensors")


def bring(manifest: Manifest, scratch: Path) -> None:
    """Gives the new directory `scratch` the files that the manifest names in a directory of another run, which may need them.

    Nothing is changed there: the files are hard-linked, since such a file is never overwritten, or else copied.
    Raises CorruptFile, naming a file that is missing; DiskFull or another StoreError.
    """
    for folder, files in (("homes", manifest.home_files), ("rows", manifest.row_files)):
        for file in sorted(files):
            source = manifest.scratch / folder / file
            try:
                with open(opened(source), "rb") as found:
                    _second_name(source, found, scratch / folder / file)
            except FileNotFoundError:
                error = CorruptFile(f"{source} is missing.", source)
                raise CorruptFile(f"{error.with_flags} {_cure(manifest.path, error)}", source) from None
            except OSError as error:
                raise explained(error, source if error.errno != errno.ENOSPC else scratch / folder / file) from None


def _second_name(source: Path, found: BinaryIO, target: Path) -> None:
    with contextlib.suppress(OSError):  # another disk, another user's file, or a file system without hard links
        os.link(source, target, follow_symlinks=False)
        if os.path.samestat(os.lstat(target), os.fstat(found.fileno())):
            return
    with open(made(target), "wb") as file:
        shutil.copyfileobj(found, file)


def _adopt_input(place: str, entry: Mapping[str, Any], boundaries: Boundaries, write_rows: RewriteRows | None) -> None:
    split = place.removesuffix("-0")
    try:
        boundaries.adopt({place: entry})
        boundaries.rows(split, 0).verify()
    except CorruptFile as error:
        if write_rows is None:
            raise
        write_rows(split, error)
        if boundaries.rows(split, 0).persist()["digest"] != entry["digest"]:
            raise CorruptFile(f"{error.with_flags} The data have changed, so it could not be made again.", error.path) from None


def _files_of(rows: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {entry[part] for entry in rows.values() for part in ("file", "sums")}


def _keep(store: Store, boundaries: Boundaries, *manifests: Manifest | None) -> None:
    store.keep(set().union(*(manifest.home_files for manifest in manifests if manifest)))
    boundaries.keep(set().union(*(manifest.row_files for manifest in manifests if manifest)))


def _readable(path: Path) -> Manifest | None:
    try:
        return load(path)
    except (CorruptFile, OptionError):
        return None


def _cure(path: Path, damage: CorruptFile | None = None) -> str:
    previous = path.with_name(PREVIOUS)
    if path.name == PREVIOUS or not previous.is_file():
        return "Start again in a new --output-dir."
    found = _readable(previous)
    needed = found.home_files | (found.row_files - _files_of(found.inputs)) if found is not None else set()
    if damage is not None and damage.path is not None and damage.path.name in needed:
        return "The file is the same in the previous checkpoint, which needs it too. Start again in a new --output-dir."
    return f"Go on from the checkpoint before it with {resuming(previous)}."
