"""How far a run has come: what a checkpoint says beside tensors, and whether it may go on here."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

import seqpart.checkpoint.manifest as manifests
from seqpart.checkpoint.changes import Place, different, kept_words, refuse_fixed, told, trained_epochs
from seqpart.checkpoint.identity import Layers, refuse_other_layers, refuse_other_rows, row_digests
from seqpart.checkpoint.manifest import Manifest
from seqpart.data.splits import Split
from seqpart.directory.publication import is_begun_anew
from seqpart.directory.run_directory import finish_what_was_published
from seqpart.errors import CorruptFile, DoesNotFit, OptionError, shown
from seqpart.execution.metrics import Metrics
from seqpart.files.scratch import WEIGHTS, has_checkpoint
from seqpart.loop.lengths import AT_THE_END
from seqpart.methods import methods_named
from seqpart.planning.plan import AS_ASKED, Plan, PlanRequest, Told
from seqpart.planning.preparation import Preparation, Prepared
from seqpart.schedule.phase import Phase
from seqpart.schedule.phases import counted
from seqpart.schedule.progress import Progress
from seqpart.schedule.steps import START, Position
from seqpart.settings import Settings
from seqpart.units import format_limit

_KINDS = {
    "settings": dict, "position": list, "place": list, "epochs": list, "losses": list, "plan": str, "micro_batches": list,
    "data": str,
}  # fmt: skip
"""Of a checkpoint's state."""
_ROOM = {"mem_limit", "ram_limit", "partitions"}
"""Settings with other values of which a plan is made anew."""


