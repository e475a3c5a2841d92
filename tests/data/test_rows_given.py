"""What may stand for rows, and what a user of plain PyTorch gives instead. A tensor alone was taken for a list of pairs, and
where its rows had two numbers it was trained on; a dict of tensors was asked for its item 0; a misspelled input was passed
on to a forward with **kwargs, which left it unused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from seqpart import Trainer
from seqpart.data.items import with_inputs
from seqpart.errors import DataError, ModelError

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, left, right):
        return self.head(self.left(left) + self.right(right).relu())


class Lenient(Two):
    """As transformers' models are."""

    def forward(self, left=None, right=None, **kwargs):
        return super().forward(left, left if right is None else right)


def trainer(model=Two, folder=None, **options):
    torch.manual_seed(0)
    more = {} if folder is None else {"output_dir": folder, "epochs": 1}
    return Trainer(model(), mem_limit="2GB", method="full", batch_size=8, quiet=True, **options, **more)


def one_tensor():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (X, r"expected a pair \(x, y\) of rows and labels; found a Tensor alone, of shape \(24, 4\). Give \(x, y\)"),
        (X[:, :2], r"found a Tensor alone, of shape \(24, 2\)"),
        (X.numpy(), r"found a ndarray alone"),
        ({"x": X, "y": Y}, r"expected a dict with labels .*; found x, y. Name them labels, or give a pair"),
        ({"train": (X, Y), "test": (X, Y)}, r"found several data sets: train, test. Give one of them, as data\['train'\]"),
        ([{"x": X[0], "text": "one", "labels": 0}] * 8, "item 0: expected numbers; text is the text 'one'. Turn texts into"),
        ("rows.npz", "found the text 'rows.npz'"),
        ((X.tolist(), Y.tolist()), r"found two lists, of 24 and 24. Give \(torch.tensor\(x\), torch.tensor\(y\)\)"),
        ((X, Y, "text"), r"item 0: expected a pair \(x, label\), .*or a dict with labels; found a Tensor of shape \(24, 4\)"),
    ],
    ids=[
        "tensor",
        "two columns",
        "array",
        "dict",
        "dict of sets",
        "texts",
        "text",
        "lists",
        "three",
    ],
)
@pytest.mark.parametrize("cache", ["auto", "none"])
def test_what_is_no_rows_with_labels_is_refused_with_what_is(rows, words, cache):
    with pytest.raises(DataError, match=words):
        trainer(one_tensor, cache=cache).plan(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"x": X.tolist(), "labels": Y}, r"expected tensors or arrays with all rows; found a list. Give torch.tensor"),
        ((X, (Y, (X, Y))), "data: expected a tuple or a dict of tensors; found a tuple of several in it, as 1"),
        ([(x, (y, [x, y])) for x, y in zip(X, Y, strict=True)], "expected .* tensors; found a list of several in it, as 1"),
    ],
)
def test_lists_that_are_no_tensors_are_named(rows, words):
    """Errors were of Python or of numpy, and spoke of padding."""
    with pytest.raises(DataError, match=words):
        trainer(one_tensor, loss=lambda output, labels: output.mean()).plan(rows)


NESTED = {
    "rows": lambda: ({"a": {"b": X, "c": X}}, Y),
    "labels": lambda: (X, {"a": {"b": Y, "c": Y}}),
    "a tuple": lambda: [((x, {"b": x, "c": x}), y) for x, y in zip(X, Y, strict=True)],
    "items": lambda: [({"a": {"b": x, "c": x}}, y) for x, y in zip(X, Y, strict=True)],
    "a loader": lambda: DataLoader([*X], collate_fn=lambda some: {"a": {"b": X[:1], "c": X[:1]}, "labels": Y[: len(some)]}),
}


@pytest.mark.parametrize("given", NESTED)
def test_a_dict_in_a_dict_is_refused_by_its_name(given):
    """It was "Could not infer dtype of dict", and of a collate_fn "made 2 rows of 8 items"."""
    with pytest.raises(DataError, match=r"data: .*a dict in it, as ('a'|1), of b, c\. Give each of these a name"):
        trainer(loss=lambda output, labels: output.mean()).plan(NESTED[given]())


def test_labels_may_be_a_list_of_numbers_beside_a_tensor(tmp_path):
    """The pair was taken for two items, of which the first was no pair."""
    for labels in (Y.tolist(), [*Y]):
        made = trainer(one_tensor)
        with made.session((X, labels)) as session, trainer(one_tensor).session((X, Y)) as other:
            assert session.step((X[:8], labels[:8])) == other.step((X[:8], Y[:8]))
        assert trainer(one_tensor).plan((X, labels)) is not None


