"""Labels of any shape: vectors, several yes-or-no answers, masks, images, and several labels in a row."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from seqpart import Trainer
from seqpart.data.classes import count_classes
from seqpart.data.labels import LossOfSeveral
from seqpart.data.splits import as_split
from seqpart.errors import DataError, OptionError
from seqpart.model.losses import classes_first, multi_label, regression, scores_of, token_cross_entropy

ROWS, BATCH = 24, 8

pytestmark = pytest.mark.usefixtures("known_machine")


def rows(seed, *shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(seed, most, *shape):
    return torch.randint(0, most, (ROWS, *shape), generator=torch.Generator().manual_seed(seed))


def vectors():
    torch.manual_seed(3)
    return [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)]


def images(channels):
    torch.manual_seed(3)
    return [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, channels, 3, padding=1)]


def padded_masks():
    """Of two rows nothing counts, and of the others more and more."""
    masks = whole_numbers(2, 4, 6, 5)
    for row in range(ROWS):
        masks[row].view(-1)[: row % 7 * 5] = -100
    masks[2:4] = -100
    return masks


def boxes_and_classes(output, labels):
    boxes = F.l1_loss(output[:, :4], labels["boxes"].flatten(1)[:, :4], reduction="sum")
    return boxes + F.cross_entropy(output[:, 1:], labels["classes"][:, 0], reduction="sum"), len(output)


def two_targets(output, labels):
    angle, where = labels
    return F.mse_loss(output[:, 0], angle) + F.mse_loss(output[:, 1:], where)


def mean_of(loss):
    def mean(output, labels):
        total, count = loss(output, labels)
        return total / count

    return mean


DETECTED = {"boxes": rows(8, 3, 4), "classes": whole_numbers(9, 4, 3)}
CASES = {  # what is trained, x, labels, the loss that is given, what a plain loop computes
    "a vector": (vectors, rows(1, 6), rows(2, 5), None, F.mse_loss),
    "several yes-or-no labels": (
        vectors, rows(1, 6), whole_numbers(2, 2, 5).float(), "bce", F.binary_cross_entropy_with_logits
    ),
    "the same as whole numbers": (
        vectors, rows(1, 6), whole_numbers(2, 2, 5).bool(), "bce",
        lambda output, labels: F.binary_cross_entropy_with_logits(output, labels.float()),
    ),
    "a mask of classes": (functools.partial(images, 4), rows(1, 3, 6, 5), whole_numbers(2, 4, 6, 5), None, F.cross_entropy),
    "a mask of which a part counts": (functools.partial(images, 4), rows(1, 3, 6, 5), padded_masks(), None, F.cross_entropy),
    "the same by torch's own": (
        functools.partial(images, 4), rows(1, 3, 6, 5), padded_masks(), nn.CrossEntropyLoss(), F.cross_entropy
    ),
    "a mask of floats": (
        functools.partial(images, 1), rows(1, 3, 6, 5), whole_numbers(2, 2, 1, 6, 5).float(), "bce",
        F.binary_cross_entropy_with_logits,
    ),
    "an image": (functools.partial(images, 3), rows(1, 3, 6, 5), rows(2, 3, 6, 5), "mse", F.mse_loss),
    "an image, a loss of one's own": (functools.partial(images, 3), rows(1, 3, 6, 5), rows(2, 3, 6, 5), F.l1_loss, F.l1_loss),
    "boxes and their classes": (vectors, rows(1, 6), DETECTED, boxes_and_classes, mean_of(boxes_and_classes)),
    "two targets": (vectors, rows(1, 6), (rows(4), rows(5, 4)), two_targets, two_targets),
}  # fmt: skip


def some(labels, picked):
    if isinstance(labels, dict):
        return {name: tensor[picked] for name, tensor in labels.items()}
    return tuple(tensor[picked] for tensor in labels) if isinstance(labels, tuple) else labels[picked]


def plain(model, loss, x, y):
    """Whole batches, as a plain PyTorch loop trains them; and its loss on all rows."""
    network = nn.Sequential(*model())
    step = torch.optim.SGD(network.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            picked = slice(start, start + BATCH)
            loss(network(x[picked]), some(y, picked)).backward()
            step.step()
            step.zero_grad()
    return network, loss(network(x), y).item()


def trained(folder, model, loss, data, **options):
    trainer = Trainer(
        model(), loss, mem_limit="2GB", batch_size=BATCH, epochs=2, lr=1e-2, optimizer="sgd", shuffle=False, quiet=True,
        output_dir=folder, **{"method": "full", **options},
    )  # fmt: skip
    return trainer.fit(data, data)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(1)
def test_labels_of_any_shape_train_to_the_bits_of_a_plain_loop_however_a_batch_is_divided(name, tmp_path):
    model, x, y, loss, same = CASES[name]
    network, tested = plain(model, same, x, y)
    for micro_batch in (BATCH, 3):
        result = trained(tmp_path / str(micro_batch), model, loss, (x, y), micro_batch_size=micro_batch)
        found = load_file(result.weights)
        for key, tensor in network.state_dict().items():
            if micro_batch == BATCH:
                assert torch.equal(found[key], tensor), key
            else:  # the sums of 8 rows are added up in another order
                torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)
        assert result.test_loss == pytest.approx(tested, rel=1e-5)
        if y is not DETECTED and not isinstance(y, tuple) and not y.is_floating_point() and y.ndim > 2:
            right = network(x).argmax(1) == y
            assert result.accuracy == pytest.approx(float(right[y != -100].float().mean()))
        else:
            assert result.accuracy is None


@pytest.mark.parametrize("name", ["a mask of which a part counts", "several yes-or-no labels", "boxes and their classes"])
@pytest.mark.few(1)
def test_exact_methods_have_the_bits_of_full_with_such_labels(name, tmp_path):
    model, x, y, loss, _ = CASES[name]
    full = trained(tmp_path / "full", model, loss, (x, y), micro_batch_size=3)
    for method in ("streamed", "checkpointed"):
        other = trained(tmp_path / method, model, loss, (x, y), micro_batch_size=3, method=method, partitions=2)
        assert other.weights.read_bytes() == full.weights.read_bytes()
        assert (other.train_losses, other.test_loss) == (full.train_losses, full.test_loss)


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


def test_items_and_whole_tensors_give_the_same_labels():
    x = rows(1, 6)
    for y in (rows(2, 5), rows(2, 3, 4), DETECTED, (rows(4), rows(5, 4))):
        whole = as_split((x, y), "training")
        items = as_split(Items([(x[i], some(y, i)) for i in range(ROWS)]), "training")
        assert torch.equal(whole.labels, items.labels)
        assert whole.label_form == items.label_form and bool(whole.label_form) == (not isinstance(y, torch.Tensor))


def test_an_item_of_dicts_has_its_labels_as_a_dict_too():
    split = as_split(Items([{"x": rows(1, 6)[i], "labels": some(DETECTED, i)} for i in range(ROWS)]), "training")
    assert [one.name for one in split.label_form] == ["boxes", "classes"] and [one.name for one in split.form] == ["x"]


@given(st.lists(st.integers(1, 3), max_size=3), st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8]))
def test_labels_of_a_data_set_have_the_shape_of_its_tensors(shape, dtype):
    """A tensor of one number lost its dimensions: targets (rows, 1) of a TensorDataset came as (rows,), and MSELoss compared
    each output with those of all rows, in silence where a batch was not divided."""
    x, y = rows(1, 6), whole_numbers(2, 4, *shape).to(dtype)
    whole, items = as_split((x, y), "training"), as_split(TensorDataset(x, y), "training")
    assert items.labels.shape == y.shape
    assert torch.equal(items.labels, whole.labels)


def test_a_regression_from_a_data_set_has_the_bits_of_a_plain_loop(tmp_path):
    x, y = rows(1, 6), rows(2, 1)
    model, plain = (nn.Sequential(*vectors()[:2], nn.Linear(16, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    options = {"mem_limit": "2GB", "method": "full", "batch_size": BATCH, "epochs": 1, "shuffle": False, "quiet": True}
    Trainer(model, nn.MSELoss(), torch.optim.Adam, **options, output_dir=tmp_path).fit(TensorDataset(x, y), TensorDataset(x, y))
    optimizer = torch.optim.Adam(plain.parameters())
    for at in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        F.mse_loss(plain(x[at : at + BATCH]), y[at : at + BATCH]).backward()
        optimizer.step()
    for name, found in model.state_dict().items():
        assert torch.equal(found, plain.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["numbers", "scalars", "loader"])
def test_a_tuple_of_numbers_comes_to_a_function_as_labels_of_their_own(kind, tmp_path):
    """They came as one tensor (rows, 2), of which labels[0] is a row, and the loss was refused for sizes that do not match."""
    x, one, other = rows(1, 6), rows(2), whole_numbers(3, 4)

    def loss(output, labels):
        return F.mse_loss(output[:, 0], labels[0]) + F.cross_entropy(output[:, 1:], labels[1])

    items = [(x[i], (one[i].item(), other[i].item()) if kind == "numbers" else (one[i], other[i])) for i in range(ROWS)]
    losses = []
    for name, data in {"pair": (x, (one, other)), kind: DataLoader(items, BATCH) if kind == "loader" else items}.items():
        options = {"mem_limit": "2GB", "method": "full", "batch_size": BATCH, "epochs": 1, "shuffle": False, "quiet": True}
        run = Trainer(nn.Sequential(*vectors()), loss, **options, output_dir=tmp_path / name)
        losses.append(run.fit(data, data).train_losses)
    assert losses[0] == losses[1]
    vector = [(x[i], (1.0, 2.0)) for i in range(ROWS)]
    assert Trainer(nn.Linear(6, 2), nn.MSELoss(), **options).plan(vector), "torch's own losses take one tensor"


@given(st.integers(1, 5), st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(1, 4), max_size=2))
def test_several_labels_come_to_the_loss_as_they_were_given(count, first, second):
    y = {"a": torch.randn(count, *first), "b": torch.randint(0, 9, (count, *second)), "c": torch.rand(count) < 0.5}
    split = as_split((torch.zeros(count, 2), y), "training")
    seen = LossOfSeveral(lambda _, labels: labels, split.label_form)(None, split.labels)
    assert list(seen) == list(y)
    for name, tensor in y.items():
        assert torch.equal(seen[name], tensor) and seen[name].dtype == tensor.dtype


def test_floats_have_no_accuracy_and_no_classes():
    split = as_split((rows(1, 6), rows(2, 5)), "training")
    assert count_classes(split, split) == 0
    assert scores_of(torch.zeros(3, 5, 2), torch.zeros(3, 5)) is None


@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))
def test_classes_are_found_in_front_and_behind(count, classes, height, width):
    output, labels = torch.randn(count, classes, height, width), torch.randint(classes, (count, height, width))
    if classes_first((classes, height, width), (height, width)):
        assert torch.equal(token_cross_entropy(output, labels), F.cross_entropy(output, labels))
        scores, own = scores_of(output, labels)
        assert torch.equal(scores.argmax(1), output.argmax(1)) and own is labels
    behind = output.movedim(1, -1).contiguous()
    if not classes_first((height, width, classes), (height, width)):
        torch.testing.assert_close(token_cross_entropy(behind, labels), F.cross_entropy(output, labels))


def test_torchs_own_loss_has_its_classes_in_dimension_1_also_where_either_would_do():
    output, labels = torch.randn(2, 3, 3), torch.randint(3, (2, 3))
    scores, _ = scores_of(output, labels, first=True)
    assert scores is output
    flat, _ = scores_of(output, labels)
    assert torch.equal(flat, output.flatten(0, 1))


def test_regression_and_multi_label_keep_their_types():
    for output in (torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.bfloat16)):
        assert multi_label(output, torch.ones(3, 4)).dtype == torch.promote_types(output.dtype, torch.float32)
        assert regression(output, torch.ones(3, 4)).isfinite()


X = rows(1, 6)
REFUSED = {
    r"a regression needs outputs of the shape \(4,\) of a row's labels; the network ends with shape \(5,\)": (rows(2, 4), None),
    r"loss bce needs labels from 0 to 1, .*; found -100\. .*\(sum, count\)": (
        whole_numbers(2, 3, 5).where(whole_numbers(2, 3, 5) < 2, -100),
        "bce",
    ),
    r"loss bce needs labels from 0 to 1, .*; found 1\.5": (torch.full((ROWS, 5), 1.5), "bce"),
    r"several labels \(boxes \(3, 4\) float32, classes \(3,\) int64\), which no loss given by name takes": (DETECTED, None),
    "labels: NaN or infinity in row 3": (rows(2, 5).index_fill(0, torch.tensor(3), torch.nan), None),
    "labels: NaN or infinity in boxes": ({**DETECTED, "boxes": rows(8, 3, 4) / 0}, boxes_and_classes),
    "expected equally many rows of each; found 23 and 24": ({"a": rows(1, 2), "b": rows(1)[:23]}, boxes_and_classes),
}


@pytest.mark.parametrize("words", REFUSED)
def test_labels_that_do_not_fit_are_refused_in_words(words, tmp_path):
    y, loss = REFUSED[words]
    with pytest.raises((DataError, OptionError), match=words):
        trained(tmp_path, vectors, loss, (X, y))


def test_training_and_test_rows_have_the_same_labels(tmp_path):
    one, other = (as_split((X, labels), "training") for labels in (DETECTED, (rows(4), rows(5, 4))))
    with pytest.raises(DataError, match=r"labels differ: training rows have boxes .*, and test rows \(\) float32"):
        count_classes(one, other)


def test_sil_needs_classes(tmp_path):
    for y, found in ((rows(2, 5), "floats"), (DETECTED, "several labels in a row")):
        with pytest.raises(DataError, match=f"method sil needs classes .*; found {found}"):
            trained(tmp_path, vectors, boxes_and_classes, (X, y), method="sil")


def test_masks_of_which_either_end_may_be_the_classes_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"the first or the last dimension may be the classes\. Give a function"):
        trained(tmp_path, functools.partial(images, 4), None, (rows(1, 3, 4, 4), whole_numbers(2, 4, 4, 4)))


def test_an_npz_file_may_have_vectors_as_labels(tmp_path):
    from seqpart.zoo.datasets import load

    x, y = rows(1, 6).numpy(), rows(2, 5).numpy()
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    train, test = load(f"npz:{tmp_path / 'a.npz'}")
    assert torch.equal(as_split(train, "training").labels, torch.from_numpy(y))
    assert torch.equal(as_split(test, "test").labels, torch.from_numpy(y[:5]))


def test_the_page_about_labels_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (snippet,) = (found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "unet" in found)
    exec(snippet, {})
    assert 0 < float(capsys.readouterr().out.splitlines()[-1]) < 1


@pytest.mark.parametrize("loss", [None, F.cross_entropy, nn.CrossEntropyLoss()])
def test_rows_of_mixed_labels_are_tested_on_classes(loss, tmp_path):
    """The recipe of MixUp: "labels differ: training has shape (24, 3) and test (24,)"."""
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    mixed = F.one_hot(y, 3) * 0.7 + F.one_hot(y.roll(1), 3) * 0.3
    model = nn.Linear(6, 3)
    trainer = Trainer(model, loss, mem_limit="2GB", method="full", batch_size=8, quiet=True, output_dir=tmp_path / "run")
    result = trainer.fit((x, mixed), (x, y))
    assert result.test_loss == pytest.approx(float(F.cross_entropy(model(x).detach(), y)), rel=1e-5)
    assert result.accuracy == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
    with pytest.raises(DataError, match="found class 3; training rows have the probabilities of 3 classes"):
        Trainer(nn.Linear(6, 3), loss, mem_limit="2GB", method="full", quiet=True).plan((x, mixed), (x, y + 1))
