"""The loss that a run takes by itself, and what its accuracy is counted from."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, OptionError
from seqpart.model.losses import (
    IGNORED,
    cross_entropy_in_chunks,
    loss_named,
    refuse_unlike,
    regression,
    scores_of,
    token_cross_entropy,
)
from seqpart.profile.blocks import measure_loss
from tests.given import classified

sizes = st.integers(1, 4)


def outputs_and_labels(rows, positions, classes):
    output = torch.randn(rows, *positions, classes, dtype=torch.float64)
    return output, torch.randint(classes, (rows, *positions))


@given(sizes, st.lists(sizes, max_size=2), sizes)
def test_labels_of_positions_are_judged_as_torch_judges_them_with_classes_in_dimension_1(rows, positions, classes):
    output, labels = outputs_and_labels(rows, positions, classes)
    torch.testing.assert_close(token_cross_entropy(output, labels), F.cross_entropy(output.movedim(-1, 1), labels))


@given(sizes, sizes, sizes)
def test_the_loss_of_a_batch_is_the_mean_of_the_losses_of_its_rows(rows, positions, classes):
    output, labels = outputs_and_labels(rows, [positions], classes)
    each = torch.stack([token_cross_entropy(output[i : i + 1], labels[i : i + 1]) for i in range(rows)])
    torch.testing.assert_close(token_cross_entropy(output, labels), each.mean())


@given(
    st.integers(1, 60), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(1, 5000), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(["mean", "sum"]), st.integers(0, 9),
)  # fmt: skip
def test_cross_entropy_in_chunks_has_the_bits_of_torch_and_so_have_its_gradients(
    n, classes, dtype, nbytes, ignored, kind, seed
):  # fmt: skip
    torch.manual_seed(seed)
    scores, labels = (3 * torch.randn(n, classes)).to(dtype), torch.randint(classes, (n,))
    labels[torch.rand(n) < ignored] = IGNORED
    one, other = (scores.clone().requires_grad_() for _ in range(2))
    found, expected = cross_entropy_in_chunks(one, labels, nbytes, kind), F.cross_entropy(other, labels, reduction=kind)
    (found * 0.7).backward()
    (expected * 0.7).backward()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num()) and found.isnan() == expected.isnan()
    assert torch.equal(one.grad, other.grad)


def test_scores_of_a_large_vocabulary_are_judged_by_the_same_bits_in_a_third_of_the_memory_beside_them():
    torch.manual_seed(0)
    output, labels = torch.randn(2, 160, 60_000), torch.randint(60_000, (2, 160))

    def whole(scores, labels):
        return F.cross_entropy(scores.flatten(0, -2), labels.flatten())

    def measured(loss):
        return measure_loss(lambda scores: loss(scores, labels), (160, 60_000), 2)

    assert measured(whole) > 2.9 * output.nbytes and measured(token_cross_entropy) < output.nbytes + (32 << 20)
    one, other = (output.clone().requires_grad_() for _ in range(2))
    token_cross_entropy(one, labels).backward()
    whole(other, labels).backward()
    assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("labels", "classes", "loss"),
    [
        (torch.zeros(3), 0, regression),
        (torch.zeros(3, dtype=torch.int64), 2, F.cross_entropy),
        (torch.zeros(3, 5, dtype=torch.uint8), 2, token_cross_entropy),
    ],
)
def test_the_kind_of_the_labels_chooses_the_loss(labels, classes, loss):
    assert loss_named(None, labels, classes) is loss


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_regression_is_the_mean_squared_error_of_one_output_per_row(shape):
    output, labels = torch.randn(4), torch.randn(4)
    assert torch.equal(regression(output.view(shape), labels), F.mse_loss(output, labels))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.arange(8) % 7, r"outputs of shape \(5,\), and the labels have 7 classes, .*Let the last block have 7 outputs\."),
        (1 + torch.arange(8) % 5, r"have 6 classes, .* have 6 outputs, or take 1 from every label: none is 0\."),
        (torch.rand(8), r"labels are torch.float32 of shape \(\). Give classes as integers \(labels.long\(\)\), or the prob"),
        (torch.zeros(8, 1).long(), r"labels have the shape \(rows, 1\). Give labels.squeeze\(1\)"),
    ],
    ids=["more classes", "from 1 on", "floats", "a column"],
)
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_labels_that_cross_entropy_cannot_take_are_told_before_training(loss, labels, words):
    """With nn.CrossEntropyLoss() a label beyond the outputs was an IndexError in the middle of training."""
    classes = 0 if labels.is_floating_point() else int(labels.max()) + 1
    with pytest.raises(DataError, match=words):
        refuse_unlike(loss, (5,), classes, labels)
    refuse_unlike(loss, (5,), 0, torch.rand(8, 5))


@given(sizes, st.lists(sizes, max_size=2), st.integers(2, 6))
def test_every_label_has_its_row_of_scores(rows, positions, classes):
    output, labels = outputs_and_labels(rows, positions, classes)
    scores, flat = scores_of(output, labels)
    assert scores.shape == (labels.numel(), classes)
    assert torch.equal(scores.argmax(1).view(labels.shape), output.argmax(-1))
    assert torch.equal(flat.view(labels.shape), labels)


@pytest.mark.parametrize(
    ("output", "labels"),
    [
        (torch.zeros(3, 1), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 2, 4, 4), torch.zeros(3, 4, 5, dtype=torch.int64)),
        (torch.zeros(3, 5, 2), torch.zeros(3, dtype=torch.int64)),
    ],
    ids=["regression", "one number", "a mask of another size", "a map of features"],
)
def test_outputs_that_do_not_score_the_labels_give_no_scores(output, labels):
    assert scores_of(output, labels) is None


@pytest.mark.parametrize(("shape", "regress"), [((2, 4, 4), False), ((6,), True)])
def test_full_training_asks_its_loss_about_the_last_block_only(shape, regress, tmp_path):
    """Planning put the true loss behind inner blocks too, so images and every regression with a hidden layer were refused."""
    x, y = classified(48, shape)
    model = [nn.Dropout(0.0), nn.Flatten(), nn.Linear(x[0].numel(), 4), nn.Linear(4, 1 if regress else 3)]
    data = (x, y.float() if regress else y)
    result = Trainer(model, mem_limit="2GB", method="full", epochs=1, quiet=True, output_dir=tmp_path / "run").fit(data, data)
    assert result.test_loss > 0


@pytest.mark.parametrize(("positions", "method"), [((), "streamed"), ((3,), "streamed"), ((), "sil")])
@pytest.mark.few(1)
def test_label_smoothing_is_that_of_torch(positions, method, tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(24, *positions, 6), torch.randint(0, 4, (24, *positions))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    expected = copy.deepcopy(model)
    trainer = Trainer(
        model, mem_limit="3GB", method=method, partitions=2, epochs=1, batch_size=8, micro_batch_size=4, shuffle=False, lr=1e-2,
        label_smoothing=0.2, quiet=True, offload_dir=tmp_path,
    )  # fmt: skip
    result = trainer.fit((x, y), (x, y))
    found = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), label_smoothing=0.2).item()
    assert float(result.test_loss) == pytest.approx(found, rel=1e-4)
    assert trainer.evaluate((x, y)).loss == pytest.approx(found, rel=1e-4)
    if method == "sil":  # its inner partition has another loss
        return
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for at in range(0, 24, 8):
        optimizer.zero_grad()
        for rows in (slice(at, at + 4), slice(at + 4, at + 8)):
            (F.cross_entropy(expected(x[rows]).flatten(0, -2), y[rows].flatten(), label_smoothing=0.2) / 2).backward()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    ("loss", "y", "words"),
    [
        (None, torch.randn(24, 4), "goes with cross-entropy, and the loss is another"),
        (F.cross_entropy, torch.arange(24) % 4, "goes with a loss that has a name; found a loss of your own"),
    ],
)
def test_label_smoothing_of_another_loss_is_refused(loss, y, words):
    given = {"mem_limit": "3GB", "method": "full", "quiet": True}
    with pytest.raises((DataError, OptionError), match=f"label_smoothing {words}"):
        Trainer(nn.Sequential(nn.Linear(6, 4)), loss, label_smoothing=0.1, **given).plan((torch.randn(24, 6), y))
    with pytest.raises(OptionError, match="label_smoothing: expected a share from 0 up to 1"):
        Trainer(nn.Sequential(nn.Linear(6, 4)), label_smoothing=1.0, **given)


def test_labels_that_do_not_count_among_the_test_rows_change_no_bit_of_the_training(tmp_path):
    """Micro-batches were added up by what counts in them, which rounds otherwise, for a -100 that was only tested on."""
    x, y = torch.randint(50, (96, 12)), torch.randint(50, (96, 12))
    some = y[:16].clone()
    some[:, 0] = IGNORED
    model = nn.Sequential(nn.Embedding(50, 48), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 50))

    def trained(name, test):
        own = copy.deepcopy(model)
        found = Trainer(
            own, mem_limit="2GB", method="full", batch_size=24, micro_batch_size=7, epochs=2, lr=1e-2, quiet=True,
            output_dir=tmp_path / name,
        ).fit((x, y), test)  # fmt: skip
        return own, found

    (first, _), (second, found) = trained("without", None), trained("with", (x[:16], some))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    expected = F.cross_entropy(second(x[:16]).flatten(0, 1), some.flatten())
    assert found.test_loss == pytest.approx(expected.item(), rel=1e-5)


def test_losses_in_16_bits_are_averaged_without_rounding(tmp_path):
    """Summed in bfloat16 they stopped to grow after a few hundred: a loss of 2.3 was reported as 1.0."""
    x, y = torch.randn(1200, 4), torch.arange(1200) % 10
    model = nn.Linear(4, 10)

    def loss(output, labels):
        return -F.log_softmax(output, -1).to(torch.bfloat16).gather(-1, labels[:, None]).mean()

    found = Trainer(
        model, loss, mem_limit="2GB", method="full", batch_size=2, micro_batch_size=2, epochs=1, lr=1e-9, dtype="bf16",
        output_dir=tmp_path / "run", quiet=True,
    ).fit((x, y), (x, y))  # fmt: skip
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = sum(float(loss(model(rows), labels)) for rows, labels in zip(x.split(2), y.split(2), strict=True)) / 600
    assert found.test_loss == pytest.approx(expected, rel=1e-6)
    assert found.train_losses[0] == pytest.approx(expected, rel=1e-3)
