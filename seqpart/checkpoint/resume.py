"""The state of a run in a checkpoint, other than tensors, and the checks whether the run may go on here."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta

import seqpart.checkpoint.changes as changes
import seqpart.checkpoint.manifest as manifests
from seqpart.checkpoint.changes import FREE, Place
from seqpart.checkpoint.manifest import Manifest, no_checkpoint
from seqpart.checkpoint.marker import MARKER, is_begun_anew
from seqpart.checkpoint.run_directory import finish_what_was_published
from seqpart.data.generators import generators_kept
from seqpart.data.source import Source
from seqpart.data.splits import Split
from seqpart.device.ranks import Ranks
from seqpart.errors import DataError, DoesNotFit, OptionError, shown
from seqpart.methods import methods_named
from seqpart.model.metrics import Tally
from seqpart.plan.plan import AS_ASKED, Plan, PlanRequest, PlanWording
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.profile.partition import state_layouts
from seqpart.schedule.best import LoopState
from seqpart.schedule.lengths import AT_THE_END
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Phases, counted
from seqpart.schedule.progress import Progress
from seqpart.schedule.steps import START, Position
from seqpart.schema import Finite, Positive, Whole, as_type
from seqpart.settings import Settings
from seqpart.store.layout import Layout
from seqpart.store.scratch import WEIGHTS, has_checkpoint
from seqpart.units import format_limit

_ROOM = {"mem_limit", "ram_limit", "optimizer_on", "partitions"}
"""Settings that need a new plan if they change."""

_OF_A_RANK = FREE | {"device", "export_every", "keep_exports", "trackers"}
"""Settings that may differ from rank to rank."""


class State(msgspec.Struct, kw_only=True):
    """A checkpoint's state of the run, other than tensors."""

    settings: dict[str, str]
    plan: str
    position: tuple[Whole, Whole]
    place: tuple[Whole, Whole, Whole | None, bool, bool]
    epochs: list[int | Finite]
    """Epochs of each partition."""
    micro_batches: Annotated[list[Positive], Meta(min_length=1)]
    """Micro-batch of each stage."""
    tally: Tally
    losses: list[Finite]
    """Losses of the training passes that are over."""
    test: tuple[Finite, Finite | None] | None
    """(loss, accuracy) of the latest pass over the test rows."""
    data: str
    rows: dict[str, str] = {}
    layers: list[tuple[str, str]] = []
    """rows: digests by split; layers: digests by block; empty if they are not known."""
    functions: dict[str, str] | None
    """Identifies a loss or an optimizer that was given as a function."""
    tuned: str
    label_bytes: Whole | None
    """Most bytes of synthetic labels that are kept whole, since the limit may have changed."""
    job: dict[str, Any] | None = None
    session: bool = False
    """True if it is of a session, whose data only its owner knows: it has the digests of none."""
    gathers: bool = False
    """True if each of several processes trained partitions of its own."""
    threads: Whole | None = None
    """Threads of the processor that computed; None: an earlier version did not say."""
    loop: LoopState = msgspec.field(default_factory=LoopState)


@dataclass(frozen=True, slots=True)
class SavedHomes:
    """The homes that a resumed run must find, or may discard."""

    layouts: Mapping[str, Layout]
    """Layout of every home by its name."""
    needed: Set[str]
    unused: Set[str]
    """Optimizer states that were saved just before the DROP that would have discarded them: the next stage begins anew."""
    best: Set[str]
    """Names of homes that must be remembered from the best evaluation."""


