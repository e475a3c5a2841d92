"""What a cut costs in memory and time by the simulator, and how memory that is left is spent on time."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seqpart.memory.heap import heap_for
from seqpart.memory.limit import limit_for
from seqpart.methods.exact import whole_network
from seqpart.methods.method import Method, PartitionTraining, Workload, test_phases
from seqpart.methods.sil import sil_phases
from seqpart.planning.problem import Candidate, Part, Parts, Problem, buffers_of, exchange_bytes, largest_boundary
from seqpart.planning.simulator import PredictedStep, Resources, simulate
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import Phase, PhaseKind, Verb

WALKED_UPDATES = 2
"""The second is one of many: its beginning waits for what the first has left."""

_REPAIRS = 3000
"""Partitions that are simulated, once each, to make a plan a little better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A candidate with its peak of the whole process or device, and seconds for one update."""

    method: Method
    candidate: Candidate
    peak: int
    seconds: float

    @property
    def fits_in(self) -> int:
        """The least limit under which it runs."""
        return limit_for(self.peak)


@dataclass(frozen=True, slots=True)
class _Option:
    """One partition that might stay, or keep its graphs: what it takes, and seconds of each kind that it saves an update."""

    partition: int
    stays: bool
    nbytes: int
    compute: float
    transfer: float


def spent(problem: Problem, plain: Prediction, available: int) -> Iterator[Prediction]:
    """Memory that is left, spent on partitions that stay and on kept graphs: a knapsack, priced at two rates of exchange.

    The time of an update is the larger of computing and of transfers, in part behind each other, so what a second of transfers
    is worth is not known beforehand: at one price it is nearly hidden, at the other it is worth as much as computing.
    """
    options = _options(problem, plain)
    orders = (
        tuple(sorted(options, key=lambda o: -(o.compute + price * o.transfer) / max(1, o.nbytes))) for price in (0.1, 1.0)
    )
    for order in dict.fromkeys(orders):  # of graphs alone both are one
        yield _filled(problem, plain, order, available)


def _options(problem: Problem, plain: Prediction) -> list[_Option]:
    candidate, speeds = plain.candidate, problem.speeds
    micro_batches = -(-problem.batch_size // candidate.micro_batch)
    shared = sharing(problem, candidate.parts)
    found = []
    for p, (_, _, cost) in enumerate(candidate.parts):
        if candidate.resources.boundary_tier == "device" and p < len(candidate.parts) - 1:
            seconds = micro_batches * speeds.computing(cost, candidate.micro_batch, forward=1, backward=0)
            at_once = 1 if plain.method.stays else micro_batches
            found.append(_Option(p, False, cost.kept * at_once, seconds, 0.0))
        if problem.may_stay and not plain.method.stays and p not in shared:
            read, written = 2 * cost.weights + cost.state, cost.weights + cost.state
            transfer = read / speeds.read + written / speeds.write
            found.append(_Option(p, True, cost.slot + cost.gradients, 0.0, transfer))
    return found


def sharing(problem: Problem, parts: Parts) -> set[int]:
    """Partitions that share weights with others: who borrows them reads them from their home, which must be up to date."""
    of_block = {number: p for p, (first, last, _) in enumerate(parts) for number in range(first, last)}
    pairs = [(of_block[b.number], of_block[tie.owner.number]) for b in problem.chain for tie in b.tied]
    return {p for pair in pairs if pair[0] != pair[1] for p in pair}


def _filled(problem: Problem, plain: Prediction, options: Sequence[_Option], available: int) -> Prediction:
    """As many of `options`, in their order, as fit."""
    best, fits, fails = plain, 0, len(options) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        tried = _with(problem, plain, options[:middle])
        if tried.peak <= available and _streams(tried):
            best, fits = tried, middle
        else:
            fails = middle
    return best


def _with(problem: Problem, plain: Prediction, chosen: Sequence[_Option]) -> Prediction:
    candidate = plain.candidate
    stays = frozenset(option.partition for option in chosen if option.stays)
    keeps = frozenset(option.partition for option in chosen if not option.stays)
    streaming = max(1, len(candidate.parts) - len(stays))
    slots = candidate.resources.slots if plain.method.stays else min(candidate.resources.slots, streaming)
    resources = replace(candidate.resources, stays=stays, slots=slots)
    return predict(problem, plain.method, candidate.micro_batch, candidate.parts, resources, keeps)


def refined(problem: Problem, best: Prediction, available: int) -> Prediction:
    """`best` with one option more, or one or two in the place of another, as long as that makes it faster and fits.

    In so many simulations that their time does not grow with the number of partitions.
    """
    left = _REPAIRS // len(best.candidate.parts)
    options = _options(problem, best)
    better = True
    while better and left > 0:
        better = False
        stays, keeps = best.candidate.resources.stays, best.candidate.keeps
        chosen = [option for option in options if option.partition in (stays if option.stays else keeps)]
        for out, come in _moves(chosen, [option for option in options if option not in chosen]):
            if left <= 0:
                break
            left -= 1
            tried = _with(problem, best, [option for option in (*chosen, *come) if option not in out])
            if tried.peak <= available and _streams(tried) and tried.seconds < best.seconds:
                best, better = tried, True
                break
    return best


_Chosen = tuple[_Option, ...]


def _moves(chosen: Sequence[_Option], others: Sequence[_Option]) -> Iterator[tuple[_Chosen, _Chosen]]:
    """(what goes, what comes), the most promising first."""
    others = sorted(others, key=lambda option: -(option.compute + option.transfer))
    chosen = sorted(chosen, key=lambda option: option.compute + option.transfer)
    yield from (((), (option,)) for option in others)
    yield from (((out,), (option,)) for option in others for out in chosen)
    yield from (((), pair) for pair in itertools.combinations(others, 2))
    yield from (((out,), pair) for pair in itertools.combinations(others, 2) for out in chosen)
    yield from ((pair, (option,)) for pair in itertools.combinations(chosen, 2) for option in others)


def _streams(prediction: Prediction) -> bool:
    """Whether some partition still comes and goes, where the method says so: else it is another method."""
    return prediction.method.stays or len(prediction.candidate.resources.stays) < len(prediction.candidate.parts)


def never_fits(problem: Problem, method: Method, parts: Parts, slots: int, available: int) -> bool:
    """Whether what is on the device whatever the micro-batch is too much already: then nothing needs to be simulated."""
    if method.stays:
        held = sum(cost.slot + (cost.gradients if cost.trainable else 0) for _, _, cost in parts)
    else:
        held = sum(sorted((cost.slot for _, _, cost in parts), reverse=True)[:slots])
    return problem.peak(held) > available


def predict(
    problem: Problem, method: Method, micro_batch: int, parts: Parts, resources: Resources,
    keeps: frozenset[int] = frozenset(),
) -> Prediction:  # fmt: skip
    resources = replace(
        resources, label_row=problem.label_row, borrows=not method.stays,
        gradients_room=problem.clips and len(parts) > 1 and not method.stays,
    )  # fmt: skip
    candidate = Candidate(micro_batch, parts, resources, keeps)
    phases = _phases(problem, method, candidate)
    costs = [part[2] for part in parts]
    walked, predicted_steps, _ = simulate(phases, costs, problem.speeds, resources)
    if resources.keeps_heap:
        candidate = replace(candidate, heap=_heap(problem, predicted_steps, len(parts)))
    peak = max(peaks_by_partition(problem, candidate, walked, predicted_steps))
    seconds = _seconds(predicted_steps, len(parts), problem.contention)
    return Prediction(method=method, candidate=candidate, peak=peak, seconds=seconds)


def _seconds(predicted_steps: Sequence[PredictedStep], count: int, contention: float) -> float:
    """Of one update, where a second of transfers behind the computation takes `contention` seconds of it."""
    updates = [number for number, predicted in enumerate(predicted_steps) if predicted.step.verb is Verb.UPDATE]
    first, last = (updates[count - 1], updates[-1]) if len(updates) > count else (-1, updates[-1])
    steady = predicted_steps[first + 1 : last + 1]
    moved = sum(predicted.seconds for predicted in steady if predicted.step.verb in (Verb.LOAD, Verb.DROP))
    began = predicted_steps[first].ends if first >= 0 else 0.0
    return (predicted_steps[last].ends - began + contention * moved) / max(1, len(updates) // count - 1)


def _phases(problem: Problem, method: Method, candidate: Candidate) -> Phases:
    batch = problem.batch_size
    training = tuple(
        PartitionTraining(epochs=1, batch_size=batch, micro_batch=candidate.micro_batch, trainable=cost.trainable)
        for _, _, cost in candidate.parts
    )
    rows = min(problem.train_rows, WALKED_UPDATES * batch)
    work = Workload(
        train_rows=rows, test_rows=min(problem.test_rows, candidate.micro_batch), shuffle=False, partitions=training,
        clips=problem.clips, stays=candidate.resources.stays, keeps=candidate.keeps,
    )  # fmt: skip
    train = replace(whole_network(work, streamed=not method.stays), epoch=1)
    return Phases([Epochs(train=train, epochs=1, behind=test_phases(work, stays=method.stays))])


def peak_alone(problem: Problem, part: Part, micro_batch: int) -> int:
    """Of the process or device while `sil` trains this partition and makes the next one's rows with it."""
    return max(peaks_by_partition(problem, *_alone(problem, part, micro_batch)))


