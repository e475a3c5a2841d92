"""Homes of weights and rows during a run: filled from the model and the data or from a checkpoint, and given back."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import torch

import seqpart.checkpoint.manifest as manifests
from seqpart.checkpoint.export import export_weights
from seqpart.checkpoint.leftovers import report_leftovers
from seqpart.checkpoint.resume import ResumePoint
from seqpart.checkpoint.run_directory import RunDirectory, new_name, open_scratch, refuse_taken
from seqpart.data.boundary_cache import Boundaries
from seqpart.data.splits import write_rows
from seqpart.device.device import describe_versions
from seqpart.device.pages import aligned, bytes_of
from seqpart.device.ranks import CHUNK
from seqpart.device.sampler import MEMORY
from seqpart.errors import BadInput, CorruptFile, DiskFull, Interrupted, ModelError, shown
from seqpart.model.blocks import Block
from seqpart.model.tensors import attach, bring_to_cpu, detach, layout_of, tensors_of
from seqpart.plan.plan import Plan
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.plan.problem import GRADIENT_ROOMS, GraphRooms
from seqpart.profile.machine import existing
from seqpart.report.reporter import EVENTS, Reporter
from seqpart.runtime.host_steps import HostSteps
from seqpart.schedule.phases import counted, dividing
from seqpart.schedule.steps import Position
from seqpart.settings import Settings
from seqpart.store.atomic import with_checksum, write_text
from seqpart.store.direct import REQUEST
from seqpart.store.divided import DividedStore
from seqpart.store.host_pool import HostPool
from seqpart.store.layout import Layout
from seqpart.store.scratch import JOB, PLAN
from seqpart.store.store import Store
from seqpart.units import format_size, now

Doing = Callable[[str], AbstractContextManager[None]]
"""A function of what is being done, which returns a context in which an out-of-memory error says so."""


class WeightStore:
    """The store of weights, the boundary cache of rows, and the host memory for boundaries and graphs.

    `stack` closes them.
    """

    def __init__(
        self, planner: Planner, prepared: ExecutionPlan, scratch: RunDirectory, reporter: Reporter, explaining: Doing,
        stack: ExitStack,
    ) -> None:  # fmt: skip
        self._planner, self._prepared, self._reporter, self._explaining = planner, prepared, reporter, explaining
        device, nbytes, room = planner.device, prepared.places.nbytes, prepared.exchange_bytes
        self._pool = pool = HostPool(nbytes, device, first=room)
        self.boundary_room = pool.take(room) if room else None
        self._graphs: dict[int, list[torch.Tensor]] = {}
        self.graph_rooms(prepared.graph_rooms)
        through = prepared.places.gradient_room
        rooms = [pool.take(through) for _ in range(GRADIENT_ROOMS if through else 0)]
        self.host_steps = HostSteps(device, [room for room in rooms if room is not None]) if prepared.places.steps else None
        if self.host_steps is not None:
            stack.callback(self.host_steps.close)
        divided = dividing(prepared.phases)
        alone = {block: divided.owner_of(p) for p, block in self._placed()} if divided is not None else {}
        self._states = {block.state_home: owner for block, owner in alone.items()}
        """{home of optimizer state: the rank that keeps it alone}."""
        # Of GPUs each keeps all weights: nobody has tried what exchanges beside NCCL's bring.
        self._weights = {block.home: owner for block, owner in alone.items() if device.shares_memory}
        """The same of weights."""
        if self._weights:
            self.store: Store = DividedStore(scratch.homes, device, pool, planner.ranks, self._weights)
        else:
            self.store = Store(scratch.homes, device, pool)
        stack.callback(self.store.close)
        if not prepared.method.alone:
            self.store.reserve({name: nbytes for name, nbytes in prepared.hosted().items() if self.store.owns(name)})
        self.boundaries = Boundaries(scratch.rows, device, pool, prepared.plan.rows_in_memory)
        stack.callback(self.boundaries.close)

    def graph_rooms(self, sizes: GraphRooms) -> dict[int, list[torch.Tensor]]:
        """Returns host memory for graphs by partition, replacing what was given before, for partitions whose graphs all fit.
        After the micro-batch was halved there may be too little: the graphs of the others are offloaded to disk."""
        if {p: tuple(room.nbytes for room in rooms) for p, rooms in self._graphs.items()} == dict(sizes):
            return self._graphs
        for p in list(self._graphs):
            self._give(self._graphs.pop(p))
        for p, own in sizes.items():
            rooms = [self._pool.take(nbytes) for nbytes in own]
            found = [room for room in rooms if room is not None]
            if len(found) == len(own):
                self._graphs[p] = found
            else:
                self._give(found)
        return self._graphs

    def _give(self, rooms: Sequence[torch.Tensor]) -> None:
        for room in rooms:
            self._pool.give(room)

    def fill(self, resumed: ResumePoint | None, *, rows: bool = True) -> None:
        """Fills the homes with weights, and with `rows` the data's rows, from the checkpoint or from the model and the data."""
        for name, split in (("train", self._planner.train), ("test", self._planner.test)):
            self.boundaries.labels[name], self.boundaries.label_types[name] = split.labels, split.label_type
            if (passing := self._planner.reading.rows(name, self._planner.device)) is not None:
                self.boundaries.passing[name] = passing
        manifest = resumed.manifest if resumed is not None else None
        with self._explaining("the blocks were built"):
            self._build(keep=manifest is not None)
        if resumed is not None and manifest is not None:
            homes = resumed.homes(self._prepared)
            with self._explaining("the checkpoint was read"):
                manifests.restore(manifest, self.store, self.boundaries, self._rewrite_rows)
                # Newly trainable parameters have no optimizer state yet.
                self.store.lay_anew(homes.layouts, growing={block.state_home for block in self._prepared.chain})
                manifests.refuse_others(manifest, self.store, homes.layouts, homes.needed, homes.best)
                if rows:
                    self._write_missing_rows(resumed.position)
            if not self._planner.settings.averages:  # the averages are kept to the end
                for name in homes.unused:
                    self.store.discard(name)
            return
        if self._planner.initial_weights is not None:
            self._reporter.say(self._planner.initial_weights.summary)
        with self._explaining("the data were read"):
            for name in ("train", "test") if rows else ():
                self._write_rows(name)

    def share(self) -> None:
        """Gives the other ranks the homes of the first: weights, and optimizer state that they need in a run that goes on."""
        if self._planner.ranks.count > 1:
            homes = [name for block in self._prepared.chain for name in (block.home, block.state_home)]
            self.give(homes, 0, {**self._states, **self._weights}.get)
            self.discard_others()

    def collect(self, *, states: bool = False, everywhere: bool = False) -> None:
        """Gives the first rank, or all of them, the weights that each of the others has alone. states: optimizer state too."""
        homes = {**self._weights, **(self._states if states else {})}
        for owner in range(not everywhere, self._planner.ranks.count if homes else 0):
            self.give([name for name, one in homes.items() if one == owner], owner, lambda _: None if everywhere else 0)

    def discard_others(self) -> None:
        """Discards homes that another rank has alone, as far as this one was given them."""
        for name, owner in {**self._states, **self._weights}.items():
            if owner != self._planner.ranks.number:
                self.store.discard(name)

    def _placed(self) -> Iterator[tuple[int, Block]]:
        """Yields each block with its partition's number."""
        for p, part in enumerate(self._prepared.plan.partitions):
            yield from ((p, block) for block in self._prepared.chain[part.first : part.last])

    def gather(self, p: int, round_: int) -> int:
        """Gives partition `p`, from the rank that has trained it, to all others. Returns the bytes sent."""
        blocks = [block for number, block in self._placed() if number == p]
        averages = [block.state_home for block in blocks] if self._planner.settings.averages else []
        return self.give([*(block.home for block in blocks), *averages], p % self._planner.ranks.count)

    def give(self, names: Iterable[str], source: int, to: Callable[[str], int | None] = lambda _: None) -> int:
        """Gives homes of rank `source`, as far as it has them, to the others. Returns the bytes sent.

        to: of a home, the only rank that takes it; None: all do.
        """
        ranks, sent = self._planner.ranks, 0
        gives = ranks.number == source
        for name, layout in ranks.gather([(name, self.store.layout(name)) for name in names if name in self.store])[source]:
            target = to(name)
            if target == source or not (gives or target in (None, ranks.number)):
                continue
            with ExitStack() as stack:
                given = stack.enter_context(closing(self.store.source(name, CHUNK))) if gives else None
                sink = stack.enter_context(self.store.sink(name, layout, CHUNK)) if not gives else None
                left = sum(spec.nbytes for spec in layout.specs)
                sent += left * (ranks.count - 1 if target is None else 1) if gives else 0
                while left:
                    piece = torch.empty(min(left, CHUNK), dtype=torch.uint8)
                    if given is not None:
                        given.fill(bytes_of(piece))
                    ranks.send(piece, source, target)
                    if sink is not None:
                        sink.append(bytes_of(piece))
                    left -= len(piece)
        return sent

    def recall(self) -> None:
        """Restores the weights of the last `remember`."""
        self.store.recall()
        layouts = {block.home: cost.layout for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True)}
        self.store.lay_anew(layouts)

    def _write_missing_rows(self, at: Position) -> None:
        """Writes the data's rows again that were deleted, and that a recovery which was not planned then reads once more."""
        ahead = {phase.reads for phase, _ in counted(self._prepared.phases[at.phase :])}
        for name in ("train", "test"):
            if (name, 0) in ahead and (name, 0) not in self.boundaries:
                self._write_rows(name)

    def _rewrite_rows(self, name: str, error: CorruptFile) -> None:
        self._reporter.warn(f"{error.with_flags} It is made again from the data.")
        self._write_rows(name)

    def _write_rows(self, name: str) -> None:
        """Checks the data set's rows and writes them to boundary 0, unless there are none or they stay in their source."""
        split = self._planner.train if name == "train" else self._planner.test
        if not split.count or split.source is not None:
            return
        rows = self.boundaries.create(name, 0, self._prepared.input_layout, split.count)
        write_rows(split, rows.append)
        rows.finish()

    def _build(self, *, keep: bool) -> None:
        """Builds one block at a time and saves it at once, so that the model never exists whole. keep: the homes exist."""
        device, seed, ranks = self._planner.device, self._planner.settings.seed, self._planner.ranks
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            module = block.build(device, seed)
            tensors = {} if block.alive is not None else block.own(tensors_of(module))
            if block.alive is None and layout_of(tensors) != cost.layout:
                raise ModelError(
                    f"{block}: its factory built other tensors (names, shapes or types) when it was called again. Let it build "
                    "the same ones every time."
                )
            # A subnetwork's home is cut out of it later; the first rank gives others theirs.
            if not keep and block.number < len(self._prepared.chain.whole) and (self.store.owns(block.home) or ranks.leads):
                self._send_home(block, cost.layout, tensors)
            detach(module)

    def _send_home(self, block: Block, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes a block's weights home. tensors: those of a module built for it, which are written one by one, not copied."""
        if block.alive is not None:
            staging = aligned(layout.padded_nbytes)
            found = layout.views(staging)
            self._planner.live_modules.read(block, found)
        else:
            strides = {spec.name: spec.stride for spec in layout.specs}
            found = {name: t.detach() if strides[name] else t.detach().contiguous() for name, t in tensors.items()}
        if self._planner.initial_weights is not None:
            self._planner.initial_weights.fill(block, found)
        if block.alive is not None:
            self.store.put(block.home, layout, staging)
            return
        with self.store.sink(block.home, layout, REQUEST) as sink:
            for spec in layout.specs:
                sink.append(_in_memory(found[spec.name]))

    def remember(self) -> None:
        """Remembers the weights as they are now, for `recall`."""
        self.store.remember([block.home for block in self._prepared.chain.whole if block.home in self.store])

    def export(self, weights: Path, *, averages: bool = False) -> None:
        """Writes the weights to a file. averages: weights that have a moving average are written as that."""
        with self._explaining("the weights were written"):
            whole = self._prepared.chain.whole
            export_weights(weights, whole, self._prepared.costs[: len(whole)], self.store, averages=averages)

    def give_back(self) -> None:
        """Copies the trained weights into the modules that the user passed built, unless these had no memory of their own. A
        run that ends early leaves them as they were."""
        if self._planner.live_modules.empty:
            return
        for block, cost in zip(self._prepared.chain, self._prepared.costs, strict=True):
            if block.alive is not None:
                attach(block.module, self._each_alone(block, cost.layout))
                bring_to_cpu(block.module)
                block.restore_learning()
                self._planner.live_modules.keep(block)

    def _each_alone(self, block: Block, layout: Layout) -> dict[str, torch.Tensor]:
        """Reads a block's weights, each into memory, or a file, of its own: torch.save and safetensors refuse tensors of a
        common one."""
        places = {spec.name: self._planner.live_modules.place(block, spec.name) for spec in layout.specs}
        found = {spec.name: spec.empty() if (at := places[spec.name]) is None else at for spec in layout.specs}
        if layout.nbytes:
            with closing(self.store.source(block.home, REQUEST)) as source:
                for tensor in found.values():
                    source.fill(_in_memory(tensor))
        return found


def _in_memory(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))