@dataclass(kw_only=True, slots=True)
class ResumePoint:
    """The starting point of a resumed run. Fields are None if it was killed before its first checkpoint."""

    root: Path
    manifest: Manifest | None = None
    state: State | None = None
    plan: Plan | None = None
    place: Place | None = None
    position: Position = START
    changed: frozenset[str] = frozenset()
    """Names of settings that have changed, and may."""
    remarks: list[str] = field(default_factory=list)
    """The changes as sentences for the user."""

    def words(self, phases: Sequence[Phase]) -> str:
        if self.manifest is None:
            return f"{self.root} was ended before anything was saved: it starts from the beginning"
        at = self.position
        where = f"update {at.updates + 1} of {phases[at.phase]}" if at.phase < len(phases) else "the writing of the results"
        other = f"; from here on: {', '.join(self.remarks)}" if self.remarks else ""
        proven = "the proof at the end covers what runs from here on"
        return f"going on from {shown(self.manifest.path)}, with {where}{other}; {proven}"

    def homes(self, prepared: ExecutionPlan) -> SavedHomes:
        at, phases, chain = self.position, prepared.phases, prepared.chain
        now = phases[at.phase] if at.phase < len(phases) else None
        over = [phase for phase, _ in counted(phases[: at.phase])]
        begun = [phase for phase, _ in counted(phases[: at.phase + bool(at.updates)]) if now and phase.stage == now.stage]
        assert self.state is not None
        options, has_parts = self.state.settings, len(chain.whole) < len(chain)
        anew = has_parts and options.get("subnet_moments") == "zero"  # every round begins with no states
        cut = now is not None and now.in_round
        layouts = {block.home: cost.layout for block, cost in zip(chain, prepared.costs, strict=True)}
        loop = self.state.loop
        never = {*loop.learns, *loop.frozen}  # possibly: they were unfrozen a moment ago, or were frozen from the beginning
        fresh = {
            block.state_home
            for block, cost in zip(chain, prepared.costs, strict=True)
            if never.issuperset(block.exported(name) for name in cost.trainable)
        }
        whole, unused = {block.home for block in chain.whole}, set[str]()
        needed = set(layouts) if cut else set(whole)
        for p, part in enumerate(prepared.plan.partitions):
            midway = any(phase.trains(p) for phase in begun) and Progress(phases, at).needs_state(p, begun[0].stage)
            merged = any(phase.kind is PhaseKind.MERGE and phase.partition == p for phase in over)
            optimizer, costs = prepared.stages[0].optimizers[p], prepared.costs[part.first : part.last]
            blocks = chain[part.first : part.last]
            laid = zip(blocks, state_layouts(blocks, costs, optimizer), strict=True)
            states = {block.state_home: layout for block, layout in laid if layout.specs}
            layouts |= states
            if part.state and not midway:
                unused |= set(states)
            elif not anew and (midway or merged):
                needed |= set(states) - fresh
        remembers = options.get("keep_best") == "yes" and self.state.loop.evaluations.best is not None
        return SavedHomes(layouts, needed, unused, best=whole if remembers else set())

    def planned(self, planner: Planner) -> ExecutionPlan:
        """Returns the plan to go on with: the cut and micro-batch of the checkpoint, or another cut if that no longer fits.

        Raises OptionError if model or data are not those of the checkpoint, DoesNotFit if nothing fits, CorruptFile if the
        checkpoint contradicts itself.
        """
        if self.manifest is None or self.state is None or self.plan is None or self.place is None:
            return planner.planned()
        state = self.state
        if not state.session and data_digest(planner.train, planner.test) != state.data:
            raise OptionError(f"--resume: {self.root} was trained on other data. Give the same --data, in the same order.")
        rows = {} if state.session else changes.row_digests(planner.train, planner.test)
        self.remarks += changes.refuse_other_rows(self.root, state.rows, rows)
        for name, was in (state.functions or {}).items():
            now = planner.functions[name]
            if now != was and not now.startswith(f"{was}("):  # a name alone is of an earlier version
                raise OptionError(
                    f"--resume: {self.root} was trained with {name} {was}, and this run has {now}. Give the same, or start "
                    "again elsewhere."
                )
        if state.tuned != planner.optimizers.tuned:
            self.remarks.append(f"the optimizer's options were {state.tuned}, are {planner.optimizers.tuned}")
        request = self._request(planner, state, self.place)
        tests_between = planner.settings.tests != AT_THE_END  # as many phases as there are partitions
        cut_matters = not planner.exact or tests_between or self.place.following is not None
        if cut_matters:  # `auto` must not take another method, whose phases are others
            request = replace(request, methods=methods_named(self.plan.method))
        micro_batches = tuple(state.micro_batches)
        prepared = planner.measured(lambda: self._prepared(planner, request, cut_matters, micro_batches))
        if prepared.plan.fingerprint != self.plan.fingerprint:
            raise OptionError(
                f"--resume: {self.root} holds another model. Give the same --model, or start a new run elsewhere."
            )
        changes.refuse_other_layers(self.root, state.layers, planner.chain.whole)
        if prepared.plan.starts != self.plan.starts and cut_matters:
            raise OptionError(f"--resume: {self.root} was cut at blocks {self.plan.starts}. Give the same method and cut.")
        if state.gathers != gathers(prepared.phases):
            was = "several processes, each of them partitions of its own" if state.gathers else "one process"
            raise OptionError(
                f"--resume: {self.root} was trained by {was}: rows between partitions, which the other way of training needs, "
                f"were not kept. Start {'two or more' if state.gathers else 'one'}."
            )
        before, found = max(micro_batches), max(stage.micro_batch for stage in prepared.stages)
        if found != before:
            self.remarks.append(f"the micro-batch was {before}, is {found}, which gives other bits")
        threads = torch.get_num_threads()
        if state.threads not in (None, threads) and planner.device.torch.type == "cpu":
            self.remarks.append(f"the threads were {state.threads}, are {threads} (OMP_NUM_THREADS), which gives other bits")
        try:
            self.position = self._find_position(prepared.phases, state.tally)
        except ValueError as error:
            raise no_checkpoint(self.manifest.path, str(error)) from None
        return prepared

    def _find_position(self, phases: Phases, tally: Tally) -> Position:
        """Returns the position in these phases. Raises ValueError if the checkpoint's values contradict each other."""
        at, place = self.position, self.place
        assert place is not None
        if place.stretch > len(phases.stretches):
            raise ValueError("state: place: beyond the end of the run")
        if {"epochs", "recovery_epochs"} & self.changed:
            at = place.position(phases, at.updates)
        elif at.phase > len(phases) or Place.of(phases, at) != place:
            raise ValueError("state: position and place: not the same")
        phase = phases[at.phase] if at.phase < len(phases) else None
        if at.phase > len(phases) or (at.updates and (phase is None or at.updates >= phase.updates)):
            raise ValueError(f"state: position: update {at.updates} is beyond the end of its pass")
        rows = phase.rows_before(at.updates) if phase is not None and phase.kind is PhaseKind.TRAIN else 0
        if tally.rows != rows:
            raise ValueError(f"state: tally: of {tally.rows} rows; the position is after {rows}")
        return at

    def _request(self, planner: Planner, state: State, place: Place) -> PlanRequest:
        """Returns the plan request; partitions that are trained keep their epochs, whatever --epochs says now."""
        request = planner.request
        request = replace(request, label_bytes=state.label_bytes or request.label_bytes)
        asked = planner.epochs(len(state.epochs))
        trained = changes.trained_epochs(place, state.epochs, sorted(self.changed), exact=not planner.alone)
        self.remarks += changes.kept_words(trained, asked)
        return replace(request, trained_epochs=trained)

    def _wording(self, request: PlanRequest, settings: Settings) -> PlanWording:
        return PlanWording(
            method="as before" if settings.method == "auto" and len(request.methods) == 1 else "",
            cut=AS_ASKED.cut if "partitions" in self.changed else "as before", micro_batch="as before",
            otherwise="not every choice is as before: what does not fit any more is chosen again",
        )  # fmt: skip

    def _prepared(
        self, planner: Planner, request: PlanRequest, cut_matters: bool, micro_batches: tuple[int, ...]
    ) -> ExecutionPlan:
        assert self.plan is not None
        starts = None if "partitions" in self.changed else self.plan.starts
        request = replace(request, wording=self._wording(request, planner.settings))
        if "micro_batch_size" in self.changed:
            asked = replace(request.wording, micro_batch=AS_ASKED.micro_batch)
            return planner.prepare(replace(request, starts=starts, wording=asked))
        largest = max(micro_batches)
        ways: list[dict[str, Any]] = [{"micro_batch": largest, "starts": starts}]
        if not _ROOM & self.changed:  # then the saved plan is used again, whatever the machine's measured speeds are now
            methods = methods_named(self.plan.method)
            again = replace(request, methods=methods)
            ways[0] |= {"saved": self.plan, "methods": methods, "wording": self._wording(again, planner.settings)}
        if len(set(micro_batches)) > 1:  # recovery has its own, which only a plan with a free choice finds again
            ways.append({"starts": starts})
        if not cut_matters:
            ways.append({"micro_batch": largest})
        for way in ways:
            try:
                prepared = planner.prepare(replace(request, **way))
            except DoesNotFit:
                if way is ways[-1]:
                    raise
                continue
            found = tuple(stage.micro_batch for stage in prepared.stages)
            if all(one == other for one, other in zip(found, micro_batches, strict=False)):  # there may be no recovery now
                return prepared
        raise OptionError(
            f"--resume: the run in {self.root} has micro-batches {micro_batches}, and under this limit they would be "
            f"{found}, which give other bits. Give --mem-limit {format_limit(self.plan.limit)} as before, or accept other bits "
            f"with --micro-batch-size {min(found)}."
        )


