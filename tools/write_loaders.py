"""Writes the table of docs/data.md: a small network is trained on rows of each kind of data in a plain loop, then here,
streamed in two partitions: whole; ended by a signal in mid-epoch and resumed in a second process; and with two workers. With
names of libraries it writes their rows alone.

    pip install -e ".[test]" torchdata datasets webdataset litdata h5py zarr pyarrow
    pip install --no-deps mosaicml-streaming brotli zstd python-snappy catalogue

Files are made in a temporary folder. Each kind of data, and each of its runs, has a process of its own.
"""

import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from write_optimizers import ROWS, apart, bits, network

from seqpart import Trainer
from seqpart.data.source import Draws, row_order, seed_generators
from seqpart.errors import Interrupted, SeqpartError

TARGET = Path(__file__).parents[1] / "docs" / "data.md"
MARKS = "<!-- written by tools/write_loaders.py -->", "<!-- end -->"
X, Y = (part.numpy() for part in ROWS)
EPOCHS, BATCH, STOP, SEED = 3, 8, 8, 5
"""Eighteen updates; the signal comes behind number `STOP`, the second of an epoch."""


class Case(NamedTuple):
    """A kind of data."""

    library: str
    what: str
    make: Callable[[Path], Any]
    """From a folder with its files to what `fit` gets."""
    order: str = "its own"
    """Whose order of rows a plain loop has: "its own", or "ours", `row_order`."""


