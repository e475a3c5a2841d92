"""The runs that test_ranks.py makes under torchrun and by one process: `rank_runs.py FOLDER runs`, `FOLDER apart`,
`FOLDER resume METHOD`, or `FOLDER SIGKILL RANK METHOD`."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from seqpart import Trainer
from seqpart.device import ranks
from seqpart.device.opening import open_device
from seqpart.errors import SeqpartError
from seqpart.report.reporter import Reporter
from seqpart.schedule.steps import StepDone, Verb

ROWS = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(40) % 5
SOME = CLASSES.where(torch.arange(40) % 3 > 0, -100)
RANKS, BATCH = 2, 16
COMMON = {"mem_limit": "2GB", "optimizer": "adam", "batch_size": BATCH, "epochs": 2, "lr": 1e-2, "seed": 3, "quiet": True}


def chain(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *between, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


def channels_last():
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 2), nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def tied():
    model = chain(nn.Tanh(), nn.utils.skip_init(nn.Linear, 32, 32))
    nn.init.zeros_(model[2].bias)
    model[2].weight = model[4].weight
    return model


def normalised(*between, bias=True):
    """Two hidden layers that `ist` divides; without biases all their tensors are matrices."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(*sizes, bias=bias) for sizes in SIZES)
    norms = [nn.BatchNorm1d(layer.out_features, affine=bias, track_running_stats=bias) for layer in (first, second)]
    return nn.Sequential(first, norms[0], nn.ReLU(), *between, second, norms[1], nn.ReLU(), third)


def deep():
    """Five linear layers, so many partitions."""
    torch.manual_seed(0)
    inner = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), *inner, nn.Linear(32, 5))