def test_a_table_of_pandas_is_refused_and_its_columns_are_taken(recwarn):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = pandas.DataFrame({name: X[:, number].numpy() for number, name in enumerate("abcd")} | {"y": Y.numpy()})
    with pytest.raises(DataError, match=r"found a table of pandas. Give \(table\[\[NAME, ...\]\].to_numpy\(\), table\[NAME\]"):
        trainer(one_tensor).plan(table)
    trainer(one_tensor).plan((table[["a", "b", "c", "d"]].to_numpy(), table["y"]))
    assert not recwarn.list


def test_rows_and_labels_as_two_arguments_are_told_to_be_one():
    for call in (trainer(one_tensor).fit, trainer(one_tensor).plan):
        with pytest.raises(DataError, match=r"Give x and y as one argument: fit\(\(x, y\)\)"):
            call(X, Y)


def test_a_dict_of_all_rows_with_their_labels_is_taken_as_the_pair_of_it(tmp_path):
    inputs = {"left": X, "right": X.flip(0)}
    pair = trainer(Two, tmp_path / "pair").fit((inputs, Y)).state_dict()
    for labels in ("labels", "label"):
        found = trainer(Two, tmp_path / labels).fit({**inputs, labels: Y.tolist()}).state_dict()
        assert all(torch.equal(pair[name], found[name]) for name in pair)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (Two, {"left": X, "rigth": X}, r"Two takes \(left, right\); found left .*, rigth .* Did you mean right\?"),
        (Lenient, {"left": X, "rigth": X}, r"one has another name there. Did you mean right\?"),
        (Two, {"left": X}, "missing a required argument: 'right'. Give each in x: a dict by name, or a tuple in order"),
        (Two, (X, X, X), "too many positional arguments"),
        (Two, X, "found one tensor: missing a required argument: 'right'"),
    ],
    ids=["misspelled", "misspelled and left unused", "missing", "too many", "one"],
)
def test_inputs_that_the_model_does_not_take_are_told_with_those_that_it_takes(model, inputs, words):
    with pytest.raises(DataError, match=words):
        trainer(model).plan((inputs, Y))


def test_other_names_are_left_to_a_forward_that_takes_any():
    assert trainer(Lenient).plan(({"left": X, "weight": X}, Y)).method == "full"


def test_a_list_of_blocks_is_given_its_tensor_by_no_name():
    with pytest.raises(ModelError, match=r"a row has a dict of x \(4,\) float32. Give the tensor itself, \(x, y\)"):
        trainer(lambda: [*one_tensor()]).plan(({"x": X}, Y))
    with pytest.raises(DataError, match=r"x has one number a row .* x\[:, None\]"):
        trainer(lambda: [*one_tensor()]).plan((X[:, 0], Y))
    with pytest.raises(DataError, match=r"the inputs that Sequential takes \(input\); found x \(4,\) float32"):
        trainer(one_tensor).plan(({"x": X}, Y))


def test_a_forward_of_one_parameter_takes_the_inputs_by_name_as_one_dict(tmp_path):
    """forward(self, batch) was refused: "expected the inputs (batch); found left, right"."""

    class OfBatch(Two):
        def forward(self, batch):
            return super().forward(batch["left"], batch["right"])

    rows = {"left": X, "right": X.flip(0), "labels": Y}
    losses = [
        trainer(model, tmp_path / model.__name__, shuffle=False, partitions=parts).fit(rows, rows).train_losses
        for model, parts in ((Two, 1), (OfBatch, 1))
    ]
    assert losses[0] == losses[1]

    class Flagged(OfBatch):
        def forward(self, batch, /, doubled=False):
            return super().forward(batch)

    assert trainer(Flagged).plan(rows)
    with pytest.raises(DataError, match="Did you mean batch"):
        trainer(OfBatch).plan(({"batches": X, "right": X}, Y))


def test_inputs_by_name_may_come_in_any_order():
    """A batch with the names in another order was refused as of another kind, in bytes."""
    with trainer().session({"left": X[:8], "right": X[8:16], "labels": Y[:8]}) as session:
        first = session.step({"labels": Y[:8], "right": X[8:16], "left": X[:8]})
        with pytest.raises(DataError, match=r"expected rows as the example has, a dict of left .*; found \(4,\) float32"):
            session.step((X[:8], Y[:8]))
    with trainer().session({"left": X[:8], "right": X[8:16], "labels": Y[:8]}) as session:
        assert session.step(({"left": X[:8], "right": X[8:16]}, Y[:8])) == first
    items = [{"left": a, "right": a} if i % 2 else {"right": a, "left": a} for i, a in enumerate(X)]
    assert trainer().plan([(item, int(y)) for item, y in zip(items, Y, strict=True)]).method == "full"