class Named(nn.Module):
    """Takes rows that are dicts too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input)


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(X[index]), int(Y[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Items()[index] for index in range(len(Y)))


class OfFile(Dataset[Any]):
    """Opens its file where it is first read."""

    def __init__(self, opens: Callable[[], Any]) -> None:
        self._opens, self._open = opens, None

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, index: int) -> Any:
        self._open = self._open or self._opens()
        return np.asarray(self._open["x"][index]), int(self._open["y"][index])


class OfParquet(IterableDataset[Any]):
    def __init__(self, file: Path) -> None:
        self._file = file

    def __iter__(self) -> Iterator[Any]:
        import pyarrow.parquet

        for some in pyarrow.parquet.ParquetFile(self._file).iter_batches(10):
            for row in some.to_pylist():
                yield torch.tensor(row["input"]), row["labels"]


# --- files ------------------------------------------------------------------------------------------------------------


def npz(folder: Path) -> Any:
    np.savez(folder / "rows.npz", x=X, y=Y)
    return np.load(folder / "rows.npz")


def npz_pair(folder: Path) -> Any:
    return npz(folder)["x"], npz(folder)["y"]


def memory_mapped(folder: Path) -> Any:
    for name, part in (("x", X), ("y", Y)):
        np.save(folder / f"{name}.npy", part)
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")


def hdf5(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file["x"], file["y"] = X, Y
    return folder / "rows.h5"


def hdf5_pair(folder: Path) -> Any:
    import h5py

    file = h5py.File(hdf5(folder))
    return file["x"], file["y"]


def hdf5_items(folder: Path) -> Any:
    import h5py

    return OfFile(partial(h5py.File, hdf5(folder)))


def zarr_group(folder: Path) -> Any:
    import zarr

    group = zarr.open_group(folder / "rows.zarr", mode="w")
    for name, part in (("x", X), ("y", Y)):
        group.create_array(name, data=part, chunks=(10, *part.shape[1:]))
    return zarr.open_group(folder / "rows.zarr", mode="r")


def zarr_pair(folder: Path) -> Any:
    group = zarr_group(folder)
    return group["x"], group["y"]


def parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"input": pyarrow.array(list(X), pyarrow.list_(pyarrow.float32())), "labels": Y})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=20)
    return folder / "rows.parquet"


def parquet_items(folder: Path) -> Any:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(parquet(folder))
    return OfFile(lambda: {"x": table["input"].to_numpy(), "y": table["labels"].to_numpy()})


def of_datasets(folder: Path) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"input": X, "labels": Y})


def streamed(folder: Path) -> Any:
    import datasets

    return datasets.load_dataset(
        "parquet", data_files=str(parquet(folder)), split="train", streaming=True, cache_dir=str(folder)
    ).with_format("torch")  # fmt: skip


def webdataset(folder: Path) -> Any:
    import webdataset

    with webdataset.TarWriter(str(folder / "rows.tar")) as tar:
        for number in range(len(Y)):
            tar.write({"__key__": f"{number:04}", "x.npy": X[number], "y.cls": int(Y[number])})
    return webdataset.WebDataset(str(folder / "rows.tar"), shardshuffle=False).decode().to_tuple("x.npy", "y.cls")


def litdata(folder: Path) -> Any:
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "cache")
    import litdata

    class Pairs(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return row["x"], row["y"]

    if not (folder / "rows").exists():
        writer = litdata.streaming.Cache(str(folder / "rows"), chunk_size=10)
        for number in range(len(Y)):
            writer[number] = {"x": torch.from_numpy(X[number]), "y": int(Y[number])}
        writer.done()
        writer.merge()
    return Pairs(str(folder / "rows"))


def mosaic(folder: Path) -> Any:
    import streaming

    class Pairs(streaming.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return (row["x"].copy(), row["y"]) if isinstance(row, dict) else row

    with streaming.MDSWriter(out=str(folder / "rows"), columns={"x": "ndarray", "y": "int"}, exist_ok=True) as writer:
        for number in range(len(Y)):
            writer.write({"x": X[number], "y": int(Y[number])})
    return Pairs(local=str(folder / "rows"), batch_size=BATCH, shuffle=False)


def stateful(*arguments: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*arguments, BATCH, **options)


def nodes(folder: Path) -> Any:
    from torchdata.nodes import IterableWrapper, Loader

    return Loader(IterableWrapper(list(Stream())))


def shuffles(generator: int) -> Any:
    return RandomSampler(Items(), generator=torch.Generator().manual_seed(generator))


def inside(kind: str, make: Callable[[Path], Any], **options: Any) -> Callable[[Path], Any]:
    """What makes the data inside another object of that class, `module:name`."""
    return lambda folder: resolve_name(kind)(make(folder), **options)


def torch_s(folder: Path) -> Any:
    return of_datasets(folder).with_format("torch")


def in_any_order(folder: Path) -> Any:
    return webdataset(folder).compose(resolve_name("webdataset:detshuffle")(16))


def mixed(items: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(items)
    return x + 0.1 * x.flip(0), y


LOADER = "torch.utils.data:DataLoader"
TORCH = (
    ("a map", lambda _: DataLoader(Items(), BATCH), "its own"),
    ("a map, `shuffle=True`", lambda _: DataLoader(Items(), BATCH, shuffle=True), "ours"),
    (
        "a map, `num_workers=2`, `persistent_workers`",
        lambda _: DataLoader(Items(), BATCH, num_workers=2, persistent_workers=True),
        "its own",
    ),
    ("a map, `drop_last`, batches of 10", lambda _: DataLoader(Items(), 10, drop_last=True), "its own"),
    ("a map, `collate_fn`", lambda _: DataLoader(Items(), BATCH, collate_fn=mixed), "its own"),
    (
        "a map, `WeightedRandomSampler`",
        lambda _: DataLoader(Items(), BATCH, sampler=WeightedRandomSampler(torch.arange(48) + 1.0, 48)),
        "its own",
    ),
    ("a map, `DistributedSampler`", lambda _: DataLoader(Items(), BATCH, sampler=DistributedSampler(Items(), 2, 1)), "its own"),
    ("a map, `RandomSampler` of a generator", lambda _: DataLoader(Items(), BATCH, sampler=shuffles(7)), "ours"),
    (
        "a map, `batch_sampler`",
        lambda _: DataLoader(Items(), batch_sampler=BatchSampler(SequentialSampler(Items()), BATCH, False)),
        "its own",
    ),
    ("a map, `batch_size=None`", lambda _: DataLoader(Items(), batch_size=None), "its own"),
    ("an iterable", lambda _: DataLoader(Stream(), BATCH), "its own"),
    ("an iterable, `num_workers=1`", lambda _: DataLoader(Stream(), BATCH, num_workers=1), "its own"),
)
CASES = (
    *(Case("torch", f"`DataLoader`: {what}", make, order) for what, make, order in TORCH),
    Case("numpy", "npz", npz_pair),
    Case("numpy", "memory-mapped arrays", memory_mapped),
    Case("h5py", "a pair of its data sets", hdf5_pair),
    Case("h5py", "items of a file opened late", hdf5_items),
    Case("zarr", "a pair of its arrays", zarr_pair),
    Case("zarr", "items of a group", lambda folder: OfFile(partial(zarr_group, folder))),
    Case("pyarrow", "items of a parquet table", parquet_items),
    Case("pyarrow", "an iterable of batches of parquet", lambda folder: DataLoader(OfParquet(parquet(folder)), BATCH)),
    Case("torchdata", "`StatefulDataLoader`: a map", lambda _: stateful(Items())),
    Case("torchdata", "`StatefulDataLoader`: a map, `shuffle=True`", lambda _: stateful(Items(), shuffle=True)),
    Case("torchdata", "`StatefulDataLoader`: a map, `num_workers=2`", lambda _: stateful(Items(), num_workers=2)),
    Case("torchdata", "`StatefulDataLoader`: an iterable", lambda _: stateful(Stream())),
    Case("torchdata", "`nodes.Loader`", nodes),
    Case("datasets", "a map, in torch's format", torch_s),
    Case("datasets", "a map, in a `DataLoader` that shuffles", inside(LOADER, torch_s, batch_size=BATCH, shuffle=True), "ours"),
    Case("datasets", "a map, without a format", of_datasets),
    Case("datasets", "an iterable", lambda folder: of_datasets(folder).to_iterable_dataset(3).with_format("torch")),
    Case("datasets", "parquet, streaming", streamed),
    Case("datasets", "parquet, streaming, `shuffle`", lambda folder: streamed(folder).shuffle(seed=3, buffer_size=16)),
    Case("datasets", "parquet, streaming, in a `DataLoader`", inside(LOADER, streamed, batch_size=BATCH)),
    Case("webdataset", "a tar", webdataset),
    Case("webdataset", "a tar, in a `DataLoader`", inside(LOADER, webdataset, batch_size=BATCH)),
    Case("webdataset", "a tar, in a `WebLoader`", inside("webdataset:WebLoader", webdataset, batch_size=BATCH)),
    Case("webdataset", "a tar, `shuffle`", lambda folder: webdataset(folder).shuffle(16)),
    Case("webdataset", "a tar, `detshuffle`", in_any_order),
    Case("litdata", "`StreamingDataset`", litdata),
    Case("litdata", "`StreamingDataset` in a `DataLoader`", inside(LOADER, litdata, batch_size=BATCH)),
    Case("litdata", "`StreamingDataLoader`", inside("litdata:StreamingDataLoader", litdata, batch_size=BATCH)),
    Case("mosaicml-streaming", "`StreamingDataset`", mosaic),
    Case("mosaicml-streaming", "`StreamingDataset` in a `DataLoader`", inside(LOADER, mosaic, batch_size=BATCH)),
    Case("mosaicml-streaming", "`StreamingDataLoader`", inside("streaming:StreamingDataLoader", mosaic, batch_size=BATCH)),
)  # fmt: skip


# --- runs -------------------------------------------------------------------------------------------------------------


def epoch_of(data: Any, case: Case, epoch: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields the batches of a plain loop's epoch."""
    loader = data
    if case.order == "ours":
        numbers = [int(number) for number in row_order(SEED, epoch, len(Y))]
        loader = DataLoader(data.dataset, BATCH, sampler=numbers, collate_fn=data.collate_fn)
    elif isinstance(data, tuple):
        loader = DataLoader(TensorDataset(*(torch.from_numpy(np.array(part)) for part in data)), BATCH)
    elif not isinstance(data, DataLoader):
        is_map = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
        loader = (
            data if "WebLoader" in case.what else DataLoader(data, BATCH, collate_fn=_stacked) if is_map else _batches(data)
        )
    sampler = getattr(loader, "sampler", None)
    for part in (sampler, data, getattr(data, "dataset", None)):
        if callable(begin := getattr(part, "set_epoch", None)):
            begin(epoch)
    draws = Draws(SEED, "train", 0, epoch)
    seed_generators(draws.seed_for("order"))
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(draws.seed_for("order"))
    streams = isinstance(getattr(data, "dataset", None), IterableDataset)
    if isinstance(data, DataLoader) and case.order == "its own" and not streams and not isinstance(sampler, SequentialSampler):
        loader = DataLoader(data.dataset, data.batch_size, sampler=list(sampler))  # before the loader draws for itself
    for batch in loader:
        x, y = (batch["input"], batch["labels"]) if isinstance(batch, dict) else batch
        yield torch.as_tensor(x), torch.as_tensor(y)


