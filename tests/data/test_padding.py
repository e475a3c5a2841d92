"""Rows of several lengths: padded to one length as they are read, to the bits of a plain loop that pads to that length."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from seqpart import Padding, Trainer
from seqpart.data.source import row_order
from seqpart.errors import DataError, OptionError
from seqpart.verify.verification import verify
from tests.resuming import Stopping, interrupt

ROWS, BATCH, TOKENS, LONGEST, LONG = 20, 4, 11, 6, 8


class Texts(Dataset):
    """Tokens of 2 to 6 places; each is to be told from those before it, and the first of a row counts for nothing."""

    def __init__(self, rows=ROWS, longest=LONGEST):
        self.rows, self.longest = rows, longest

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        length = 2 + (index * 3) % (self.longest - 1)
        tokens = torch.tensor([1 + (index + 2 * place) % (TOKENS - 1) for place in range(length)])
        return {"input_ids": tokens, "labels": torch.cat([torch.tensor([-100]), tokens[1:]])}


def by_name(items):
    """As transformers' collators: to the longest of the batch."""
    ids, labels = (pad_sequence([item[name] for item in items], True, 0) for name in ("input_ids", "labels"))
    mask = pad_sequence([torch.ones_like(item["input_ids"]) for item in items], True, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def in_pairs(items):
    found = by_name(items)
    return found["input_ids"], found["labels"]


def by_place(items):
    return tuple(by_name(items).values())


class Reader(nn.Module):
    """Sees what came before each place."""

    def __init__(self):
        super().__init__()
        self.words, self.end = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[:, :, None]
        return self.end(torch.tanh(x.cumsum(1)))


class OwnLoss(Reader):
    def forward(self, input_ids, attention_mask=None, labels=None):
        scores = super().forward(input_ids, attention_mask)
        loss = None if labels is None else F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores}


class Classifier(Reader):
    """The mean over the places that the mask leaves."""

    def forward(self, input_ids, attention_mask):
        return (super().forward(input_ids, attention_mask) * attention_mask[:, :, None]).sum(1)


def made(kind=Reader):
    torch.manual_seed(0)
    return kind()


def loader(collate=by_name, items=None, **options):
    return DataLoader(Texts() if items is None else items, batch_size=BATCH, collate_fn=collate, **options)


def trainer(folder, padding, *, model=None, loss=None, **options):
    options = {"mem_limit": "2GB", "method": "full", "optimizer": "sgd", "lr": 0.1, "epochs": 2, "quiet": True, **options}
    return Trainer(made() if model is None else model, loss, padding=padding, output_dir=folder, **options)


def padded_by_hand(batch, length, *, token=0):
    """input_ids, mask and labels of `length` places, written once more in the plainest way."""
    x, y = ({name: part for name, part in batch.items() if name != "labels"}, batch["labels"])
    by = length - y.shape[1]
    x = {name: F.pad(part, (0, by), value=token if name == "input_ids" else 0) for name, part in x.items()}
    return x, F.pad(y, (0, by), value=-100)


def plainly(length, *, collate=by_name, order=None, epochs=2, micro=BATCH, kind=Reader, batches=None, **how):
    """The weights of a plain loop whose batches are padded to that length; the loss is the mean over what it counts, divided
    at the end as a run does where a batch has several micro-batches."""
    items, model = Texts(), made(kind)
    step = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if batches is None:
        orders = [range(ROWS) if order is None else order(0, epoch, ROWS) for epoch in range(1, epochs + 1)]
        batches = [
            by_name([items[int(at)] for at in rows[first : first + BATCH]])
            for rows in orders
            for first in range(0, ROWS, BATCH)
        ]  # fmt: skip
    for batch in batches:
        x, y = padded_by_hand(batch, length, **how)
        for first in range(0, len(y), micro):
            rows = slice(first, first + micro)
            named = {name: part[rows] for name, part in x.items() if name == "input_ids" or collate is not in_pairs}
            found = model(**named)
            found = found["logits"] if isinstance(found, dict) else found
            loss = F.cross_entropy(found.flatten(0, 1), y[rows].flatten())
            (loss if micro >= len(y) else loss * (int((y[rows] != -100).sum()) / len(y))).backward()
        for parameter in model.parameters() if micro < len(y) else ():
            parameter.grad.mul_(len(y) / int((y != -100).sum()))
        step.step()
        step.zero_grad(set_to_none=True)
    return model.state_dict()


