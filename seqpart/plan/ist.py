"""Turns checked inputs into a plan of `ist`: the whole network and its subnets are cut separately, and simulated together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from seqpart.device.limit import left_of, limit_for, refused, what_helps
from seqpart.errors import DataError, DoesNotFit, ModelError, OptionError
from seqpart.methods.exact import FULL, STREAMED
from seqpart.methods.ist.moving import buffer_bytes
from seqpart.methods.ist.parts import Parts, parted
from seqpart.methods.method import Method, PartitionTraining, Subnets, Workload
from seqpart.model.blocks import Chain
from seqpart.model.losses import LossFunction
from seqpart.model.optimizers import Optimizer, choose
from seqpart.model.packs import DEVICE, tier_at, tiers_of
from seqpart.plan.exact import choose_exact
from seqpart.plan.plan import Plan, PlanRequest, PlanWording
from seqpart.plan.planner import Planner
from seqpart.plan.prediction import Prediction, heaps_of, peaks_by_partition, with_heap, works_of
from seqpart.plan.problem import Candidate, Part, Problem, cost_of, costs_from, measurable, micro_batches, parts_of, starts_of
from seqpart.plan.simulator import simulate
from seqpart.profile.partition import Parting, PartitionCost, state_layouts
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases
from seqpart.store.layout import Layout
from seqpart.units import format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """The cuts of `ist`: partitions of the whole network, and how one subnet is run; all subnets are cut alike."""

    whole: tuple[Part, ...]
    subnet: Candidate
    subnet_reasons: tuple[str, ...]


def piece_of(problem: Problem, number: int, *, trained: bool = True) -> Problem:
    """The problem of one chain of a joint chain: of the whole network (0), or a subnet. trained: if False, without state."""
    first, last = problem.chain.begins[number], problem.chain.ends[number]
    starts, count = problem.starts, problem.count
    if starts is not None and starts[-1] >= problem.chain.ends[0]:  # of a plan made again, for the joint chain
        starts, count = tuple(start - first for start in starts if first <= start < last), None
    elif number == 0:  # --partitions is for a subnet
        starts = count = None
    states = problem.states[first:last] if trained else [Layout(())] * (last - first)
    return replace(
        problem, chain=Chain(problem.chain[first:last]), costs_at=lambda rows: problem.costs_at(rows)[first:last],
        counted_at=lambda rows: problem.counted_at(rows)[first:last], states=states, saved=None,
        machine=replace(problem.machine, may_keep_heap=False, graph_tiers=()), known={}, placed={},
        starts=starts, count=count,
    )  # fmt: skip


def choose_cuts(problem: Problem, wording: PlanWording) -> Cuts:
    """Cuts at the largest micro-batch at which the whole can be tested and a subnet trained. Raises DoesNotFit, in words."""
    whole, subnet = piece_of(problem, 0, trained=False), piece_of(problem, 1)
    refusals: list[DoesNotFit] = []
    if not problem.micro_batch:
        wording = replace(wording, micro_batch="the largest that fits")
    for rows in micro_batches(problem):
        if not measurable(problem, rows):
            break
        try:
            return _cuts_at(whole, subnet, rows, wording)
        except DoesNotFit as refusal:
            refusals.append(refusal)
    least = min(refusals, key=lambda refusal: refusal.smallest or problem.limit)
    words = ""
    if problem.machine.runtime <= problem.available:
        words = "\n  One subnet, and one block of the whole network, must each fit: with more --subnets a subnet is smaller."
    raise refused(f"{least.message}{words}", least.smallest or problem.limit, least.rows)


def _cuts_at(whole: Problem, subnet: Problem, rows: int, wording: PlanWording) -> Cuts:
    tested, asked = _tested(whole, rows), replace(subnet, micro_batch=rows)
    one = (subnet.count or 1) == 1 and len(subnet.starts or (0,)) == 1
    try:
        _, candidate, reasons = choose_exact(asked, (FULL if one else STREAMED,), wording)
    except DoesNotFit:
        if not one or subnet.count or subnet.starts:
            raise
        _, candidate, reasons = choose_exact(asked, (STREAMED,), wording)
    return Cuts(whole=tested, subnet=candidate, subnet_reasons=reasons)


def _tested(problem: Problem, rows: int) -> tuple[Part, ...]:
    """The fewest partitions of the whole network that fit one by one with their test rows, without training."""
    if problem.starts is not None:
        return parts_of(problem, rows, problem.starts)
    starts, found, first = starts_of(problem), list[Part](), 0
    while first < len(problem.chain):
        fitting = None
        longer = costs_from(problem, rows, first) if first in starts else {first + 1: cost_of(problem, rows, first, first + 1)}
        for last, cost in longer.items():  # the shortest first, which has to fit
            peak = test_peak(problem, (first, last, cost), rows)
            if peak > problem.available and fitting is None:
                block, held = problem.chain[first], cost.slot + cost.forward_peak
                helps = what_helps(problem.limit, problem.machine.runtime, peak, block=held)
                raise refused(
                    f"{block} of the whole network needs {format_size(peak)} to be tested, at micro-batch {rows}, and "
                    f"{left_of(problem.limit)}.\n  runtime {format_size(problem.machine.runtime)}, "
                    f"weights {format_size(cost.weights)}"
                    f"\n  {helps}",
                    limit_for(peak),
                    rows,
                )
            if peak > problem.available:
                break
            fitting = first, last, cost
        assert fitting is not None
        found.append(fitting)
        first = fitting[1]
    return tuple(found)


def test_peak(problem: Problem, part: Part, rows: int) -> int:
    """Peak bytes of the process or device while the partition alone runs on test rows."""
    count = min(problem.test_rows or problem.train_rows, 2 * rows)
    test = Phase(kind=PhaseKind.TEST, partition=0, rows=count, batch=rows, micro_batch=rows)
    phases = Phases([Epochs(train=test, epochs=0, following=(test,))])
    candidate: Candidate = Candidate(rows, (part,))
    simulated = simulate(phases, [part[2]], problem.machine.speeds, candidate.resources)
    return max(peaks_by_partition(problem, candidate, simulated))


LOCAL_STEPS, GROUP = 20, 64
OBSERVED_ROWS = 2048
"""Most training rows from which the whole network's running statistics are made."""
_ATTEMPTS = 8
"""Attempts to cut more finely what did not fit together."""
WITHOUT_STATE = choose("sgd", lr=0.0)
"""Optimizer of the whole network's partitions, which are never trained: their moments, if there are any, stay at home."""