def _stacked(items: list[Any]) -> Any:
    pairs = [(item["input"], item["labels"]) if isinstance(item, dict) else item for item in items]
    return torch.stack([torch.as_tensor(x) for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])


def _batches(stream: Any) -> Iterator[Any]:
    some: list[Any] = []
    for item in stream:
        some.append(item)
        if len(some) == BATCH:
            yield _stacked(some)
            some = []


def in_a_plain_loop(case: Case) -> dict[str, bytes]:
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        data = case.make(Path(folder))
        for epoch in range(1, EPOCHS + 1):
            for x, y in epoch_of(data, case, epoch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return bits(model)


def in_a_run(case: Case, root: Path, *, ends: bool = False, goes_on: bool = False, workers: int | None = None) -> Any:
    """Returns (weights, the proof of the limit)."""

    def end(event: Any) -> None:
        if event.update == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    model = Named()
    root.mkdir(exist_ok=True)
    data = case.make(root)
    loader = isinstance(data, DataLoader)
    trainer = Trainer(
        model, None, partial(torch.optim.SGD, lr=0.1, fused=True), mem_limit="4GB", method="streamed", partitions=2,
        epochs=EPOCHS, seed=SEED, save_every="1", quiet=True, **({} if loader else {"batch_size": BATCH, "shuffle": False}),
        **({} if workers is None else {"workers": workers}), **({} if goes_on else {"output_dir": root / "run"}),
    )  # fmt: skip
    try:
        result = trainer.fit(
            data, resume=root / "run" if goes_on else None, callbacks=[SimpleNamespace(on_step=end)] if ends else []
        )
    except Interrupted:
        assert ends
        return None
    proof = result.proof
    return bits(model), (proof.peak, proof.predicted, bool(proof.violations))


def row_of(case: Case) -> str:
    """The row of a kind of data, to be called `apart`."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        try:
            plain = apart(partial(in_a_plain_loop, case))
            found, alone = apart(partial(in_a_run, case, root / "whole", workers=0))
            apart(partial(in_a_run, case, root / "ended", ends=True))
            resumed, _ = apart(partial(in_a_run, case, root / "ended", goes_on=True))
        except SeqpartError as error:
            return f"refused: {_reason(str(error))} | |"
        except RuntimeError as error:
            return f"ERROR {error} | |"
        words = ["the same" if found == plain else "OTHERS", "the same" if resumed == found else "OTHERS"]
        try:
            several, two = apart(partial(in_a_run, case, root / "workers", workers=2))
        except SeqpartError as error:
            words.append("none: rows are kept" if "rows that are not kept" in str(error) else f"refused: {_reason(str(error))}")
        except RuntimeError as error:
            words.append(f"ERROR {error}")
        else:
            counted = two[0] > alone[0] + 100e6 and not two[2] and two[1] > 0.98 * two[0]
            words.append(
                f"{'the same' if several == found else 'OTHERS'}, {'counted' if counted else f'NOT COUNTED {alone} {two}'}"
            )
    return " | ".join(words)


def _reason(text: str) -> str:
    said = re.split(r"\. |\n", text.split(" data: ", 1)[-1])[0]
    return re.sub(r" /\S+", " ...", said)[:160].replace("|", "/")


def main() -> None:
    head, _, rest = TARGET.read_text().partition(MARKS[0])
    old, _, rest = rest.partition(MARKS[1])
    for library in sys.argv[1:] or dict.fromkeys(case.library for case in CASES):
        rows = [line for line in old.splitlines() if line.startswith("| `") and not line.startswith(f"| `{library}` ")]
        for case in CASES:
            if case.library == library:
                rows.append(f"| `{library}` | {case.what} | {apart(partial(row_of, case), 600)} |")
                print(rows[-1], flush=True)
        old = "\n".join(
            ["", "", "| library | data | rows | ended and resumed | two workers |", "|---|---|---|---|---|", *rows, "", ""]
        )
        TARGET.write_text(head + MARKS[0] + old + MARKS[1] + rest)


if __name__ == "__main__":
    main()
