"""Turns checked inputs into a plan and everything that a run needs to carry it out, before anything is trained."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import seqpart.plan.problem as planning
from seqpart.data.row_packs import RowPack
from seqpart.device.limit import margin_of, refused
from seqpart.device.ranks import per_machine
from seqpart.errors import DoesNotFit, OptionError
from seqpart.fields import values_of
from seqpart.methods import methods_named
from seqpart.methods.exact import STREAMED
from seqpart.methods.method import Method, PartitionLoss, PartitionTraining, Recovery, Workload
from seqpart.model.blocks import Chain
from seqpart.model.optimizers import Optimizer
from seqpart.model.packs import DEVICE, tier_at
from seqpart.plan.exact import choose_exact, fastest_of
from seqpart.plan.inputs import Inputs
from seqpart.plan.plan import KEPT, RECOMPUTED, PartitionPlan, Plan, PlanRequest
from seqpart.plan.prediction import Prediction, disk_bytes, peaks_by_partition, rows_for_memory, rows_reason, with_rows
from seqpart.plan.problem import Candidate, Problem
from seqpart.plan.sil import choose_cut
from seqpart.plan.simulator import Resources, simulate
from seqpart.plan.unfreezing import stages_in_words
from seqpart.profile.blocks import BlockCost
from seqpart.profile.machine import Speeds
from seqpart.profile.partition import PartitionCost, prefix_costs, state_layouts
from seqpart.schedule.phases import Phases, counted, dividing
from seqpart.store.direct import REQUEST
from seqpart.store.row_file import RowLayout
from seqpart.units import format_size, parse_size

_MOST_CHUNKS = 256
"""Most chunks of the loss that a plan takes unasked: beyond, each has more overhead than logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Phases up to number `end` (not included), and the resources that they may use."""

    end: int
    resources: Resources
    micro_batch: int
    heap: int
    offloads: frozenset[int]
    """Partitions whose graphs are offloaded."""
    optimizers: tuple[Optimizer, ...]
    """Optimizer of each partition. In all stages a partition has the same kinds of state."""


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """A plan, and everything that a run needs to carry it out."""

    request: PlanRequest
    plan: Plan
    chain: Chain
    method: Method
    costs: tuple[BlockCost, ...]
    phases: Phases
    stages: tuple[Stage, ...]
    row_packs: tuple[RowPack, ...]
    """Row layout of the boundary after each partition."""
    input_layout: RowLayout
    partition_costs: tuple[PartitionCost, ...]
    speeds: Speeds
    loss: Callable[[int], PartitionLoss | None]
    places: planning.HostPlaces
    """The contents of the host pool beside boundaries."""
    exchange_bytes: int
    """Bytes of the host pool for boundaries."""
    graph_rooms: planning.GraphRooms
    """Bytes of the host pool for offloaded graphs."""

    def hosted(self) -> dict[str, int]:
        """{home: bytes} for homes planned to be in host memory, partition by partition: weights, optimizer state, and gradients
        where they wait for their norm."""
        homes: dict[str, int] = {}
        waits = any(phase.defers_updates and phase.streams for phase, _ in counted(self.phases))
        for p in sorted(self.places.homes):
            part, optimizer = self.plan.partitions[p], self.stages[0].optimizers[p]
            costs, blocks = self.costs[part.first : part.last], self.chain[part.first : part.last]
            for block, cost, state in zip(blocks, costs, state_layouts(blocks, costs, optimizer), strict=True):
                homes |= {block.home: cost.layout.nbytes} | ({block.state_home: state.nbytes} if state.specs else {})
                homes |= {block.gradient_home: cost.gradient_layout.nbytes} if waits and cost.gradients else {}
        for p in sorted(self.places.narrow):
            part = self.plan.partitions[p]
            for block, cost in zip(self.chain[part.first : part.last], self.costs[part.first : part.last], strict=True):
                homes |= {block.narrow_home: cost.narrow.nbytes} if cost.narrow.specs else {}
        return homes


class Planner(Inputs):
    """Makes the plan, and makes it again when a failed allocation asks for one that needs less."""

    def problem(self, request: PlanRequest) -> Problem:
        (count, asked), batch = self.settings.partition_choice(), self.updates.shared(self.updates.largest)
        labels = self.train.labels
        costs = self.costs_at(self.updates.largest)
        laid = [(one, state_layouts(self.chain, costs, one)) for one in self.optimizers.possible()]
        heaviest, states = max(laid, key=lambda pair: sum(state.nbytes for state in pair[1]))
        return Problem(
            chain=self.chain, method=request.methods[0], machine=self._machine(request, costs), limit=request.limit,
            costs_at=self.costs_at, counted_at=self.counted_at, states=states,
            optimizer=heaviest, loss_of=partial(self.loss_cost, request),
            defers_updates=self._starts is not None or self.settings.clip_grad_norm is not None,
            label_row=self.train.label_type.itemsize * (labels.numel() // max(1, len(labels))), pair_rows=self.rows_per_pass,
            batch_size=batch, the_batch=None if self.updates.only is None else self.updates.shared(self.updates.only),
            micro_batch=request.micro_batch or self.settings.micro_batch_size,
            starts=self._starts or request.starts or asked, count=count, input_row=self.reading.layout, row_pack=self.row_pack,
            can_cut_after=self.can_cut_after, learns_alone=self.row_pack.has_one_that_learns,
            train_rows=self.updates.epoch_rows,
            test_rows=self.test.count, saved=request.saved, auto=self.settings.method == "auto",
            draft=request.draft, steps=self._steps(request),
        )  # fmt: skip

    def _machine(self, request: PlanRequest, costs: Sequence[BlockCost]) -> planning.Machine:
        device, shares, budget = self.device, self.device.shares_memory, self._host_budget()
        kept = request.methods[0].library_bytes(self.rows_per_pass(self.updates.largest)) if shares else 0
        exports = 0
        if shares and self.settings.export_every is not None:  # it holds a whole block, and a request
            exports = max(cost.layout.padded_nbytes for cost in costs) + REQUEST
        return planning.Machine(
            device=device.name, host_counts=shares, runtime=self.runtime + request.spare,
            growth=device.growth + kept + self.ranks.room,
            live_bytes=self.live_bytes, export_bytes=exports, heap_below=device.heap_below, speeds=self.speeds,
            contention=device.contention,
            # A kept heap is touched as a whole: what an LSTM reserves and does not touch made it larger than planned.
            may_keep_heap=device.keeps_heap and request.may_keep_heap and self.ranks.keeps_heap
            and not any(cost.untouched for cost in costs),
            boundary_tiers=("device", "host" if not shares or self.settings.ram_limit else "disk"),
            graph_tiers=self._graph_tiers() if self.settings.method == "auto" and not self.settings.compile else (),
            host_room=budget // (1 if shares else 2), host_budget=budget,
        )  # fmt: skip

    def planned(self, request: PlanRequest | None = None) -> ExecutionPlan:
        """Makes a new plan, or one with the cut and micro-batch of the saved plan. Raises like `prepare`."""
        asked = request or self.request
        while True:
            try:
                return self.measured(partial(self._planned, asked), partial(self._planned, replace(asked, draft=True)))
            except DoesNotFit:
                if self.purpose.loss_chunks is not None or asked.loss_chunks >= _MOST_CHUNKS:
                    raise
                asked = replace(asked, loss_chunks=2 * asked.loss_chunks)

    def with_fewer_workers(self, plan: Callable[[], ExecutionPlan]) -> ExecutionPlan:
        """Returns `plan()` with as many workers as fit in the limit. Raises DoesNotFit if nothing fits without workers."""
        while True:
            try:
                return plan()
            except DoesNotFit:
                if not (freed := self.reading.fewer()):
                    raise
                self.runtime -= freed

    def measured(self, plan: Callable[[], ExecutionPlan], draft: Callable[[], ExecutionPlan] | None = None) -> ExecutionPlan:
        """Repeats `plan` until the blocks that it uses have been run for real, each kind at the plan's micro-batch.

        draft: a plan that is made faster and uses nearly always the same, for the first of these runs.
        """
        with self.under_limit():
            if draft is not None and self.trials.are_to_come and not self.settings.compile:  # each number of rows takes long
                with suppress(DoesNotFit):  # which `plan` says
                    self.try_blocks(self._used_by(draft()))
            while True:
                try:
                    prepared = plan()
                except DoesNotFit as refusal:  # the limit that it names must be one that fits
                    rows = refusal.rows or min(planning.possible_micro_batches(self.problem(self.request)))
                    with suppress(DoesNotFit):  # without room for the compiler, which is part of `least_limit`
                        if self.try_blocks([(rows, 0, len(self.chain))]):
                            continue
                    least = self.trials.least_limit(rows, refusal.smallest or 0)
                    if refusal.smallest is None or least <= refusal.smallest:
                        raise
                    raise refused(refusal.message, least, rows, tried=False) from None
                if not self.try_blocks(self._used_by(prepared)):
                    return prepared

    def _used_by(self, prepared: ExecutionPlan) -> list[tuple[int, int, int]]:
        """Returns (rows, first block, last block) of all that a run of the plan computes with."""
        parts = prepared.plan.partitions
        sizes = {stage.micro_batch for stage in prepared.stages[1:]}
        wanted = [(prepared.partition_costs[p].rows, part.first, part.last) for p, part in enumerate(parts)]
        batches = [rows for size in values_of(self.settings.batch_size) for rows in (size, self.train.epoch_rows % size)]
        sizes |= self.trials.last_rows({part.micro_batch for part in parts}, [*batches, self.test.count])
        return [*wanted, *((size, 0, len(self.chain)) for size in sizes)]

    def _planned(self, request: PlanRequest) -> ExecutionPlan:
        reuse = request.saved
        if reuse is None:
            return self.prepare(request)
        now = planning.fingerprint(self.chain, self.costs_at(self.updates.largest), self.train.shape)
        names = [method.name for method in request.methods]
        if reuse.method not in names or (reuse.fingerprint, reuse.partitions[-1].last) != (now, len(self.chain)):
            if self.ranks.number:
                raise OptionError(
                    f"rank {self.ranks.number} was given another model or method than rank 0, whose plan this is "
                    f"({reuse.method}, {reuse.fingerprint}); its own is {', '.join(names)}, {now}. Give every process the same."
                )
            raise OptionError(
                f"--plan: that plan is for another model or method ({reuse.method}, {reuse.fingerprint}); this run is "
                f"{' or '.join(names)}, {now}. Make a new one with --plan-out."
            )
        self.refuse_cuts("--plan", reuse.starts)
        methods = methods_named(reuse.method)  # `auto` takes the one of the plan
        return self.prepare(replace(request, methods=methods, micro_batch=reuse.micro_batch, starts=reuse.starts))

    def prepare(self, request: PlanRequest) -> ExecutionPlan:
        """Makes the plan and its parts. Raises DoesNotFit, DataError, ModelError or OptionError that says what is wrong."""
        try:
            return self._prepare(request)
        except DoesNotFit as refusal:
            if request.draft:
                raise
            raise self._tried(refusal, request) from None

    def _tried(self, refusal: DoesNotFit, request: PlanRequest) -> DoesNotFit:
        """The refusal with a limit at which a plan was really made, since synthetic labels and recovery may need more there."""
        smallest, rows, follows = refusal.smallest, refusal.rows, request.label_bytes == request.limit // 10
        for _ in range(4):
            if smallest is None:
                break
            label_bytes = smallest // 10 if follows else request.label_bytes
            try:
                self._prepare(replace(request, limit=smallest, label_bytes=label_bytes))
                return refused(refusal.message, smallest, rows)
            except DoesNotFit as again:
                smallest, rows = again.smallest, again.rows
        return refusal

    def _prepare(self, request: PlanRequest) -> ExecutionPlan:
        problem = self.problem(request)
        method, candidate, reasons = self._choose(problem, request)
        block_costs, training = self.costs_at(candidate.micro_batch), self._training(request, candidate)
        recovery = self._recovery(request, problem, candidate)
        head, whole = self.chain.head, self.chain.whole
        reasons = (
            *reasons, *([] if recovery is None else [self._recovery_in_words(recovery)]),
            *([] if head is None else [head.note(request.loss_chunks)]),
            *self.chain.notes, *self.reading.notes, *self.trials.notes, *self.optimizers.notes,
            *stages_in_words(whole, block_costs[: len(whole)], self.late, self.settings.frozen),
        )  # fmt: skip
        optimizers = self._optimizers(candidate)
        costs = self._partition_costs(request, candidate, training, optimizers)
        phases = method.phases(self._workload(candidate, training, recovery))
        row_packs = tuple(self.row_pack(block_costs[last - 1]) for _, last, _ in candidate.parts)
        streamed = recovery.candidate if recovery is not None else candidate
        largest = max(problem.batch_size, self.updates.shared(self.updates.of_recovery, independent=False))
        exchange_bytes = planning.host_boundaries(
            replace(problem, batch_size=largest), streamed.parts, streamed.micro_batch, streamed.resources.tiers
        )
        rooms = planning.graph_rooms(
            costs, candidate.resources.graphs_at_host,
            planning.graphs_at_once(method, problem.batch_size, candidate.micro_batch),
        )  # fmt: skip
        places = self._host_places(problem, exchange_bytes, rooms, candidate, row_packs)
        plan = self._plan(
            problem, method, candidate, training, costs, phases, reasons, row_packs, places, recovery, request.loss_chunks
        )
        ends = [(block_costs[last - 1].output_shape, last in self.chain.ends) for _, last, _ in candidate.parts]
        return ExecutionPlan(
            request=request, plan=plan, chain=self.chain, method=method, costs=block_costs, phases=phases,
            stages=self._stages(phases, candidate, recovery),
            row_packs=row_packs, input_layout=self.reading.layout, partition_costs=costs, speeds=self.speeds,
            loss=lambda p: self.losses.of_partition(
                method, request.label_bytes, p, *ends[p], self.device.torch, request.loss_chunks
            ), places=places,
            exchange_bytes=exchange_bytes, graph_rooms=rooms,
        )  # fmt: skip

    def _choose(self, problem: Problem, request: PlanRequest) -> tuple[Method, Candidate, tuple[str, ...]]:
        """Chooses method, cut and micro-batch, and says why. Raises DoesNotFit."""
        if not self.alone:
            return choose_exact(problem, request.methods, request.wording)
        candidate, reasons = choose_cut(problem, request.wording)
        if self.updates.independent:
            if (found := len(candidate.parts)) < (count := self.ranks.count):
                raise OptionError(
                    f"{found} partition(s) are trained by {count} processes, each of which takes at least one. Give "
                    f"--partitions {count}, or start fewer."
                )
            each = f"partition p is process p mod {count}'s, and waits for nothing of the others (this is no pipeline)"
            reasons = (*reasons, f"{count} processes train partitions at the same time: {each}")
        return request.methods[0], candidate, (*reasons, *request.methods[0].idle_options(self.settings, len(candidate.parts)))

    def _optimizers(self, candidate: Candidate, *, recovery: bool = False) -> tuple[Optimizer, ...]:
        return self.optimizers.of_partitions(len(candidate.parts), recovery=recovery)

    def epochs(self, count: int, trained: tuple[float, ...] = ()) -> list[float]:
        """Epochs of each of `count` partitions. trained: epochs that the first partitions, already trained, had."""
        return [*trained, *self.settings.of_partitions("epochs", count)[len(trained) :]]

    def _training(self, request: PlanRequest, candidate: Candidate) -> tuple[PartitionTraining, ...]:
        count, micro = len(candidate.parts), candidate.micro_batch
        epochs = self.epochs(count, request.trained_epochs)
        batches = [min(size, self.updates.epoch_rows) for size in self.settings.of_partitions("batch_size", count)]
        return tuple(
            PartitionTraining(
                epochs=n.epochs, updates=n.counted, batch_size=b, micro_batch=min(micro, b), trainable=c.trainable, rows=c.rows
            )
            for n, b, (_, _, c) in zip(map(self.updates.length, epochs, batches), batches, candidate.parts, strict=True)
        )

    def _recovery(self, request: PlanRequest, problem: Problem, candidate: Candidate) -> Prediction | None:
        """Plans recovery, the second stage: the streamed schedule on the same cut, under the same limit. None without it."""
        if not self.settings.recovery_epochs:
            return None
        if len(candidate.parts) == 1:
            raise OptionError(
                "--recovery-epochs: the network fits as one partition, which is trained against the true loss already; there "
                "is nothing to recover. Leave it out, or cut with --partitions."
            )
        # With a recovery the choices of a saved plan are for that stage.
        saved = None if request.saved is None else replace(request.saved, method=STREAMED.name)
        asked = replace(
            problem, starts=tuple(part[0] for part in candidate.parts), count=None, known={}, saved=saved,
            batch_size=(batch := self.updates.shared(self.updates.of_recovery, independent=False)), the_batch=batch,
            loss_of=partial(self.loss_cost, request, true=True),
        )  # fmt: skip
        found = fastest_of(asked, STREAMED)
        if found is None:
            choose_exact(asked, (STREAMED,))  # says in words what is missing
        return found

    def _recovery_in_words(self, recovery: Prediction) -> str:
        candidate, settings = recovery.candidate, self.settings
        learns = "all partitions" if settings.recover == "all" else "all partitions but the last"
        rate = "" if settings.recovery_lr is None else f", learning rate {settings.recovery_lr:g}"
        return (
            f"recovery: {settings.recovery_epochs} epoch(s) of streamed back-propagation, {learns} learn, micro-batch "
            f"{candidate.micro_batch}, {candidate.resources.slots} slot(s), peak {format_size(recovery.peak)}{rate}"
        )

    def _stages(self, phases: Phases, candidate: Candidate, recovery: Prediction | None) -> tuple[Stage, ...]:
        def stage(end: int, used: Candidate, *, recovers: bool) -> Stage:
            return Stage(
                end=end, resources=used.resources, micro_batch=used.micro_batch, heap=used.heap, offloads=used.offloads,
                optimizers=self._optimizers(used, recovery=recovers),
            )  # fmt: skip

        begun = stage(len(phases.of_stage(0)), candidate, recovers=False)
        return (begun,) if recovery is None else (begun, stage(len(phases), recovery.candidate, recovers=True))

    def _workload(self, candidate: Candidate, training: tuple[PartitionTraining, ...], recovery: Prediction | None) -> Workload:
        stage, kept = None, candidate
        if recovery is not None:
            kept = recovery.candidate
            stage = Recovery(
                epochs=self.settings.recovery_epochs, batch_size=self.updates.of_recovery, micro_batch=kept.micro_batch,
                frozen=frozenset() if self.settings.recover == "all" else frozenset({len(training) - 1}),
            )  # fmt: skip
        return Workload(
            train_rows=self.updates.epoch_rows, test_rows=self.test.count, shuffle=self.settings.shuffles, partitions=training,
            defers_updates=self.settings.clip_grad_norm is not None, stays=kept.resources.stays, keeps=kept.keeps,
            offloads=kept.offloads, host_steps=kept.resources.host_steps, recovery=stage, tests=self.settings.tests,
            synthetic_inputs=self.settings.sil_inputs == "synthetic", views=self.settings.views,
            one_value=planning.routing_of([cost for _, _, cost in candidate.parts]).is_one_value,
            rank=self.ranks.number, ranks=self.ranks.count,
            divides_state=self.ranks.count > 1 and self.exact and not self.settings.averages,
        )  # fmt: skip

    def _exchanged(self, candidate: Candidate, costs: Sequence[PartitionCost]) -> tuple[int, str]:
        """Returns the bytes that each exchange between processes is of, and when it is, in words."""
        if self.updates.independent:
            return sum(cost.weights for cost in costs) // len(costs), "a trained partition, of {} on average, is shared"
        gradients = sum(cost.gradients for cost in costs if cost.trainable)
        return gradients // (len(costs) if self.alone else 1), "an update exchanges {} of gradients"

    def _partition_costs(
        self, request: PlanRequest, candidate: Candidate, training: Sequence[PartitionTraining],
        optimizers: Sequence[Optimizer],
    ) -> tuple[PartitionCost, ...]:  # fmt: skip
        """Costs with every partition's own micro-batch and optimizer."""
        found = []
        for (first, last, _), part, optimizer in zip(candidate.parts, training, optimizers, strict=True):
            rows = min(part.micro_batch, part.rows)
            blocks = self.costs_at(rows)[first:last]
            states = state_layouts(self.chain[first:last], blocks, optimizer)
            *_, cost = prefix_costs(
                blocks, states, self.loss_cost(request, rows), optimizer=optimizer,
                in_lists=not self.device.shares_memory, heap_below=self.device.heap_below,
                shares=planning.shares_of(self.updates.epoch_rows, part.batch_size, rows),
            )  # fmt: skip
            found.append(cost)
        return tuple(found)

    def _host_places(
        self, problem: Problem, boundaries: int, rooms: planning.GraphRooms, candidate: Candidate,
        row_packs: Sequence[RowPack],
    ) -> planning.HostPlaces:  # fmt: skip
        """The contents of the host pool beside `boundaries` (bytes): graphs, then homes in order, then rows."""
        count = self.settings.views * self.train.count + self.test.count
        passed = self.test.count if self.exact else count  # by one partition to the next, through the boundary cache
        rows = self.reading.layout.home_bytes(count) + sum(pack.home_bytes(passed) for pack in row_packs)
        problem = replace(problem, host_steps=bool(candidate.resources.host_steps))
        return planning.host_places(problem, candidate.parts, boundaries, states=not self.alone, rows=rows, graphs=rooms)

    def _steps(self, request: PlanRequest) -> tuple[bool, ...]:
        """Places of optimizer steps that the plan may choose from: on the device (False), on the host (True)."""
        asked, saved, method = self.settings.optimizer_on, request.saved, request.methods[0]
        budget = self._host_budget()
        if asked == "host" and not budget:
            raise OptionError(
                "--optimizer-on host: weights and optimizer state must be in host memory, and there is none for them. Give "
                "--ram-limit."
            )
        if asked == "host" and self.optimizers.groups_by_identity:
            raise OptionError(
                "--optimizer-on host: the optimizer's function tells parameters apart by which objects they are, and steps on "
                "the host are made with others of the same names and attributes. Let it go by names (a parameter called "
                "named_parameters), or give --optimizer-on device."
            )
        by_identity = self.optimizers.groups_by_identity
        if by_identity or self.alone or method.in_pairs or method.has_subnets or asked == "device" or not budget:
            return (False,)
        return (True,) if asked == "host" else (False, True) if saved is None else (bool(saved.host_steps),)

    def _graph_tiers(self) -> tuple[str, ...]:
        """Tiers for offloaded graphs. With a GPU not the disk: the computing thread would wait for every copy between them."""
        if not self.device.shares_memory:
            return ("host",)
        return ("host", "disk") if self.settings.ram_limit else ("disk",)

    def _graph_of(self, p: int, used: Candidate) -> str:
        if p not in used.offloads:
            return KEPT if p in used.keeps else RECOMPUTED
        return self.device.host_tier if p in used.resources.graphs_at_host else "disk"

    def _host_budget(self) -> int:
        asked, free = self.settings.ram_limit, self.host_free
        if asked is None:
            return 0 if self.device.shares_memory else free // 2 // per_machine()
        budget = parse_size(asked, total=free, free=free, name="--ram-limit")
        simulated = self.purpose.dry and self.device.hardware is not None  # such a card has a machine of its own
        if budget > free and not simulated:
            asked, most = format_size(budget), format_size(free)
            raise OptionError(f"--ram-limit: {asked} were asked for, and {most} of RAM are free. Give at most that.")
        return budget

    def _plan(
        self, problem: Problem, method: Method, candidate: Candidate, training: Sequence[PartitionTraining],
        costs: Sequence[PartitionCost], phases: Phases, reasons: tuple[str, ...],
        row_packs: Sequence[RowPack], places: planning.HostPlaces, recovery: Prediction | None, loss_chunks: int,
    ) -> Plan:  # fmt: skip
        resources = replace(candidate.resources, at_host=places.homes)
        simulated = simulate(phases.of_stage(0), costs, self.speeds, resources)
        seconds = simulated.seconds
        rows = rows_for_memory(problem, () if self.exact else row_packs[:-1], recovery is not None, self.settings.views)
        candidate = with_rows(problem, candidate, simulated, rows)
        peaks = peaks_by_partition(problem, candidate, simulated)
        used, parts = recovery.candidate if recovery is not None else candidate, []
        for p, ((first, last, _), part, cost) in enumerate(zip(candidate.parts, training, costs, strict=True)):
            reading, writing = planning.buffers_of(
                problem, first, last, part.micro_batch, reads_memory=p in candidate.rows, writes_memory=p + 1 in candidate.rows
            )
            parts.append(
                PartitionPlan(
                    first=first, last=last, micro_batch=part.micro_batch, weights=cost.weights, state=cost.state,
                    slot=cost.slot, gradients=cost.gradients, activations=cost.saved, buffers=reading + writing,
                    boundary_row=row_packs[p].layout.nbytes if self.alone else cost.output_row,
                    tier=self.device.host_tier if p in places.homes else "disk",
                    stays=method.stays or p in used.resources.stays, graph=self._graph_of(p, used),
                    weights_stay=p in used.resources.weights_stay,
                    boundary_tier=tier_at(used.resources.tiers, p),
                    optimizer_on="host" if p in used.resources.host_steps else DEVICE, rows_in_memory=p in candidate.rows,
                    why=used.why[p] if used.why else "",
                    peak=max(peaks[p], recovery.peak if recovery is not None else 0, self.runtime + self.trials.beyond),
                )
            )  # fmt: skip
        if recovery is not None:
            seconds += recovery.seconds * self.updates.recovery_updates
        (exchanged, words), others = self._exchanged(candidate, costs), self.ranks.count - 1
        waits, saves = self.ranks.seconds_of(exchanged), self.settings.save_every != "never"
        divided = None if saves else dividing(phases)
        own = [cost for p, cost in enumerate(costs) if divided is None or divided.owner_of(p) == divided.rank]
        tests = problem.test_rows if self.purpose.whole else problem.train_rows
        if others:
            seconds += waits * sum(phase.updates * times for phase, times in counted(phases) if phase.ranks > 1)
            reasons = (*reasons, f"{words.format(format_size(exchanged))} with {others} other process(es): {waits:.3g} s")
        return Plan(
            method=method.name, device=self.device.name, limit=problem.limit, margin=margin_of(problem.limit),
            runtime=self.runtime, growth=self.device.growth, full_state=sum(c.weights + c.gradients + c.state for c in costs),
            parameters=sum(cost.parameters for cost in costs), partitions=tuple(parts), host_limit=places.nbytes,
            disk_bytes=disk_bytes(
                problem, candidate, costs, row_packs, own=own, saves=saves, views=self.settings.views,
                cached=tests if self.exact else tests + self.settings.views * problem.train_rows,
                all_states=not self.alone or bool(self.settings.recovery_epochs) or self.settings.averages,
                remembers=self.settings.keep_best), seconds=round(seconds, 1), reasons=(*reasons, *rows_reason(candidate.rows)),
            fingerprint=planning.fingerprint(self.chain, self.costs_at(candidate.micro_batch), self.train.shape),
            slots=used.resources.slots, update_seconds=round(candidate.seconds + waits * (not self.updates.independent), 4),
            heap=used.heap, tile=self.chain.tile, loss_chunks=loss_chunks,
            live_bytes=self.live_bytes, frozen=sum(cost.frozen for cost in costs),
        )  # fmt: skip
