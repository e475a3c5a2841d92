"""Writes the table of docs/optimizers.md: every optimizer of these libraries trains a small network in a plain loop, then
streamed in three partitions, ended by a signal and resumed in a second process, then with its steps on the host; or in one
partition, if it is refused in several. With names of optimizers or libraries it writes their rows alone.

    pip install -e ".[test]" pytorch_optimizer torchao prodigyopt lion-pytorch adam-mini apollo-torch heavyball torch-optimi
    pip install --no-deps galore-torch    # and `dion` of github.com/microsoft/dion

Each optimizer, and each of its runs, has a process of its own, in which nothing is compiled.
"""

import inspect
import io
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import Interrupted, SeqpartError
from seqpart.model.optimizer_state import parts_of
from seqpart.model.optimizers import describe
from seqpart.store.layout import TensorSpec

T = TypeVar("T")
TARGET = Path(__file__).parents[1] / "docs" / "optimizers.md"
MARKS = "<!-- written by tools/write_optimizers.py -->", "<!-- end -->"
LIBRARIES = (
    "torch.optim", "pytorch_optimizer", "adam_mini", "apollo_torch", "bitsandbytes.optim", "dion", "galore_torch", "heavyball",
    "lion_pytorch", "optimi", "prodigyopt", "schedulefree", "timm.optim", "torchao.optim", "transformers.optimization",
)  # fmt: skip
WIDTH = 64
"""Its matrix of 64 x 64 has 4,096 numbers: with fewer, optimizers in 8 bits keep 32."""
ROWS = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 4
EPOCHS, BATCH, STOP = 4, 16, 5
"""Twelve updates; the signal comes behind number `STOP`."""
MODES: dict[str, dict[str, Any]] = {
    "streamed": {"method": "streamed", "partitions": 3},
    "host": {"method": "streamed", "partitions": 3, "optimizer_on": "host", "ram_limit": "2GB"},
    "full": {"method": "full"},
}
SECONDS = 120
"""Time limit of one run."""


class Way(NamedTuple):
    """A way to build an optimizer."""

    needs: str
    """What it needs beside parameters, for the table."""
    build: Callable[..., Any]
    """From a class and parameters to an optimizer, or to several."""
    closure: bool = False


class Row(NamedTuple):
    """A row of the table."""

    name: str
    held: str
    nbytes: str
    planned: str
    needs: str
    words: str


def _parted(kind: Any, parameters: list[nn.Parameter], matrices: dict[str, Any], others: dict[str, Any], **options: Any) -> Any:
    """Two groups: matrices, and the rest."""
    parts = [[one for one in parameters if (one.ndim == 2) is is_matrix] for is_matrix in (True, False)]
    return kind([{"params": part, **own} for part, own in zip(parts, (matrices, others), strict=True) if part], **options)


def _trains(kind: Any, *arguments: Any, **options: Any) -> Any:
    """Has `train()` called, which a plain loop calls where there is one."""
    optimizer = kind(*arguments, **options)
    getattr(optimizer, "train", int)()
    return optimizer


_RANK = {"rank": 4, "update_proj_gap": 3, "scale": 1.0, "proj_type": "std", "proj": "random", "scale_type": "channel"}
WAYS = (
    Way("", lambda kind, parameters: _trains(kind, parameters, lr=1e-2)),
    Way("", lambda kind, parameters: _trains(kind, parameters)),
    Way("another optimizer", lambda kind, parameters: kind(torch.optim.AdamW(parameters, lr=1e-2))),
    Way("groups", lambda kind, parameters: _parted(kind, parameters, {"use_muon": True}, {"use_muon": False})),
    Way("groups", lambda kind, parameters: _parted(kind, parameters, {}, {"algorithm": "adamw"}, lr=1e-2)),
    Way("names", lambda kind, named_parameters: kind(named_parameters, lr=1e-2)),
    Way(
        "matrices",
        lambda kind, parameters: [
            kind([one for one in parameters if one.ndim == 2]),
            torch.optim.AdamW([one for one in parameters if one.ndim != 2]),
        ],
    ),
    Way("a closure", lambda kind, parameters: kind(parameters, lr=1e-2), closure=True),
)
"""How optimizers are built: the first way with which a plain loop works."""
LOW_RANK = (
    Way("a rank", lambda kind, parameters: _parted(kind, parameters, _RANK, {}, lr=1e-2)),
    Way("a rank", lambda kind, parameters: _parted(kind, parameters, _RANK, {})),
)
"""Those of libraries whose optimizers are plain AdamW without a rank."""


