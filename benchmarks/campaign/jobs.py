"""Random jobs: what is trained, how, and under which limit. A job is a function of the seed and its number."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from random import Random

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
    "regression": ("amounts", (32, 128, 512), (1, 3, 5)),
    "conv": ("images", (8, 16, 32), (1, 3, 5)),
    "lstm": ("series", (16, 64, 128), (1, 2, 3)),
    "encoder": ("series", (16, 32, 64), (1, 2, 4)),
}
HEAVY = ("mlp", "conv", "lstm", "encoder", "gpt")
"""Kinds whose updates take long enough to do with one epoch."""


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
    options = [*_model_and_data(random, kind), "--method", method, *_training(random, kind, method)]
    return Job(
        number=number, kind=kind, options=tuple(options), slack=random.choice([0, 0, 1, 5, 20, 80]) * MB,
        ram=random.random() < 0.1, offload=random.random() < 0.35, linked=random.random() < 0.2,
    )  # fmt: skip


def _model_and_data(random: Random, kind: str) -> list[str]:
    data, widths, depths = KINDS[kind]
    width, depth = str(random.choice(widths)), str(random.choice(depths))
    if kind == "mlp":
        return ["--data", data, "--width", width, "--depth", depth]
    if kind == "gpt":
        context = str(random.choice([16, 24, 32]))
        return ["--data", data, "--context", context, "--model", "gpt", "--width", width, "--depth", depth, "--heads", "2"]
    rows = random.choice([150, 203, 240])
    return ["--data", f"{MODULE}:{data}_{rows}", "--model", f"{MODULE}:{kind}_{width}_{depth}"]


def _training(random: Random, kind: str, method: str) -> list[str]:
    batch = random.choice([96, 128, 256] if kind == "mlp" else [25, 32, 64])
    optimizer = random.choice(["adam", "adamw", "sgd"])
    options = [
        "--batch-size", str(batch), "--optimizer", optimizer, "--lr", "1e-2" if optimizer == "sgd" else "1e-3",
        "--epochs", str(1 if kind in HEAVY else random.choice([1, 2])), "--seed", str(random.randrange(1000)),
        "--save-every", str(random.choice([1, 2, 3, 5])), "--dtype", random.choice(["fp32", "fp32", "fp32", "bf16"]),
    ]  # fmt: skip
    if optimizer == "sgd" and random.random() < 0.7:
        options += ["--momentum", "0.9"]
    if optimizer == "adamw":
        options += ["--weight-decay", "0.01"]
    if random.random() < 0.4:
        options += ["--micro-batch-size", str(random.choice([batch, batch // 2, batch // 3, 7]))]
    if random.random() < 0.3:
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
