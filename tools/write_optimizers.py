"""Writes the table of docs/optimizers.md: every optimizer of torch and of pytorch_optimizer trains a small network in a plain
loop, then streamed in three partitions, ended by a signal and resumed; or in one partition, if it is refused in several."""

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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


def builder(kind: Any) -> Build:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return kind(parameters, lr=1e-2)  # type: ignore[no-any-return]
        except TypeError:
            return kind(parameters)  # type: ignore[no-any-return]

    build.__name__ = kind.__name__
    return build


def in_a_plain_loop(build: Build) -> dict[str, torch.Tensor]:
    model = network()
    optimizer = build(list(model.parameters()))
    for _ in range(EPOCHS):
        for x, y in zip(*(part.split(BATCH) for part in ROWS), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
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
    """Returns (bytes of state a number of a parameter, what came of it). Raises whatever the plain loop raises."""
    plain = in_a_plain_loop(build)
    if not all(bool(value.isfinite().all()) for value in plain.values()):
        return "", "its weights are not finite in a plain loop"
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
    return text.split(": ", 1)[-1].split("\n")[0].split(". ")[0].split(" (")[0]


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
                yield name, *verdict(builder(kind))
        except Exception as error:
            print(f"{name}: not in a plain loop: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)


def main() -> None:
    warnings.simplefilter("ignore")
    found = []
    for row in rows(sys.argv[1:]):
        print(*row, sep=" | ", flush=True)
        found.append(row)
    if not sys.argv[1:]:
        lines = ["| optimizer | bytes of state a number | streamed in 3 partitions, ended and resumed |", "|---|---|---|"]
        lines += [f"| `{name}` | {size} | {words} |" for name, size, words in found]
        head, _, rest = TARGET.read_text().partition(MARKS[0])
        TARGET.write_text("\n".join([head + MARKS[0], *lines, MARKS[1] + rest.partition(MARKS[1])[2]]))


if __name__ == "__main__":
    main()
