"""One arm of benchmarks/streamed_speed.py, frontier.py and scaling.py in a process of its own: prints one JSON line. Under
torchrun several share an update, of --batch rows each, and the first prints.

plain     a plain PyTorch loop with PyTorch's own settings and all memory; with --segments torch's checkpoint_sequential in it;
          in several processes with DistributedDataParallel
streamed  seqpart, by --method
compute   the same steps without loads and saves: what the computation alone takes
io        the same loads and saves without computation: what the disk alone takes
"""

import argparse
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import children

WARM_UP = 3
"""Updates that are not timed: first touches, state that is not at home yet."""
SETTLED, SMALL = 120, 4 << 20
RATE, SEED = 1e-4, 0
STATES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"rounding": "stochastic", "moments_dtype": "bf16", "dtype": "bf16"},
    "8bit": {"optimizer": "adamw8bit"},
}
"""Options of Trainer by what its state is kept in; a plain loop keeps float32."""
RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))


def blocks_of(arguments: argparse.Namespace) -> list[Any]:
    from benchmarks import frontier_networks, streamed_networks

    if arguments.network:
        blocks = frontier_networks.blocks_of(arguments.network)
    else:
        blocks = streamed_networks.network(arguments.width, arguments.depth)
    return streamed_networks.in_16_bits(blocks) if arguments.states == "bf16" else blocks


def rows(network: str, count: int) -> tuple[Any, Any]:
    """`count` rows from real digits, repeated where there are too few, so that every update is whole."""
    import torch

    from benchmarks.frontier_networks import rows_of
    from seqpart.zoo.datasets import digits_table  # a file of numbers, read without scikit-learn's 57 MB

    table = torch.from_numpy(digits_table())
    x, y = rows_of(network, table[:, :64], table[:, 64])
    picked = torch.arange(count) % len(x)
    return x[picked], y[picked]


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.checkpoint import checkpoint_sequential

    from benchmarks.frontier_networks import rows_of
    from benchmarks.peers.networks import build_all, mean_loss

    digits = load_digits()
    x, y = rows_of(arguments.network or "", torch.from_numpy(digits.data), torch.from_numpy(digits.target))
    model: torch.nn.Module = torch.nn.Sequential(*build_all(blocks_of(arguments), SEED))
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    if RANKS > 1 and arguments.sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
        for block in [*model, model]:
            fully_shard(block, mesh=mesh)
    elif RANKS > 1 and not arguments.deepspeed:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if arguments.deepspeed:
        model, step = zero_3(model, optimizer, arguments.batch)
    batch, segments = arguments.batch, arguments.segments
    took, losses, used = [], [], Used()
    for number in range(arguments.updates):
        if number == WARM_UP:
            used = Used()
        began = time.perf_counter()
        first = (number * RANKS + RANK) * batch
        picked = torch.arange(first, first + batch) % len(x)
        output = model(x[picked]) if not segments else checkpoint_sequential(model, segments, x[picked], use_reentrant=False)
        loss = mean_loss(output, y[picked])
        step(loss)
        losses.append(loss.item())
        took.append(time.perf_counter() - began)
    used_by = used.per_update(Used(), arguments.updates - WARM_UP)
    if RANKS > 1:
        torch.distributed.barrier()  # a rank that ends while another still waits for it is cut off
        torch.distributed.destroy_process_group()
    return {"seconds": took[WARM_UP:], **used_by, "peak": peak_anonymous(), "loss": sum(losses) / len(losses)}


