"""Writes the table of docs/optimizers.md: every optimizer of torch and of pytorch_optimizer trains a small network in a plain
loop, then streamed in three partitions, ended by a signal and resumed; or in one partition, if it is refused in several."""

import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_optimizer
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import Interrupted, SeqpartError
from seqpart.model.optimizers import describe
from seqpart.store.layout import TensorSpec

TARGET = Path(__file__).parents[1] / "docs" / "optimizers.md"
MARKS = "<!-- written by tools/write_optimizers.py -->", "<!-- end -->"
ROWS = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 4
EPOCHS, BATCH, STOP = 4, 16, 5
"""Twelve updates; the signal comes behind number `STOP`."""
SECONDS = 120
"""Time limit of one optimizer."""
Build = Callable[[list[nn.Parameter]], Any]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def kinds() -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    """Yields (name, class) of every optimizer of both libraries."""
    for library in (torch.optim, pytorch_optimizer):
        for name, kind in sorted(vars(library).items()):
            is_one = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
            if is_one and not name.startswith(("_", "Base")):
                yield f"{library.__name__}.{name}", kind


WAYS: tuple[Callable[[Any, list[nn.Parameter]], Any], ...] = (
    lambda kind, parameters: kind(parameters, lr=1e-2),
    lambda kind, parameters: kind(parameters),
    lambda kind, parameters: kind(torch.optim.AdamW(parameters, lr=1e-2)),
    lambda kind, parameters: kind(
        [
            {"params": [one for one in parameters if (one.ndim == 2) is is_muon], "use_muon": is_muon}
            for is_muon in (True, False)
        ]
    ),
    lambda kind, parameters: [
        kind([one for one in parameters if one.ndim == 2]),
        torch.optim.AdamW([one for one in parameters if one.ndim != 2]),
    ],
)
"""How optimizers are built: a class, a wrapper of another one, and those that take only matrices or know two groups."""


def builders(kind: type[torch.optim.Optimizer]) -> Iterator[Build]:
    """Yields functions from parameters to an optimizer of that class, to be tried in order."""
    for way in WAYS:
        build = partial(way, kind)
        build.__name__ = kind.__name__  # type: ignore[attr-defined]
        yield build


def built_of(kind: type[torch.optim.Optimizer]) -> Build:
    """Returns the first of `builders` with which a plain loop works. Raises what the first of them raises."""
    failed: list[Exception] = []
    for build in builders(kind):
        try:
            in_a_plain_loop(build)
        except Exception as error:
            failed.append(error)
        else:
            return build
    raise failed[0]


def in_a_plain_loop(build: Build) -> dict[str, torch.Tensor]:
    model = network()
    built = build(list(model.parameters()))
    optimizers = built if isinstance(built, list) else [built]
    for _ in range(EPOCHS):
        for x, y in zip(*(part.split(BATCH) for part in ROWS), strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    return model.state_dict()


def in_a_run(build: Build, **options: Any) -> dict[str, torch.Tensor]:
    """Weights of a run that a signal ended behind update `STOP`, and that went on from its checkpoint."""

    def end(event: Any) -> None:
        if event.update == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        for resume in (None, root):
            model = network()
            trainer = Trainer(
                model, None, build, mem_limit="2GB", epochs=EPOCHS, batch_size=BATCH, micro_batch_size=BATCH, shuffle=False,
                save_every="1", quiet=True, **options, **({} if resume else {"output_dir": root}),
            )  # fmt: skip
            try:
                trainer.fit(ROWS, resume=resume, callbacks=[] if resume else [SimpleNamespace(on_step=end)])
            except Interrupted:
                assert resume is None
    return model.state_dict()


def same(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, others[name]) for name, value in ones.items())


def verdict(build: Build) -> tuple[str, str]:
    """Returns (bytes of state per number of a matrix, what came of it)."""
    plain = in_a_plain_loop(build)
    said = []
    for method, options in (("streamed", {"partitions": 3}), ("full", {})):
        try:
            found = in_a_run(build, method=method, **options)
        except SeqpartError as error:
            said.append(f"{method}: refused, {_reason(str(error))}")
            continue
        said.append(f"{method}: {'same bits' if same(plain, found) else 'OTHER BITS'}")
        break
    size = 64
    try:
        layout = describe("", build).state_layout({"w": TensorSpec(name="w", shape=(size, size), dtype=torch.float32)})
    except SeqpartError:
        return "", said[0]
    return f"{layout.nbytes / size**2:.3g}", "; ".join(said)


def _reason(text: str) -> str:
    """The first clause of a message, without the optimizer's name."""
    return re.split(r", |\. | \(|\n", text.split(": ", 1)[-1])[0]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Inside, TimeoutError is raised after that time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{seconds} s were not enough")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rows(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, bytes, verdict) for the optimizers of these names, or for all that train in a plain loop."""
    for name, kind in kinds():
        if names and name.rpartition(".")[2] not in names:
            continue
        try:
            with at_most(SECONDS):
                yield name, *verdict(built_of(kind))
        except Exception as error:
            print(f"{name}: not in a plain loop: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)


def main() -> None:
    warnings.simplefilter("ignore")
    found = []
    for row in rows(sys.argv[1:]):
        print(*row, sep=" | ", flush=True)
        found.append(row)
    if not sys.argv[1:]:
        write(found)


def write(found: Sequence[tuple[str, str, str]]) -> None:
    """Writes the table of docs/optimizers.md, and their numbers above it."""
    streamed, full = (sum(f"{method}: same bits" in words for *_, words in found) for method in ("streamed", "full"))
    lines = [
        f"Of {len(found)} optimizers {streamed} have a plain loop's bits streamed, and {full} more in `full`.\n",
        "| optimizer | bytes of state per number | trained, ended and resumed |",
        "|---|---|---|",
        *(f"| `{name}` | {size} | {words} |" for name, size, words in found),
    ]
    head, _, rest = TARGET.read_text().partition(MARKS[0])
    TARGET.write_text("\n".join([head + MARKS[0], "", *lines, "", MARKS[1] + rest.partition(MARKS[1])[2]]))


if __name__ == "__main__":
    main()
