"""Does a streamed update take little more than its longest part? Seconds of computing and of copies, by torch.profiler.

    python -m benchmarks.gpu.overlap                               on a GPU: L under 2 GB, four updates
    python -m benchmarks.gpu.overlap --device sim --width 256      the same by the simulated device's own account

A part's seconds are those in which at least one of its kernels or copies runs. The ratio, wall / max(computing, up, down), is 1
where everything else hides behind the longest part. Results: benchmarks/results/gpu-overlap-DEVICE.json.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import record
from benchmarks.streamed_arm import rows
from benchmarks.streamed_networks import BATCH, DEPTH, WIDTHS, network
from seqpart import Trainer
from seqpart.device.device import DOWN, UP
from seqpart.device.opening import open_device
from seqpart.device.simulated import SimulatedDevice
from seqpart.errors import OptionError, SeqpartError
from seqpart.report.reporter import Reporter
from seqpart.schedule.phase import PhaseKind
from seqpart.schedule.steps import StepDone, Verb

WARM_UP = 3
"""Updates that are not looked at: state that is not at home yet, kernels that are loaded."""
_COPIES = {"HtoD": UP, "DtoH": DOWN, "HostToDevice": UP, "DeviceToHost": DOWN}
"""As the profilers of CUDA and of ROCm name them."""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Seconds of some updates."""

    wall: float
    computing: float
    up: float
    down: float
    copies: dict[str, float] = field(default_factory=dict)
    """By the profiler's names, which tell pinned memory from pageable."""

    @property
    def ratio(self) -> float:
        longest = max(self.computing, self.up, self.down)
        return self.wall / longest if longest else float("nan")

    def per_update(self, updates: int) -> "Busy":
        parts = {name: value / updates for name, value in asdict(self).items() if name != "copies"}
        return Busy(**parts, copies={name: value / updates for name, value in self.copies.items()})


def busy_of(events: Iterable[dict[str, Any]]) -> Busy:
    """From a trace's events, whose times are microseconds. Raises RuntimeError where none is of a GPU."""
    spans: dict[str, list[tuple[float, float]]] = {"computing": [], UP: [], DOWN: []}
    copies: dict[str, float] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name, began, took = str(event["name"]), float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
            part = next((part for text, part in _COPIES.items() if event["cat"] == "gpu_memcpy" and text in name), "computing")
            spans[part].append((began, began + took))
            if part != "computing":
                copies[name] = copies.get(name, 0.0) + took
    every = [span for found in spans.values() for span in found]
    if not every:
        raise RuntimeError("the profiler saw no kernel and no copy of a GPU: is CUPTI usable here?")
    wall = max(end for _, end in every) - min(began for began, _ in every)
    return Busy(
        wall=wall, computing=covered(spans["computing"]), up=covered(spans[UP]), down=covered(spans[DOWN]), copies=copies
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of their union."""
    total, until = 0.0, float("-inf")
    for began, end in sorted(spans):
        total += max(0.0, end - max(began, until))
        until = max(until, end)
    return total


class Probe(Protocol):
    def begin(self) -> None: ...

    def end(self) -> Busy: ...


_UNKNOWN = float("nan")


class Traced:
    """By torch.profiler. It is used once before the run: what it takes of the GPU belongs to the runtime of the plan. Where it
    fails, only the seconds of the whole are known."""

    def __init__(self) -> None:
        self.begin()
        torch.ones(1, device="cuda").add_(1)
        self.end()

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._began = time.perf_counter()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def end(self) -> Busy:
        torch.cuda.synchronize()
        wall = time.perf_counter() - self._began
        try:
            self._profile.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(path))
                return busy_of(json.loads(path.read_text())["traceEvents"])
        except Exception as error:
            print(f"torch.profiler: {error}", file=sys.stderr)
            return Busy(wall=wall, computing=_UNKNOWN, up=_UNKNOWN, down=_UNKNOWN)


class Simulated:
    """As the simulated device says of itself."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def begin(self) -> None:
        self._before = (self._device.streams.current.seconds, dict(self._device.busy))

    def end(self) -> Busy:
        began, before = self._before
        now = {name: seconds - before[name] for name, seconds in self._device.busy.items()}
        wall = self._device.streams.current.seconds - began
        return Busy(wall=wall, computing=now["computing"], up=now[UP], down=now[DOWN])


class Watch(Reporter):
    """Lets `probe` look at the updates behind the first ones."""

    def __init__(self, probe: Probe, updates: int) -> None:
        super().__init__(quiet=True)
        self._probe, self._updates, self._done = probe, updates, 0
        self.busy: Busy | None = None
        self.host = 0.0
        """Seconds of them by the host's clock."""

    def begin(self, phases: Any, *rest: Any) -> None:
        self.phases = phases
        super().begin(phases, *rest)

    def listen(self, event: Any) -> None:
        super().listen(event)
        if not isinstance(event, StepDone) or self.phases[event.step.phase].kind is not PhaseKind.TRAIN:
            return
        if event.step.verb is Verb.UPDATE and event.step.partition == 0:
            self._done += 1
            if self._done == WARM_UP:
                self._probe.begin()
                self._began = time.perf_counter()
            elif self._done == WARM_UP + self._updates:
                self.host = time.perf_counter() - self._began
                self.busy = self._probe.end()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    updates = options.updates
    x, y = rows("", BATCH * (WARM_UP + updates + 1))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer = Trainer(
            network(options.width, options.depth), mem_limit=options.limit, method="streamed", epochs=1, batch_size=BATCH,
            micro_batch_size=BATCH, lr=1e-4, shuffle=False, output_dir=Path(folder) / "run", save_every="never", quiet=True,
            device=options.device, **({"partitions": options.partitions} if options.partitions else {}),
        )  # fmt: skip
        device = trainer.device
        watch = Watch(Simulated(device) if isinstance(device, SimulatedDevice) else Traced(), updates)
        result = trainer.fit((x, y), (x[:BATCH], y[:BATCH]), reporter=watch)
    assert watch.busy is not None
    found, plan = watch.busy.per_update(updates), result.plan
    return {
        "device": device.name, **asdict(found), "ratio": found.ratio, "host": watch.host / updates, "updates": updates,
        "predicted": plan.update_seconds, "peak": result.proof.peak, "predicted peak": plan.peak,
        "violations": result.proof.violations, "partitions": len(plan.partitions), "slots": plan.slots,
        "stays": sorted(plan.stays), "tiers": sorted({part.tier for part in plan.partitions}),
    }  # fmt: skip


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim or sim:CARD")
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--width", type=int, default=WIDTHS["L"])
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--partitions", type=int, help="default: what the plan takes")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path(), help="where homes on disk go")
    options = parser.parse_args(words)
    if options.device.partition(":")[0] not in ("cuda", "sim"):
        parser.error("--device: only an accelerator has streams of copies: cuda, cuda:N, sim or sim:CARD")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        kind = open_device(options.device).kind
        found = measured(options)
    except OptionError as error:
        print(f"refused: {error.with_flags}", file=sys.stderr)
        return error.exit_code
    except SeqpartError as error:
        print(f"failed: {error.with_flags}", file=sys.stderr)
        return error.exit_code
    print(
        f"{found['device']}: an update takes {found['wall']:.4g} s, computes {found['computing']:.4g} s, copies up "
        f"{found['up']:.4g} s and down {found['down']:.4g} s; wall / longest {found['ratio']:.2f}, predicted "
        f"{found['predicted']:.4g} s\n{record.save('gpu-overlap', found, kind)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
