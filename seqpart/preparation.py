"""From a model, settings and the shape of the data to a plan: everything that is decided before anything is trained."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

import seqpart.plan as planning
from seqpart.arena import piece_sizes
from seqpart.blocks import Chain, as_chain
from seqpart.costs import BlockCost, measure_chain, measure_loss
from seqpart.device import Device, host_memory_free
from seqpart.direct import probe_disk, round_up
from seqpart.errors import DataError, DiskFull, OptionError
from seqpart.ingest import Split, count_classes, refuse_mismatch
from seqpart.meter import margin_of, measure_runtime, seconds_of
from seqpart.methods import method_named
from seqpart.methods.method import LossFunction, Method, PartitionLoss, PartitionTraining, Targets, Workload
from seqpart.optimizers import Optimizer, choose
from seqpart.plan import Candidate, PartitionPlan, Plan, Request
from seqpart.resident import state_layouts
from seqpart.rows import RowLayout
from seqpart.schedule import Phase, one_at_a_time
from seqpart.settings import Settings, at_least_one, listed, per_partition
from seqpart.simulate import PartitionCost, Rates, Simulator, growing
from seqpart.units import format_size, parse_size


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan, and what carrying it out needs to know."""

    plan: Plan
    chain: Chain
    method: Method
    costs: tuple[BlockCost, ...]
    optimizers: tuple[Optimizer, ...]
    phases: tuple[Phase, ...]
    cache_layouts: tuple[RowLayout, ...]
    input_layout: RowLayout
    partition_costs: tuple[PartitionCost, ...]
    rates: Rates
    loss: Callable[[int], PartitionLoss]
    at_host: frozenset[int]
    arena_bytes: int


def limit_of(settings: Settings, device: Device) -> int:
    """Bytes of --mem-limit. Raises OptionError for more than the device has: no such promise could be kept."""
    total = device.total_memory()
    limit = parse_size(settings.mem_limit, total=total, free=device.free_memory(), name="--mem-limit")
    if limit > total:
        raise OptionError(
            f"--mem-limit: {format_size(limit)} were asked for, and the device has {format_size(total)}. Give less, or auto."
        )
    return limit