class MostSeen(nn.Module):
    """Remembers the largest number that it was given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.most.copy_(torch.maximum(self.most, x.detach().max()))
        return x / (1 + self.most.detach()) if not self.training else x


APART = {"method": "sil", "sil_inputs": "synthetic", "partitions": 5}
SIZES = (16, 32), (32, 24), (24, 5)
IST = {"method": "ist", "subnets": 2, "local_steps": 2}
CASES = {
    "streamed": (
        chain,
        CLASSES,
        {"method": "streamed", "partitions": 3, "optimizer": "adam", "clip_grad_norm": 0.1, "shuffle": False},
    ),
    "checkpointed": (chain, CLASSES, {"method": "checkpointed", "partitions": 2, "optimizer": "sgd", "momentum": 0.9}),
    "labels that do not count": (chain, SOME, {"method": "full"}),
    "dropout": (lambda: chain(nn.Dropout(0.5)), CLASSES, {"method": "streamed", "partitions": 2, "export_every": "1epoch"}),
    "running statistics": (lambda: chain(nn.BatchNorm1d(32)), CLASSES, {"method": "streamed", "partitions": 2}),
    "running statistics, of the largest number": (
        lambda: chain(MostSeen()),
        CLASSES,
        {"method": "streamed", "partitions": (0, 1), "shuffle": False},
    ),
    "running statistics of frozen layers": (
        lambda: chain(nn.BatchNorm1d(32)),
        CLASSES,
        {"method": "streamed", "partitions": 3, "freeze": ["0.*", "1.*"]},
    ),
    "a frozen beginning": (chain, SOME, {"method": "streamed", "partitions": 3, "freeze": "0.*"}),
    "tied weights": (tied, CLASSES, {"method": "streamed", "partitions": 3}),
    "channels last": (channels_last, CLASSES, {"method": "full"}),
    "steps on the host": (chain, CLASSES, {"method": "streamed", "partitions": 2, "optimizer_on": "host", "ram_limit": "1GB"}),
    "sil": (chain, CLASSES, {"method": "sil", "partitions": 2, "recovery_epochs": 1}),
    "partitions apart": (deep, CLASSES, APART),
    "partitions apart, one frozen": (deep, CLASSES, {**APART, "freeze": "6.*", "clip_grad_norm": 0.1, "ema": 0.9}),
    "subnets": (lambda: normalised(nn.Dropout(0.3)), CLASSES, {**IST, "eval_every": "1epoch", "partitions": 2}),
    "three subnets": (normalised, SOME, {**IST, "subnets": 3, "subnet_moments": "zero", "clip_grad_norm": 0.1}),
    "subnets of matrices": (lambda: normalised(bias=False), CLASSES, {**IST, "optimizer": "sgd"}),
    "the best weights of divided ones": (
        chain,
        CLASSES,
        {
            "method": "streamed",
            "partitions": 3,
            "eval_every": "1epoch",
            "keep_best": True,
            "early_stopping": 1,
            "export_every": "evaluation",
            "lr": 0.5,
            "epochs": 6,
        },
    ),
    "the best weights": (chain, CLASSES, {"method": "auto", "eval_every": "1epoch", "keep_best": True, "lr": 0.5}),
}
REFUSED = {
    "subnets": {"method": "ist", "subnets": 1},
    "partitions": {**APART, "partitions": 1},
    "tests": {**APART, "eval_every": "1epoch"},
    "unfreeze": {"method": "full", "unfreeze": {"0.*": "epoch 1"}},
    "micro-batch": {"method": "full", "micro_batch_size": BATCH},
    "batch": {"method": "full", "batch_size": 1},
    "limit": {"method": "full", "mem_limit": "1MB"},
    "rows": {"method": "full"},
    "sampler": {"method": "full", "cache": "none"},
    "settings": {"method": "full"},
}


class Fails:
    """A callback that raises in the second rank alone."""

    def __init__(self, rank):
        self.rank = rank

    def on_step(self, event):
        if self.rank == 1 and event.update == 2:
            raise ValueError


class Freezes:
    """A callback that freezes a layer in the second rank alone."""

    def __init__(self, rank, model):
        self.rank, self.model = rank, model

    def on_step(self, event):
        self.model[0].requires_grad_(self.rank == 0)


class Kept:
    """A callback that notes the homes of the second rank, and those of the first."""

    def __init__(self, folder):
        self.folder, self.found = folder, []

    def on_epoch(self, event):
        places = [*self.folder.glob("rank-*"), self.folder / "streamed"]
        self.found = [sorted({file.name.rpartition(".")[0].rpartition(".")[0] for file in place.rglob("block-*.safetensors")})
                      for place in places]  # fmt: skip


def no_metrics(outputs, labels):
    raise ValueError


class Sent(Reporter):
    """Counts the bytes that the ranks give one another before the subnets are merged."""

    def __init__(self):
        super().__init__(quiet=True)
        self.nbytes = 0

    def listen(self, event):
        super().listen(event)
        if isinstance(event, StepDone) and event.step.verb is Verb.GATHER:
            self.nbytes += event.bytes_written


def fitted(name, folder, callbacks=(), reporter=None):
    """The result and the trained model of a case."""
    make, labels, options = CASES[name]
    model = make()
    trainer = Trainer(model, output_dir=folder, micro_batch_size=BATCH // RANKS, **{**COMMON, **options})
    return trainer.fit((ROWS, labels), (ROWS, labels), callbacks=callbacks, reporter=reporter), model


def runs(folder, rank):
    for name in CASES:
        sent, kept = Sent(), Kept(folder)
        result, model = fitted(name, folder / name.replace(" ", "-"), callbacks=[kept], reporter=sent)
        if name == "streamed":
            (folder / f"kept-{rank}.json").write_text(json.dumps(kept.found))
        told = result.train_losses, result.test_loss, result.accuracy, str(result.weights), len(result.proofs), sent.nbytes
        torch.save((model.state_dict(), told), folder / f"{name}-{rank}.pt")
    said = {}
    for name, options in REFUSED.items():
        try:
            rows = ROWS + (rank if name == "rows" else 0)
            options = {**COMMON, **options, "epochs": 2 + (rank if name == "settings" else 0)}
            model = deep() if name == "tests" else normalised()
            given = rows, CLASSES
            if name == "sampler":
                data = TensorDataset(*given)
                given = DataLoader(data, batch_size=options["batch_size"], sampler=DistributedSampler(data))
            Trainer(model, output_dir=folder / f"refused-{name}", **options).fit(given, (rows, CLASSES))
        except SeqpartError as error:
            said[name] = type(error).__name__, str(error)
    try:
        with Trainer(chain(), method="full", **COMMON).session((ROWS, CLASSES)):
            pass
    except SeqpartError as error:
        said["session"] = type(error).__name__, str(error)
    model = deep()
    try:
        trainer = Trainer(model, output_dir=folder / "frozen", **{**COMMON, "method": "full"})
        trainer.fit((ROWS, CLASSES), callbacks=[Freezes(rank, model)])
    except SeqpartError as error:
        said["frozen"] = type(error).__name__, str(error)
    try:
        fitted("channels last", folder / "failed", callbacks=[Fails(rank)])
    except Exception as error:
        (folder / f"failed-{rank}").write_text(type(error).__name__)
    fitted("channels last", folder / "again")
    _, labels, options = CASES["tied weights"]
    model = tied()
    trainer = Trainer(model, output_dir=folder / "late", micro_batch_size=BATCH // RANKS, **{**COMMON, **options})
    try:
        trainer.fit((ROWS, labels), (ROWS, labels), compute_metrics=no_metrics)
    except Exception as error:
        torch.save((model.state_dict(), type(error).__name__), folder / f"late-{rank}.pt")
    trainer = Trainer(tied(), output_dir=folder / "later", micro_batch_size=BATCH // RANKS, **{**COMMON, **options})
    with contextlib.suppress(ValueError, SeqpartError):
        trainer.fit((ROWS, labels), (ROWS, labels), compute_metrics=no_metrics if rank else lambda *_: {"number": 0.0})
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


class Signal:
    """A callback that sends its process a signal, once, after an update, or after that of one partition."""

    def __init__(self, rank, update, number, partition=None):
        self.here = int(os.environ.get("RANK", "-1")) == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.update, self.number, self.partition = update, number, partition

    def on_step(self, event):
        if self.here and event.update == self.update and self.partition in (None, event.partition):
            os.kill(os.getpid(), self.number)


class Stops:
    """Ends the training of some partitions: in the middle of an epoch, and after one."""

    def on_step(self, event):
        if event.partition == 1 and event.update == 2:
            event.stop()

    def on_epoch(self, event):
        if event.partition == 3 and event.epoch == 1:
            event.stop()


METHODS = {
    "streamed": (chain, {"method": "streamed", "partitions": 3}),
    "ist": (normalised, IST),
    "sil": (deep, {**APART, "save_every": "1h"}),
}


def uninterrupted(folder, callbacks=(), method="streamed", **resume):
    """The weights of a run that saves after each update, or wherever it can."""
    (make, own), place = METHODS[method], {} if resume else {"output_dir": folder}
    model, options = make(), {**COMMON, "save_every": 1, **own, "micro_batch_size": BATCH // RANKS, **place}
    Trainer(model, **options).fit((ROWS, CLASSES), (ROWS, CLASSES) if method == "sil" else None, callbacks=callbacks, **resume)
    return model.state_dict()


def gradients(rank):
    """Weights, and gradients of a rank: in pieces of a chunk and less, in another order, and none at all."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(70, 100), (7,), (), (50, 60), (3, 5), (0, 4), (2, 31)]]
    torch.manual_seed(1 + rank)
    for n, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape) if n != 1 + rank else None
    weights[3].grad = torch.randn(60, 50).t() if rank == 1 else weights[3].grad
    return weights


