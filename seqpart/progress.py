"""How far a run has come: what a checkpoint says beside tensors, and whether it may go on here."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

import seqpart.manifest as manifests
from seqpart.errors import DoesNotFit, OptionError
from seqpart.ingest import Split
from seqpart.manifest import Manifest
from seqpart.plan import Plan
from seqpart.preparation import Preparation, Prepared
from seqpart.rundir import has_checkpoint
from seqpart.schedule import START, Position
from seqpart.settings import Settings
from seqpart.tally import Tally

FREE = {"mem_limit", "ram_limit", "offload_dir", "output_dir", "overwrite", "save_every", "partitions", "micro_batch_size"}
"""Settings that may differ when a run goes on; the cut and the micro-batch are the checkpoint's."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a run that goes on begins with. `manifest` is None where it was killed before its first checkpoint."""

    root: Path
    manifest: Manifest | None = None
    position: Position = START
    tally: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    """Of the training passes that are over."""
    plan: Plan | None = None
    data: str = ""

    def planned(self, preparation: Preparation) -> Prepared:
        """The plan to go on with: the cut and micro-batch of the checkpoint; another cut where that no longer fits.

        Raises OptionError where model or data are not those of the checkpoint, DoesNotFit where nothing fits.
        """
        if self.plan is None:
            return preparation.planned()
        found = data_digest(preparation.train, preparation.test)
        if found != self.data:
            raise OptionError(f"--resume: {self.root} was trained on other data. Give the same --data, in the same order.")
        micro_batch = max(part.micro_batch for part in self.plan.partitions)
        cut_matters = not preparation.exact or self.position.phase >= _passes(preparation)
        try:
            prepared = preparation.prepare(micro_batch=micro_batch, starts=self.plan.starts)
        except DoesNotFit:
            if cut_matters:
                raise
            prepared = preparation.prepare(micro_batch=micro_batch)
        if prepared.plan.fingerprint != self.plan.fingerprint:
            raise OptionError(f"--resume: {self.root} holds another model. Give the same --model, or start anew elsewhere.")
        if prepared.plan.starts != self.plan.starts and cut_matters:
            raise OptionError(f"--resume: {self.root} was cut at blocks {self.plan.starts}. Give the same method and cut.")
        return prepared


def _passes(preparation: Preparation) -> int:
    return max(preparation.values("--epochs", preparation.settings.epochs, int, 1))


def progress_of(path: Path, settings: Settings) -> Progress:
    """Read the checkpoint at `path`: a run's directory or a manifest file.

    Raises OptionError where it was made with other settings, CorruptFile where it is damaged.
    """
    root = path if path.is_dir() else path.parent
    if path.is_dir() and not has_checkpoint(path):
        return Progress(root=root)
    manifest = manifests.load(path)
    state = manifest.state
    mine = settings_of(settings)
    different = sorted(name for name, value in state["settings"].items() if name not in FREE and mine.get(name) != value)
    if different:
        said = ", ".join(f"{name} was {state['settings'][name]}, not {mine.get(name)}" for name in different)
        raise OptionError(f"--resume: the run in {root} has other settings: {said}. Give the same, or start anew elsewhere.")
    return Progress(
        root=root, manifest=manifest, position=Position(*state["position"]), tally=state["tally"], losses=state["losses"],
        plan=Plan.from_json(state["plan"], str(manifest.path)), data=state["data"],
    )  # fmt: skip


def state_of(
    settings: Settings, plan: Plan, position: Position, tally: Tally, losses: list[float], data: str
) -> dict[str, Any]:
    """What `progress_of` reads again."""
    return {
        "settings": settings_of(settings), "plan": plan.to_json(), "position": [position.phase, position.updates],
        "tally": tally.to_json(), "losses": losses, "data": data,
    }  # fmt: skip


def settings_of(settings: Settings) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(settings).items()}


def data_digest(train: Split, test: Split) -> str:
    """Tells data sets apart by shape, number and labels; the rows of the first boundary have checksums of their own."""
    digest = xxhash.xxh3_64()
    for split in (train, test):
        digest.update(repr((split.count, split.shape, str(split.dtype), tuple(split.labels.shape))).encode())
        digest.update(split.labels.contiguous().numpy().tobytes())
    return digest.hexdigest()
