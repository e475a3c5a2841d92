"""Random jobs: what is trained, how, and under which limit. A job is a function of the seed and its number."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.campaign.optimizers import OPTIMIZERS, RATELESS

MODULE = "benchmarks.campaign.models"
TOO_SMALL = "310MB"
"""A limit that no job fits: the refusal names the smallest one that does, and that is the limit that the job is given."""
WORDS = "words.txt"
MB = 10**6

KINDS = {
    # kind: data, widths, depths
    "mlp": ("digits", (64, 128, 256, 512, 1024), (1, 2, 4, 8)),
    "gpt": (f"text:{WORDS}", (16, 32), (1, 2)),
    "normed": ("features", (32, 100, 256, 700), (1, 3, 6)),
    "alive": ("features", (32, 128, 512), (1, 3, 5)),
    "frozen": ("features", (32, 128, 512), (2, 4, 6)),
    "partly": ("features", (32, 128, 512), (1, 3, 5)),
    "odd": ("features", (31, 97, 257), (1, 3, 5)),
    "mixed": ("features", (32, 100, 256), (2, 4, 6)),
    "regression": ("amounts", (32, 128, 512), (1, 3, 5)),
    "conv": ("images", (8, 16, 32), (1, 3, 5)),
    "lstm": ("series", (16, 64, 128), (1, 2, 3)),
    "encoder": ("series", (16, 32, 64), (1, 2, 4)),
}
HEAVY = ("mlp", "conv", "lstm", "encoder", "gpt")
"""Kinds whose updates take long enough to do with one epoch."""
TRAITS = {
    "one row": "a micro-batch, or the last batch, of one row",
    "odd sizes": "a scalar and other parameters of odd sizes before those of the layers",
    "several types": "parameters of float64, float32 and bfloat16, most of them clipped",
    "frozen base": "half of the layers, or all but one of them, do not learn",
    "freezing": "a callback freezes a layer and lets it learn again, or lets a frozen one learn",
    "optimizer from a function": f"{', '.join(OPTIMIZERS)}: torch's, and two of the campaign's own",
    "two threads": "torch computes with two threads",
}
"""What is unusual about a job, for a table of its own."""
_TRAIT_OF = {"odd": "odd sizes", "mixed": "several types", "frozen": "frozen base", "partly": "frozen base"}


@dataclass(frozen=True, kw_only=True)
class Job:
    number: int
    kind: str
    options: tuple[str, ...]
    """All but the limit and the directories."""
    slack: int
    """Bytes above the smallest limit."""
    ram: bool
    """Homes in shared memory beside the limit."""
    offload: bool
    """Homes in a directory elsewhere."""
    linked: bool
    """The directories are named through a symbolic link."""
    updates: int
    """At least; of a partition where one trains after the other."""
    program: tuple[str, ...] = ()
    """Words for program.py, which starts the command then."""
    threads: int = 1
    traits: tuple[str, ...] = ()
    limit: int | None = None
    """Bytes; known when the refusal has named it."""

    @property
    def ram_bytes(self) -> int:
        return 40 * MB if self.ram else 0

    @property
    def method(self) -> str:
        return self.options[self.options.index("--method") + 1]

    def under(self, smallest: int) -> "Job":
        return dataclasses.replace(self, limit=smallest + self.slack)

    def arguments(self, runs: Path, offload: Path, name: str = "out") -> list[str]:
        """For a run in `runs`/`name`."""
        if self.linked:
            runs, offload = (folder.with_name(f"{folder.name}-link") for folder in (runs, offload))
        limit = TOO_SMALL if self.limit is None else str(self.limit)
        return [
            *self.options, "--mem-limit", limit, "--output-dir", str(runs / name),
            *(["--offload-dir", str(offload)] if self.offload else []),
            *(["--ram-limit", str(self.ram_bytes)] if self.ram else []),
        ]  # fmt: skip


def words(seed: int) -> str:
    """A text of a few letters, in which some follow others more often."""
    random = Random(seed)
    parts = ["".join(random.choices("abcdefgh ", k=random.randint(2, 6))) for _ in range(40)]
    return " ".join(random.choices(parts, k=900))


def draw(seed: int, number: int) -> Job:
    random = Random(f"{seed} job {number}")
    kind = random.choice(list(KINDS))
    methods = ["streamed", "streamed", "sil", "checkpointed", "full", "auto"]
    if kind == "regression":
        methods.remove("sil")
    method = random.choice(methods)
    batch = random.choice([96, 128, 256] if kind == "mlp" else [25, 32, 64])
    epochs = 1 if kind in HEAVY else random.choice([1, 2])
    one_row = kind not in ("mlp", "gpt", "normed") and random.random() < 0.3  # batch norm takes no single row
    rows = {"mlp": 1437, "gpt": 3 * batch}.get(kind, random.choice([150, 203, 240]) if not one_row else 5 * batch + 1)
    updates = epochs * -(-rows // batch)
    model = _model_and_data(random, kind, rows)
    training = _training(random, kind, method, batch, epochs, one_row)
    learns = _learns(random, model[-1], method, updates) if kind in ("alive", "mixed", "partly") else ()
    optimizer = _optimizer(random, training) if random.random() < 0.25 else ()
    threads = random.choice([1, 1, 1, 2])
    has = {"one row": one_row, "freezing": learns, "optimizer from a function": optimizer, "two threads": threads == 2}
    traits = [*filter(None, [_TRAIT_OF.get(kind)]), *(trait for trait, value in has.items() if value)]
    return Job(
        number=number, kind=kind, options=(*model, "--method", method, *training), updates=updates,
        slack=80 * MB if any(word.endswith(":1") for word in learns) else random.choice([0, 0, 1, 5, 20, 80]) * MB,
        ram=random.random() < 0.1, offload=random.random() < 0.35, linked=random.random() < 0.2,
        program=(*learns, *optimizer), threads=threads, traits=tuple(traits),
    )  # fmt: skip


def _model_and_data(random: Random, kind: str, rows: int) -> list[str]:
    data, widths, depths = KINDS[kind]
    width, depth = str(random.choice(widths)), str(random.choice(depths))
    if kind == "mlp":
        return ["--data", data, "--width", width, "--depth", depth]
    if kind == "gpt":
        context = str(random.choice([16, 24, 32]))
        return ["--data", data, "--context", context, "--model", "gpt", "--width", width, "--depth", depth, "--heads", "2"]
    part = f"_{random.choice([0, 1, 2])}" if kind == "partly" else ""
    return ["--data", f"{MODULE}:{data}_{rows}", "--model", f"{MODULE}:{kind}_{width}_{depth}{part}"]


def _training(random: Random, kind: str, method: str, batch: int, epochs: int, one_row: bool) -> list[str]:
    optimizer = random.choice(["adam", "adamw", "sgd", "adafactor"])
    options = [
        "--batch-size", str(batch), "--optimizer", optimizer, "--lr", "1e-2" if optimizer == "sgd" else "1e-3",
        "--epochs", str(epochs), "--seed", str(random.randrange(1000)),
        "--save-every", str(random.choice([1, 2, 3, 5])), "--dtype", random.choice(["fp32", "fp32", "fp32", "bf16"]),
    ]  # fmt: skip
    if optimizer == "sgd" and random.random() < 0.7:
        options += ["--momentum", "0.9"]
    if optimizer == "adamw":
        options += ["--weight-decay", "0.01"]
    if random.random() < 0.4:
        options += ["--micro-batch-size", str(random.choice([1 if one_row else batch, batch, batch // 2, batch // 3, 7]))]
    if random.random() < (0.8 if kind == "mixed" else 0.3):
        options += ["--clip-grad-norm", random.choice(["0.5", "2"])]
    if random.random() < 0.3:
        options += ["--lr-schedule", random.choice(["linear", "cosine"]), "--warmup-updates", str(random.choice([0, 3]))]
    if method in ("streamed", "sil", "checkpointed") and random.random() < 0.5:
        options += ["--partitions", str(random.choice([2, 3]))]
    if method == "sil" and random.random() < 0.4:
        options += ["--recovery-epochs", "1"]
    if method == "sil" and random.random() < 0.3:
        options += ["--objective", random.choice(["mse", "prototype"])]
    return options


def _learns(random: Random, model: str, method: str, updates: int) -> tuple[str, ...]:
    """A layer is frozen for some updates; or a frozen one learns from an update on, which exact methods can."""
    if random.random() < 0.4:
        return ()
    _, _, depth, *part = model.rpartition(":")[2].split("_")
    if part:  # of `partly`: an entry that is frozen in it
        return () if method == "sil" else (f"learns={random.randrange(updates)}:{int(part[0] == '1')}:1",)
    entry, begins = random.randrange(int(depth) + 2), random.randrange(updates)
    frozen, ends = f"learns={begins}:{entry}:0", random.randint(begins + 1, updates)
    return (frozen, f"learns={ends}:{entry}:1") if ends < updates else (frozen,)


def _optimizer(random: Random, training: list[str]) -> tuple[str, ...]:
    name = random.choice([name for name in OPTIMIZERS if name != RATELESS or "--lr-schedule" not in training])
    return (f"optimizer={name}",)