UNBEGUN = "unbegun"
"""The state of a run whose rows and weights have not all been written yet."""


def open_places(
    plan: Plan, settings: Settings, reporter: Reporter, stack: ExitStack,
    *, resumed: ResumePoint | None, job: dict[str, Any] | None, state: Callable[[], str],
) -> tuple[RunDirectory, RunDirectory]:  # fmt: skip
    """Opens a run's directory and that of its homes and rows, which may be the same; writes the plan and `job`, and begins the
    log. `stack` closes them with the final `state`."""
    manifest = resumed.manifest if resumed is not None else None
    name = new_name(plan.method)
    root = resumed.root if resumed is not None else settings.output_dir or Path("runs") / name
    directory = RunDirectory(root, overwrite=settings.overwrite, resume=manifest is not None)

    def close(kind: type[BaseException] | None, *_: object) -> None:
        ended = "interrupted" if kind is not None and issubclass(kind, Interrupted) else state()
        in_vain = ended == UNBEGUN and kind is not None and issubclass(kind, BadInput)
        directory.close("failed" if ended == UNBEGUN else ended, (PLAN, JOB, EVENTS, MEMORY) if in_vain else ())

    stack.push(close)
    scratch = open_scratch(directory, manifest, settings.offload_dir, name)
    if scratch is not directory:
        stack.push(lambda kind, *_: scratch.vanish(failed=kind is not None))
    if manifest is None:
        refuse_small_disk(plan, scratch.root, written=plan.live_bytes)
    for line in report_leftovers(scratch.root.parent, directory.cleaned):
        reporter.say(line)
    reporter.open_log(directory.result(EVENTS), add=manifest is not None)
    at = dict(zip(("phase", "updates"), manifest.state["position"], strict=True)) if manifest is not None else None
    reporter.record("start", time=now(), **describe_versions(), settings=settings.to_json(), checkpoint=at)
    write_text(directory.result(PLAN), plan.to_json())
    if job is not None:
        write_text(directory.result(JOB), with_checksum("job", job))
    reporter.say(f"run directory {shown(directory.root)}")
    return directory, scratch


def refuse_taken_places(output_dir: Path | None, resume: str | Path | None, *, overwrite: bool) -> None:
    """Raises what `open_places` would for the results' directory, before anything is read or planned."""
    if resume is not None:
        refuse_taken(Path(resume) if Path(resume).is_dir() else Path(resume).parent, resume=True)
    elif output_dir is not None:
        refuse_taken(output_dir, overwrite=overwrite)


def refuse_small_disk(plan: Plan, folder: Path, written: int = 0) -> None:
    """Raises DiskFull if the plan does not fit. written: bytes of the plan that are on the disk already."""
    free = written + shutil.disk_usage(existing(folder)).free
    if free < plan.disk_bytes:
        raise DiskFull(
            f"{folder} has {format_size(free)} free, and the plan needs {format_size(plan.disk_bytes)} for weights, "
            "optimizer state, rows, checkpoints and the result. Free some space, give another place with --offload-dir, or do "
            "without checkpoints (--save-every never)."
        )
