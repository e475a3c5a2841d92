"""Simulates an update of 1 to 1,024 ranks on cards and networks that need not be there: seconds, and what they wait for.

    python -m benchmarks.scaling_simulated                all models, cards, networks and numbers of ranks
    python -m benchmarks.scaling_simulated --page         the page once more, from what is kept
    python -m benchmarks.scaling_simulated --quick        a small ViT on one card, to see that it runs; kept nowhere

One rank's share is planned and timed by seqpart's own planner and simulator. The exchange is added from what device/ranks.py
sends: for each chunk of gradients W - 1 messages to all, W - 1 sums in the order of ranks, and W - 1 messages again; for
each chunk of weights whose optimizer state one rank has, that rank's broadcast. Networks: links.toml.
Results: benchmarks/results/scaling-simulated-*.json, and docs/scaling.md
"""

import argparse
import itertools
import math
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import quick, record
from benchmarks.record import save
from benchmarks.what_fits import MODELS, QUICK, RESERVED, Model
from seqpart import Trainer
from seqpart.device import ranks as exchange
from seqpart.device.card import load
from seqpart.plan.planner import ExecutionPlan
from seqpart.plan.simulator import Simulator
from seqpart.schedule.phases import shortened
from seqpart.schedule.steps import Step, Verb, steps_of

RANKS = 1, 2, 4, 8, 16, 64, 256, 1024
UPDATES = 4
PAGE, SIMULATED, MEASURED = "scaling.md", "scaling-simulated", "scaling"


@dataclass(frozen=True)
class Scene:
    """A model on a card, with the rows of an update of all ranks (strong scaling) and of each rank (weak scaling)."""

    model: str
    card: str
    ram: str
    strong: int
    weak: int

    @property
    def title(self) -> str:
        return f"{(MODELS | QUICK)[self.model].title}, on {load(self.card).name} with {self.ram} of host memory"