class SubnetPreparation(Planner):
    """The `Planner` of method ist."""

    parts: Parts

    def _begin(self, loss: LossFunction | None, why_not: str) -> None:
        settings = self.settings
        assert settings.subnets is not None
        self.count, self.all_rows = settings.subnets, settings.subnet_rows == "all"
        joint_chain = parted(self.chain, count=self.count, group=settings.subnet_groups or GROUP, seed=settings.seed)
        self.chain, self.parts = joint_chain, joint_chain.parts
        super()._begin(loss, why_not)
        self.trials.first = self.parts.blocks
        self._refuse_shapes()

    def _rows_of_an_epoch(self) -> int:
        if self.all_rows:
            return super()._rows_of_an_epoch()
        if not (rows := self.train.count // self.count):
            raise DataError(
                f"{self.train.count} training rows are fewer than {self.count} subnets, and each subnet needs rows of its own. "
                "Give fewer --subnets, or --subnet-rows all."
            )
        return rows

    def _refuse_shapes(self) -> None:
        """Raises ModelError unless each block returns rows, and blocks dealt out to subnets keep the shape of their input."""
        rows = self.updates.largest
        section = self.parts.section.blocks if self.parts.section is not None else ()
        for block, cost in zip(self.chain.whole, self.costs_at(rows), strict=False):
            taken, given = cost.takes[0].shape, cost.gives[0].shape
            if given[:1] != (rows,):
                raise ModelError(
                    f"method ist needs blocks that return one row for each row of the batch; {block} returned the shape "
                    f"{given} for {rows} rows. Use --method auto."
                )
            if block.number in section and taken != given:
                raise ModelError(
                    f"{block} declares by residual_branch() that it adds to its input, but a row has the shape {taken[1:]} "
                    f"before it and {given[1:]} after it. Let residual_branch() return None where the shape changes."
                )

    def _refuse_ranks(self) -> None:
        if self.count < (count := self.ranks.count):
            raise OptionError(
                f"--subnets {self.count} are trained by {count} processes, each of which takes at least one. Give at least "
                f"{count}, or start fewer."
            )

    @property
    def local_steps(self) -> int:
        return self.settings.local_steps or LOCAL_STEPS

    def _check_partitions(self) -> None:
        starts = self.settings.partition_choice()[1]
        if starts and starts[-1] >= self.parts.blocks:
            raise OptionError(
                f"--partitions: block {starts[-1]} does not exist; a subnet has blocks 0..{self.parts.blocks - 1}."
            )

    def _choose(self, problem: Problem, request: PlanRequest) -> tuple[Method, Candidate, tuple[str, ...]]:
        (method,) = request.methods
        asked, refusal = problem, None
        for _ in range(_ATTEMPTS):
            try:
                cuts = choose_cuts(asked, request.wording)
            except DoesNotFit as error:
                raise refusal or error from None
            candidate, peak = self._fitting(problem, method, request, self._joint(problem, cuts))
            if peak <= problem.available:
                whole, each = len(cuts.whole), len(cuts.subnet.parts)
                return method, candidate, (
                    *self.parts.notes, *self._reasons(whole, each), *cuts.subnet_reasons, *candidate.heap_reason
                )  # fmt: skip
            # Partitions of the whole and of a subnet share the slots, each as large as the largest partition needs.
            asked = replace(asked, limit=asked.limit - (peak - problem.available))
            if refusal is None or refusal.smallest is None or limit_for(peak) < refusal.smallest:
                needs = f"the subnets and the whole network, one at a time, need {format_size(peak)}"
                refusal = refused(f"{needs}, and {left_of(problem.limit)}.", limit_for(peak), candidate.micro_batch)
        assert refusal is not None
        raise refusal

    def _joint(self, problem: Problem, cuts: Cuts) -> Candidate:
        """The candidate with the partitions of the whole, then those of each subnet, cut and run alike, with block numbers of
        the joint chain."""
        found, parts = cuts.subnet, list(cuts.whole)
        for part in range(self.count):
            own, first = piece_of(problem, 1 + part), problem.chain.begins[1 + part]
            alike = parts_of(own, found.micro_batch, [begin for begin, _, _ in found.parts])
            parts += [(first + begin, first + end, cost) for begin, end, cost in alike]
        whole, each = len(cuts.whole), len(found.parts)

        def of_all(own: frozenset[int]) -> frozenset[int]:
            return frozenset(whole + part * each + p for part in range(self.count) for p in own)

        tiers = tiers_of([DEVICE] * whole + [tier_at(found.resources.tiers, p) for p in range(each)] * self.count)
        resources = replace(found.resources, parting=self._parting(cuts.whole), tiers=tiers)
        return replace(
            found, parts=tuple(parts), resources=resources, keeps=of_all(found.keeps), offloads=of_all(found.offloads),
            why=(*[""] * whole, *found.why * self.count), seconds=0.0,
        )  # fmt: skip

    def _reasons(self, whole: int, each: int) -> Iterable[str]:
        updates = -(-self.updates.epoch_rows // self.updates.largest)
        local, left = min(self.local_steps, updates), updates % self.local_steps
        last = f", {left} in the last of an epoch" if left and left != local else ""
        rows = f"all {self.updates.epoch_rows} rows" if self.all_rows else f"{self.updates.epoch_rows} rows of its own"
        yield f"rounds of {local} update(s) of each subnet{last}; an epoch is {rows} for each"
        if rest := 0 if self.all_rows else self.train.count % self.count:
            which = "other ones each time" if self.settings.shuffles else "always the last"
            yield f"{rest} row(s) are left out of every epoch, {which}, so that all subnets have the same number"
        if self.ranks.count > 1:
            yield f"{self.ranks.count} processes train them at the same time: subnet s is process s mod {self.ranks.count}'s"
        yield f"partitions 0..{whole - 1} are the whole network's, for tests; then each subnet's {each}"

    def _exchanged(self, candidate: Candidate, costs: Sequence[PartitionCost]) -> tuple[int, str]:
        parting = candidate.resources.parting
        return sum(parts for _, parts, _ in parting.homes) if parting is not None else 0, "a round exchanges {} of subnets"

    def _parting(self, whole: Sequence[tuple[int, int, PartitionCost]]) -> Parting:
        """Sizes for splitting and merging homes one block at a time, weights and moments alike."""
        costs, states = self.costs_at(self.updates.largest), self._states()
        keeps = self.settings.subnet_moments != "zero"

        def size(block: int) -> int:
            return costs[block].weights + (states[block].nbytes if keeps else 0)

        homes = []
        for first, last, _ in whole:
            parts = [sum(size(self.parts.block_of(part, block)) for block in range(first, last)) for part in range(self.count)]
            own = parts[self.ranks.number :: self.ranks.count]
            homes.append((sum(map(size, range(first, last))), sum(parts), sum(own)))
        layouts = [*(cost.layout for cost in costs), *(states if keeps else ())]
        return Parting(buffer_bytes(layouts, self.count), tuple(homes))

    def _states(self) -> list[Any]:
        return state_layouts(self.chain, self.costs_at(self.updates.largest), self.optimizers.possible()[0])

    def _fitting(self, problem: Problem, method: Method, request: PlanRequest, candidate: Candidate) -> tuple[Candidate, int]:
        """`candidate` with a kept heap if there is room, or with one slot if there is no room for more; and its peak, which may
        still not fit."""
        training = self._training(request, candidate)
        costs = self._partition_costs(request, candidate, training, self._optimizers(candidate))
        phases = method.phases(self._workload(candidate, training, None))
        found, peak = candidate, 0
        for slots in dict.fromkeys((candidate.resources.slots, 1)):
            for keeps_heap in (True, False) if problem.machine.may_keep_heap and not candidate.resources.tiers else (False,):
                resources = replace(candidate.resources, slots=slots, keeps_heap=keeps_heap)
                found = replace(candidate, resources=resources)
                simulated = simulate(phases, costs, self.speeds, resources)
                if keeps_heap:
                    sizes = heaps_of(problem, max(works_of(simulated.steps, len(costs))), costs, streamed=True)
                    found = with_heap(problem, found, sizes, partial(peaks_by_partition, problem, simulated=simulated))
                peak = max(peaks_by_partition(problem, found, simulated))
                if peak <= problem.available:
                    return found, peak
        return found, peak

    def _optimizers(self, candidate: Candidate, *, recovery: bool = False) -> tuple[Optimizer, ...]:
        whole = self._whole(candidate)
        return (WITHOUT_STATE,) * whole + self.optimizers.of_partitions(len(candidate.parts) - whole)

    def _whole(self, candidate: Candidate) -> int:
        """Number of partitions of the whole network."""
        return sum(last <= self.parts.blocks for _, last, _ in candidate.parts)

    def _workload(self, candidate: Candidate, training: tuple[PartitionTraining, ...], recovery: Prediction | None) -> Workload:
        whole = self._whole(candidate)
        each = (len(candidate.parts) - whole) // self.count
        own = frozenset(p - whole for p in candidate.keeps if p < whole + each)
        observed = [p for p in range(whole) if self.parts.batch_norms.intersection(range(*candidate.parts[p][:2]))]
        rows = min(self.train.count, OBSERVED_ROWS)
        size = training[0].micro_batch
        local = replace(candidate, parts=candidate.parts[whole : whole + each], keeps=own, offloads=frozenset())
        return replace(
            super()._workload(local, training[whole : whole + each], None),
            subnets=Subnets(
                count=self.count, whole=whole, local_steps=self.local_steps, rows=self.updates.epoch_rows,
                all_rows=self.all_rows, observed=observed[-1] + 1 if observed and self.count > 1 else 0,
                observed_rows=rows // size * size or rows,
            ),
        )  # fmt: skip

    def _plan(self, problem: Problem, method: Method, candidate: Candidate, *others: Any) -> Plan:
        """Makes the plan; its totals for the network are those of the whole. Partitions of subnets that other processes train
        have the peaks of this one's first, which in the first process has the most neurons."""
        plan = super()._plan(problem, method, candidate, *others)
        whole, ranks = self._whole(candidate), self.ranks
        each = (len(candidate.parts) - whole) // self.count
        peaks = [part.peak for part in plan.partitions]
        for p in range(whole, len(peaks)):
            if (p - whole) // each % ranks.count != ranks.number:
                peaks[p] = peaks[whole + ranks.number * each + (p - whole) % each]
        costs, states = self.costs_at(candidate.micro_batch)[: self.parts.blocks], self._states()[: self.parts.blocks]
        state = sum(layout.nbytes for layout in states)
        weights, gradients = sum(cost.weights for cost in costs), sum(cost.gradients for cost in costs)
        parameters = sum(
            spec.nbytes // spec.dtype.itemsize for cost in costs for spec in cost.layout.specs if spec.name in cost.trainable
        )
        versions = 4 if self.settings.saves else 2
        moments = versions * state if self.settings.subnet_moments != "zero" else 0
        return replace(
            plan, partitions=tuple(replace(part, peak=peak) for part, peak in zip(plan.partitions, peaks, strict=True)),
            full_state=weights + gradients + state, parameters=parameters, frozen=sum(cost.frozen for cost in costs),
            disk_bytes=plan.disk_bytes + moments, update_seconds=0.0,
        )  # fmt: skip
