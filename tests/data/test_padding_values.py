"""Which tensors of a batch a Padding pads, to which length and with what; and what is no Padding."""

import pytest
import torch
from torch import nn

from seqpart import Padding, Trainer
from seqpart.errors import DataError, OptionError


def test_a_batch_is_padded_by_a_call():
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3), "pixels": torch.ones(2, 3, 4, 4),
        "depth": torch.ones(2, 3, 2), "labels": torch.ones(2, 3, dtype=torch.int64), "label": torch.ones(2),
    }  # fmt: skip
    found = Padding(5, token=7, values={"depth": 0.5})(batch)
    assert found["input_ids"].tolist() == [[1, 1, 1, 7, 7]] * 2 and found["attention_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert found["labels"].tolist() == [[1, 1, 1, -100, -100]] * 2 and found["depth"][0, 3:].tolist() == [[0.5, 0.5]] * 2
    assert found["pixels"] is batch["pixels"] and found["label"] is batch["label"]
    x, y = Padding({0: 4, "labels": 5}, side="left")((batch["input_ids"], batch["labels"]))
    assert x.tolist() == [[0, 1, 1, 1]] * 2 and y.tolist() == [[-100, -100, 1, 1, 1]] * 2


def test_rows_of_an_encoder_and_a_decoder_have_lengths_of_their_own():
    batch = {name: torch.ones(2, length, dtype=torch.int64) for name, length in (("input_ids", 3), ("labels", 2))}
    found = Padding({"input_ids": 6, "labels": 4})(batch)
    assert (found["input_ids"].shape, found["labels"].shape) == ((2, 6), (2, 4))


def test_several_labels_are_padded_by_their_names():
    boxes = {"boxes": torch.ones(2, 3, 4), "classes": torch.ones(2, 3, dtype=torch.int64)}
    _, found = Padding(5, values={"boxes": 0.0, "classes": -100})((torch.zeros(2, 3, 8, 8), boxes))
    assert found["boxes"].shape == (2, 5, 4) and found["classes"].tolist() == [[1, 1, 1, -100, -100]] * 2


REFUSED = {
    r"padding: expected a length from 1 up, \"longest\".*found length=0": lambda: Padding(0),
    r"found length='long'": lambda: Padding("long"),
    "found length=.'labels': -1": lambda: Padding({"labels": -1}),
    "expected a token, a whole number from 0 up; found token=-100": lambda: Padding(8, token=-100),
    "side=.left. or .*found 'both'": lambda: Padding(8, side="both"),
    "expected values=.*found None": lambda: Padding(8, values=None),
    "padding: expected a seqpart.Padding; found 128. Give Padding.128.": lambda: Trainer(
        nn.Linear(1, 1), mem_limit="2GB", method="full", padding=128
    ),
    "which row is the longest is known of whole data": lambda: Padding("longest")(
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3))
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_padding_is_refused_in_words(words):
    with pytest.raises(OptionError, match=words):
        REFUSED[words]()


class Failing:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("data", "words"),
    [(5, "found int"), ([], "the set is empty"), (Failing(), "item 0 cannot be read: OSError: gone"), ([3, 4], "pair")],
    ids=["a number", "none", "failing", "numbers"],
)
@pytest.mark.parametrize("length", [8, "longest"])
def test_what_are_no_rows_is_refused_as_without_padding(data, words, length):
    trainer = Trainer(nn.Linear(1, 1), mem_limit="2GB", method="full", padding=Padding(length), quiet=True)
    with pytest.raises(DataError, match=words):
        trainer.plan(data)
