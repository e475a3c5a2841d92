"""What benchmarks/frontier.py found, as a table, as sentences and as a picture; beside it, what benchmarks/peers found.

Peers' ratios are to the plain loop of their own run, at their own peak. Of several runs of a peer, and of that plain loop, the
fastest counts. L and T were not run plainly there: their ratio is to `checkpointed`, times this benchmark's own ratio of
checkpointing every block ("by checkpointed"). `mapped` is placed at the size of its cgroup, because its weights are pages of
files, which its own peak leaves out; about 70 MB of that size are libraries, which no other point counts.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs" / "frontier.png"
COLUMNS, PANEL = 3, (5.2, 4.0)
FAR_OFF = 0.15
"""Share by which a prediction may miss the seconds measured."""
PEERS = {
    "deepspeed_nvme": "DeepSpeed ZeRO-3, NVMe",
    "deepspeed_cpu": "DeepSpeed ZeRO-3, CPU",
    "mapped": "file mappings",
    "mapped_ahead": "file mappings, read ahead",
}
RUNS = ("unlimited", "at_smallest", "at_equal", "timed")
EVERY_BLOCK = "checkpoint_sequential, every block"
MARKS = {name: ("^v<>"[place], "#3c7d3c" if "deepspeed" in name else "#7a4f9e") for place, name in enumerate(PEERS)}

SMALL = {"bf16": ("seqpart, states in bfloat16", "#5b9bd5"), "8bit": ("seqpart, moments in 8 bits", "#9dc3e6")}
"""Smaller states (streamed_arm.STATES): their label, and their colour."""

Points = dict[str, Any]


@dataclass(frozen=True)
class Other:
    """A point that is not seqpart's. Memory in bytes, `ratio` in seconds of the plain loop."""

    name: str
    memory: int
    ratio: float
    through: str = ""


def ended(points: Points) -> Points:
    """The arms that came to their end in every round."""
    return {name: point for name, point in points.items() if "failed" not in point}


def with_states(limit: str, states: str) -> str:
    """Name of the arm under this limit whose states are smaller."""
    return f"{limit}, {states}"


def ours(points: Points, states: str = "") -> Points:
    """Seqpart's points by limit, from the smallest: those in float32, or with smaller `states`."""
    from seqpart.units import parse_size

    found = {}
    for name, point in ended(points).items():
        limit, _, kind = name.partition(", ")
        if kind == states and "method" in point["runs"][0]:
            found[limit] = point
    return dict(sorted(found.items(), key=lambda named: parse_size(named[0])))


def peers(points: Points, found: dict[str, Any]) -> list[Other]:
    """Of `found`, what benchmarks/peers knows of this network at this batch."""
    arms = found.get("arms", {})
    for base, ratio, through in (
        ("full", 1.0, ""),
        ("checkpointed", points.get(EVERY_BLOCK, {}).get("to plain"), "checkpointed"),
    ):
        if ratio and (plainly := _runs(arms.get(base, {}))):
            scale = ratio / min(median(run["seconds"]) for run in plainly)
            return [_peer(name, arms[name], scale, through) for name in PEERS if _runs(arms.get(name, {}), _paged(name))]
    return []


def _peer(name: str, arm: dict[str, Any], scale: float, through: str) -> Other:
    runs = _runs(arm, _paged(name))
    memory = min(run["size"] for run in runs) if _paged(name) else max(run["peak"] for run in runs)
    return Other(PEERS[name], memory, scale * min(median(run["seconds"]) for run in runs), through)


def _paged(name: str) -> bool:
    return name.startswith("mapped")


def _runs(arm: dict[str, Any], held: bool = False) -> list[dict[str, Any]]:
    """Runs with seconds; those `held` in a cgroup at the arm's smallest size where its own peak says too little."""
    kinds = ("at_smallest",) if held else RUNS
    runs = [run for kind in kinds for run in _listed(arm.get(kind))]
    return [run for run in runs if run.get("seconds")]


def _listed(runs: Any) -> list[dict[str, Any]]:
    return runs if isinstance(runs, list) else [runs] if runs else []


def others(points: Points, found: dict[str, Any]) -> list[Other]:
    """Peers, and the arms of this benchmark that are not seqpart."""
    here = [Other(name, p["peak"], p["to plain"]) for name, p in ended(points).items() if "method" not in p["runs"][0]]
    return here + peers(points, found)


def predicted(point: dict[str, Any]) -> float | None:
    """Seconds per update."""
    found = [run["predicted seconds"] for run in point["runs"] if run.get("predicted seconds")]
    return median(found) if found else None


def _staying(run: dict[str, Any]) -> str:
    weights = run.get("weights_stay")
    return f"{len(run['stays'])} stay" + (f", weights of {len(weights)}" if weights else "")


def table(part: str, points: Points, found: dict[str, Any]) -> str:
    lines = [f"{part}: {'arm':32} {'peak':>9} {'s/update':>9} {'predicted':>9} {'x plain':>8}  plan"]
    for name, point in ended(points).items():
        run, expected = point["runs"][0], predicted(point)
        plan = f"{run['method']}, {run['partitions']} partitions, {_staying(run)}" if "method" in run else ""
        seconds = f"{expected:9.3f}" if expected else " " * 9
        lines.append(
            f"  {name:37} {point['peak'] / 1e6:6.0f} MB {point['seconds']:9.3f} {seconds} {point['to plain']:8.2f}  {plan}"
        )
    lines += [f"  {name:37} failed: {point['failed'][:80]}" for name, point in points.items() if "failed" in point]
    for peer in peers(points, found):
        through = f"by {peer.through}" if peer.through else ""
        lines.append(f"  {peer.name:37} {peer.memory / 1e6:6.0f} MB {'':19} {peer.ratio:8.2f}  {through}")
    return "\n".join([*lines, *(f"  {sentence}" for sentence in sentences(points, found))])


