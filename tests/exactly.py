"""Every bit of a training run, update by update, and runs forced onto one way of training, to compare the two."""

import itertools
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

from seqpart import Trainer
from seqpart.data.splits import Split
from seqpart.model.packs import tiers_of
from seqpart.plan.prediction import predict
from seqpart.plan.problem import parts_of, sharing
from seqpart.plan.simulator import Resources
from seqpart.profile.blocks import measure_chain
from seqpart.profile.trials import Trials
from tests import forced, machine

ROWS, BATCH = 22, 8  # updates of 8, 8 and 6 rows


@dataclass(frozen=True)
class How:
    """One way to the same bits. `keeps` is the first partition that keeps its graphs: a share of all partitions. `stays` are
    those that stay while others stream: a share from the first on, negative from the last on. `weights` are those of the others
    whose weights stay, counted in the same way."""

    method: str = "streamed"
    slots: int = 1
    boundary_tier: str = "device"
    """Where boundaries wait; "mixed": those of the partitions in turn on the device, in host memory and on the disk."""
    keeps: float | None = None
    stays: float = 0
    weights: float = 0
    offloads: str = ""
    """Where the graphs that are kept wait, if not on the device: host or disk."""
    host_steps: bool = False
    """Optimizer steps are computed on the host, but for partitions with buffers that change."""

    def __str__(self):
        kept = "" if self.keeps is None else f", keeps from {self.keeps}"
        stays = "" if not self.stays else f", {self.stays} stay"
        stays += "" if not self.weights else f", weights of {self.weights} stay"
        away = f", offloaded to {self.offloads}" if self.offloads else ""
        steps = ", steps on the host" if self.host_steps else ""
        return f"{self.method}, {self.slots} slot(s), {self.boundary_tier}{kept}{away}{stays}{steps}"


def tiers(place, count):
    """Of the boundaries of `count` partitions, all in one place, or mixed."""
    mixed = ("device", "host", "disk")
    return tiers_of(mixed[p % 3] if place == "mixed" else place for p in range(count)) if count > 1 else ()


FULL = How(method="full")
HOWS = [
    How(method="checkpointed"),
    How(method="checkpointed", keeps=0.3),
    How(weights=0.5),
    How(slots=2, weights=-0.5, keeps=0.4, offloads="disk", boundary_tier="disk"),
    How(slots=2, stays=-0.34, weights=1, boundary_tier="host"),
    How(stays=0.5),
    How(slots=2, stays=-0.5, keeps=0),
    How(stays=0.5, boundary_tier="disk"),
    How(stays=1),
    How(slots=2, keeps=0, offloads="disk"),
    How(method="checkpointed", keeps=0, offloads="disk"),
    How(keeps=0.4, offloads="disk", boundary_tier="disk", stays=0.5),
    How(keeps=0, offloads="disk", boundary_tier="host"),
    How(slots=2, keeps=0, offloads="host"),
    How(method="checkpointed", keeps=0.4, offloads="host"),
    How(keeps=0, offloads="host", boundary_tier="host", stays=0.5),
    How(slots=2, keeps=0.5, offloads="host", boundary_tier="disk"),
    How(keeps=0, boundary_tier="disk"),
    How(slots=2, keeps=0.5, boundary_tier="mixed"),
    How(boundary_tier="mixed", stays=0.5),
    How(),
    How(slots=2, keeps=0),
    How(slots=1, keeps=0.5),
    How(slots=1, boundary_tier="disk"),
    How(slots=2, boundary_tier="disk"),
    How(slots=2, boundary_tier="host"),
    How(host_steps=True),
    How(slots=2, stays=0.5, host_steps=True),
    How(method="checkpointed", host_steps=True),
    How(slots=2, keeps=0, stays=-0.34, boundary_tier="host", host_steps=True),
]


class Record(dict):
    """(update, what, tensor's name): a copy of the tensor, None for a gradient that is not there."""

    def __init__(self):
        super().__init__()
        self._updates = {}
        self.in_part = False
        """True if state, and gradients that wait at home, were elsewhere."""

    def __call__(self, partition, step):
        update = self._updates[step.partition] = self._updates.get(step.partition, -1) + 1
        if partition.awaits_step:
            return
        state = partition.optimizer.state if partition.optimizer is not None else {}
        for block in partition.blocks:
            elsewhere = {tie.name for tie in block.tied}
            for name, tensor in [*block.module.named_parameters(), *block.module.named_buffers()]:
                if name in elsewhere:
                    continue
                key = f"{block.name}.{name}"
                self[update, "value", key] = tensor.detach().clone()
                if tensor.requires_grad:
                    self[update, "gradient", key] = None if tensor.grad is None else tensor.grad.clone()
                for part, value in state.get(tensor, {}).items():
                    self[update, part, key] = value.clone()


def first_difference(found, expected):
    """The name of the first tensor that is not the same in both, in the order of `expected`; None where all are."""
    for key, tensor in expected.items():
        if getattr(found, "in_part", False) and key[0] != "end" and key not in found:
            continue
        other = found.get(key)
        if (tensor is None) != (other is None) or (tensor is not None and not same(other, tensor)):
            return key
    return next((key for key in found if key not in expected), None)


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