def _alone(problem: Problem, part: Part, micro_batch: int) -> tuple[Candidate, Sequence[Phase], Sequence[PredictedStep]]:
    batch = problem.batch_size
    one = PartitionTraining(epochs=1, batch_size=batch, micro_batch=min(micro_batch, batch), trainable=part[2].trainable)
    rows = min(problem.train_rows, WALKED_UPDATES * batch)
    work = Workload(
        train_rows=rows, test_rows=min(problem.test_rows, micro_batch), shuffle=False,
        partitions=(one,) if part[1] == len(problem.chain) else (one, one),
    )  # fmt: skip
    phases = Phases(sil_phases(work).stretches[:1])  # of an inner partition with what makes rows of its outputs
    walked, predicted_steps, _ = simulate(phases, [part[2]], problem.speeds, Resources())
    return Candidate(micro_batch, (part,)), walked, predicted_steps


def with_heap(problem: Problem, candidate: Candidate, available: int) -> Candidate:
    """`candidate` of `sil` with a heap that is kept for the whole run, where there is memory for that."""
    if not problem.may_keep_heap:
        return candidate
    simulated = [_alone(problem, part, candidate.micro_batch) for part in candidate.parts]
    heap = max(_heap(problem, predicted_steps, len(candidate.parts)) for _, _, predicted_steps in simulated)
    kept = replace(candidate, heap=heap, resources=replace(candidate.resources, keeps_heap=True))
    alone = [peaks_by_partition(problem, replace(one, heap=heap), walked, steps) for one, walked, steps in simulated]
    return kept if max(peak for (peak,) in alone) <= available else candidate