SCENES = (
    Scene("vit-l", "rtx3060-12gb", "32GB", 1024, 32),
    Scene("llama-1.1b", "rtx4090", "64GB", 1024, 16),
    Scene("llama-8b", "rtx4090", "64GB", 1024, 16),
    Scene("llama-8b", "h100", "200GB", 1024, 16),
)
SMALL = (Scene("a small vit", "rtx3060-12gb", "32GB", 16, 4),)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, and what a rank does with the bytes that it receives."""

    latency: float
    bandwidth: float
    most: int | None = None
    tree: bool = False
    """True if a broadcast goes down a tree, as gloo's, and not around a ring, as NCCL's."""
    copy: float = math.inf
    """Bytes per second that a rank copies."""
    launch: float = 0.0
    """Seconds to start a copy or a sum."""

    def adding(self, nbytes: int, chunks: int, count: int) -> tuple[float, float]:
        """Returns the seconds that `Ranks.add_up` takes: (with endless bandwidth, of bytes alone)."""
        others = count - 1
        waits = (2 * chunks + 1) * others * self.latency + chunks * (others + 2) * self.launch
        inside = (1 + 1.5 * others / count) * nbytes / self.copy  # a sum reads two and writes one; then it is copied for all
        return waits, 2 * others / count * nbytes / self.bandwidth + inside

    def giving(self, nbytes: int, chunks: int, count: int) -> tuple[float, float]:
        """Returns the same of `Ranks.give`."""
        depth = math.ceil(math.log2(count))
        waits = chunks * ((depth if self.tree else count - 1) * self.latency + 2 * self.launch)
        return waits, (depth if self.tree else 1) * nbytes / self.bandwidth


def networks(card: str) -> dict[str, Network]:
    found, hardware = tomllib.loads((Path(__file__).parent / "links.toml").read_text()), load(card)
    inside = {"copy": hardware.memory_bandwidth / 2, "launch": hardware.launch}
    links = {name: {key: value for key, value in link.items() if key != "sources"} for name, link in found.items()}
    return {name: Network(**link, **inside) for name, link in links.items() if "H100" not in name or card == "h100"}


class Shared(exchange.Ranks):
    """Two ranks, of which there is one: a plan of theirs is that of any number with as many rows each."""

    count, room = 2, 4 * exchange.CHUNK


@contextmanager
def planned(model: Model, scene: Scene, rows: int, *, alone: bool) -> Iterator[ExecutionPlan]:
    """A context with the plan of one process with `rows` rows of an update, or of one rank of several with as many."""
    batch = rows if alone else 2 * rows
    x, y = model.rows(UPDATES * batch)
    ranks = exchange.ALONE if alone else Shared()
    with tempfile.TemporaryDirectory() as folder, patch("seqpart.runtime.setup.ranks_of", return_value=ranks):
        trainer = Trainer(
            model.blocks(), optimizer="adam", device=f"sim:{scene.card}", method="auto", seed=0, dtype="bf16", epochs=1,
            mem_limit=int(RESERVED * load(scene.card).memory), ram_limit=scene.ram, batch_size=batch, save_every="never",
            output_dir=Path(folder) / "run", quiet=True,
        )  # fmt: skip
        with trainer.planned((x, y), (x[:1], y[:1]), dry=True) as (_, prepared):
            yield prepared


@cache
def chunks_of(sizes: tuple[int, ...], parts: int, ranks: int) -> int:
    """Number of chunks that `ranks` exchange of float32 tensors of so many numbers, each divided into equal parts."""
    own = [torch.empty(size, device="meta") for size in sizes]
    return sum(1 for _ in exchange._chunks(own, parts, exchange.chunk_of(ranks))) if own else 0


class Lockstep:
    """Walks an update in as many ranks as differ, which wait for one another wherever they exchange."""

    def __init__(self, prepared: ExecutionPlan) -> None:
        phases, _, self._stands_for = shortened(prepared.phases.of_stage(0))
        self._phases = [phase for phase in phases if phase.kind.name == "TRAIN"][:1]
        self._prepared, (train,) = prepared, self._phases
        self._divides = train.divides_state and not train.host_steps
        self._resources = replace(prepared.stages[0].resources, at_host=prepared.places.homes)
        parts = prepared.plan.partitions
        layouts = [
            [spec for cost in prepared.costs[part.first : part.last] for spec in cost.gradient_layout.specs] for part in parts
        ]
        self._tensors = [tuple(math.prod(spec.shape) for spec in specs) for specs in layouts]

    def run(self, network: Network, count: int) -> dict[str, Any]:
        """Returns seconds of an update of `count` ranks, and of each thing that it may wait for, in the first rank."""
        prepared, (train,) = self._prepared, self._phases
        differ = min(count, len(self._tensors) + 1) if self._divides else 1
        costs, speeds, resources = prepared.partition_costs, prepared.speeds, self._resources
        stands_for = {key: value for key, value in self._stands_for.items() if key[0] == 0}
        ranks = [Simulator(self._phases, costs, speeds, resources, stands_for=stands_for) for _ in range(differ)]
        busy = dict.fromkeys(("device", "disk", "link", "host", "latency", "bandwidth"), 0.0)
        marks = list[tuple[float, dict[str, float]]]()
        for step in steps_of(self._phases):
            learns = step.verb is Verb.UPDATE and train.trains(step.partition) and costs[step.partition].trainable
            if learns and count > 1:
                self._meet(ranks, busy, network.adding(*self._sent(step, count, count), count))
            for rank, simulator in enumerate(ranks):
                owns = not self._divides or step.partition % count == rank
                found = simulator.take(step if owns or step.verb is not Verb.LOAD else step._replace(more=False))
                if rank == 0:
                    self._add(busy, step, found)
            if learns and count > 1 and self._divides:
                self._meet(ranks, busy, network.giving(*self._sent(step, 1, count), count))
            if step.verb is Verb.UPDATE and step.partition == train.partition:
                marks.append((max(simulator._clock._computing for simulator in ranks), dict(busy)))
        # The first finds no optimizer state at home, and behind the last nothing is loaded.
        (began, before), (ended, after), times = marks[0], marks[-2], len(marks) - 2
        busy = {name: (after[name] - before[name]) / times for name in busy}
        network_waits = busy["latency"] + busy["bandwidth"]
        bound = max((name for name in busy if name not in ("latency", "bandwidth")), key=busy.__getitem__)
        if network_waits > busy[bound]:
            bound = "latency" if busy["latency"] > busy["bandwidth"] else "bandwidth"
        return {"seconds": (ended - began) / times, "bound": bound, "busy": busy}

    def _sent(self, step: Step, parts: int, count: int) -> tuple[int, int]:
        p = step.partition
        return self._prepared.partition_costs[p].gradients, chunks_of(self._tensors[p], parts, count)

    def _meet(self, ranks: Sequence[Simulator], busy: dict[str, float], seconds: tuple[float, float]) -> None:
        """Lets all wait for the last, and for an exchange."""
        ends = max(simulator._clock._computing for simulator in ranks) + sum(seconds)
        for simulator in ranks:
            simulator._clock._computing = ends
        busy["latency"] += seconds[0]
        busy["bandwidth"] += seconds[1]

    def _add(self, busy: dict[str, float], step: Step, found: Any) -> None:
        resources, p = self._resources, step.partition
        if step.verb in (Verb.LOAD, Verb.DROP):
            near = p in resources.at_host
        else:
            busy["device"] += found.seconds
            near = p in resources.graphs_at_host or "disk" not in resources.tiers
        busy["link" if near else "disk"] += found.moving
        busy["host"] += found.stepping


NAMES = {
    "device": "the device", "disk": "the disk", "link": "the link to the host", "host": "steps on the host",
    "latency": "the network's messages and sums", "bandwidth": "the network's bytes",
}  # fmt: skip


def simulated(scene: Scene, counts: Sequence[int]) -> dict[str, Any]:
    """{"strong" or "weak": {network: {ranks: what was found}}}, and how the share of most rows is trained."""
    model, known = (MODELS | QUICK)[scene.model], dict[tuple[int, bool], tuple[Lockstep, str]]()

    def share(rows: int, alone: bool) -> Lockstep:
        if (rows, alone) not in known:
            with planned(model, scene, rows, alone=alone) as prepared:
                plan = prepared.plan
                homes = " and ".join(sorted({part.tier for part in plan.partitions if not part.stays}))
                steps = ", steps on the host" if plan.host_steps else ""
                known[rows, alone] = Lockstep(prepared), f"{plan.method}{homes and ', ' + homes}{steps}"
        return known[rows, alone][0]

    found: dict[str, Any] = {"strong": {}, "weak": {}}
    for kind, (name, network), count in itertools.product(found, networks(scene.card).items(), counts):
        if network.most is not None and count > network.most:
            continue
        batch = scene.strong if kind == "strong" else scene.weak * count
        one = share(-(-batch // count), count == 1).run(network, count)
        one |= {"rows": batch, "samples": batch / one["seconds"]}
        first = found[kind].setdefault(name, {}).setdefault(counts[0], one)
        found[kind][name][count] = one | {"of ideal": one["samples"] * counts[0] / (first["samples"] * count)}
    return found | {"ways": {f"{rows:,}{' alone' * alone}": way for (rows, alone), (_, way) in known.items()}}


def sentence(of_network: dict[Any, dict[str, Any]]) -> str:
    """Which ranks are busy longest with what, and how many are the fastest."""
    runs = [(bound, [*group]) for bound, group in itertools.groupby(of_network, lambda count: of_network[count]["bound"])]
    best = max(of_network, key=lambda count: of_network[count]["samples"])
    said = [f"{NAMES[bound]} at {_span(counts)}" for bound, counts in runs]
    return f"{', '.join(said)}; most rows a second with {_span([best])}"


def _span(counts: Sequence[Any]) -> str:
    first, last = counts[0], counts[-1]
    return f"{int(first):,}" if first == last else f"{int(first):,} to {int(last):,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(found: dict[str, dict[Any, dict[str, Any]]]) -> list[str]:
    counts = max(found.values(), key=len)
    lines = ["| ranks | rows | " + " | ".join(found) + " |", "|---" * (len(found) + 2) + "|"]
    for count in counts:
        cells = [_cell(of_network[count]) if count in of_network else "" for of_network in found.values()]
        lines.append(f"| {int(count):,} | {counts[count]['rows']:,} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"- {name}: {sentence(of_network)}." for name, of_network in found.items())]


def _cell(one: dict[str, Any]) -> str:
    return f"{_number(one['seconds'])} s, {_number(one['samples'])}/s, {one['of ideal']:.0%}, {one['bound']}"


KINDS = {"strong": "rows of an update are shared", "weak": "each rank has as many rows"}


INTRODUCTION = """# Scaling to 1,024 ranks, simulated