@dataclass(kw_only=True, slots=True)
class ResumePoint:
    """What a run that goes on begins with. `manifest` is None where it was killed before its first checkpoint."""

    root: Path
    manifest: Manifest | None = None
    position: Position = START
    metrics: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    """Of the training passes that are over."""
    test: tuple[float, float | None] | None = None
    """Loss and accuracy of the latest pass over the test rows."""
    plan: Plan | None = None
    micro_batches: tuple[int, ...] = ()
    """Of each stage."""
    changed: frozenset[str] = frozenset()
    """Settings that are not what they were, and may be others."""
    said: list[str] = field(default_factory=list)
    """The same, for the user."""
    place: Place | None = None
    epochs: tuple[float, ...] = ()
    """Of each partition, as they were."""
    data: str = ""
    rows: dict[str, str] = field(default_factory=dict)
    layers: Layers = ()
    functions: dict[str, str] | None = None
    """What tells one loss or optimizer that was given as a function from another."""
    tuned: str = ""
    loop: dict[str, Any] = field(default_factory=dict)
    """Evaluations, and an end that was asked for."""
    label_bytes: int | None = None
    """Of synthetic labels that are kept whole: the limit may be another now."""

    def words(self, phases: Sequence[Phase]) -> str:
        if self.manifest is None:
            return f"{self.root} was ended before anything was saved: it begins anew"
        at = self.position
        where = f"update {at.updates + 1} of {phases[at.phase]}" if at.phase < len(phases) else "the writing of the results"
        other = f"; from here on: {', '.join(self.said)}" if self.said else ""
        return (
            f"going on from {shown(self.manifest.path)}, with {where}{other}; the proof at the end is of what runs from here on"
        )

    def unused_states(self, prepared: Prepared) -> Iterator[str]:
        """Homes of optimizer states that were saved just before the DROP that discarded them: another stage begins anew."""
        at, phases = self.position, prepared.phases
        stage = phases[at.phase].stage if at.phase < len(phases) else None
        begun = [phase for phase, _ in counted(phases[: at.phase + bool(at.updates)]) if phase.stage == stage]
        for p, part in enumerate(prepared.plan.partitions):
            midway = any(phase.trains(p) for phase in begun) and Progress(phases, at).needs_state(p, begun[0].stage)
            if not midway:
                yield from (block.state_home for block in prepared.chain[part.first : part.last] if part.state)

    def planned(self, preparation: Preparation) -> Prepared:
        """The plan to go on with: the cut and micro-batch of the checkpoint; another cut where that no longer fits.

        Raises OptionError where model or data are not those of the checkpoint, DoesNotFit where nothing fits.
        """
        if self.plan is None:
            return preparation.planned()
        found = data_digest(preparation.train, preparation.test)
        if found != self.data:
            raise OptionError(f"--resume: {self.root} was trained on other data. Give the same --data, in the same order.")
        refuse_other_rows(self.root, self.rows, row_digests(preparation.train, preparation.test))
        for name, was in (self.functions or {}).items():
            if preparation.functions[name] != was:
                raise OptionError(
                    f"--resume: {self.root} was trained with {name} {was}, and this run has "
                    f"{preparation.functions[name]}. Give the same, or start anew elsewhere."
                )
        if self.tuned != preparation.tuned:
            self.said.append(f"the optimizer's options were {self.tuned}, are {preparation.tuned}")
        request = self._request(preparation)
        tests_between = preparation.settings.tests != AT_THE_END  # as many phases as there are partitions
        cut_matters = not preparation.exact or tests_between or (self.place is None or self.place.behind is not None)
        if cut_matters:  # `auto` must not take another method, whose phases are others
            request = replace(request, methods=methods_named(self.plan.method))
        prepared = preparation.measured(lambda: self._prepared(preparation, request, cut_matters))
        if prepared.plan.fingerprint != self.plan.fingerprint:
            raise OptionError(f"--resume: {self.root} holds another model. Give the same --model, or start anew elsewhere.")
        refuse_other_layers(self.root, self.layers, preparation.chain.whole)
        if prepared.plan.starts != self.plan.starts and cut_matters:
            raise OptionError(f"--resume: {self.root} was cut at blocks {self.plan.starts}. Give the same method and cut.")
        before, now = max(self.micro_batches), max(stage.micro_batch for stage in prepared.stages)
        if now != before:
            self.said.append(f"the micro-batch was {before}, is {now}, which gives other bits")
        if self.place is not None and {"epochs", "recovery_epochs"} & self.changed:
            self.position = self.place.position(prepared.phases, self.position.updates)
        return prepared

    def _request(self, preparation: Preparation) -> PlanRequest:
        """Partitions that are trained keep the epochs that they had, whatever --epochs says now."""
        request = preparation.request
        request = replace(request, label_bytes=self.label_bytes or request.label_bytes)
        if self.place is None:
            return request
        asked = preparation.epochs(len(self.epochs))
        trained = trained_epochs(self.place, self.epochs, sorted(self.changed), exact=not preparation.alone)
        self.said += kept_words(trained, asked)
        return replace(request, trained_epochs=trained)

    def _told(self, request: PlanRequest, settings: Settings) -> Told:
        return Told(
            method="as before" if settings.method == "auto" and len(request.methods) == 1 else "",
            cut=AS_ASKED.cut if "partitions" in self.changed else "as before", micro_batch="as before",
            otherwise="not all is as before: what does not fit any more is chosen anew",
        )  # fmt: skip

    def _prepared(self, preparation: Preparation, request: PlanRequest, cut_matters: bool) -> Prepared:
        assert self.plan is not None
        starts = None if "partitions" in self.changed else self.plan.starts
        request = replace(request, told=self._told(request, preparation.settings))
        if "micro_batch_size" in self.changed:
            asked = replace(request.told, micro_batch=AS_ASKED.micro_batch)
            return preparation.prepare(replace(request, starts=starts, told=asked))
        largest = max(self.micro_batches)
        ways: list[dict[str, Any]] = [{"micro_batch": largest, "starts": starts}]
        if not _ROOM & self.changed:  # then it is the same plan, whatever the machine is measured to do now
            methods = methods_named(self.plan.method)
            again = replace(request, methods=methods)
            ways[0] |= {"saved": self.plan, "methods": methods, "told": self._told(again, preparation.settings)}
        if len(set(self.micro_batches)) > 1:  # recovery has its own, which only a plan that is free to choose finds again
            ways.append({"starts": starts})
        if not cut_matters:
            ways.append({"micro_batch": largest})
        for way in ways:
            try:
                prepared = preparation.prepare(replace(request, **way))
            except DoesNotFit:
                if way is ways[-1]:
                    raise
                continue
            found = tuple(stage.micro_batch for stage in prepared.stages)
            if all(one == other for one, other in zip(found, self.micro_batches, strict=False)):  # there may be no recovery now
                return prepared
        raise OptionError(
            f"--resume: the run in {self.root} has micro-batches {self.micro_batches}, and under this limit they would be "
            f"{found}, which give other bits. Give --mem-limit {format_limit(self.plan.limit)} as before, or accept other bits "
            f"with --micro-batch-size {min(found)}."
        )