def sums(rank):
    """Gradients are added up in the order of the ranks, in chunks that are smaller than most, and given weights arrive."""
    ranks.CHUNK = 4096
    group, weights = ranks.ranks_of(open_device("cpu")), gradients(rank)
    sent = group.add_up(weights)
    for n, weight in enumerate(weights):
        found = [one for one in (gradients(r)[n].grad for r in range(group.count)) if one is not None]
        assert torch.equal(weight.grad, sum(found[1:], start=found[0])), n
    counted = sum(weight.grad.nbytes for weight in weights)
    assert 1 <= sent / (2 * (group.count - 1) / group.count * counted) < 1.01, sent
    group.give([weight.detach().mul_(rank) for weight in weights], owner=1)
    assert all(map(torch.equal, weights, gradients(1)))


if __name__ == "__main__":
    at, number = Path(sys.argv[1]), int(os.environ["RANK"])
    if sys.argv[2] == "runs":
        runs(at, number)
    elif sys.argv[2] == "sums":
        sums(number)
    elif sys.argv[2] == "resume":
        torch.save(uninterrupted(at, method=sys.argv[3], resume=at / "run"), at / f"{number}.pt")
    elif sys.argv[2] == "apart":
        result, model = fitted("partitions apart", at / "run", [Stops()])
        torch.save((model.state_dict(), result.train_losses, result.test_loss), at / f"{number}.pt")
    else:
        here = {"SIGKILL": 3, "SIGTERM": 1}[sys.argv[2]] if sys.argv[4] == "sil" else None
        ends = Signal(int(sys.argv[3]), 3, getattr(signal, sys.argv[2]), here)
        found = uninterrupted(at / "run", [ends], method=sys.argv[4])
        torch.save(found, at / f"{number}.pt")