def several(x_by_name, y_by_name, *, at=None):
    """Two inputs and two labels, of all rows or of one."""
    inputs, labels = (X, X.flip(0)), (X[:, :3], X[:, 1:])
    inputs, labels = ((one, other) if at is None else (one[at], other[at]) for one, other in (inputs, labels))
    x = dict(zip(("left", "right"), inputs, strict=True)) if x_by_name else inputs
    return x, dict(zip("ab", labels, strict=True)) if y_by_name else labels


def both(output, labels):
    one, other = labels.values() if isinstance(labels, dict) else labels
    return nn.functional.mse_loss(output, one) + nn.functional.mse_loss(output.exp(), other)


@pytest.mark.parametrize("y_by_name", [True, False], ids=["labels by name", "labels in order"])
@pytest.mark.parametrize("x_by_name", [True, False], ids=["inputs by name", "inputs in order"])
def test_several_inputs_go_with_several_labels_however_they_are_given(x_by_name, y_by_name, tmp_path):
    """A loader of pairs of tuples ended with numpy's words for unlike shapes, and pairs of dicts were asked to be pairs."""
    items = [several(x_by_name, y_by_name, at=row) for row in range(len(X))]
    given = {"all": several(x_by_name, y_by_name), "items": items, "loader": DataLoader(items, batch_size=8)}
    if y_by_name and not x_by_name:
        given["labels last"] = (*given["all"][0], given["all"][1])
    losses = set()
    for name, data in given.items():
        torch.manual_seed(0)
        options = {"mem_limit": "2GB", "method": "full", "batch_size": 8, "epochs": 1, "shuffle": False, "quiet": True}
        losses |= {Trainer(Two(), both, **options, output_dir=tmp_path / name).fit(data).train_losses}
    assert len(losses) == 1


class Ratings(nn.Module):
    """Two ids in, a score out: a matrix factorization."""

    def __init__(self):
        super().__init__()
        self.users, self.films = nn.Embedding(9, 4), nn.Embedding(7, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, user, film):
        return self.score(self.users(user) * self.films(film)).squeeze(1)


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def rating_rows():
    user, film = torch.arange(24) % 9, torch.arange(24) * 5 % 7
    return user, film, (user - film).float()


@pytest.mark.parametrize(
    "given",
    [
        lambda *rows: TensorDataset(*rows),
        lambda *rows: DataLoader(TensorDataset(*rows), batch_size=8),
        lambda *rows: [tuple(one.item() for one in item) for item in zip(*rows, strict=True)],
        lambda *rows: [((int(user), int(film)), float(score)) for user, film, score in zip(*rows, strict=True)],
        lambda *rows: DataLoader(Stream(list(zip(*(one.numpy() for one in rows), strict=True))), batch_size=8),
    ],
    ids=["tensors", "loader", "numbers", "pairs", "stream of scalars"],
)
def test_numbers_are_inputs_of_their_own_for_a_model_that_takes_several(given, tmp_path):
    """A TensorDataset of users, films and ratings was refused: "expected the inputs (user, film); found one tensor"."""

    def made(name):
        torch.manual_seed(0)
        options = {"mem_limit": "2GB", "method": "full", "batch_size": 8, "shuffle": False, "quiet": True}
        return Trainer(Ratings(), "mse", **options, output_dir=tmp_path / name)

    user, film, score = rating_rows()
    one, other = made("one"), made("other")
    data = given(user, film, score)
    expected, found = one.fit(((user, film), score), ((user, film), score)), other.fit(data, data)
    assert (found.train_losses, found.test_loss) == (expected.train_losses, expected.test_loss)
    assert other.evaluate(data).loss == pytest.approx(expected.test_loss)
    with made("loop").session(data) as session:
        loss = session.step(((user[:8], film[:8]), score[:8]))
        assert loss != session.evaluate(data).loss == session.evaluate(((user, film), score)).loss