def same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


BY_PLACE = {1: 0}
"""The mask has no name there."""


@pytest.mark.parametrize("method", ["streamed", "full"])
@pytest.mark.parametrize("collate", [by_name, in_pairs, by_place])
@pytest.mark.parametrize(("length", "makes"), [(LONG, LONG), ("longest", LONGEST)])
@pytest.mark.few(1)
def test_any_loader_trains_to_the_bits_of_a_plain_loop_padded_to_that_length(length, makes, collate, method, tmp_path):
    values = BY_PLACE if collate is by_place else {}
    options = {"partitions": 2} if method == "streamed" else {}
    found = trainer(tmp_path / "run", Padding(length, values=values), method=method, **options).fit(loader(collate))
    same(found.state_dict(), plainly(makes, collate=collate))


@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"micro_batch_size": 2, "method": "streamed", "partitions": 2}])
@pytest.mark.few(1)
def test_micro_batches_count_by_the_labels_that_are_no_padding(options, tmp_path):
    found = trainer(tmp_path / "run", Padding(LONG), **options).fit(loader())
    same(found.state_dict(), plainly(LONG, micro=2))


def test_a_model_that_computes_its_own_loss_counts_the_same_labels(tmp_path):
    """As those of transformers do, from `labels` among their inputs."""
    found = trainer(tmp_path / "run", Padding(LONG), model=made(OwnLoss), loss="model").fit(loader())
    same(found.state_dict(), plainly(LONG, kind=OwnLoss))


class Stream(IterableDataset):
    def __iter__(self):
        return (Texts()[index] for index in range(ROWS))


def without_mask(length, **how):
    return plainly(length, collate=in_pairs, **how)


