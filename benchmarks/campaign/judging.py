"""What is looked at when a run has ended. A violation is a text that begins with what was broken."""

import json
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.campaign.starting import Ended
from seqpart.units import parse_size

KNOWN_CODES = (0, 2, 3, 4, 5, 6, 130)
"""README's table."""
OVER, UNDER = 0.05, 0.01
"""The band of the prediction, as in benchmarks/prediction.py."""
TOLERANCE = 2_000_000
"""Bytes by which the run's own sampler may see less than one outside: what comes and goes between two of its looks."""
RESULTS = {
    "model.safetensors", "plan.json", "result.json", "events.jsonl", "memory.jsonl", "job.json", "seqpart-run.json",
    "seqpart.lock", ".gitignore",
}  # fmt: skip
_NEEDED = re.compile(r" needs ([\d.]+ ?[kMGT]i?B)")
_SMALLEST = re.compile(r"(?:smallest limit that (?:fits|would)[^:]*:|Give more, for example) ([\d.]+ ?[kMGT]i?B)")


@dataclass(frozen=True)
class Figures:
    """Of a run that is done, in bytes."""

    limit: int
    predicted: int
    own_peak: int
    outside_peak: int
    host: int

    imports: int = 0
    """What importing the command takes at its highest, of a process of its own: the run begins behind that."""

    @property
    def is_predicted(self) -> bool:
        """Whether the peak was one that a plan predicts: what importing takes comes before any plan."""
        return not self.host and self.outside_peak > self.imports + TOLERANCE

    @property
    def error(self) -> float:
        """Of the prediction, from what was measured outside."""
        return self.predicted / self.outside_peak - 1


def smallest_named(complained: str) -> int | None:
    """The limit that a refusal names."""
    return _size(_SMALLEST.search(complained))


def needed(complained: str) -> int | None:
    """What a refusal says is needed, without the margin that a limit has above it."""
    return _size(_NEEDED.search(complained))


def _size(found: re.Match[str] | None) -> int | None:
    return parse_size(found[1], total=None, free=None, name="a refusal") if found else None


def ending(ended: Ended, codes: tuple[int, ...], begun: bool) -> list[str]:
    """The exit code is one that this fault may lead to, and one message says why. `begun`: whether it had its directory."""
    found = []
    code = ended.code
    if ended.hung:
        return ["ending: it hung and was killed"]
    traced = "Traceback" in ended.complained + ended.said
    # Before the program has installed its handlers a signal ends Python as Python does it.
    if not begun and (code in (-2, -15) or (code in (1, 130) and "KeyboardInterrupt" in ended.complained)):
        return []
    if code not in codes or (code == -signal.SIGSEGV and not _crashed_outside(ended)):
        found.append(f"ending: exit code {code}, expected {' or '.join(map(str, codes))}: {last_words(ended)}")
    if code >= 0 and code not in KNOWN_CODES:
        found.append(f"ending: exit code {code} is none of README's: {last_words(ended)}")
    if traced:
        found.append(f"message: a traceback: {last_words(ended)}")
    if code > 0 and not ended.complained.strip():
        found.append(f"message: exit code {code} and no word of why")
    return found


def _crashed_outside(ended: Ended) -> bool:
    """Whether the innermost call of Python was in a library's code: a kernel did not look whether it was given memory."""
    found = re.search(r"Current thread [^\n]*\n  File \"([^\"]+)\"", ended.complained)
    return found is not None and "site-packages" in found[1]


def last_words(ended: Ended) -> str:
    lines = [line for line in ended.complained.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:]


def memory(ended: Ended, limit: int, shared: int) -> list[str]:
    """The limit, by the watcher outside. `shared`: bytes of --ram-limit beside it. A refusal (3) has trained nothing."""
    if ended.code == 3 or ended.watched.peak <= limit + shared:
        return []
    return [f"limit: {ended.watched.peak} bytes seen from outside, {ended.watched.peak - limit - shared} over {limit + shared}"]


def figures(out: Path, ended: Ended, imports: int) -> Figures:
    proof = json.loads((out / "result.json").read_text())["proof"]
    return Figures(proof["limit"], proof["predicted"], proof["peak"], ended.watched.peak, proof["host"], imports)


def proof(found: Figures, *, whole: bool) -> list[str]:
    """Of a run with exit code 0: the proof is no less than what was seen outside; `whole`: and the prediction in its band.

    A run that went on may have had its highest moment before.
    """
    problems = []
    if found.own_peak > found.limit:
        problems.append(f"proof: its own peak of {found.own_peak} bytes is over the limit of {found.limit}")
    if found.host:
        return problems
    if found.own_peak < found.outside_peak - TOLERANCE:
        problems.append(f"proof: {found.own_peak} bytes, {found.outside_peak} seen from outside")
    if found.is_predicted and (found.error < -UNDER or (whole and found.error > OVER)):
        problems.append(
            f"prediction: {found.predicted} bytes, {found.outside_peak} measured: {100 * found.error:+.2f} %, "
            f"outside {-100 * UNDER:.0f} to {100 * OVER:+.0f} %"
        )
    return problems


def leftovers(out: Path) -> list[str]:
    """What a finished run leaves besides its results."""
    strange = sorted(path.name for path in out.iterdir() if path.name not in RESULTS)
    return [f"leftover: {', '.join(strange)} in the directory of a finished run"] if strange else []


def results(out: Path) -> dict[str, Any]:
    found = json.loads((out / "result.json").read_text())
    return {name: found[name] for name in ("train_losses", "test_loss", "accuracy")}


def same_tensors(one: Path, other: Path) -> str | None:
    """None where all are equal bit for bit, else the first that is not."""
    found, expected = load_file(one), load_file(other)
    if found.keys() != expected.keys():
        return f"other names: {sorted(found.keys() ^ expected.keys())[:4]}"
    for name, tensor in expected.items():
        mine = found[name]
        if mine.dtype != tensor.dtype or mine.shape != tensor.shape or _bytes_of(mine) != _bytes_of(tensor):
            return f"{name}: {int((mine != tensor).sum())} of {tensor.numel()} elements"
    return None


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def halvings(out: Path) -> list[int]:
    """The micro-batches that a run went on with after allocations that failed. A line that was damaged is passed over."""
    path = out / "events.jsonl"
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            event = json.loads(line)
            if event.get("event") == "allocation failed":
                found.append(event["micro_batch"])
    return found


def plan_of(out: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((out / "plan.json").read_text())
    return plan


def cut(plan: dict[str, Any]) -> tuple[Any, ...]:
    """What of a plan decides the bits of `sil`."""
    return tuple((part["first"], part["last"], part["micro_batch"]) for part in plan["partitions"])