@pytest.mark.parametrize("kind", ["items", "loader", "session"])
def test_rows_of_one_number_come_to_the_model_as_in_a_plain_loop(kind, tmp_path):
    """Ids of shape (rows,) were refused, and as a data set ended in an IndexError."""
    ids = torch.arange(24) % 9

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 3))

    options = {"mem_limit": "2GB", "method": "streamed", "partitions": 2, "batch_size": 8, "shuffle": False, "quiet": True}
    model, plain = made(), made()
    one = Trainer(model, None, torch.optim.Adam, **options, output_dir=tmp_path / "run")
    items = [(int(x), int(y)) for x, y in zip(ids, Y, strict=True)]
    if kind == "session":
        with one.session((ids[:8], Y[:8])) as session:
            for at in range(0, 24, 8):
                session.step((ids[at : at + 8], Y[at : at + 8]))
    else:
        one.settings = replace(one.settings, epochs=1)
        one.fit(items if kind == "items" else DataLoader(TensorDataset(ids, Y), batch_size=8), (ids, Y))
    optimizer = torch.optim.Adam(plain.parameters())
    for at in range(0, 24, 8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(ids[at : at + 8]), Y[at : at + 8]).backward()
        optimizer.step()
    for name, found in model.state_dict().items():
        assert torch.equal(found, plain.state_dict()[name]), name


def test_a_number_beside_a_tensor_is_an_input_of_its_own(tmp_path):
    """(image, age) with an age that Python made was refused: "only one element tensors can be converted"."""

    class Aged(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.age = nn.Linear(4, 8), nn.Embedding(9, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, image, age):
            return self.head(self.image(image) + self.age(age))

    losses = []
    for name, data in {
        "pair": ((X, torch.arange(24) % 9), Y),
        "items": [((X[i], i % 9), int(Y[i])) for i in range(24)],
    }.items():
        losses.append(trainer(Aged, tmp_path / name, shuffle=False).fit(data).train_losses)
    assert losses[0] == losses[1]


def test_labels_of_their_own_are_not_the_targets_of_a_data_set(tmp_path):
    class Rated(Dataset):
        def __init__(self):
            self.targets = [(float(i), i % 3) for i in range(24)]

        def __len__(self):
            return 24

        def __getitem__(self, index):
            return X[index], self.targets[index]

    def loss(output, labels):
        return nn.functional.mse_loss(output[:, 0], labels[0]) + nn.functional.cross_entropy(output, labels[1])

    loss.__module__ = None  # as of a function that `exec` made
    pair = (X, (torch.arange(24).float(), Y))
    losses = [
        trainer(one_tensor, tmp_path / str(n), loss=loss, shuffle=False).fit(d).train_losses
        for n, d in enumerate((Rated(), pair))
    ]
    assert losses[0] == losses[1]


def test_the_command_takes_ids_before_it_has_a_model():
    assert with_inputs(TensorDataset(torch.arange(4), torch.arange(4)), None)[2] == ((2,), 2)


def test_numbers_are_one_row_for_a_model_that_takes_one_input(tmp_path):
    torch.manual_seed(0)
    rows = [((0.0, 1.0), 1), ((1.0, 1.0), 0)] * 8
    assert Trainer(nn.Linear(2, 2), mem_limit="2GB", method="full", batch_size=8, quiet=True).plan(rows)


def test_rows_without_labels_may_have_targets(tmp_path):
    """The zeros that stand for their labels were compared with them, and refused."""

    class Digits(TensorDataset):
        targets = torch.arange(len(X)) == 13

        def __getitem__(self, index):
            return self.tensors[0][index]

    found = Trainer(
        nn.Linear(4, 3), lambda output: output.square().mean(), mem_limit="2GB", method="full", batch_size=8, quiet=True
    )
    assert found.plan(Digits(X))


def test_several_inputs_without_labels_are_a_tuple_in_a_tuple(tmp_path):
    """The refusal of others said "a tuple in order", and no tuple was taken."""

    class Both(Two):
        def forward(self, left, right):
            return self.left(left), self.right(right)

    def far(found):
        return nn.functional.mse_loss(*found)

    options = {"mem_limit": "2GB", "method": "full", "batch_size": 8, "epochs": 1, "quiet": True}
    losses = []
    for number, data in enumerate([((X, X.flip(0)),), {"left": X, "right": X.flip(0)}]):
        torch.manual_seed(0)
        losses.append(Trainer(Both(), far, **options, output_dir=tmp_path / str(number)).fit(data).train_losses)
    assert losses[0] == losses[1]
    with pytest.raises(DataError, match=r"where rows have no labels, fit\(\(\(a, b\),\)\)"):
        Trainer(Both(), far, **options).plan((X, X))