def zero_3(model: Any, optimizer: Any, batch: int) -> tuple[Any, Any]:
    """DeepSpeed's engine for ZeRO-3 in memory, with its own settings, and the function that makes an update of a loss."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if RANKS == 1:
        from benchmarks.peers.common import one_process

        one_process()
    deepspeed.init_distributed(dist_backend="gloo")
    settings = {
        "train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0, "steps_per_print": 1 << 30,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(loss: Any) -> None:
        engine.backward(loss)
        engine.step()

    return engine, step


class Used:
    """What this process used so far: processor seconds, of them the kernel's, and pages that were mapped."""

    def __init__(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.cpu, self.kernel, self.faults = usage.ru_utime + usage.ru_stime, usage.ru_stime, usage.ru_minflt

    def per_update(self, later: "Used", updates: int) -> dict[str, float]:
        return {key: (getattr(later, key) - getattr(self, key)) / updates for key in ("cpu", "kernel", "faults")}


def peak_anonymous() -> int:
    """Roughly: of a loop that holds all, the most resident memory, less the files' pages."""
    files = next(int(line.split()[1]) * 1024 for line in _status() if line.startswith("RssFile"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - files


def _status() -> list[str]:
    return Path("/proc/self/status").read_text().splitlines()


def streamed(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.peers.networks import mean_loss
    from seqpart import Trainer
    from seqpart.report.reporter import Reporter
    from seqpart.schedule.phase import PhaseKind
    from seqpart.schedule.steps import StepDone, Verb

    class Watch(Reporter):
        def __init__(self) -> None:
            super().__init__(quiet=not arguments.verbose)
            self.ends: list[float] = []
            self.used: list[Used] = []
            self.verbs: dict[str, float] = {}
            self.sent = 0

        def begin(self, phases: Any, *rest: Any) -> None:
            self.phases = phases
            super().begin(phases, *rest)

        def listen(self, event: Any) -> None:
            if isinstance(event, StepDone) and self.phases[event.step.phase].kind is PhaseKind.TRAIN:
                if len(self.ends) >= WARM_UP:
                    name = event.step.verb.name
                    self.verbs[name] = self.verbs.get(name, 0.0) + event.seconds
                    self.sent += event.bytes_written if event.step.verb is Verb.REDUCE else 0
                if event.step.verb is Verb.UPDATE and event.step.partition == 0:
                    self.ends.append(time.perf_counter())
                    self.used.append(Used())
            super().listen(event)

    if arguments.arm != "streamed":
        idle(arguments.arm)
    watch = Watch()
    x, y = rows(arguments.network or "", arguments.batch * RANKS * arguments.updates)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        options = {"micro_batch_size": arguments.batch} if not arguments.any_micro_batch else {}
        if arguments.partitions:
            options["partitions"] = arguments.partitions
        trainer = Trainer(
            blocks_of(arguments), mean_loss if arguments.network == "T" else None,
            mem_limit=arguments.limit, method=arguments.method, epochs=1,
            batch_size=arguments.batch * RANKS, lr=RATE, seed=SEED, shuffle=False,
            output_dir=Path(folder) / "run", save_every="never",
            **options, **STATES[arguments.states],
        )  # fmt: skip
        result = trainer.fit((x, y), (x[:256], y[:256]), reporter=watch)
        simulated = simulate(trainer, (x, y), (x[:256], y[:256]), result.plan) if RANKS > 1 else {}
    ends = watch.ends[WARM_UP - 1 :]
    plan = result.plan
    return {
        "seconds": [after - before for before, after in itertools.pairwise(ends)],
        **watch.used[WARM_UP - 1].per_update(watch.used[-1], len(ends) - 1),
        "peak": result.proof.peak, "predicted": plan.peak, "predicted seconds": plan.update_seconds, "method": plan.method,
        "loss": result.train_losses[-1] if result.train_losses else None,  # without computation there is none
        "violations": result.proof.violations, "runtime": plan.runtime,
        "sent": watch.sent // max(1, len(ends) - 1), "peaks": [proof.peak for proof in result.proofs],
        "gradients": sum(part.gradients for part in plan.partitions),
        "partitions": len(plan.partitions), "slots": plan.slots, "boundary_tiers": plan.tiers,
        "stays": sorted(plan.stays), "weights_stay": sorted(plan.weights_stay),
        "keeps": sorted(plan.keeps), "offloads": sorted(plan.offloads),
        "micro_batch": result.final_micro_batch, "file_growth": result.proof.file_growth,
        "verbs": {name: round(seconds / max(1, len(ends) - 1), 4) for name, seconds in watch.verbs.items()},
        **simulated,
    }  # fmt: skip


def simulate(trainer: Any, train: Any, test: Any, plan: Any) -> dict[str, Any]:
    """What benchmarks/scaling_simulated.py says of these ranks, by the speeds that this machine measures for their plan."""
    from benchmarks.scaling_simulated import Lockstep, Network
    from seqpart.device.ranks import CHUNK, ranks_of

    ranks: Any = ranks_of(trainer.device)
    message = ranks.tried(1) / (3 * (RANKS - 1))  # to all, around the ring, and the word about its gradients
    chunk = max(1e-9, ranks.tried(CHUNK // 4) - 3 * (RANKS - 1) * message)  # copies and sums are in it
    network = Network(latency=message, bandwidth=2 * (RANKS - 1) / RANKS * CHUNK / chunk, tree=True)
    with trainer.planned(train, test, reuse=plan, dry=True) as (_, prepared):
        found = Lockstep(prepared).run(network, RANKS)
    return {"simulated": found["seconds"], "busy": found["busy"], "network": [network.latency, network.bandwidth]}


def idle(arm: str) -> None:
    """Take the disk, or the computation, out of the run, from the first updates on."""
    from seqpart.model.metrics import Metrics
    from seqpart.runtime.compute import Compute
    from seqpart.runtime.partition import Partition
    from seqpart.store.store import Store, Transfer

    if arm == "compute":
        real_get, real_put = Store.begin_get, Store.begin_put
        calls = {"get": 0}

        def begin_get(self: Store, items: Any, after: Any, **how: Any) -> Transfer:
            calls["get"] += 1
            # The slots hold numbers by now, of whichever block; blocks of another layout still come and go.
            work = [item for item in items if calls["get"] < SETTLED or self.layout(item[0]).nbytes < SMALL]
            return real_get(self, work, after, **how)

        def begin_put(self: Store, items: Any, after: Any, **how: Any) -> Transfer:
            work = [item for item in items if calls["get"] < SETTLED or item[1].nbytes < SMALL]
            return real_put(self, work, after, **how)

        real_end = Compute.end_phase

        def end_phase(self: Compute, number: int) -> None:
            self.metrics = Metrics(loss=0.0, rows=1)  # the weights of other blocks bring no loss worth a look
            real_end(self, number)

        Store.begin_get, Store.begin_put = begin_get, begin_put  # type: ignore[method-assign]
        Compute.end_phase = end_phase  # type: ignore[method-assign]
        return

    def nothing(self: Compute, step: Any) -> tuple[int, int]:
        batch_rows = self.phases[step.phase].kind.name
        if batch_rows == "TRAIN" and step.verb.name == "FORWARD" and step.partition == 0:
            batch = self._next_batch(step)
            self._release(batch)
        return (0, 0) if batch_rows == "TRAIN" else real_forward(self, step)

    real_forward = Compute.forward
    Compute.forward = Compute.backward = nothing  # type: ignore[method-assign]

    def update(self: Partition, *_: object, **__: object) -> None:
        self.changed = True

    Partition.update = update  # type: ignore[method-assign]


def run_arm(
    name: str, *options: object, folder: Path, ranks: int = 1, threads: int | None = None, python: str = sys.executable
) -> dict[str, Any]:
    """What the arm `name` printed in a process of its own, or in several, with its homes under `folder`.

    Raises RuntimeError with its last lines where it failed.
    """
    # PyTorch's own settings for the plain loop; those of seqpart, which imports torch too late here, for the others.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    if name != "plain":
        environment |= {"GOMP_SPINCOUNT": "1000", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return children.printed(
            "benchmarks.streamed_arm", name, *options, "--folder", place, name=name, environment=environment, ranks=ranks,
            python=python,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=["plain", "streamed", "compute", "io"])
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--width", type=int, help="of a residual MLP of --depth blocks")
    network.add_argument("--network", help="one of benchmarks/frontier_networks.py")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--partitions", type=int)
    parser.add_argument("--segments", type=int)
    parser.add_argument("--method", default="streamed")
    parser.add_argument("--any-micro-batch", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="`plain` in several processes by FSDP2 instead of DDP")
    parser.add_argument("--deepspeed", action="store_true", help="`plain` by DeepSpeed's ZeRO-3")
    parser.add_argument("--states", choices=STATES, default="fp32", help="weights and moments of `streamed`")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    found = plain(arguments) if arguments.arm == "plain" else streamed(arguments)
    found["median"] = median(found["seconds"])
    if RANK == 0:
        print(json.dumps(found), file=sys.stdout if not arguments.verbose else sys.stderr, flush=True)
    if (
        arguments.sharded
    ):  # torch 2.14's FSDP sometimes aborts on a busy machine, as a thread of its own is left at the very end
        os._exit(0)


if __name__ == "__main__":
    main()