def resume_point_of(path: Path, settings: Settings) -> ResumePoint:
    """Read the checkpoint at `path`: a run's directory or a manifest file.

    Raises OptionError where it was made with other settings, CorruptFile where it is damaged.
    """
    root = path if path.is_dir() else path.parent
    if path.is_dir() and not has_checkpoint(path):
        finish_what_was_published(root)
        refuse_finished(root)
        return ResumePoint(root=root)
    manifest = manifests.load(path)
    state = _well_formed(manifest)
    mine = settings.texts()
    place = Place(*state["place"])
    changed = different(state["settings"], mine)
    refuse_fixed(root, changed, state["settings"], mine, recovers=place.recovers)
    return ResumePoint(
        root=root, manifest=manifest, position=Position(*state["position"]), metrics=state["tally"], losses=state["losses"],
        test=tuple(state["test"]) if state["test"] else None, plan=Plan.from_json(state["plan"], str(manifest.path)),
        micro_batches=tuple(state["micro_batches"]), changed=frozenset(changed), said=told(changed, state["settings"], mine),
        place=place, epochs=tuple(state["epochs"]), data=state["data"], functions=state["functions"], tuned=state["tuned"],
        label_bytes=state["label_bytes"], loop=state.get("loop", {}), rows=state.get("rows", {}),
        layers=state.get("layers", ()),
    )  # fmt: skip


def _well_formed(manifest: Manifest) -> dict[str, Any]:
    """The state. Raises CorruptFile where it is whole, by its checksum, and yet nothing that a run wrote."""
    state = manifest.state
    if isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in _KINDS.items()):
        return state
    raise CorruptFile(f"{manifest.path} is no checkpoint that seqpart wrote. It was not used.", manifest.path)


def refuse_finished(root: Path) -> None:
    """Raises OptionError where `root` has the results of a run that is done: there is nothing to go on with."""
    if (root / WEIGHTS).exists():
        raise OptionError(
            f"--resume: the run in {root} is finished, and its weights are in {root / WEIGHTS}. "
            + (
                "What was to replace it was ended before anything was saved: give its options again, with --overwrite."
                if is_begun_anew(root)
                else "Start another in a new --output-dir."
            )
        )


def state_of(
    preparation: Preparation, prepared: Prepared, position: Position, metrics: Metrics,
    *, losses: list[float], test: tuple[float, float | None] | None, data: str, rows: dict[str, str], layers: Layers,
    job: dict[str, Any] | None, loop: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What `progress_of` reads again."""
    return {
        "settings": preparation.settings.texts(), "plan": prepared.plan.to_json(),
        "position": [position.phase, position.updates], "place": astuple(Place.of(prepared.phases, position)),
        "epochs": preparation.epochs(len(prepared.plan.partitions), prepared.request.trained_epochs),
        "micro_batches": [stage.micro_batch for stage in prepared.stages], "tally": metrics.to_json(), "losses": losses,
        "test": test, "data": data, "rows": rows, "layers": layers, "functions": preparation.functions,
        "tuned": preparation.tuned, "label_bytes": prepared.request.label_bytes, "job": job, "loop": loop,
    }  # fmt: skip


def data_digest(train: Split, test: Split) -> str:
    """Tells data sets apart by shape, number and labels."""
    digest = xxhash.xxh3_64()
    for split in (train, test):
        digest.update(
            repr(
                (split.count, split.shape, str(split.dtype), tuple(split.labels.shape), *split.form, *split.label_form)
            ).encode()
        )
        digest.update(split.padded.encode())
        digest.update(split.labels.contiguous().numpy().tobytes())
    return digest.hexdigest()
