"""FORWARD and BACKWARD of one partition on one micro-batch, with the rows, labels and gradients that they need.

What a partition reads and writes depends only on its place in the phase: the first one reads rows, the last one owns
the loss, and between them the boundary exchange passes activations up and gradients down.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.graph import get_gradient_edge

from seqpart.data.boundary_cache import Boundaries
from seqpart.data.reader import Batch, BatchReader, ReaderThread, open_reader
from seqpart.data.row_packs import PackReader, PackWriter, RowPack
from seqpart.device.compiler import back_propagate
from seqpart.device.device import Device
from seqpart.device.ranks import Ranks
from seqpart.errors import ModelError
from seqpart.methods.ist.statistics import observed
from seqpart.methods.method import PartitionLoss, SyntheticLoss, TrueLoss
from seqpart.model.blocks import Block
from seqpart.model.gradient_hooks import call_hooks, hooks_put_off
from seqpart.model.metrics import Metrics, MetricSinks
from seqpart.model.packs import Pack
from seqpart.model.reductions import LossValue, share_of_update
from seqpart.model.tensors import RefuseAway
from seqpart.plan.planner import ExecutionPlan
from seqpart.runtime.boundary_io import BoundaryIO, falsified
from seqpart.runtime.elements import Elements
from seqpart.runtime.graph_offload import Arrival, Graph, GraphOffload, apart_from, entering
from seqpart.runtime.partition import Partition
from seqpart.schedule.phase import Phase, PhaseKind, Span
from seqpart.schedule.steps import Event, PhaseBegun, Position, Step


@dataclass(kw_only=True, slots=True)
class Hooks:
    """Callbacks of a run's loop.

    `listen` gets every event, `sinks` the outputs that metrics are made of. `at_rest` gets the executor after each complete
    update, and after each step of a pass without updates, when nothing is half done; it ends the steps if it returns False.
    Both may raise.
    `before_update` gets a partition with its gradients before each training update. `failed` gets the executor and an error of
    a block or of the rows in a LOAD, FORWARD or BACKWARD, when every home is as `position` says.
    """

    listen: Callable[[Event], None]
    sinks: MetricSinks
    at_rest: Callable[[Any], bool]
    before_update: Callable[[Partition, Step], None]
    failed: Callable[[Any, Exception], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Sources and destinations of a stage's values: rows, boundaries between partitions, offloaded graphs."""

    boundaries: Boundaries
    reader_thread: ReaderThread
    between: BoundaryIO
    graphs: GraphOffload
    falsify: bool
    """True if what backward takes from `between` is slightly wrong: the control run of `verify`."""