Predicted seconds of an exact update with Adam and `--dtype bf16` in 1 to 1,024 processes of torchrun, of a card each, by
`python -m benchmarks.scaling_simulated`, on any machine. In a cell: seconds of an update, rows a second, these against as
many times those of one rank, and what a rank is busy with longest: the `device`, the `disk`, the `link` to the host, the
optimizer's steps on the `host`, and of the network `bandwidth` (bytes) or `latency` (messages, and starts of sums).

No run of several GPUs was made, and nothing but the last table was measured. A rank's share is planned and timed as for
[what fits](what_fits.md). Added is what a rank sends ([torchrun](torchrun.md)), while nothing is computed: for each chunk of
gradients (4 MiB, or 64 KiB a rank) W - 1 messages to the others, W - 1 sums in the order of ranks, W - 1 messages; and where
optimizer state is divided, its owner's broadcast of the weights, for which all wait, as for its loads. Assumed: rates of
`benchmarks/links.toml` and `seqpart/device/cards/*.toml`, with a source each; a network as fast between all ranks as between
two; messages of an operation one after the other, which is too slow where they overlap."""


def page(result: dict[str, Any], measured: dict[str, Any]) -> str:
    lines = [INTRODUCTION]
    for title, found in result.items():
        lines += ["", f"## {title}", ""]
        plans: dict[str, list[str]] = {}
        for rows, way in found["ways"].items():
            plans.setdefault(way, []).append(rows)
        lines += [
            "Plans, by the rows of a rank: " + "; ".join(f"{way}: {', '.join(rows)}" for way, rows in plans.items()) + "."
        ]
        for kind, said in KINDS.items():
            lines += ["", f"{kind.capitalize()} scaling: {said}.", "", *table(found[kind])]
    return "\n".join([*lines, *against(measured)]) + "\n"


COMPARISON = """
## Against measured runs