WAYS = {
    "a data set": Texts,
    "a data set that is read anew": lambda: loader(None),
    "a stream": Stream,
    "a pair that is shorter": lambda: in_pairs([Texts()[index] for index in range(ROWS)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(2)
def test_rows_are_padded_without_a_collate_fn_too(way, tmp_path):
    options = {"shuffle": False, "batch_size": BATCH}
    found = trainer(tmp_path / "run", Padding(LONG), **options).fit(WAYS[way]())
    same(found.state_dict(), without_mask(LONG))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(1)
def test_a_run_that_was_interrupted_goes_on_within_an_epoch(workers, tmp_path):
    def fit(folder, **options):
        new = {} if "resume" in options else {"output_dir": tmp_path / folder}
        made_anew = Trainer(
            made(), mem_limit="2GB", method="full", optimizer="sgd", lr=0.1, epochs=2, quiet=True, save_every=1,
            padding=Padding("longest"), **new,
        )  # fmt: skip
        return made_anew.fit(loader(shuffle=True, num_workers=workers), loader(items=Texts(6)), **options)

    whole = fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("again", reporter=Stopping(19, interrupt))
    again = fit("again", resume=tmp_path / "again")
    same(again.state_dict(), plainly(LONGEST, order=row_order))
    assert again.weights.read_bytes() == whole.weights.read_bytes() and again.test_loss == whole.test_loss


def test_a_run_goes_on_with_the_padding_that_it_had(tmp_path):
    options = {"save_every": 1, "method": "full"}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", Padding(LONG), **options).fit(loader(), reporter=Stopping(9, interrupt))
    for other in (Padding(LONG, token=3), Padding(LONG + 1)):
        with pytest.raises(OptionError, match="was trained on other data"):
            trainer(None, other, **options).fit(loader(), resume=tmp_path / "run")


def test_test_rows_and_evaluations_are_padded_alike(tmp_path):
    """The longest row of all is one of the test rows."""
    tests, own = Texts(10, longest=LONG), trainer(tmp_path / "run", Padding("longest"))
    result = own.fit(loader(), loader(items=tests, num_workers=1))
    same(result.state_dict(), plainly(LONG))
    model = made()
    model.load_state_dict(result.state_dict())
    x, y = padded_by_hand(by_name([tests[index] for index in range(10)]), LONG)
    with torch.no_grad():
        scores = model.eval()(**x).flatten(0, 1)
    expected = F.cross_entropy(scores, y.flatten()).item()
    found = own.evaluate(loader(items=tests))
    assert result.test_loss == pytest.approx(expected, rel=1e-6) and found.loss == pytest.approx(expected, rel=1e-6)
    counted = y.flatten() != -100
    assert found.accuracy == pytest.approx((scores.argmax(1) == y.flatten())[counted].float().mean().item())


@pytest.mark.parametrize("example", ["a loader", "a batch"])
@pytest.mark.parametrize(
    "options", [{}, {"method": "streamed", "partitions": 2, "micro_batch_size": 2}], ids=["full", "streamed"]
)
@pytest.mark.few(1)
def test_every_step_of_a_loop_of_ones_own_may_have_rows_of_another_length(example, options, tmp_path):
    batches = list(loader())
    assert len({batch["labels"].shape[1] for batch in batches}) > 1
    own = Trainer(
        made(), None, "sgd", mem_limit="2GB", lr=0.1, batch_size=BATCH, quiet=True, offload_dir=tmp_path,
        padding=Padding("longest" if example == "a loader" else LONGEST), **{"method": "full", **options},
    )  # fmt: skip
    with own.session(loader() if example == "a loader" else batches[0]) as session:
        for batch in batches:
            session.step(batch)
        evaluated = session.evaluate(loader(items=Texts(6)))
        session.step(batches[0])
        found = session.state_dict()
    same(found, plainly(LONGEST, batches=[*batches, batches[0]], micro=options.get("micro_batch_size", BATCH)))
    assert 0 < evaluated.loss < 10 and evaluated.accuracy is not None


def test_a_loop_of_ones_own_takes_the_tuples_that_a_loader_makes(tmp_path):
    batches = list(loader(by_place))
    own = Trainer(
        made(), None, "sgd", mem_limit="2GB", method="full", lr=0.1, batch_size=BATCH, quiet=True, offload_dir=tmp_path,
        padding=Padding(LONGEST, values=BY_PLACE),
    )  # fmt: skip
    with own.session(batches[0]) as session:
        for batch in batches:
            session.step(batch)
        found = session.state_dict()
    same(found, plainly(LONGEST, epochs=1))


def classified(items):
    found = by_name(items)
    return found | {"labels": found["input_ids"][:, 0] % 3}


@pytest.mark.parametrize("method", ["full", "sil"])
def test_a_class_of_a_row_stays_what_it_is_and_kept_rows_have_the_same_bits(method, tmp_path):
    """`sil` needs classes; it takes inputs by name."""

    def fit(name, train, padding):
        options = {"method": method, "partitions": 2 if method == "sil" else "auto", "batch_size": BATCH, "shuffle": False}
        found = trainer(tmp_path / name, padding, model=made(Classifier), micro_batch_size=BATCH, **options).fit(train, train)
        return found.weights.read_bytes(), found.train_losses, found.test_loss

    whole = classified([Texts()[index] for index in range(ROWS)])
    labels = whole.pop("labels")
    by_hand = {name: F.pad(part, (0, LONG - LONGEST)) for name, part in whole.items()}
    assert fit("loader", loader(classified), Padding(LONG)) == fit("pair", (by_hand, labels), None)


# --- a tokenizer that says how ------------------------------------------------------------------------------------------


class Tokenizer:
    """As far as a collator asks one of transformers. It pads from the left, with 9."""

    pad_token_id, padding_side, mask_token = 9, "left", None

    def pad(self, items, **_):
        longest = max(len(item["input_ids"]) for item in items)
        rows = [[9] * (longest - len(item["input_ids"])) + item["input_ids"].tolist() for item in items]
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": (ids != 9).long()}


def test_a_collator_says_by_its_tokenizer_with_which_token_and_on_which_side(tmp_path):
    class Modelling:
        tokenizer = Tokenizer()

        def __call__(self, items):
            found = self.tokenizer.pad(items)
            # Without the mask the model sees what rows are padded with, and on which side.
            ids = found["input_ids"]
            return {"input_ids": ids, "labels": ids.masked_fill(found["attention_mask"] == 0, -100)}

    found = trainer(tmp_path / "run", Padding(LONG), epochs=1).fit(loader(Modelling()))
    plain = [Padding(LONG, token=9, side="left")(batch) for batch in loader(Modelling())]
    same(found.state_dict(), plainly(LONG, batches=plain))
    other = trainer(tmp_path / "other", Padding(LONG, token=8, side="right"), epochs=1).fit(loader(Modelling()))
    with pytest.raises(AssertionError):
        same(other.state_dict(), plainly(LONG, batches=plain))


# --- what is refused --------------------------------------------------------------------------------------------------


def nameless(items):
    """A tensor of a name that says nothing."""
    found = by_name(items)
    return {"input_ids": found["input_ids"], "seen": found["attention_mask"], "labels": found["labels"]}


DATA = {
    "without padding, by name": (None, by_name, "expected rows of shape.*input_ids.*padding=seqpart.Padding"),
    "without padding, a pair": (None, in_pairs, "expected rows of shape.*padding=seqpart.Padding"),
    "a longer row": (
        Padding(4), by_name, "training data: expected rows of input_ids of at most 4 places.*found one of [56]"
    ),
    "a name that says nothing": (Padding("longest"), nameless, "seen has rows of several lengths.*values=.'seen': 0"),
    "no such name": (Padding({"input_id": 8}), by_name, "attention_mask, input_ids, labels; found padding for input_id"),
    "a place": (Padding("longest"), by_place, "input 1 has rows of several lengths.*values=.1: 0"),
}  # fmt: skip


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_whose_rows_cannot_be_padded_is_refused_with_the_cure(data, workers, tmp_path):
    padding, collate, words = DATA[data]
    rows = loader(collate, num_workers=workers)
    with pytest.raises(DataError, match=words):
        trainer(tmp_path, padding).fit(rows)


def test_a_batch_that_cannot_be_padded_is_refused_and_the_session_goes_on(tmp_path):
    options = {"mem_limit": "2GB", "method": "full", "lr": 0.1, "batch_size": BATCH, "quiet": True, "offload_dir": tmp_path}
    batches = list(loader())
    with Trainer(made(), None, "sgd", padding=Padding(LONGEST), **options).session(batches[0]) as session:
        session.step(batches[0])
        longer = by_name([Texts(longest=9)[index] for index in range(BATCH)])
        with pytest.raises(
            DataError, match=r"the batch: expected rows of input_ids of at most .* places.*found one of 8.*length of 8 or more"
        ):
            session.step(longer)
        session.step(batches[1])
        found = session.state_dict()
    same(found, plainly(LONGEST, batches=batches[:2]))
    with Trainer(made(), None, "sgd", **options).session(batches[0]) as session:
        other = next(batch for batch in batches if batch["labels"].shape != batches[0]["labels"].shape)
        with pytest.raises(DataError, match=r"expected rows as the example has, a dict of input_ids.*padding=seqpart.Padding"):
            session.step(other)


def test_a_session_measures_the_longest_row_of_an_example_without_labels(tmp_path):
    """It looked for labels in these tensors, and refused them; `fit` takes them."""
    rows = [torch.arange(1, 1 + length) for length in (2, LONGEST, 3, 4)]
    model = nn.Sequential(nn.Embedding(TOKENS, 3), nn.Linear(3, 1))
    options = {"mem_limit": "2GB", "method": "full", "batch_size": len(rows), "quiet": True, "offload_dir": tmp_path}
    trainer = Trainer(model, lambda output: output.square().mean(), padding=Padding("longest"), **options)
    with trainer.session(rows) as session:
        assert session.step(pad_sequence(rows, True, 0)) > 0
        assert session.step(rows[0].repeat(len(rows), 1)) > 0  # shorter ones are padded to that length


def test_padded_rows_are_verified(tmp_path):
    options = {"mem_limit": "2GB", "batch_size": BATCH, "offload_dir": tmp_path, "padding": Padding("longest")}
    assert verify(made(), Texts(), steps=1, **options).tensors > 0