def resume_point_of(path: Path, settings: Settings, *, session: bool = False, restarted: bool = False) -> ResumePoint:
    """Reads the checkpoint at `path`: a run's directory or a manifest file. session: expects that of a session. restarted: true
    for a run that torchrun starts again, which may have ended before it left anything.

    Raises OptionError if it was made with other settings, CorruptFile if it is damaged.
    """
    root = path if path.is_dir() else path.parent
    if path.is_dir() and not has_checkpoint(path):
        finish_what_was_published(root)
        refuse_finished(root)
        if not restarted and not (root / MARKER).is_file():
            raise OptionError(
                f"--resume: expected the directory of a run, with {MARKER} in it; found none in {root}. Leave it out to begin."
            )
        return ResumePoint(root=root)
    manifest = manifests.load(path)
    state = as_state(manifest)
    if state.session is not session:
        cure = "Go on with Trainer.session(example, resume=DIR)." if state.session else "Go on with fit(..., resume=DIR)."
        raise OptionError(f"--resume: {root} holds a checkpoint of a {'session' if state.session else 'run by fit'}. {cure}")
    plan = Plan.read(state.plan)
    mine = settings.texts()
    place = Place(*state.place)
    changed = changes.different(state.settings, mine)
    changes.refuse_fixed(root, changed, state.settings, mine, recovers=place.recovers)
    return ResumePoint(
        root=root, manifest=manifest, state=state, plan=plan, place=place, position=Position(*state.position),
        changed=frozenset(changed), remarks=changes.in_words(changed, state.settings, mine),
    )  # fmt: skip