The processes of `python -m benchmarks.scaling`, of one thread each, connected by gloo, which share two cores and a disk. The
simulation takes the speeds that each measures at its end, also those of an exchange of one weight and of 4 MiB. R is the adding
up of gradients.

| method, processes | measured | simulated | error | the plan's own | R measured | R and weights simulated |
|---|---|---|---|---|---|---|"""


def against(measured: dict[str, Any]) -> list[str]:
    """The simulation beside what benchmarks/scaling.py measured, of processes that share a machine."""
    rows = [(name, one) for name, one in measured.items() if one.get("simulated")]
    lines = [COMPARISON]
    errors = [one["simulated"] / one["seconds"] - 1 for _, one in rows]
    for error, (name, one) in zip(errors, rows, strict=True):
        reduced = median(run["verbs"]["REDUCE"] for run in one["runs"])
        sent = median(run["busy"]["latency"] + run["busy"]["bandwidth"] for run in one["runs"])
        seconds = f"{one['seconds']:.2f} s | {one['simulated']:.2f} s | {error:+.0%} | {one['predicted seconds']:.2f} s"
        lines.append(f"| {name} | {seconds} | {reduced:.2f} s | {sent:.2f} s |")
    if rows:
        least, most = (f"{error:+.0%}" for error in (min(errors), max(errors)))
        lines += ["", f"The simulated seconds are {least} to {most} off. Of an exchange the fastest of four is taken."]
    return lines if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page once more from what is kept")
    quick.add_to(parser)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.page:
        (quick.DOCS / PAGE).write_text(page(record.load(SIMULATED), record.load(MEASURED)))
        return
    for scene in SMALL if options.quick else SCENES:
        result[scene.title] = found = simulated(scene, RANKS[:4] if options.quick else RANKS)
        print(f"\n{scene.title}\n{found['ways']}")
        for kind, said in KINDS.items():
            print(f"\n{kind} scaling: {said}", *table(found[kind]), sep="\n", flush=True)
    measured = record.load(MEASURED)
    print(*against(measured), sep="\n")
    with quick.places(options.quick) as docs:
        print(save(SIMULATED, result))
        (docs / PAGE).write_text(page(result, measured))


if __name__ == "__main__":
    main()