class Compute:
    """Runs forward and backward; `loaded` are the partitions on the device, by number: the executor loads and drops them."""

    def __init__(
        self, prepared: ExecutionPlan, partitions: Sequence[Partition], exchanges: Exchanges, device: Device, hooks: Hooks,
        *, seed: int, start: Position, metrics: Metrics, ranks: Ranks,
    ) -> None:  # fmt: skip
        """metrics: the sums of the pass that `start` is in."""
        self.phases, self.partitions, self.boundaries = prepared.phases, partitions, exchanges.boundaries
        self.device, self.hooks, self.start = device, hooks, start
        self.loaded: dict[int, Partition] = {}
        self.metrics, self.committed = Metrics(), metrics
        """Metric sums over the pass so far, and as they were at the end of the last update."""
        self.losses_computed = 0
        """Number of losses that were computed."""
        self._losses, self._row_packs, self._seed, self._resumes = prepared.loss, prepared.row_packs, seed, start.updates > 0
        self._between = exchanges.between
        self._graphs, self._thread, self._falsify = exchanges.graphs, exchanges.reader_thread, exchanges.falsify
        self._own_loss: dict[int, PartitionLoss | None] = {}
        self._labels: dict[int, torch.Tensor] = {}
        self._reader: BatchReader | None = None
        self._unpacked: PackReader | None = None
        """Unpacks the rows of `_reader` into values."""
        self._rows_out: PackWriter | None = None
        self._began, self._earlier = 0.0, 0
        self._ties = [*dict.fromkeys((partition.number, tie) for partition in partitions for _, tie in partition.tied)]
        """(partition, weight that it uses and another partition owns), in the model's order."""
        self._counted_weight: float | None = None
        """Weight that the loss of the unfinished update has counted so far; None if micro-batches count by their rows."""
        self._ranks = ranks
        self._own_metrics: Metrics | None = None
        """Sums of this process's part of the unfinished update, if it is one of several."""
        self._elements = Elements(
            loaded=self.loaded, read=self._read, done=self._release, run=partial(self._output, training=True),
            add_loss=lambda total, rows: self.metrics.add(total, rows, None, weight=rows),
        )  # fmt: skip

    def forward(self, step: Step) -> tuple[int, int]:
        phase = self.phases[step.phase]
        if phase.in_pairs:
            return self._elements.forward(step, phase), 0
        if phase.kind is PhaseKind.DRAW:
            return 0, self._draw(step)
        batch, inputs, labels = self._input(step)
        read, written = (batch.x.nbytes if batch else 0), 0
        if phase.kind is PhaseKind.TRAIN:
            self._forward_to_train(step, inputs, labels)
        else:
            written = self._forward_to_test(step, batch, inputs, labels)
        if batch is not None:
            self._release(batch)
        return read, written

    def _forward_to_test(self, step: Step, batch: Batch | None, inputs: Pack, labels: torch.Tensor) -> int:
        """Runs forward without a graph. Returns the bytes written."""
        phase, p, m = self.phases[step.phase], step.partition, self._number_in_update(step)
        with torch.no_grad():
            outputs = self._output(step, inputs, training=False)
            if phase.partition != phase.last:
                self._between.used_up(p, m)
                if p < phase.last:
                    self._between.put_outputs(m, outputs)
                    return 0
                labels = self._labels.pop(m)
            # In recovery only the model's end has a loss, and the plan relies on it; a STATISTICS phase has none.
            if phase.kind is not PhaseKind.STATISTICS and (not phase.stage or p == len(self.partitions) - 1):
                self._compute_loss(step, self._loss_input(p, outputs), labels)
            return self._write_rows(outputs, batch)

    def _draw(self, step: Step) -> int:
        """Writes a partition's synthetic labels, which need no rows, as the rows of the next. Returns the bytes written."""
        if self._rows_out is None:
            self._open_phase(step.phase)
        assert self._rows_out is not None
        split, p, span = self.phases[step.phase].reads[0], step.partition, self.span(step)
        labels = self.device.upload(self.boundaries.labels[split][span.start : span.stop])
        with torch.no_grad():
            ideal = cast(SyntheticLoss, self._loss_of(p)).ideal(labels.to(self.boundaries.label_types[split]))
            found = {self._row_packs[p].loss_input: ideal}  # nothing goes past it
            return self._rows_out.append(found, found.__getitem__)

    def _loss_input(self, p: int, outputs: Pack) -> torch.Tensor:
        """Returns the output that the loss takes, (rows, ...), also of one row, where squeeze() leaves out that dimension."""
        pack = self._row_packs[p]
        shape = next((column.shape for column in pack.columns if column.number == pack.loss_input), pack.layout.shape)
        output = outputs[pack.loss_input]
        return output if output.dim() > len(shape) else output[None]

    def _write_rows(self, outputs: Pack, batch: Batch | None) -> int:
        if self._rows_out is None:
            return 0
        assert batch is not None, "rows of a boundary are made by one partition alone"
        assert self._unpacked is not None
        return self._rows_out.append(outputs, partial(self._unpacked.value, rows=batch.x))

    def _forward_to_train(self, step: Step, inputs: Pack, labels: torch.Tensor) -> None:
        """Runs forward with a graph, even if it is thrown away: the recompute in BACKWARD must use the same kernels."""
        phase, p, m = self.phases[step.phase], step.partition, self._number_in_update(step)
        partition = self.loaded[p]
        stays = p not in phase.streams
        if stays and m == 0:
            partition.buffers.begin_update()
        if p >= phase.lowest and not (stays and phase.keeps_graph(p)):  # else nothing is recomputed
            partition.buffers.remember()
        inputs, arrivals = self._entering(step, inputs)
        offload = self._graphs if phase.offloads_graph(p) else None
        if offload is not None:
            offload.begin((p, m))
        with partition.packing(offload) if phase.keeps_graph(p) else nullcontext():
            outputs = self._output(step, inputs, training=True)
        graph = self._graph(p, inputs, arrivals, outputs)
        if offload is not None:
            offload.finish()
            graph.let_go()
        if phase.keeps_graph(p):
            partition.kept_graphs[m] = graph
        if p < phase.last:
            self._between.put_outputs(m, outputs)
            if p < phase.lowest:
                self._between.used_up(p, m)
        else:
            self._compute_loss(step, self._loss_input(p, outputs), labels if p == phase.partition else self._labels.pop(m))

    def backward(self, step: Step) -> tuple[int, int]:
        phase, p, partition = self.phases[step.phase], step.partition, self.loaded[step.partition]
        if phase.in_pairs:
            self._elements.backward(step, phase, self.span(step).update_rows)
            self.losses_computed += 1  # an update has rows, so one of its pairs has a loss
            return 0, 0
        m = self._number_in_update(step)
        if phase.partition == phase.last:
            batch, inputs, labels = self._input(step)
            assert batch is not None
            if m == 0:
                partition.buffers.begin_update()
            self._back_propagate_loss(step, self._entering(step, inputs)[0], labels)
            partition.unalias_gradients()
            self._release(batch)
            return batch.x.nbytes, 0
        if p == phase.last and p not in phase.streams and m == 0:
            partition.buffers.begin_update()  # its only forward pass is here
        partition.buffers.restore()
        away = phase.offloads_graph(p)
        with self._graphs.on_device((p, m) if away else None) as others:
            with partition.collect_tied_gradients() as tied:
                arrived = apart_from(others, self._back_propagate(step).gradients)
            partition.unalias_gradients(arrived.values(), others)
            for tie, gradient in tied.items():
                if gradient is not None:
                    (gradient,) = apart_from(others, {0: gradient}).values()
                    self._between.put_shared_gradient(self._ties.index((p, tie)), m, gradient)
        self._send_gradients(step, arrived)
        return 0, 0

    def _back_propagate(self, step: Step) -> Graph:
        """Back-propagates one of several partitions: the last from its own loss, the others from the gradient left for them."""
        phase, p, m = self.phases[step.phase], step.partition, self._number_in_update(step)
        if phase.keeps_graph(p):
            graph = self.loaded[p].kept_graphs.pop(m)
            self._propagate(step, graph.edges)
            return graph
        inputs = self._between.take_inputs(p, m)
        if p < phase.last or p == phase.lowest:  # the last one's only forward is here: a wrong loss proves little
            inputs = self._falsified(inputs)
        inputs, arrivals = self._entering(step, inputs)
        if p == phase.last:
            self._back_propagate_loss(step, inputs, self._labels.pop(m))
            return Graph(arrivals, {})
        graph = self._graph(p, inputs, arrivals, self._output(step, inputs, training=True))
        del inputs
        self._propagate(step, graph.edges)
        return graph

    def _shared(self, p: int) -> Iterator[tuple[int, torch.nn.Parameter]]:
        """Yields (number in `_ties`, parameter of p) for each weight that p owns or borrows and a later partition uses too: the
        number of the next one's use."""
        here = {(tie.owner, tie.owner_name): (block, tie.name) for block, tie in reversed(self.partitions[p].tied)}
        following = dict[tuple[Block, str], int]()
        for number, (later, tie) in enumerate(self._ties):
            weight = tie.owner, tie.owner_name
            used = later > p and (weight in here or tie.owner in self.partitions[p].blocks)
            if used and following.setdefault(weight, later) == later:
                block, name = here.get(weight, weight)
                yield number, block.module.get_parameter(name)

    def _graph(self, p: int, inputs: Pack, arrivals: dict[int, Arrival], outputs: Pack) -> Graph:
        again = self._between.taken_again(p)
        return Graph.of(arrivals, [*outputs.items(), *((number, inputs[number]) for number in again)])

    def _propagate(self, step: Step, edges: Mapping[int, Any]) -> None:
        """Back-propagates from the gradients that later partitions left, and from those of the weights that they share.

        One call does both: then a shared weight's gradients of one micro-batch are added up, the last use's first, before they
        are added to those of other micro-batches, as in a model that is not cut. So a partition that borrows the weight takes
        what later ones left, and leaves the sum.
        """
        p, m = step.partition, self._number_in_update(step)
        found = self._falsified(self._between.take_gradients(p, m, edges.keys()))
        roots: list[Any] = [edges[number] for number in found]
        gradients = list(found.values())
        for number, parameter in self._shared(p):
            for gradient in self._between.take_shared_gradient(number, m):
                roots.append(parameter)
                gradients.append(gradient)
        if roots:
            self._run_backward(step, roots, gradients)

    def _run_backward(self, step: Step, roots: list[Any], gradients: list[torch.Tensor]) -> None:
        edges = [get_gradient_edge(root) if isinstance(root, torch.Tensor) else root for root in roots]
        parameters = [*self.loaded[step.partition].trainable.values()] if self.divides(step) else []
        versions = [parameter._version for parameter in parameters]
        with RefuseAway(_READS_OTHERS), hooks_put_off(parameters):  # torch turns modes off in a backward pass from tensors
            back_propagate(edges, gradients)
        if versions != [parameter._version for parameter in parameters]:
            raise ModelError(
                "a hook changes weights in backward, as an optimizer of its own does, and other micro-batches of the update go "
                "forward with the old ones. Leave it out, or give --micro-batch-size the rows of an update."
            )

    def divides(self, step: Step) -> bool:
        """True if the gradients of the step's update are the sum of several micro-batches'."""
        if self.phases[step.phase].ranks > 1:
            return True
        span = self.span(step)
        return span.stop - span.start < span.update_rows

    def call_hooks(self, step: Step) -> None:
        """Calls the hooks of a partition's parameters on the gradients of a whole update, if it is divided."""
        if self.divides(step):
            with RefuseAway(_READS_OTHERS):
                call_hooks(self.loaded[step.partition].trainable.values())

    def _falsified(self, handed: Pack) -> Pack:
        """Returns what BACKWARD takes from other partitions; slightly wrong in `verify`'s control run, see `falsified`."""
        return {number: falsified(tensor) for number, tensor in handed.items()} if self._falsify else handed

    def _send_gradients(self, step: Step, gradients: Pack) -> None:
        phase, p, m = self.phases[step.phase], step.partition, self._number_in_update(step)
        self._between.put_gradients(p, m, gradients, phase.lowest)
        if p > phase.lowest and self._between.wanted(p, phase.lowest) and not self._between.gradients_wait(m):
            raise ModelError(
                f"no gradient came back through partition {p} (from {self.loaded[p].blocks[0]} on), and blocks before it are "
                "to learn. Freeze them (requires_grad_(False)), or let that block be differentiable."
            )

    def _back_propagate_loss(self, step: Step, inputs: Pack, labels: torch.Tensor) -> None:
        """Back-propagates the partition's own loss, weighted so that an update's micro-batches add up to the whole batch's."""
        output = self._loss_input(step.partition, self._output(step, inputs, training=True))
        self._hold_parts(step, output, labels)
        value = self._compute_loss(step, output, labels)
        del output  # only the graph holds it, until the loss has its gradient
        assert value is not None
        part, counted = share_of_update(value, self.span(step))
        if counted:  # the total is known only after the last micro-batch: see `scale`
            self._counted_weight = (self._counted_weight or 0.0) + counted
        if value.loss.requires_grad:
            loss = value.loss if part == 1.0 else value.loss * part
            self._run_backward(step, [loss], [torch.ones_like(loss)])

    def _hold_parts(self, step: Step, output: torch.Tensor, labels: torch.Tensor) -> None:
        """Holds the outputs of a batch that is split into micro-batches, in updates 0, 1, 2, 4, 8, ... of the phase."""
        phase, loss = self.phases[step.phase], self._loss_of(step.partition)
        update = phase.share_of(_micro_batch(step) // phase.micro_batches_per_update)[0]
        whole = len(output) == self.span(step).update_rows or phase.ranks > 1  # then no process has them all
        if isinstance(loss, TrueLoss) and not whole and not update & (update - 1):
            loss.hold(output, labels, self.span(step), phase.micro_batches_per_update)

    def scale(self, number: int, update: int) -> float | None:
        """Returns the factor for the gradients of an update of phase `number`; None if they stay as they are."""
        phase = self.phases[number]
        rows = phase.rows_before(update + 1) - phase.rows_before(update)
        return rows / self._counted_weight if self._counted_weight not in (None, 0.0, rows) else None

    def share_losses(self, step: Step) -> None:
        """Adds up the losses of an update over all processes, once the partition that has them has computed each one's own."""
        if self._reader is None:  # of a pass of whose rows this process has none
            self._open_phase(step.phase)
        if self._own_metrics is None or step.partition < self.phases[step.phase].last:
            return
        found, self._own_metrics = self._ranks.gather((self._own_metrics.tally(), self._counted_weight)), None
        for sums, _ in found:
            self.metrics.include(Metrics.of(sums))
        self._counted_weight = sum(counted or 0.0 for _, counted in found) or None

    def _entering(self, step: Step, inputs: Pack) -> tuple[Pack, dict[int, Arrival]]:
        """Returns the partition's inputs as leaves of its graph, requiring gradients where an earlier partition is to learn."""
        wanted = self._between.wanted(step.partition, self.phases[step.phase].lowest)
        found = {number: entering(x, wants_gradient=number in wanted) for number, x in inputs.items()}
        return {number: x for number, (x, _) in found.items()}, {number: arrival for number, (_, arrival) in found.items()}

    def _compute_loss(self, step: Step, output: torch.Tensor, labels: torch.Tensor) -> LossValue | None:
        loss_fn = self._loss_of(step.partition)
        if loss_fn is None:
            return None
        pieces = self.hooks.sinks.pieces(self.phases[step.phase], self.span(step))
        if pieces is None:
            return self._loss_of_rows(step, loss_fn, output, labels)
        for name, rows in pieces:
            self._loss_of_rows(step, loss_fn, output[rows], labels[rows], name)
        return None

    def _loss_of_rows(
        self, step: Step, loss_fn: PartitionLoss, output: torch.Tensor, labels: torch.Tensor, name: str = ""
    ) -> LossValue:
        """Computes the loss of rows, and adds it to the metrics. name: their test set, if there are several."""
        sinks = self.hooks.sinks
        if without := sinks.without_loss(self.phases[step.phase]):
            found: LossValue | torch.Tensor = output.new_zeros((), dtype=torch.float32)
        else:
            with self.loaded[step.partition].autocast():
                found = loss_fn(output, labels, self.span(step)) if isinstance(loss_fn, TrueLoss) else loss_fn(output, labels)
        value = found if isinstance(found, LossValue) else LossValue(found, len(output))
        with torch.no_grad():
            scores = None if without else loss_fn.scores(output.detach(), labels)
            whole = self.metrics if self._own_metrics is None else self._own_metrics
            for sums in (whole, sinks.of_set(name)) if name else (whole,):
                sums.add(value.total, len(output), scores, weight=value.weight, parts=value.totals)
            returned = loss_fn.returned if isinstance(loss_fn, TrueLoss) else torch.positive
            dims = partial(loss_fn.row_dims, output) if isinstance(loss_fn, TrueLoss) else list[int | None]
            sinks.collect(self.phases[step.phase], output, labels, returned, dims, name)
        self.losses_computed += 1
        return value

    def _loss_of(self, p: int) -> PartitionLoss | None:
        if p not in self._own_loss:
            self._own_loss[p] = self._losses(p)
        return self._own_loss[p]

    def _output(self, step: Step, inputs: Pack, *, training: bool) -> Pack:
        phase = self.phases[step.phase]
        update, part = divmod(_micro_batch(step), phase.micro_batches_per_update)
        observes = phase.kind is PhaseKind.STATISTICS
        around = partial(observed, anew=self.span(step).start == 0) if observes else nullcontext
        key = phase.epoch, phase.within.done + update, part
        return self.loaded[step.partition].forward(inputs, training=training, key=key, around=around)

    def _number_in_update(self, step: Step) -> int:
        """Returns the micro-batch's number among this process's own of its update; boundary tensors are stored by it, in reused
        places."""
        return self.phases[step.phase].part_of(_micro_batch(step))

    def span(self, step: Step) -> Span:
        return self.phases[step.phase].span(_micro_batch(step))

    def _input(self, step: Step) -> tuple[Batch | None, Pack, torch.Tensor]:
        """Returns (batch, values, labels): the phase's first partition reads rows, the others take boundary tensors."""
        phase, p, m = self.phases[step.phase], step.partition, self._number_in_update(step)
        if p != phase.partition:
            keeps = phase.kind is PhaseKind.TRAIN and phase.keeps_graph(p)
            return None, self._between.take_inputs(p, m, to_keep=keeps), torch.empty(0)
        batch, inputs, labels = self._read(step)
        if phase.partition != phase.last:
            for number, x in inputs.items():
                if x.data_ptr() == batch.x.data_ptr():  # the reader reuses its memory
                    inputs[number] = x.clone()
            self._labels[m] = labels
            self._between.put_outputs(m, inputs)
        return batch, inputs, labels

    def _read(self, step: Step) -> tuple[Batch, Pack, torch.Tensor]:
        batch = self._next_batch(step)
        assert self._unpacked is not None
        labels = self.device.upload(batch.labels)
        return batch, self._unpacked.take(batch.x), labels.to(self.boundaries.label_types[self.phases[step.phase].reads[0]])

    def _next_batch(self, step: Step) -> Batch:
        if self._reader is None:
            self._open_phase(step.phase)
        assert self._reader is not None
        batch = self._reader.take()
        assert batch.micro_batch == step.micro_batch, f"{step}: the reader is at micro-batch {batch.micro_batch}"
        return batch

    def _open_phase(self, number: int) -> None:
        """Opens a phase: its reader, and the writer of the rows that it leaves."""
        phase = self.phases[number]
        split, source = phase.reads
        first_update = self.start.updates if self._resumes else 0
        self.metrics = replace(self.committed) if self._resumes else Metrics()
        self.hooks.sinks.begin(phase, self.metrics, self.device.torch)
        self._own_metrics = Metrics() if phase.ranks > 1 else None
        self._resumes, self._began = False, time.perf_counter()
        if phase.kind is not PhaseKind.TRAIN and phase.hands_on(len(self.partitions)):
            pack, p = self._row_packs[phase.last], phase.last + 1
            self._rows_out = PackWriter(pack, self.boundaries, phase.leaves, p, phase.rows, self.device)
        if phase.kind is not PhaseKind.DRAW:
            rows, entering = self.boundaries.entering(phase.enters, source), self.partitions[phase.partition].entering
            pack = self._row_packs[source - 1] if source else RowPack.of_one(entering[0].number, rows.layout)
            self._unpacked = PackReader(pack, self.boundaries, phase.enters, source, entering, self.device)
            self._reader = open_reader(
                rows, self.boundaries.labels[split], phase, self.device, self._thread, seed=self._seed,
                first_update=first_update,
            )  # fmt: skip
        self._earlier = phase.rows_before(first_update)
        self.hooks.listen(PhaseBegun(phase=phase, number=number, earlier=self._earlier))

    def _release(self, batch: Batch) -> None:
        assert self._reader is not None
        self._reader.done(batch)

    def end_update(self, phase: Phase) -> None:
        """An update of `phase` is finished: the metric sums so far are those that a resumed run goes on with."""
        self._counted_weight, self._own_metrics = None, Metrics() if phase.ranks > 1 else None
        self._elements.end_update()
        self.committed = replace(self.metrics)

    def refuse_divergence(self, number: int, update: int | None = None) -> None:
        """Raises Diverged if a loss of phase `number` so far, up to `update` (from 1), is not finite. Synchronizes on CUDA."""
        self.metrics.refuse_divergence(f"{'' if update is None else f'update {update} of '}{self.phases[number]}")

    def end_phase(self, number: int) -> None:
        """Ends phase `number` after its last row. Raises Diverged if the loss is not finite."""
        if self._rows_out is not None:
            self._rows_out.finish()
            self._rows_out = None
        self.close_reader()
        metrics, phase, seconds = self.metrics, self.phases[number], time.perf_counter() - self._began
        self.refuse_divergence(number)
        self.committed = Metrics()
        self.hooks.listen(metrics.done(phase, self._earlier, seconds, self.hooks.sinks.found(phase)))

    def forget_loss(self, p: int) -> None:
        """Frees the fixed targets of partition p's loss, when p is dropped."""
        self._own_loss.pop(p, None)

    def close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def abandon(self) -> None:
        """Forgets the unfinished pass."""
        self.close_reader()
        self._rows_out = None
        self._labels.clear()
        self.hooks.sinks.forget()
        self._between.abandon()
        self._counted_weight = None
        self._elements.end_update()
        self._own_loss.clear()  # the next executor builds fixed targets of its own


def _micro_batch(step: Step) -> int:
    assert step.micro_batch is not None
    return step.micro_batch


_READS_OTHERS = partial(
    ModelError,
    "in backward, a hook or an autograd.Function uses a weight of another layer, or its gradient, which is not on the device. "
    "Give --method full or checkpointed, which keep all there, or let one module hold both layers: it is one block of a list.",
)
