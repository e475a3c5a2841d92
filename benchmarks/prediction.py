"""Is the predicted peak the measured one? Real runs of the real command, watched from outside.

    python -m benchmarks.prediction

The claim: predicted within 5 % of the measured peak, and never under it by more than 1 %. Prints a table and writes
benchmarks/results/prediction-*.json and prediction.md.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import FOLDER, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from watch import watch

OVER, UNDER = 0.05, 0.01


@dataclass(frozen=True)
class Case:
    width: int
    depth: int
    batch: int
    optimizer: str
    limit: str
    extra: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        return [
            "--width", str(self.width), "--depth", str(self.depth), "--batch-size", str(self.batch), "--optimizer",
            self.optimizer, "--mem-limit", self.limit, "--epochs", "1", "--quiet", *self.extra,
        ]  # fmt: skip


def cases() -> list[Case]:
    networks = [
        (512, 60, ("480MB", "600MB")),
        (1024, 24, ("520MB", "700MB")),
        (2048, 12, ("620MB", "1GB")),
        (4096, 3, ("1GB", "1.5GB")),
    ]
    grid = [
        Case(width, depth, batch, optimizer, limits[number % 2])
        for (width, depth, limits) in networks
        for number, (batch, optimizer) in enumerate(itertools.product((32, 256, 1024), ("adam", "sgd")))
    ]
    more = [
        Case(1024, 24, 128, "adamw", "600MB"),
        Case(2048, 12, 64, "adam", "800MB", ("--cache-dtype", "bf16")),
        Case(2048, 12, 64, "sgd", "700MB", ("--objective", "mse", "--momentum", "0.9")),
        Case(1024, 24, 512, "adam", "600MB", ("--micro-batch-size", "64")),
        Case(2048, 8, 128, "adam", "1.2GB", ("--method", "full")),
        Case(1024, 40, 64, "adam", "1GB", ("--partitions", "5")),
    ]
    exact = [
        Case(1024, 24, 256, "adam", "460MB", ("--method", "streamed")),
        Case(1024, 40, 128, "adam", "420MB", ("--method", "streamed", "--clip-grad-norm", "1")),
        Case(2048, 12, 64, "adamw", "700MB", ("--method", "streamed")),
        Case(2048, 12, 256, "sgd", "480MB", ("--method", "streamed", "--micro-batch-size", "64")),
        Case(4096, 3, 32, "adam", "900MB", ("--method", "streamed")),
        Case(1024, 24, 512, "adam", "900MB", ("--method", "checkpointed")),
        Case(1024, 24, 128, "adam", "600MB", ("--recovery-epochs", "1", "--partitions", "4")),
    ]
    return grid + more + exact


def measure(case: Case) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        command = [sys.executable, "-m", "seqpart.train", "--output-dir", f"{folder}/run", *case.arguments()]
        watched = watch(command, stdout=subprocess.DEVNULL)
        if watched.exit_code:
            return {**asdict(case), "exit_code": watched.exit_code}
        plan = json.loads((Path(folder) / "run" / "plan.json").read_text())
    predicted = max(part["peak"] for part in plan["partitions"])
    return {
        **asdict(case), "exit_code": 0, "partitions": len(plan["partitions"]),
        "micro_batch": max(part["micro_batch"] for part in plan["partitions"]), "runtime": plan["runtime"],
        "limit_bytes": plan["limit"], "predicted": predicted, "measured": watched.peak,
        "error": predicted / watched.peak - 1, "within": -UNDER <= predicted / watched.peak - 1 <= OVER,
        "kept": watched.peak <= plan["limit"], "seconds": watched.seconds,
    }  # fmt: skip


COLUMNS = ("width", "depth", "batch", "optimizer", "options", "limit", "parts", "micro", "predicted MB", "measured MB", "error")


def row(found: dict[str, object]) -> list[str]:
    head = [str(found[key]) for key in ("width", "depth", "batch", "optimizer")] + [
        " ".join(found["extra"]),
        str(found["limit"]),
    ]
    if found["exit_code"]:
        return [*head, "-", "-", "-", f"exit code {found['exit_code']}", "-"]
    return [
        *head, str(found["partitions"]), str(found["micro_batch"]), f"{found['predicted'] / 1e6:.1f}",
        f"{found['measured'] / 1e6:.1f}", f"{100 * found['error']:+.2f} %",
    ]  # fmt: skip


def markdown(rows: list[list[str]], summary: str) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [list(COLUMNS), ["---"] * len(COLUMNS), *rows]]
    return "# Predicted and measured peaks\n\n" + "\n".join(lines) + f"\n\n{summary}\n"


def main() -> int:
    found = []
    for case in cases():
        found.append(measure(case))
        print("  ".join(row(found[-1])), flush=True)
    done = [one for one in found if not one["exit_code"]]
    errors = [float(one["error"]) for one in done]
    good = sum(bool(one["within"]) and bool(one["kept"]) for one in done)
    summary = (
        f"{good} of {len(found)} within +{100 * OVER:.0f} % and -{100 * UNDER:.0f} %, limit kept; "
        f"errors from {100 * min(errors):+.2f} % to {100 * max(errors):+.2f} %"
    )
    path = save("prediction", {"cases": found, "summary": summary})
    (FOLDER / "prediction.md").write_text(markdown([row(one) for one in found], summary))
    print(f"{summary}; written to {path}")
    return int(good < len(found))


if __name__ == "__main__":
    sys.exit(main())
