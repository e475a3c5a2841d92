"""How fast a partition trains from the disk cache, against a plain PyTorch loop; how fast it is loaded and saved.

    python -m benchmarks.partition_speed
    python -m benchmarks.partition_speed --quick      small sizes, to see that it runs; not kept

One SIL epoch of an inner partition (residual blocks of width 2048, batch 256, Adam, prototype objective) is run by
seqpart in one process, fed from the boundary cache on disk, and by a plain loop over inputs in memory in two others,
with the same threads: one with seqpart's process settings (memory given back at once, OpenMP threads that do not spin),
one with PyTorch's defaults. The epochs alternate; the ratios are of medians. The first ratio is what partitions and the
cache cost, the second what keeping a memory limit costs on top. Then one
partition is saved and loaded, alternating with the program's own disk probe and, where it is installed, with fio.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks import quick
from benchmarks.children import InTurn, answer, wait

QUICK = "--quick" in sys.argv
WIDTH, BLOCKS, BATCH, ROWS = (64, 3, 32, 128) if QUICK else (2048, 6, 256, 4096)
PAIRS, WARM = (1, 1) if QUICK else (7, 1)
PROBE = (8 if QUICK else 512) << 20
"""Bytes that the disk probe reads and writes."""


def seqpart_worker(folder: Path) -> None:
    from seqpart.launch import prepare

    prepare()  # before torch: the settings of the command
    import torch

    from seqpart import Trainer
    from seqpart.report.reporter import Reporter
    from seqpart.schedule.phase import PhaseKind
    from seqpart.schedule.steps import PhaseDone
    from seqpart.zoo.models import mlp

    class Alternating(Reporter):
        """Answers each timed epoch to the parent, and waits for its word before the next."""

        def listen(self, event: object) -> None:
            if isinstance(event, PhaseDone) and event.phase.kind is PhaseKind.TRAIN and event.phase.partition == 1:
                answer(event.seconds)
                wait()
            elif isinstance(event, PhaseDone) and event.phase.kind is PhaseKind.CACHE and event.phase.partition == 0:
                wait()

    x, y = torch.randn(ROWS, 64), torch.arange(ROWS) % 10
    trainer = Trainer(
        mlp(64, 10, width=WIDTH, depth=BLOCKS), mem_limit="2GB", method="sil", partitions=(0, 1, BLOCKS + 1),
        epochs=[1, PAIRS + WARM, 1], batch_size=BATCH, output_dir=folder / "run", quiet=True,
    )  # fmt: skip
    trainer.fit((x, y), (x[:BATCH], y[:BATCH]), reporter=Alternating(quiet=True))


def plain_worker(*, settled: bool) -> None:
    from seqpart.device.device import Device

    with Device().settled() if settled else nullcontext():
        plain_epochs()


def plain_epochs() -> None:
    import torch
    import torch.nn.functional as F

    from seqpart.zoo.models import ResidualBlock

    x, y = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 10
    model = torch.nn.Sequential(*(ResidualBlock(WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    directions = 16 * F.normalize(torch.randn(WIDTH, 10), dim=0) / WIDTH**0.5
    for _ in range(PAIRS + WARM):
        wait()
        began = time.perf_counter()
        for rows in torch.randperm(ROWS).split(BATCH):
            logits = F.layer_norm(model(x[rows]), (WIDTH,)) @ directions
            F.cross_entropy(logits, y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        answer(time.perf_counter() - began)


def worker(name: str, folder: Path, environment: dict[str, str]) -> InTurn:
    words = ["--worker", name, "--folder", str(folder), *(["--quick"] if QUICK else [])]
    return InTurn("benchmarks.partition_speed", words, {**os.environ, **environment})


def epochs(folder: Path) -> dict[str, object]:
    defaults = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "300000"), "THP_MEM_ALLOC_ENABLE": "0"}
    workers = {
        "seqpart": worker("seqpart", folder, {}),
        "plain_same_settings": worker("settled", folder, {"GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "0"}),
        "plain_defaults": worker("plain", folder, defaults),
    }
    seen: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(PAIRS + WARM):
        for name in list(workers)[:: 1 if turn % 2 else -1]:
            seen[name].append(workers[name].turn())
    for running in workers.values():
        running.end()
    seconds = {name: statistics.median(values[WARM:]) for name, values in seen.items()}
    return {
        "width": WIDTH, "blocks": BLOCKS, "batch": BATCH, "rows": ROWS, "epochs": seen, "median_seconds": seconds,
        "ratio_same_settings": seconds["seqpart"] / seconds["plain_same_settings"],
        "ratio_defaults": seconds["seqpart"] / seconds["plain_defaults"],
        "cache_bytes_per_second": ROWS * WIDTH * 4 / seconds["seqpart"],
    }  # fmt: skip


def homes(folder: Path, repeats: int = 5) -> dict[str, object]:
    """Save and load a partition of 20 blocks, alternating with the probes."""
    import torch

    from seqpart.device.opening import open_device
    from seqpart.model.blocks import as_chain
    from seqpart.model.optimizers import choose
    from seqpart.model.tensors import tensors_of
    from seqpart.profile.blocks import measure_chain
    from seqpart.runtime.partition import Partition
    from seqpart.runtime.slots import Slot
    from seqpart.store.direct import probe_disk
    from seqpart.store.store import Store, at_once
    from seqpart.zoo.models import ResidualBlock

    device = open_device("cpu")
    chain = as_chain([lambda: ResidualBlock(WIDTH)] * 20)
    costs, adam = measure_chain(chain, (WIDTH,), 8), choose("adam", lr=1e-4)
    store = Store(folder, device)
    for block, cost in zip(chain, costs, strict=True):
        views = cost.layout.views(flat := device.empty(cost.layout.padded_nbytes))
        for name, tensor in tensors_of(block.build(device, 0)).items():
            views[name].copy_(tensor.detach())
        store.put(block.home, cost.layout, flat)
    partition = Partition(0, chain, costs, store, device, optimizer=adam, seed=0)
    slot = Slot(device.empty(partition.needs(to_update=True, gradients=False)).zero_(), at_once)

    def load(*, learns: bool) -> None:
        partition.begin_load(slot, to_update=learns)
        partition.finish_load(learns=learns)

    def drop() -> None:
        _, free, _ = partition.begin_drop(keep_state=False)
        free()

    nbytes = sum(cost.weights for cost in costs)
    seen: dict[str, list[float]] = {"load": [], "save": [], "probe_read": [], "probe_write": []}
    for _ in range(repeats):
        began = time.perf_counter()
        load(learns=False)
        seen["load"].append(nbytes / (time.perf_counter() - began))
        drop()
        load(learns=True)
        for parameter in partition.trainable.values():
            parameter.grad = torch.zeros_like(parameter)
        partition.update()
        began = time.perf_counter()
        drop()
        seen["save"].append(nbytes / (time.perf_counter() - began))
        read, write = probe_disk(folder, PROBE)
        seen["probe_read"].append(read)
        seen["probe_write"].append(write)
        for kind, speed in fio(folder).items():
            seen.setdefault(kind, []).append(speed)
    store.close()
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return {
        "partition_bytes": nbytes, "bytes_per_second": medians, "all": seen,
        "load_share": medians["load"] / medians["probe_read"], "save_share": medians["save"] / medians["probe_write"],
    }  # fmt: skip


def fio(folder: Path) -> dict[str, float]:
    """Sequential 8 MiB direct I/O, one job, as fio sees it; nothing where fio is not installed."""
    if not shutil.which("fio"):
        return {}
    found = {}
    for kind in ("write", "read"):
        command = [
            "fio", "--name=probe", f"--directory={folder}", f"--rw={kind}", "--bs=8m", "--size=512m", "--direct=1",
            "--ioengine=psync", "--output-format=json", "--unlink=0" if kind == "write" else "--unlink=1",
        ]  # fmt: skip
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[f"fio_{kind}"] = float(json.loads(output)["jobs"][0][kind]["bw_bytes"])
    for left in folder.glob("probe.*"):
        left.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=["seqpart", "plain", "settled"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="directory on the disk to measure (default: a temporary one here)")
    quick.add_to(parser)
    options = parser.parse_args()
    if options.worker == "seqpart":
        return seqpart_worker(options.folder)
    if options.worker:
        return plain_worker(settled=options.worker == "settled")
    from benchmarks.record import save
    from seqpart.device.device import Device

    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        epoch = epochs(Path(folder))
        with Device().settled():
            result = {"epoch": epoch, "homes": homes(Path(folder))}
    home = result["homes"]
    for name, seconds in epoch["median_seconds"].items():
        print(f"one SIL epoch, {name}: {seconds:.2f} s")
    print(
        f"ratio {epoch['ratio_same_settings']:.3f} with the same settings, {epoch['ratio_defaults']:.3f} to PyTorch's defaults"
    )
    print(f"boundary cache: {epoch['cache_bytes_per_second'] / 1e6:.0f} MB/s were needed and read")
    for name, speed in home["bytes_per_second"].items():
        print(f"{name}: {speed / 1e9:.2f} GB/s")
    print(f"load {100 * home['load_share']:.0f} %, save {100 * home['save_share']:.0f} % of the program's own probe")
    if not QUICK:
        print(f"written to {save('partition_speed', result)}")
    return None


if __name__ == "__main__":
    main()
