"""Arms of benchmarks/ist_paper.py: IST by the public Trainer; full training, local SGD and an ensemble in plain PyTorch."""

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

from benchmarks.ist_networks import Job, Subnet, blocks, order, put_back, units
from benchmarks.objectives.tasks import Rows
from benchmarks.psl_arm import Curve
from seqpart import Trainer
from seqpart.model.scheduler import rate_schedule
from seqpart.plan.ist import OBSERVED_ROWS
from seqpart.schedule.steps import StepDone

ARMS = ("full", "local", "ensemble", "ist zero", "ist keep")
SCHEDULE = "cosine"
Found = dict[str, Any]


def carried_out(job: Job, train: Rows, test: Rows, folder: Path | None = None) -> Found:
    """Test accuracies (`curve`) behind every `job.every` epochs and at the end, and seconds of this thread's processor."""
    began = time.process_time()
    found = _by_trainer(job, train, test, folder) if job.arm.startswith("ist") else PLAIN[job.arm](job, train, test)
    return {**found, "lr": job.lr, "seconds": time.process_time() - began}


class _Moved(Curve):
    """Bytes that steps of each kind have read and written, too."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, list[int]] = {}

    def listen(self, event: Any) -> None:
        super().listen(event)
        if isinstance(event, StepDone) and event.bytes_read + event.bytes_written:
            both = self.moved.setdefault(event.step.verb.name.lower(), [0, 0])
            both[0], both[1] = both[0] + event.bytes_read, both[1] + event.bytes_written


def _by_trainer(job: Job, train: Rows, test: Rows, folder: Path | None) -> Found:
    heard = _Moved()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        trainer = Trainer(
            blocks(job.sizes, job.seed), None, "adam", mem_limit="3GB", method="ist", subnets=job.subnets,
            local_steps=job.local, subnet_groups=1, subnet_moments=job.arm.split()[1], epochs=job.epochs,
            batch_size=job.batch, micro_batch_size=job.batch, lr=job.lr, lr_schedule=SCHEDULE, seed=job.seed,
            test_every=job.every, save_every="never", output_dir=Path(place) / "run", quiet=True,
        )  # type: ignore[arg-type]  # fmt: skip
        trainer.fit(train, test, reporter=heard)
    return {"curve": heard.accuracies, "moved": heard.moved}


class _Site:
    """One of those that learn on rows of their own: `job.updates` an epoch, with Adam and the learning-rate schedule."""

    def __init__(self, job: Job, train: Rows, number: int, network: nn.Module) -> None:
        self._job, self._train, self._number, self.network = job, train, number, network
        self._adam = torch.optim.Adam(network.parameters(), lr=job.lr, fused=True)
        self._rate, self._done = rate_schedule(SCHEDULE, 0), 0

    def learn(self, rows: torch.Tensor, first: int, stop: int) -> None:
        """Updates `first` to `stop` of an epoch with that order of rows."""
        job, (x, y) = self._job, self._train
        mine = rows[self._number * job.shard :][: job.shard][first * job.batch : stop * job.batch]
        for batch in torch.split(mine, job.batch):
            self._adam.param_groups[0]["lr"] = job.lr * self._rate(self._done, job.epochs * job.updates)
            F.cross_entropy(self.network(x[batch]), y[batch]).backward()
            self._adam.step()
            self._adam.zero_grad()
            self._done += 1


def _learned(job: Job, sites: Sequence[_Site], behind_round: Callable[[], None], judged: Callable[[], float]) -> Found:
    """All epochs, with `behind_round` after every `job.local` updates of all sites."""
    curve = []
    for epoch in range(1, job.epochs + 1):
        rows = order(job, epoch)
        for first in range(0, job.updates, job.local):
            for site in sites:
                site.learn(rows, first, first + job.local)
            behind_round()
        if epoch == job.epochs or epoch % job.every == 0:
            curve.append(judged())
    return {"curve": curve}


def judged(network: nn.Sequential, job: Job, train: Rows, test: Rows) -> float:
    """Accuracy of a copy, its BatchNorms with the statistics that method ist gives them."""
    network = with_statistics(copy.deepcopy(network), job, train)
    with torch.no_grad():
        return float((network(test[0]).argmax(1) == test[1]).float().mean())


def with_statistics(network: nn.Sequential, job: Job, train: Rows) -> nn.Sequential:
    rows = min(job.rows, OBSERVED_ROWS) // job.batch * job.batch
    update_bn((train[0][batch] for batch in torch.split(order(job, 0)[:rows], job.batch)), network)
    return network.eval()


def _nothing() -> None:
    pass


def _full(job: Job, train: Rows, test: Rows) -> Found:
    network = nn.Sequential(*blocks(job.sizes, job.seed))
    return _learned(job, [_Site(job, train, 0, network)], _nothing, lambda: judged(network, job, train, test))


def _local(job: Job, train: Rows, test: Rows) -> Found:
    """Sites with copies of the whole network; their mean takes the copies' place every J updates. Moments stay at the sites."""
    networks = [nn.Sequential(*blocks(job.sizes, job.seed)) for _ in range(job.subnets)]
    sites = [_Site(job, train, number, network) for number, network in enumerate(networks)]

    @torch.no_grad()
    def averaged() -> None:
        for alike in zip(*(network.parameters() for network in networks), strict=True):
            mean = torch.stack(alike).mean(0)
            for parameter in alike:
                parameter.copy_(mean)

    return _learned(job, sites, averaged, lambda: judged(networks[0], job, train, test))


def _ensemble(job: Job, train: Rows, test: Rows) -> Found:
    """Subnets drawn once, put together for tests alone; `voted`: the mean of their own outputs at the end."""
    network, own = nn.Sequential(*blocks(job.sizes, job.seed)), units(job, 1)
    subnets = [Subnet(network, mine, job.subnets) for mine in own]
    sites = [_Site(job, train, number, subnet) for number, subnet in enumerate(subnets)]

    def joined() -> float:
        put_back(network, subnets, own)
        return judged(network, job, train, test)

    found = _learned(job, sites, _nothing, joined)
    with torch.no_grad():
        for subnet in subnets:
            with_statistics(subnet, job, train)
        votes = torch.stack([subnet(test[0]) for subnet in subnets]).mean(0)
    return {**found, "voted": float((votes.argmax(1) == test[1]).float().mean())}


PLAIN = {"full": _full, "local": _local, "ensemble": _ensemble}
