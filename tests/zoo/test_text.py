"""A text file becomes rows of tokens and the tokens that follow them; what is no text is refused in words."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.data.classes import count_classes
from seqpart.data.splits import as_split, count_tokens, write_rows
from seqpart.errors import DataError, OptionError
from seqpart.zoo import datasets, text

SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare" / "input.txt"
QUESTION = "To be, or not to be, that is the question.\n" * 10


def rows_of(split):
    rows = []
    write_rows(as_split(split, "some"), rows.append)
    return torch.cat(rows)


def written(path, words):
    path.write_bytes(words.encode())
    return path


def read_back(split, characters):
    """(the text of the rows, the text of the labels), each a list of one string a row."""
    return tuple(["".join(characters[i] for i in row) for row in part.tolist()] for part in (rows_of(split), split.labels))


@given(
    words=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=200), data=st.data()
)
def test_rows_are_windows_of_the_text_and_labels_the_same_one_character_later(tmp_path_factory, words, data):
    path = written(tmp_path_factory.getbasetemp() / "any.txt", words)
    if len(words) <= 10:
        with pytest.raises(DataError, match=f"{len(words)} characters are too few for rows of 1"):
            text.load(path, 1)
        return
    context = data.draw(st.integers(1, (len(words) - 1) // 10))
    characters, cut = text.vocabulary(path), len(words) * 9 // 10
    assert characters == "".join(sorted(set(words)))
    for split, own in zip(text.load(path, context), (words[:cut], words[cut:]), strict=True):
        whole = (len(own) - 1) // context
        assert (split.count, split.shape, split.dtype) == (whole, (context,), torch.int64)
        rows, labels = read_back(split, characters)
        assert rows == [own[i * context : (i + 1) * context] for i in range(whole)]
        assert labels == [own[i * context + 1 : (i + 1) * context + 1] for i in range(whole)]


def test_a_text_is_found_by_its_name_with_a_context_of_128(tmp_path):
    path = written(tmp_path / "a.txt", QUESTION * 10)
    train, test = datasets.load(f"text:{path}")
    assert (train.shape, test.shape) == ((128,), (128,))
    assert datasets.load(f"text:{path}", context=7)[0].shape == (7,)


def test_a_character_that_only_the_test_part_has_is_a_class(tmp_path):
    train, test = text.load(written(tmp_path / "a.txt", "ab" * 100 + "zaza" * 5), 4)
    assert train.labels.max() < test.labels.max()
    assert count_classes(train, test) == count_tokens(train, test) == 3


def test_line_ends_are_characters_as_they_stand_in_the_file(tmp_path):
    assert text.vocabulary(written(tmp_path / "a.txt", "a\r\nb\n")) == "\n\rab"


def test_characters_are_told_apart_where_pieces_of_the_file_meet(tmp_path, monkeypatch):
    words = "aé€😀" * 60
    path = written(tmp_path / "a.txt", words)
    whole = text.load(path, 5)
    monkeypatch.setattr(text, "_PIECE", 7)
    for one, other in zip(whole, text.load(path, 5), strict=True):
        assert torch.equal(rows_of(one), rows_of(other))
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize(("different", "kind"), [(256, torch.uint8), (257, torch.int16), (text.MOST_CHARACTERS, torch.int16)])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(different, kind, tmp_path):
    words = "".join(chr(i) for i in range(1, 70000) if not 0xD800 <= i < 0xE000)[:different]
    train, test = text.load(written(tmp_path / "a.txt", words * 2), 3)
    assert train.labels.dtype == kind
    assert rows_of(train).max() == different - 1
    assert count_classes(train, test) == different


def test_a_text_is_held_once_and_in_narrow_tokens(tmp_path):
    path = written(tmp_path / "a.txt", "some words and others. " * 200_000)
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        train, _ = text.load(path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.02 * path.stat().st_size
    assert peak < path.stat().st_size + (4 << 20)
    (rows, *_), labels = train.open(), train.labels
    assert rows.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr()


REFUSED = {
    "is empty. Give a UTF-8 text file": b"",
    r"is not UTF-8 text: invalid start byte \(0x89\)": b"\x89PNG and so on",
    r"is not UTF-8 text: .* \(0xff\)": "To be".encode("utf-16"),
    "is not a text: it has a zero byte": b"GIF\0\0",
    r"is not UTF-8 text: unexpected end of data": "to bé".encode()[:-1],
    "129 characters are too few for rows of 13: .* Give at least 131 characters, or a smaller context": b"ab" * 64 + b"a",
    "has more than 32768 different characters": "".join(map(chr, range(1, 32770))).encode(),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_text_or_too_little_of_it_is_refused_in_words(words, tmp_path):
    (tmp_path / "a.txt").write_bytes(REFUSED[words])
    with pytest.raises(DataError, match=rf"a\.txt.*{words}"):
        text.load(tmp_path / "a.txt", 13)


@pytest.mark.parametrize("name", ["nowhere.txt", "."])
def test_a_file_that_is_not_there_is_named(name, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        text.load(tmp_path / name)


def test_one_character_more_than_a_tenth_of_the_rows_is_enough(tmp_path):
    train, test = text.load(written(tmp_path / "a.txt", "ab" * 65 + "a"), 13)
    assert (train.count, test.count) == (8, 1)


def test_a_text_of_a_single_character_teaches_nothing(tmp_path):
    with pytest.raises(DataError, match=r"training labels: every row has class 0\. Training needs at least two"):
        count_classes(*text.load(written(tmp_path / "a.txt", "a" * 100), 3))


@pytest.mark.parametrize(("name", "context"), [("digits", 8), ("text:a.txt", 0)])
def test_a_context_is_for_texts_and_from_one_up(name, context):
    with pytest.raises(OptionError, match="context"):
        datasets.load(name, context=context)


def test_a_file_that_grows_while_it_is_read_is_taken_as_it_was(tmp_path, monkeypatch):
    path = written(tmp_path / "a.txt", QUESTION)
    expected = rows_of(text.load(path, 10)[0])
    looked_through = text._looked_through

    def then_grows(path):
        found = looked_through(path)
        with open(path, "a") as file:
            file.write("To sleep, perchance to dream")
        return found

    monkeypatch.setattr(text, "_looked_through", then_grows)
    assert torch.equal(rows_of(text.load(path, 10)[0]), expected)


@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason="tinyshakespeare is not beside this repository")
def test_shakespeare_has_65_characters_and_reads_back():
    train, test = datasets.load(f"text:{SHAKESPEARE}")
    words = SHAKESPEARE.read_text(encoding="utf-8")
    assert (train.count, test.count) == (1003854 // 128, 111539 // 128)
    assert count_classes(train, test) == count_tokens(train, test) == 65
    assert train.labels.dtype == torch.uint8
    rows, _ = read_back(train, text.vocabulary(SHAKESPEARE))
    assert "".join(rows) == words[: np.prod(rows_of(train).shape)]