class Trained:
    """Records of runs of one model on one data set, each forced onto one way."""

    def __init__(self, monkeypatch, folder, model, data, **options):
        self._patch, self._folder, self.model, self._data = monkeypatch, folder, model, data
        self._numbers, self._costs = itertools.count(), {}
        self.options = {
            "mem_limit": "2GB", "batch_size": BATCH, "micro_batch_size": 3, "epochs": 2, "lr": 1e-2, "seed": 7, **options,
        }  # fmt: skip

    def rows(self):
        """(rows, labels) to train on."""
        train = self._data[0]
        return (train.open()[0].to(train.dtype), train.labels) if isinstance(train, Split) else train

    def run(self, how, **options):
        """The record of a run, with the final weights and losses in it."""
        self._force(how)
        options = {**self.options, "method": how.method, **options}
        loss, optimizer = options.pop("loss", None), options.pop("optimizer", "sgd")
        if how.method == "full":
            options.pop("partitions", None)
        if {"host", "mixed"} & {how.boundary_tier, how.offloads} or how.host_steps:
            options.setdefault("ram_limit", "50MB")
        options["optimizer_on"] = "host" if how.host_steps else "device"
        record = Record()
        record.in_part = how.host_steps
        trainer = Trainer(
            self.model(), loss, optimizer, output_dir=self._folder / f"run-{next(self._numbers)}", quiet=True, **options
        )
        result = trainer.fit(*self._data, before_update=record)
        count = len(result.plan.partitions)
        assert how.method == "full" or (result.plan.tiers, result.plan.slots) == (
            tiers(how.boundary_tier, count),
            self._slots(how, result.plan),
        )
        assert bool(how.offloads) == bool(result.plan.offloads)
        assert how.host_steps >= bool(result.plan.host_steps)
        assert result.plan.graphs_at_host == (result.plan.offloads if how.offloads == "host" else frozenset())
        for name, tensor in load_file(result.weights).items():
            record["end", "value", name] = tensor
        for number, loss in enumerate(result.train_losses):
            record["end", "loss", number] = torch.tensor(loss, dtype=torch.float64)
        record["end", "loss", "test"] = torch.tensor(result.test_loss, dtype=torch.float64)
        return record

    def _slots(self, how, plan):
        return how.slots if how.method == "streamed" else len(plan.partitions)

    def _share(self, share, count):
        """So many of `count` partitions, from the first on; of a negative share from the last on."""
        number = round(abs(share) * count)
        return frozenset(range(number) if share > 0 else range(count - number, count))

    def _force(self, how):
        def only(problem, method, micro_batch):
            starts = problem.starts if method.cuts else (0,)
            parts = parts_of(problem, micro_batch, starts)
            count = len(parts)
            keeps = frozenset() if how.keeps is None else frozenset(range(int(how.keeps * (count - 1)), count - 1))
            # Borrowers read weights that are shared from their home: no plan lets their owners stay.
            shared = sharing(problem, parts)
            stays, weights = (self._share(share, count) - shared for share in (how.stays, how.weights))
            slots = len(parts) if method.stays else how.slots
            host = keeps if how.offloads == "host" else frozenset()
            places = tiers(how.boundary_tier, count)
            resources = Resources(slots=slots, tiers=places, stays=stays, weights_stay=weights - stays, graphs_at_host=host)
            return predict(problem, method, micro_batch, parts, resources, keeps, keeps if how.offloads else frozenset())

        forced.plans(self._patch, only)
        # Looked at by plans only, which are forced here; they take half of so short a run.
        machine.known(self._patch)
        self._patch.setattr(Trials, "run", lambda *_: False)
        self._patch.setattr("seqpart.plan.inputs.measure_chain", self._measured)

    def _measured(self, chain, shape, batch, **named):
        """Once for all runs: half of so short a one."""
        key = (self.model, shape, batch, *named.values())
        if key not in self._costs:
            self._costs[key] = measure_chain(chain, shape, batch, **named)
        return self._costs[key]


def split(name, x, y, dtype=torch.float32):
    return Split(name=name, count=len(y), shape=tuple(x.shape[1:]), labels=y, open=lambda: [x], dtype=dtype)


def numbers(shape, *, classes=4, dtype=torch.float32, rows=ROWS):
    """Training and test rows of quantities."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(rows + 5, *shape, generator=generator, dtype=torch.float64), torch.arange(rows + 5) % classes
    return split("training", x[:rows], y[:rows], dtype), split("test", x[rows:], y[rows:], dtype)


def tokens(*, vocabulary=11, context=6, rows=ROWS):
    """Training and test rows of tokens, each to predict the one behind it."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, vocabulary, (rows + 5, context + 1), generator=generator)
    return (text[:rows, :-1], text[:rows, 1:]), (text[rows:, :-1], text[rows:, 1:])