def _heap(problem: Problem, predicted_steps: Sequence[PredictedStep], partitions: int) -> int:
    """Bytes of a heap that has room for the work of all steps. partitions: that share it."""
    alive = max(predicted.peak - predicted.slots for predicted in predicted_steps)
    return heap_for(alive, several=partitions > 1) + problem.growth


def peaks_by_partition(
    problem: Problem, candidate: Candidate, phases: Sequence[Phase], predicted_steps: Sequence[PredictedStep]
) -> list[int]:
    """Of the whole process or device, while each partition works. A heap that is kept is there from the first step on."""
    peaks = [0] * len(candidate.parts)
    buffers = [_buffers(problem, candidate, phase) for phase in phases]
    for predicted in predicted_steps:
        p = predicted.step.partition
        work = predicted.slots + candidate.heap - problem.growth if candidate.heap else predicted.peak
        peaks[p] = max(peaks[p], work + buffers[predicted.step.phase])
    return [problem.peak(peak) for peak in peaks]


def _buffers(problem: Problem, candidate: Candidate, phase: Phase) -> int:
    """Host buffers of rows and of boundaries on disk, where they count against the limit."""
    if not problem.host_counts:
        return 0
    first, last, _ = candidate.parts[phase.partition]
    reading, writing = buffers_of(problem, first, last, phase.micro_batch)
    if phase.through is None:
        return reading + (writing if phase.kind is not PhaseKind.TRAIN else 0)
    largest = largest_boundary([cost for _, _, cost in candidate.parts], phase.micro_batch)
    return reading + (exchange_bytes(largest) if candidate.resources.boundary_tier == "disk" else 0)
