"""How long the longest rows of some data are: found by a pass over them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from seqpart.data.draws import generators_kept
from seqpart.data.loaders import counted, source_of
from seqpart.data.padding import Padding, Sizes, sizes_of_batch, sizes_of_item, tokenizer_says
from seqpart.data.pairs import is_pair
from seqpart.data.source import SourceReader
from seqpart.data.splits import Split


def for_data(padding: Padding | None, several: Sequence[Any], seed: int = 0) -> Padding | None:
    """`padding` with a length, a token and a side: what it says, and else what these data, which are all that it is for, say.

    Raises DataError for rows that cannot be read.
    """
    if padding is None:
        return None
    several = [data for data in several if data is not None and not isinstance(data, Split)]
    for loader in (data for data in several if isinstance(data, DataLoader)):
        token, side = tokenizer_says(getattr(loader.collate_fn, "tokenizer", None))
        padding = padding.or_else(token, side)
    if padding.length != "longest" or not several:
        return padding
    with generators_kept():
        largest, short = spanned(sizes for data in several for sizes in _sizes(data, seed))
    padding.refuse_unknown(short, "the data")
    return replace(padding, length=largest)


def spanned(several: Iterable[Sizes]) -> tuple[Sizes, list[str | int]]:
    """(the largest that each is, those that are not always so large)."""
    largest: Sizes = {}
    smallest: Sizes = {}
    for sizes in several:
        largest |= {key: max(size, largest.get(key, size)) for key, size in sizes.items()}
        smallest |= {key: min(size, smallest.get(key, size)) for key, size in sizes.items()}
    return largest, [key for key in largest if smallest[key] < largest[key]]


def _sizes(data: Any, seed: int) -> Iterator[Sizes]:
    """Of its batches or items, in order."""
    if isinstance(data, Mapping) or is_pair(data):
        yield sizes_of_batch(data)
        return
    source = counted(source_of(data, "training"))
    reader, draws = SourceReader(source), source.draws(seed, "train", 0, 0)
    if source.collate is None:
        yield from (sizes_of_item(reader.item(draws, number)) for number in range(source.count))
        return
    for batch, first in enumerate(range(0, source.count, source.batch)):
        numbers = range(first, min(first + source.batch, source.count))
        yield from (sizes_of_batch(found) for found in reader.read(draws, batch, numbers))