def sentences(points: Points, found: dict[str, Any]) -> list[str]:
    """What a reader asks of a part, one line each; nothing where seqpart was not measured."""
    curve = ours(points)
    if not curve:
        return []
    return [_steps(curve), _limits(curve), _right_end(curve), _predictions(curve), _below(curve, others(points, found))]


def _steps(curve: Points) -> str:
    rises = {(low, high): curve[high]["to plain"] / curve[low]["to plain"] - 1 for low, high in itertools.pairwise(curve)}
    (low, high), most = max(rises.items(), key=lambda named: named[1], default=(("", ""), 0.0))
    if most <= 0:
        return "monotone: more memory was never slower"
    return f"not monotone: the largest step up is {most:.1%}, from {low} to {high}"


def _limits(curve: Points) -> str:
    from seqpart.units import parse_size

    shares = {name: point["peak"] / parse_size(name) for name, point in curve.items()}
    least = min(shares, key=lambda name: shares[name])
    return f"share of the limit used: {shares[least]:.0%} (at {least}) to {max(shares.values()):.0%}"


def _right_end(curve: Points) -> str:
    name, point = list(curve.items())[-1]
    return f"right end: {point['to plain']:.2f} x plain at {name}, where the peak is {point['peak'] / 1e6:.0f} MB"


def _predictions(curve: Points) -> str:
    off = {name: expected / point["seconds"] - 1 for name, point in curve.items() if (expected := predicted(point))}
    far = [f"{name} {miss:+.0%}" for name, miss in off.items() if abs(miss) > FAR_OFF]
    return f"predicted seconds off by more than {FAR_OFF:.0%}: {', '.join(far) or 'none'}"


def _below(curve: Points, them: list[Other]) -> str:
    """Below all of ours; and, less strictly, where no point of ours does with no more memory and no more time."""
    places = [(point["peak"], point["to plain"]) for point in curve.values()]
    wholly = [one.name for one in them if all(one.memory < peak and one.ratio < ratio for peak, ratio in places)]
    free = [one.name for one in them if not any(peak <= one.memory and ratio <= one.ratio for peak, ratio in places)]
    found = {"below every point of ours": wholly, "not matched by any point of ours": free}
    return "; ".join(f"{what}: {', '.join(names) or 'none'}" for what, names in found.items())


def picture(parts: dict[str, tuple[str, Points, dict[str, Any]]], path: Path = PICTURE) -> None:
    """One panel for each part, from (title, points, what the peers benchmark found)."""
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(parts))
    lines = -(-len(parts) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines + 0.6), layout="constrained")
    labels: dict[str, Any] = {}
    for place, (title, points, found) in enumerate(parts.values()):
        axes = figure.add_subplot(lines, columns, place + 1)
        _panel(axes, points, found)
        axes.set(title=title, ylim=(0, None))
        if place + columns >= len(parts):
            axes.set_xlabel("measured peak of the process, GB")
        if place % columns == 0:
            axes.set_ylabel("seconds per update,\nin those of plain PyTorch")
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)
    print(f"  {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _panel(axes: Any, points: Points, found: dict[str, Any]) -> None:
    curve = ours(points)
    if curve:
        places = [(point["peak"] / 1e9, point["to plain"]) for point in curve.values()]
        axes.plot(*zip(*places, strict=True), "o-", color="#1f5f99", label="seqpart --method auto")
    for states, (label, colour) in SMALL.items():
        if places := [(point["peak"] / 1e9, point["to plain"]) for point in ours(points, states).values()]:
            axes.plot(*zip(*places, strict=True), ".--", color=colour, label=label)
    torchs = [(p["peak"] / 1e9, p["to plain"]) for name, p in points.items() if name.startswith("checkpoint")]
    if torchs:
        axes.plot(*zip(*torchs, strict=True), "s", color="#b3541e", label="checkpoint_sequential")
    if "plain" in points:
        axes.plot(points["plain"]["peak"] / 1e9, 1, "D", color="#444444", label="plain PyTorch")
    shown = {PEERS[name]: mark for name, mark in MARKS.items()}
    # A peer many times slower would flatten the curve: it stands at the upper edge, with its ratio written beside it.
    top = 1.15 * max([1.0, *(point["to plain"] for point in ended(points).values())])
    for peer in peers(points, found):
        mark, colour = shown[peer.name]
        axes.plot(peer.memory / 1e9, min(peer.ratio, top), mark, color=colour, label=peer.name)
        if peer.ratio > top:
            left = mark == "<"
            axes.annotate(
                f"{peer.ratio:.1f} x \N{UPWARDS ARROW}", (peer.memory / 1e9, top), xytext=(-6 if left else 6, -3),
                textcoords="offset points", ha="right" if left else "left", fontsize=8,
            )  # fmt: skip
    axes.set_xlim(0, None)
    axes.grid(alpha=0.3)