def names_of(library: str) -> list[str]:
    """Names of the optimizers of a library."""
    found = sorted(vars(import_module(library)).items())
    return [
        f"{library}.{name}"
        for name, kind in found
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        if not name.startswith(("_", "Base"))
    ]


def apart(call: Callable[[], T], seconds: float | None = SECONDS) -> T:
    """What `call` returns in a process of its own, or its error as a RuntimeError, or SeqpartError for one of seqpart's."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe(duplex=False)

    def work() -> None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch.set_num_threads(1)  # threads do not survive a fork
        warnings.simplefilter("ignore")
        sys.stdout = io.StringIO()
        try:
            its.send((None, call()))
        except BaseException as error:
            lines = str(error).splitlines() or [""]
            its.send(
                (
                    isinstance(error, SeqpartError),
                    str(error) if isinstance(error, SeqpartError) else f"{type(error).__name__}: {lines[0]}",
                )
            )

    process = fork.Process(target=work)
    process.start()
    its.close()
    try:
        if not mine.poll(seconds):
            raise RuntimeError(f"{seconds} s were not enough")
        refused, found = mine.recv()
    except EOFError:
        raise RuntimeError("its process ended") from None
    finally:
        process.kill()
        process.join()
    if refused is not None:
        raise (SeqpartError if refused else RuntimeError)(found)
    return found


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)
    )  # fmt: skip


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def in_a_plain_loop(build: Callable[..., Any], closure: bool = False) -> tuple[dict[str, bytes], str, float]:
    """Returns (weights, tensors of the matrix's state, their bytes per number)."""
    model = network()
    named = "named_parameters" in inspect.signature(build).parameters
    built = build(list(model.named_parameters() if named else model.parameters()))
    optimizers = built if isinstance(built, list) else [built]

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = nn.functional.cross_entropy(model(x), y)
        found.backward()
        return found

    for _ in range(EPOCHS):
        for x, y in zip(*(part.split(BATCH) for part in ROWS), strict=True):
            if not closure:
                loss(x, y)
            for optimizer in optimizers:
                optimizer.step(*[partial(loss, x, y)] if closure else [])
    weights = bits(model)
    if weights == bits(network()) or not all(one.isfinite().all() for one in model.parameters()):
        raise ValueError("the weights stay as they are, or become infinite")
    matrix = model.get_parameter("3.weight")
    states = [part.state[matrix] for optimizer in optimizers for part in parts_of(optimizer) if matrix in part.state]
    tensors = {(one.data_ptr(), one.shape): one for one in _tensors(states) if one is not matrix}.values()
    said = Counter(f"{str(one.dtype).removeprefix('torch.')} {'x'.join(map(str, one.shape)) or 'scalar'}" for one in tensors)
    listed = ", ".join(f"{count} {one}" if count > 1 else one for one, count in said.items())
    return weights, listed, sum(one.nbytes for one in tensors) / matrix.numel()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a state, and those of which tensors of other types are made."""
    if hasattr(value, "__tensor_flatten__") and type(value) is not torch.Tensor:
        yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _tensors(vars(value))


def in_a_run(build: Callable[..., Any], *, ends: bool, **options: Any) -> dict[str, bytes]:
    """Weights of a run. ends: a signal ends it behind update `STOP`, and it goes on from its checkpoint in a second process."""

    def end(event: Any) -> None:
        if ends and event.update == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    def work(root: Path, goes_on: bool) -> dict[str, bytes]:
        model = network()
        trainer = Trainer(
            model, None, build, mem_limit="2GB", epochs=EPOCHS, batch_size=BATCH, micro_batch_size=BATCH, shuffle=False,
            save_every="1" if ends else "never", quiet=True, **options, **({} if goes_on else {"output_dir": root}),
        )  # fmt: skip
        with suppress(Interrupted):
            trainer.fit(ROWS, resume=root if goes_on else None, callbacks=[] if goes_on else [SimpleNamespace(on_step=end)])
        return bits(model)

    with tempfile.TemporaryDirectory() as folder:
        return [apart(partial(work, Path(folder) / "run", goes_on)) for goes_on in (False, True)[: 1 + ends]][-1]


def row_of(name: str) -> Row:
    """The row of an optimizer. Raises RuntimeError for one that trains in no plain loop. To be called `apart`."""
    library, _, own = name.rpartition(".")
    kind, failed = getattr(import_module(library), own), []
    for way in LOW_RANK if library in ("apollo_torch", "galore_torch") else WAYS:
        build = partial(way.build, kind)
        build.__name__ = own  # type: ignore[attr-defined]
        try:
            plain, held, nbytes = apart(partial(in_a_plain_loop, build, way.closure))
            break
        except RuntimeError as error:
            failed.append(error)
    else:
        raise failed[0]
    words = _said(build, plain, "streamed")
    then = _said(build, plain, "full" if "refused" in words else "host")
    words = words if "refused" in words and then.partition(": ")[2] == words.partition(": ")[2] else f"{words}; {then}"
    needs = [way.needs] * bool(way.needs) + ["`train()`"] * callable(getattr(kind, "train", None))
    planned = ""
    with suppress(SeqpartError):
        size, whole = apart(partial(_planned, build))
        planned, needs = f"{size:.3g}", needs + ["whole weights"] * whole
    return Row(name, held, f"{nbytes:.3g}", planned, ", ".join(needs), words)


def _said(build: Callable[..., Any], plain: dict[str, bytes], mode: str) -> str:
    """What came of a run in one of MODES."""
    try:
        return f"{mode}: {'same bits' if in_a_run(build, ends=mode != 'host', **MODES[mode]) == plain else 'OTHER BITS'}"
    except SeqpartError as error:
        return f"{mode}: refused, {_reason(str(error))}"


def _planned(build: Callable[..., Any]) -> tuple[float, bool]:
    """Returns (bytes of state per number of the matrix in a plan, true if its steps depend on weights as a whole)."""
    choice, shape = describe("", build), (WIDTH, WIDTH)
    layout = choice.state_layout({"w": TensorSpec(name="w", shape=shape, dtype=torch.float32)})
    return layout.nbytes / WIDTH**2, choice.whole


def _reason(text: str) -> str:
    """The first clause of a message, without the optimizer's name."""
    return re.split(r", |\. | \(|\n", text.split(": ", 1)[-1])[0]


def rows(library: str, names: Sequence[str] = ()) -> list[Row]:
    """Returns rows of a library's optimizers, or of those of these names. Prints them."""
    found = []
    for name in names_of(library):
        if not names or library in names or name in names:
            try:
                found.append(apart(partial(row_of, name), 10 * SECONDS))
            except RuntimeError as error:
                found.append(Row(name, *[""] * 4, f"not in a plain loop: {_reason(str(error))}"))
            print(*found[-1], sep=" | ", file=sys.stderr, flush=True)
    return found


def main() -> None:
    names = sys.argv[1:]
    found = table() if names else {}
    for library in LIBRARIES:
        if not names or any(name == library or name.rpartition(".")[0] == library for name in names):
            found |= {row.name: row for row in apart(partial(rows, library, names), None)}
            write(found)


def table() -> dict[str, Row]:
    """The rows that docs/optimizers.md has."""
    text = TARGET.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    found = [Row(*line[3:-2].replace("` |", " |", 1).split(" | ")) for line in text.splitlines() if line.startswith("| `")]
    return {row.name: row for row in found}


def write(found: dict[str, Row]) -> None:
    """Writes the table of docs/optimizers.md, and the numbers of each library above it."""
    lines = [
        "| library | optimizers | streamed | and on the host | only in `full` | refused, or no plain loop |",
        "|---|---|---|---|---|---|",
    ]
    for library in LIBRARIES:
        own = [row.words for row in found.values() if row.name.rpartition(".")[0] == library]
        counts = [sum(f"{mode}: same bits" in words for words in own) for mode in MODES]
        lines += [f"| {library} | {len(own)} | {' | '.join(map(str, counts))} | {len(own) - counts[0] - counts[2]} |"] * bool(
            own
        )
    lines += [
        "", "| optimizer | state of a matrix of 64 x 64 | bytes per number | in a plan | needs | trained |",
        "|---|---|---|---|---|---|",
        *(f"| `{row.name}` | {' | '.join(row[1:])} |" for row in sorted(found.values(), key=_place)),
    ]  # fmt: skip
    head, _, rest = TARGET.read_text().partition(MARKS[0])
    TARGET.write_text("\n".join([head + MARKS[0], "", *lines, "", MARKS[1] + rest.partition(MARKS[1])[2]]))


def _place(row: Row) -> tuple[int, str]:
    return LIBRARIES.index(row.name.rpartition(".")[0]), row.name


if __name__ == "__main__":
    main()
