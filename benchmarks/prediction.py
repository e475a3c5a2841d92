"""Is the predicted peak the measured one? Real runs of the real command, watched from outside.

    python -m benchmarks.prediction
    python -m benchmarks.prediction architectures          models that no constant was tuned on (benchmarks/architectures)
    python -m benchmarks.prediction --new                  cases that the results on this machine do not have yet
    python -m benchmarks.prediction --quick                one small case, to see that it runs; not kept

The claim: predicted within 5 % of the measured peak, and never under it by more than 1 %. Prints a table and writes
benchmarks/results/prediction-*.json and prediction.md, or architectures-*.json and architectures.md.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import children, quick, record
from benchmarks.record import origin, path_of, save
from seqpart.device.device import describe_versions

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


@dataclass(frozen=True)
class Architecture:
    """A function of a module of benchmarks/architectures."""

    module: str
    name: str
    rows: str
    batch: int
    method: str = "full"
    limit: str = "3GB"
    extra: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        folder = "benchmarks.architectures"
        return [
            "--model", f"{folder}.{self.module}:{self.name}", "--data", f"{folder}.rows:{self.rows}", "--batch-size",
            str(self.batch), "--method", self.method, "--mem-limit", self.limit, "--epochs", "1", "--save-every", "never",
            "--quiet", *self.extra,
        ]  # fmt: skip


def architectures() -> list[Architecture]:
    """Some whole, where blocks add up, and some in pieces, where one of them is the peak."""
    streamed = {"method": "streamed", "limit": "600MB"}
    vision = [
        ("resnet18", {}), ("resnet50", {}), ("resnext50", {}), ("mobilenet_v2", {}), ("mobilenet_v3", streamed),
        ("efficientnet_b0", {}), ("convnext_tiny", {}), ("densenet121", {}), ("vgg11_bn", {"method": "auto"}),
        ("alexnet", {}), ("squeezenet", {}), ("shufflenet", streamed), ("mnasnet", {}), ("regnet", streamed),
        ("swin_t", {"method": "auto", "limit": "1GB"}),
    ]  # fmt: skip
    sequences = [
        ("lstm", "series", {}), ("gru", "series", {}), ("bidirectional_lstm", "series", streamed),
        ("lstm_language", "texts", {}), ("llama_untied", "texts", {}), ("lora", "texts", {}), ("bert", "sentences", streamed),
        ("vit", "images64", {}), ("performer", "sentences", {}), ("fnet", "sentences", streamed), ("mlp_mixer", "images64", {}),
    ]  # fmt: skip
    others = [
        ("convmixer", "images64", {}), ("unet", "images64", {}), ("transposed7", "images64", {}),
        ("generator", "images64", {}), ("dilated", "waves", streamed), ("volumes", "cubes", {}),
        ("orthogonal", "vectors", streamed), ("experts", "vectors", {}),
    ]  # fmt: skip
    parts = [
        Architecture("vision", "resnet50", "images64", 16, "ist", "1.2GB", ("--subnets", "2", "--local-steps", "1")),
        Architecture("vision", "resnet50", "images64", 16, "ist", "600MB", ("--subnets", "5", "--local-steps", "1")),
        Architecture("sequences", "vit", "images64", 16, "ist", "600MB", ("--subnets", "3", "--local-steps", "1")),
        Architecture("others", "psnet", "images64", 32, "psl", "600MB"),
        Architecture("others", "psnet", "images64", 64, "psl", "600MB", ("--micro-batch-size", "8")),
        Architecture("others", "psnet_wide", "images64", 64, "psl", "1GB"),
    ]
    return [
        *(Architecture("vision", name, "images64", 32, **how) for name, how in vision),
        *(Architecture("sequences", name, rows, 16, **how) for name, rows, how in sequences),
        *(Architecture("others", name, rows, 16, **how) for name, rows, how in others),
        *parts,
    ]


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
    ist = [
        Case(2048, 12, 64, "adam", "700MB", ("--method", "ist", "--subnets", "2")),
        Case(4096, 3, 128, "adam", "800MB", ("--method", "ist", "--subnets", "4", "--local-steps", "1")),
        Case(4096, 3, 64, "sgd", "600MB", ("--method", "ist", "--subnets", "8", "--subnet-moments", "zero")),
        Case(1024, 24, 256, "adamw", "480MB", ("--method", "ist", "--subnets", "2", "--partitions", "3")),
    ]
    return grid + more + exact + ist


QUICK: dict[str, list[Case] | list[Architecture]] = {
    "prediction": [Case(64, 4, 64, "adam", "500MB", ("--method", "streamed", "--partitions", "3"))],
    "architectures": [Architecture("others", "experts", "vectors", 16)],
}


def measure(case: Case | Architecture) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        command = children.command("seqpart.train", "--output-dir", f"{folder}/run", *case.arguments())
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
        "made": made({"date": time.strftime("%Y-%m-%d"), **describe_versions()}),
    }  # fmt: skip


PREDICTED = ("limit", "parts", "micro", "predicted MB", "measured MB", "error")
HEADS = {
    "prediction": ("width", "depth", "batch", "optimizer", "extra"),
    "architectures": ("name", "rows", "batch", "method", "extra"),
}


def row(found: dict[str, object], head: tuple[str, ...]) -> list[str]:
    values = map(found.get, (*head, "limit"))
    told = [" ".join(value) if isinstance(value, list | tuple) else str("" if value is None else value) for value in values]
    if found["exit_code"]:
        return [*told, "-", "-", "-", f"exit code {found['exit_code']}", "-"]
    return [
        *told, str(found["partitions"]), str(found["micro_batch"]), f"{found['predicted'] / 1e6:.1f}",
        f"{found['measured'] / 1e6:.1f}", f"{100 * found['error']:+.2f} %",
    ]  # fmt: skip


def markdown(columns: list[str], rows: list[list[str]], summary: str) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [columns, ["---"] * len(columns), *rows]]
    return "# Predicted and measured peaks\n\n" + "\n".join(lines) + f"\n\n{summary}\n"


def judged(found: list[dict[str, object]]) -> tuple[int, str]:
    """(how many are as claimed, all in words)."""
    done = [one for one in found if not one["exit_code"]]
    errors = [float(one["error"]) for one in done] or [0.0]
    good, kept = sum(bool(one["within"]) and bool(one["kept"]) for one in done), sum(bool(one["kept"]) for one in done)
    return good, (
        f"{good} of {len(found)} within +{100 * OVER:.0f} % and -{100 * UNDER:.0f} %, limit kept by {kept}; "
        f"errors from {100 * min(errors):+.2f} % to {100 * max(errors):+.2f} %"
    )


def keep(what: str, found: list[dict[str, object]]) -> None:
    """What has been found so far, as JSON and as a table: also of a run that is cut short."""
    _, summary = judged(found)
    save(what, {"cases": found, "summary": summary})
    columns = ["options" if name == "extra" else name for name in (*HEADS[what], *PREDICTED)]
    rows = [row(one, HEADS[what]) for one in found]
    times = Counter(one["made"] for one in found if "made" in one)
    several = "".join(f"\n{count} of them: {when}." for when, count in times.items()) if len(times) > 1 else ""
    (record.FOLDER / f"{what}.md").write_text(markdown(columns, rows, f"{summary}\n\n{origin()}{several}"))


def made(document: Mapping[str, object]) -> str:
    """When, and with which versions."""
    return f"{document['date']}, seqpart {document['seqpart']}, torch {document['torch']}"


def known(what: str, case: Case | Architecture) -> dict[str, object] | None:
    """What earlier results on this machine say of the case, where it was run to its end."""
    asked = json.loads(json.dumps(asdict(case)))
    document = json.loads(path_of(what).read_text()) if path_of(what).exists() else {"result": {"cases": []}}
    found = ({"extra": [], "made": made(document), **one} for one in document["result"]["cases"] if not one["exit_code"])
    return next((one for one in found if one.items() >= asked.items()), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=list(HEADS), default="prediction")
    parser.add_argument("--only", default="", help="names of architectures, separated by commas: nothing is written")
    parser.add_argument("--new", action="store_true", help="only cases that the results on this machine do not have yet")
    quick.add_to(parser)
    options = parser.parse_args()
    head, found = HEADS[options.what], []
    wanted: list[Case] | list[Architecture] = cases()
    if options.what == "architectures":
        names = options.only.split(",") if options.only else []
        wanted = [case for case in architectures() if not names or case.name in names]
    with quick.places(options.quick):
        wanted = QUICK[options.what] if options.quick else wanted
        before = [known(options.what, case) if options.new else None for case in wanted]
        for case, earlier in zip(wanted, before, strict=True):
            found.append(earlier or measure(case))
            print("  ".join(row(found[-1], head)), flush=True)
            if not options.only:
                keep(options.what, found)
    good, summary = judged(found)
    print(summary)
    return int(good < len(found))


if __name__ == "__main__":
    sys.exit(main())