def as_state(manifest: Manifest) -> State:
    """Returns the manifest's state. Raises CorruptFile if its checksum is right but no run wrote such a state."""
    try:
        state = as_type(State, manifest.state)
        try:
            plan = Plan.read(state.plan)
        except ValueError as error:
            raise ValueError(f"plan: {error}") from None
        if state.micro_batches[0] != plan.micro_batch:
            raise ValueError(f"micro_batches: {state.micro_batches[0]}; its plan has {plan.micro_batch}")
        if len(state.epochs) != len(plan.partitions):
            raise ValueError(f"epochs: of {len(state.epochs)} partitions; its plan has {len(plan.partitions)}")
    except ValueError as error:
        raise no_checkpoint(manifest.path, f"state: {error}") from None
    return state


def refuse_finished(root: Path) -> None:
    """Raises OptionError if `root` has the results of a finished run: there is nothing to resume."""
    if (root / WEIGHTS).exists():
        raise OptionError(
            f"--resume: the run in {root} is finished, and its weights are in {root / WEIGHTS}. "
            + (
                "The run that was to replace it ended before anything was saved: start that one again, with --overwrite."
                if is_begun_anew(root)
                else "Start another in a new --output-dir."
            )
        )


def gathers(phases: Phases) -> bool:
    """True if each of several processes trains partitions of its own."""
    return any(phase.kind is PhaseKind.GATHER for phase, _ in counted(phases))


def refuse_unlike_ranks(ranks: Ranks, planner: Planner) -> None:
    """Raises DataError if the processes of a run were given other rows than the first, OptionError for other settings."""
    if ranks.count == 1:
        return
    rows = planner.train, planner.test
    settings = {name: str(value) for name, value in planner.settings.to_json().items() if name not in _OF_A_RANK}
    settings |= planner.functions
    order = _order_digest(planner.train, planner.settings.seed)
    given = ranks.gather((settings, (data_digest(*rows), changes.row_digests(*rows), order)))
    for rank, (other, _) in enumerate(given):
        if names := [name for name in settings if other[name] != given[0][0][name]]:
            differences = ", ".join(f"{name} is {other[name]}, not {given[0][0][name]}" for name in names)
            raise OptionError(f"rank {rank} was given other settings than rank 0: {differences}. Give every process the same.")
    found = [one for _, one in given]
    if others := [rank for rank, one in enumerate(found) if one != found[0]]:
        raise DataError(
            f"rank {others[0]} was given other rows than rank 0. Give every process the whole data, in the same order and "
            "without a DistributedSampler: each takes its own part of every batch."
        )


def _order_digest(split: Split, seed: int) -> str:
    """Returns a digest of the first epoch's order and random numbers, which a loader may have of its own; "" for kept rows."""
    source = split.source
    if not isinstance(source, Source):
        return ""
    draws = source.draws(seed, "train", 0, 1)
    with generators_kept():
        order = np.asarray(source.order(draws, shuffle=not source.streams))
    return xxhash.xxh3_64_hexdigest(f"{draws}".encode() + order.tobytes())


def data_digest(train: Split, test: Split) -> str:
    """Returns a digest of the data sets' shapes, row counts and labels."""
    digest = xxhash.xxh3_64()
    for split in (train, test):
        digest.update(
            repr(
                (split.count, split.shape, str(split.dtype), tuple(split.labels.shape), *split.form, *split.label_form)
            ).encode()
        )
        digest.update(split.padded.encode())
        digest.update(split.labels.contiguous().numpy().data)
    return digest.hexdigest()