class Preparation:
    """Holds the inputs while the plan is made, and again when a failed allocation asks for a smaller micro-batch."""

    def __init__(
        self, model: object, settings: Settings, train: Split, test: Split, device: Device,
        *, final_loss: LossFunction | None = None, optimizer: Optimizer | None = None, folder: Path, reuse: Plan | None = None,
    ) -> None:  # fmt: skip
        refuse_mismatch(train, test)
        self.settings, self.train, self.test, self.device = settings, train, test, device
        self.chain, self.method = as_chain(model), method_named(settings.method)
        self.classes = count_classes(train, test)
        if not self.classes and not self.method.exact:
            raise DataError("method sil needs class labels (integers); found floats. Use --method full for a regression.")
        self._final_loss = final_loss or (F.cross_entropy if self.classes else _regression)
        self._optimizer, self._reuse = optimizer, reuse
        self.input_layout = RowLayout(train.shape, torch.float32)
        self.costs_at = cache(self._measure)
        self._check_partitions()
        micro = settings.micro_batch_size
        if micro is not None and micro > self.largest_batch:
            raise OptionError(f"--micro-batch-size {micro} is more than the batch of {self.largest_batch}. Give at most that.")
        self._possible_optimizers()
        self.live_bytes = sum(block.live_bytes for block in self.chain)
        self.runtime = max(0, measure_runtime(device) - (self.live_bytes if device.kind == "cpu" else 0))
        self.limit = limit_of(settings, device)
        self.folder = folder
        # Looked at once: a second plan, after a failed allocation, is made when the arena has taken its share.
        self.host_free = host_memory_free()
        self.rates = self._measure_rates()

    def _measure(self, micro_batch: int) -> tuple[BlockCost, ...]:
        return measure_chain(self.chain, self.train.shape, micro_batch, granule=self.device.granule)

    def _check_partitions(self) -> None:
        starts = self.settings.partition_choice()[1]
        if starts and starts[-1] >= len(self.chain):
            raise OptionError(
                f"--partitions: block {starts[-1]} does not exist; the model has blocks 0..{len(self.chain) - 1}."
            )

    def _measure_rates(self) -> Rates:
        read, write = probe_disk(_existing(self.folder))  # first: its buffer is gone when the others come
        rows = min(self.largest_batch, self.train.count, 256)  # a rate, and not the memory of a whole batch
        weight = torch.ones(1024, 1024, device=self.device.torch)
        x = torch.ones(rows, 1024, device=self.device.torch)

        def matmul() -> None:
            for _ in range(4):
                x @ weight
            self.device.wait(self.device.mark())

        matmul()
        parameter = torch.nn.Parameter(weight[:256])
        parameter.grad = torch.ones_like(parameter)
        optimizer = self._possible_optimizers()[0].build([parameter])

        def step() -> None:
            optimizer.step()
            self.device.wait(self.device.mark())

        step()
        return Rates(
            flops=4 * 2 * rows * 1024**2 / seconds_of(matmul),
            optimizer=parameter.numel() / seconds_of(step),
            read=read,
            write=write,
        )

    @property
    def largest_batch(self) -> int:
        sizes = listed("--batch-size", self.settings.batch_size, int)
        at_least_one("--batch-size", sizes)
        return max(sizes)

    def _optimizers(self, count: int) -> list[Optimizer]:
        """One for each of `count` partitions."""
        if self._optimizer is not None:
            return [self._optimizer] * count
        settings = self.settings
        names = per_partition("--optimizer", settings.optimizer, str, count)
        rates = per_partition("--lr", settings.lr, float, count)
        if settings.momentum and "sgd" not in names:
            raise OptionError("--momentum goes with --optimizer sgd; adam and adamw keep moments of their own.")
        return [
            choose(n, lr=lr, weight_decay=settings.weight_decay, momentum=settings.momentum if n == "sgd" else 0.0)
            for n, lr in zip(names, rates, strict=True)
        ]

    def _possible_optimizers(self) -> list[Optimizer]:
        """Until the cut is known any partition may get any of them."""
        if self._optimizer is not None:
            return [self._optimizer]
        names = listed("--optimizer", self.settings.optimizer, str)
        return [choose(name, lr=1.0, momentum=self.settings.momentum if name == "sgd" else 0.0) for name in names]

    def loss_for(self, partition: int, partitions: int, output_shape: tuple[int, ...], device: torch.device) -> PartitionLoss:
        settings = self.settings
        return self.method.loss(
            Targets(
                partition=partition, partitions=partitions, output_shape=output_shape, classes=self.classes,
                seed=settings.seed, device=device, final_loss=self._final_loss, objective=settings.objective_name,
                kappa=10.0 if settings.kappa is None else settings.kappa,
                prototype_scale=16.0 if settings.prototype_scale is None else settings.prototype_scale,
            )
        )  # fmt: skip

    def _loss_cost(self, micro_batch: int) -> Callable[[BlockCost], tuple[int, int]]:
        """(peak, targets) of the loss behind a block: the true loss after the last one, SIL after the others."""
        last = self.costs_at(micro_batch)[-1]
        labels = torch.zeros(micro_batch, dtype=self.train.labels.dtype)

        @cache
        def measured(shape: tuple[int, ...], final: bool) -> tuple[int, int]:
            targets = 0

            def judged(output: torch.Tensor) -> torch.Tensor:
                """As the executor does it: the scores are looked at while the loss still holds its graph."""
                nonlocal targets
                loss = self.loss_for(0, 1 if final else 2, shape, torch.device("cpu"))  # on fake tensors: it may be large
                targets = loss.nbytes
                value = loss(output, labels)
                with torch.no_grad():
                    loss.scores(output.detach())
                return value

            try:
                peak = measure_loss(judged, shape, micro_batch, self.device.granule)
            except Exception as error:
                raise DataError(
                    f"the loss cannot judge outputs of shape {shape} against {self.classes or 'float'} "
                    f"{'classes' if self.classes else 'labels'}: {error}"
                ) from error
            return max(0, peak - targets), targets

        def cost(block: BlockCost) -> tuple[int, int]:
            if block is not last and not self.method.cuts:
                return 0, 0  # no loss ever stands there, and the true one may not suit that shape
            return measured(block.output_shape, block is last)

        self._refuse_few_outputs(last)
        return cost

    def _refuse_few_outputs(self, last: BlockCost) -> None:
        if self._final_loss is _regression and torch.Size(last.output_shape).numel() != 1:
            raise DataError(f"a regression needs one output per row; the network ends with shape {last.output_shape}.")
        if self.classes and self._final_loss is F.cross_entropy and last.output_shape[:1] < (self.classes,):
            raise DataError(
                f"the network ends with outputs of shape {last.output_shape}, and the labels have {self.classes} classes. "
                f"Let the last block have {self.classes} outputs."
            )

    def _cache_row(self, shape: tuple[int, ...]) -> RowLayout:
        return RowLayout(shape, self.settings.cache_type)

    def request(self, micro_batch: int | None, starts: tuple[int, ...] | None) -> Request:
        count, asked = self.settings.partition_choice()
        batch = min(self.largest_batch, self.train.count)
        heaviest = max(self._possible_optimizers(), key=lambda optimizer: len(optimizer.state))
        costs = self.costs_at(batch)
        return Request(
            chain=self.chain, method=self.method.name, cuts=self.method.cuts, device=self.device.name,
            host_counts=self.device.kind == "cpu", limit=self.limit, runtime=self.runtime, growth=self.device.growth,
            costs_at=self.costs_at, states=state_layouts(costs, heaviest), loss_of=self._loss_cost, fused=heaviest.fused,
            heap_below=self.device.heap_below,
            batch_size=batch, micro_batch=micro_batch or self.settings.micro_batch_size, starts=starts or asked, count=count,
            input_row=self.input_layout, cache_row=self._cache_row, train_rows=self.train.count, test_rows=self.test.count,
        )  # fmt: skip

    def planned(self) -> Prepared:
        """The plan: a new one, or the cut and micro-batch of the one to reuse. Raises like `prepare`."""
        reuse = self._reuse
        if reuse is None:
            return self.prepare()
        now = planning.fingerprint(self.chain, self.costs_at(min(self.largest_batch, self.train.count)), self.train.shape)
        if (reuse.method, reuse.fingerprint) != (self.method.name, now):
            raise OptionError(
                f"--plan: that plan is for another model or method ({reuse.method}, {reuse.fingerprint}); this run is "
                f"{self.method.name}, {now}. Make a new one with --plan-out."
            )
        return self.prepare(micro_batch=max(part.micro_batch for part in reuse.partitions), starts=reuse.starts)

    def prepare(self, *, micro_batch: int | None = None, starts: tuple[int, ...] | None = None) -> Prepared:
        """The plan and its parts. Raises DoesNotFit, DataError, ModelError or OptionError, in words."""
        request = self.request(micro_batch, starts)
        candidate, reasons = planning.choose_cut(request)
        count = len(candidate.parts)
        training = self._training(count, candidate)
        optimizers = self._optimizers(count)
        costs = self._partition_costs(candidate, training, optimizers)
        phases = self.method.phases(
            Workload(
                train_rows=self.train.count,
                test_rows=self.test.count,
                shuffle=self.settings.shuffles,
                partitions=training,
            )
        )
        block_costs = self.costs_at(candidate.micro_batch)
        cache_layouts = tuple(self._cache_row(block_costs[last - 1].output_shape) for _, last, _ in candidate.parts)
        arena_bytes, at_host = self._host_tier(candidate, block_costs, cache_layouts)
        plan = self._plan(request, candidate, training, costs, phases, reasons, cache_layouts, arena_bytes, at_host)
        shapes = [block_costs[last - 1].output_shape for _, last, _ in candidate.parts]
        return Prepared(
            plan=plan, chain=self.chain, method=self.method, costs=block_costs, optimizers=tuple(optimizers), phases=phases,
            cache_layouts=cache_layouts, input_layout=self.input_layout, partition_costs=costs, rates=self.rates,
            loss=lambda p: self.loss_for(p, count, shapes[p], self.device.torch), at_host=at_host, arena_bytes=arena_bytes,
        )  # fmt: skip

    def _training(self, count: int, candidate: Candidate) -> tuple[PartitionTraining, ...]:
        epochs = per_partition("--epochs", self.settings.epochs, int, count)
        batches = per_partition("--batch-size", self.settings.batch_size, int, count)
        at_least_one("--epochs", epochs)
        batches = [min(batch, self.train.count) for batch in batches]
        return tuple(
            PartitionTraining(epochs=e, batch_size=b, micro_batch=min(candidate.micro_batch, b), trainable=part[2].trainable)
            for e, b, part in zip(epochs, batches, candidate.parts, strict=True)
        )

    def _partition_costs(
        self, candidate: Candidate, training: Sequence[PartitionTraining], optimizers: Sequence[Optimizer]
    ) -> tuple[PartitionCost, ...]:
        """Costs with every partition's own micro-batch and optimizer."""
        found = []
        for (first, last, _), part, optimizer in zip(candidate.parts, training, optimizers, strict=True):
            blocks = self.costs_at(part.micro_batch)[first:last]
            states = state_layouts(blocks, optimizer)
            *_, cost = growing(
                blocks, states, self._loss_cost(part.micro_batch), fused=optimizer.fused, heap_below=self.device.heap_below,
                shares=planning.shares_of(self.train.count, part.batch_size, part.micro_batch),
            )  # fmt: skip
            found.append(cost)
        return tuple(found)

    def _host_tier(
        self, candidate: Candidate, costs: Sequence[BlockCost], cache_layouts: Sequence[RowLayout]
    ) -> tuple[int, frozenset[int]]:
        """(bytes of the host arena, partitions whose homes fit in it): homes come first, in order, then rows."""
        asked = self.settings.ram_limit
        free = self.host_free
        if asked is None:
            budget = free // 2 if self.device.kind == "cuda" else 0
        else:
            budget = parse_size(asked, total=free, free=free, name="--ram-limit")
            if budget > free:
                raise OptionError(
                    f"--ram-limit: {format_size(budget)} were asked for, and {format_size(free)} of RAM are free."
                )
        homes = [round_up(max(cost.weights, 1)) for cost in costs]
        rows = sum(layout.home_bytes(self.train.count + self.test.count) for layout in (self.input_layout, *cache_layouts))
        budget = min(budget, sum(homes) + rows)
        budget = sum(piece_sizes(budget, powers_of_two=self.device.kind == "cuda"))
        used, at_host = 0, set()
        for p, (first, last, _) in enumerate(candidate.parts):
            used += sum(homes[first:last])
            if used <= budget:
                at_host.add(p)
        return budget, frozenset(at_host)

    def _plan(
        self, request: Request, candidate: Candidate, training: Sequence[PartitionTraining], costs: Sequence[PartitionCost],
        phases: Sequence[Phase], reasons: tuple[str, ...], cache_layouts: Sequence[RowLayout], arena_bytes: int,
        at_host: frozenset[int],
    ) -> Plan:  # fmt: skip
        parts, slot = [], 0
        for p, ((first, last, _), part, cost) in enumerate(zip(candidate.parts, training, costs, strict=True)):
            slot = max(slot, cost.slot)  # made once, for the largest so far
            own = replace(request, batch_size=part.batch_size)
            reading, writing = planning.buffers_of(own, first, last, part.micro_batch)
            parts.append(
                PartitionPlan(
                    first=first, last=last, micro_batch=part.micro_batch, weights=cost.weights, state=cost.state,
                    slot=cost.slot, gradients=cost.gradients,
                    activations=cost.saved, buffers=reading + writing,
                    boundary_row=cost.output_row, tier=self.device.host_tier if p in at_host else "disk",
                    peak=planning.peak_of(own, replace(cost, slot=slot), first, last, part.micro_batch),
                )
            )  # fmt: skip
        moments = Simulator(phases, costs, self.rates, at_host).run(one_at_a_time(phases))
        weights = sum(cost.weights for cost in costs)
        widest = max((layout.home_bytes(self.train.count + self.test.count) for layout in cache_layouts[:-1]), default=0)
        disk = 3 * weights + self.input_layout.home_bytes(self.train.count + self.test.count) + 2 * widest
        return Plan(
            method=self.method.name, device=self.device.name, limit=self.limit, margin=margin_of(self.limit),
            runtime=self.runtime, growth=self.device.growth, full_state=sum(c.weights + c.gradients + c.state for c in costs),
            parameters=sum(cost.parameters for cost in costs), partitions=tuple(parts), host_limit=arena_bytes, disk_bytes=disk,
            seconds=round(sum(moment.seconds for moment in moments), 1), reasons=reasons,
            fingerprint=planning.fingerprint(self.chain, self.costs_at(candidate.micro_batch), self.train.shape),
        )  # fmt: skip


def _regression(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared error of outputs (rows, 1) or (rows,) to labels (rows,)."""
    return (output.reshape(len(output)) - labels).square().mean()


def _existing(folder: Path) -> Path:
    """The nearest directory that is there already."""
    while not folder.exists():
        folder = folder.parent
    return folder


def refuse_small_disk(plan: Plan, folder: Path) -> None:
    free = shutil.disk_usage(_existing(folder)).free
    if free < plan.disk_bytes:
        raise DiskFull(
            f"{folder} has {format_size(free)} free, and the plan needs {format_size(plan.disk_bytes)} for homes, boundary "
            "rows and the result. Free some space, or give another place with --offload-dir."
        )
