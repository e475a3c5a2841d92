"""The partially-separable loss, the layer that its models are made of, and the two networks of its paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from seqpart import Settings, Trainer
from seqpart.cli.commands import verified
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.model import SeparableLinear
from seqpart.model.losses import LINEAR_FROM, partially_separable
from seqpart.zoo.models import lenet, psnet
from tests.command import call, refused
from tests.exactly import FULL, How, Trained, first_difference, numbers

sizes = st.integers(1, 5)
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def element(difference):
    """In float64, as it is documented: exp, and its tangent from LINEAR_FROM on."""
    return math.exp(min(difference, LINEAR_FROM)) * (1 + max(0.0, difference - LINEAR_FROM))


def slowly(scores, labels):
    rows = [
        sum(element(float(score - row[label])) for j, score in enumerate(row) if j != label)
        for row, label in zip(scores.double(), labels.tolist(), strict=True)
    ]
    return sum(rows) / len(rows)


@given(st.integers(1, 8), st.integers(2, 6), st.sampled_from(sorted(DTYPES, key=str)), st.floats(0.01, 100), st.integers(0, 99))
def test_the_loss_is_the_mean_over_rows_of_the_sum_over_other_classes_in_every_type(rows, classes, dtype, size, seed):
    torch.manual_seed(seed)
    scores, labels = (size * torch.randn(rows, classes)).to(dtype), torch.randint(classes, (rows,))
    found = partially_separable(scores.requires_grad_(), labels)
    assert float(found.detach()) == pytest.approx(slowly(scores.detach(), labels), rel=1e-5)
    found.backward()
    exact = scores.detach().double().requires_grad_()
    partially_separable(exact, labels).backward()
    largest = float(exact.grad.abs().max())
    torch.testing.assert_close(scores.grad.double(), exact.grad, rtol=DTYPES[dtype], atol=DTYPES[dtype] * largest + 1e-37)


@given(st.integers(1, 8), st.integers(2, 6), st.floats(0.01, 2), st.integers(0, 99))
def test_with_the_labels_own_class_it_is_exp_of_cross_entropy_where_nothing_is_continued(rows, classes, size, seed):
    torch.manual_seed(seed)
    scores, labels = (size * torch.randn(rows, classes, dtype=torch.float64)).clamp(-4, 4), torch.randint(classes, (rows,))
    one, other = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found, expected = partially_separable(one, labels), F.cross_entropy(other, labels, reduction="none").exp().mean()
    torch.testing.assert_close(found + 1, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_stays_finite_and_bounded_however_far_off_a_row_is(dtype):
    for distance in (LINEAR_FROM - 1, LINEAR_FROM + 1, 88.0, 89.0, 1e4, 1e30):
        scores = torch.tensor([[distance, 0.0, -distance]], dtype=dtype, requires_grad=True)
        loss = partially_separable(scores, torch.tensor([1]))
        loss.backward()
        assert loss.isfinite() and scores.grad.isfinite().all()
        assert scores.grad.abs().max() <= 1.01 * math.exp(LINEAR_FROM)


def test_a_score_that_is_not_a_number_is_not_hidden():
    assert partially_separable(torch.tensor([[torch.nan, 0.0]]), torch.tensor([1])).isnan()


def test_elements_far_below_one_keep_their_digits():
    scores = torch.tensor([[0.0, -20.0]], requires_grad=True)
    assert float(partially_separable(scores, torch.tensor([0])).detach()) == pytest.approx(math.exp(-20), rel=1e-6)


def test_autocast_leaves_the_differences_in_float32():
    scores, labels = 5 * torch.randn(6, 4), torch.randint(4, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = partially_separable(scores, labels)
    assert found.dtype == torch.float32 and torch.equal(found, partially_separable(scores, labels))


def test_labels_of_positions_are_judged_one_by_one_and_those_that_do_not_count_are_left_out():
    scores, labels = torch.randn(2, 3, 4), torch.tensor([[0, -100, 2], [3, 1, -100]])
    kept = labels.flatten() != -100
    expected = partially_separable(scores.flatten(0, 1)[kept], labels.flatten()[kept])
    torch.testing.assert_close(partially_separable(scores, labels), expected)


@given(st.integers(1, 4), sizes, sizes, st.lists(sizes, max_size=2), st.booleans(), st.integers(0, 99))
def test_a_separable_layer_is_a_linear_one_whose_weight_is_zero_but_for_its_groups(groups, inputs, outputs, rows, bias, seed):
    torch.manual_seed(seed)
    layer = SeparableLinear(groups * inputs, groups * outputs, groups=groups, bias=bias).double()
    dense = torch.block_diag(*layer.weight.view(groups, outputs, inputs))
    x = torch.randn(*rows, groups * inputs, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, dense, layer.bias))
    assert sum(parameter.numel() for parameter in layer.parameters()) == groups * outputs * (inputs + bias)


def test_groups_must_divide_inputs_and_outputs():
    for shape in ((6, 4, 3), (5, 4, 2), (4, 4, 0)):
        with pytest.raises(ModelError, match=r"a number of groups that divides .* found \d"):
            SeparableLinear(*shape[:2], groups=shape[2])


def counted(network):
    return sum(parameter.numel() for block in network for parameter in block().parameters())


def test_the_networks_have_as_many_weights_as_the_paper_counts():
    assert counted(lenet((1, 28, 28), 10)) == 44_426
    assert counted(lenet((3, 32, 32), 10)) == 104_182  # the paper prints 103,882, with the first layer of one channel
    assert counted(psnet((3, 32, 32), 10)) == 81_750
    assert counted(psnet((1, 28, 28), 10)) == 46_740  # what its widths give; the paper prints 53,780


def test_two_scores_of_psnet_depend_on_as_many_weights_as_the_paper_counts():
    network = nn.Sequential(*(block() for block in psnet((3, 32, 32), 10)))
    for parameter in network.parameters():
        parameter.data.abs_()  # so that no ReLU is closed

    def used(*classes):
        """Weights that move these scores."""
        network.zero_grad()
        network(torch.rand(2, 3, 32, 32))[:, classes].sum().backward()
        return torch.cat([parameter.grad.flatten() != 0 for parameter in network.parameters()])

    assert used(2).sum() == 12_279 and used(2, 7).sum() == 19_998
    assert (used(2) & used(7)).sum() == 4_560


def small_psnet():
    return psnet((1, 16, 16), 3)


@pytest.mark.usefixtures("known_machine")
def test_every_exact_method_gives_the_bits_of_full_training_under_the_loss(tmp_path, monkeypatch):
    arm = Trained(
        monkeypatch, tmp_path, small_psnet, numbers((1, 16, 16), classes=3), loss="psl", lr=1e-3, partitions=[0, 1, 3]
    )
    expected = arm.run(FULL)
    for how in (How(slots=2, keeps=0), How(method="checkpointed")):
        assert first_difference(arm.run(how), expected) is None, how


def plain(model, x, y, *, batch, epochs):
    """A plain loop from the weights that a run begins with."""
    step = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(epochs):
        for start in range(0, len(x), batch):
            step.zero_grad()
            partially_separable(model(x[start : start + batch]), y[start : start + batch]).backward()
            step.step()
    return model.state_dict()


@pytest.mark.parametrize("micro", [8, 3])
@pytest.mark.few(1)
def test_an_update_is_that_of_a_plain_loop_however_the_batch_is_divided(micro, tmp_path):
    torch.manual_seed(1)
    blocks = [block() for block in small_psnet()]
    x, y = torch.randn(24, 1, 16, 16), torch.arange(24) % 3
    names = {name: tensor.clone() for name, tensor in nn.Sequential(*blocks).state_dict().items()}
    whole = nn.Sequential(*(block() for block in small_psnet()))
    whole.load_state_dict(names)
    trainer = Trainer(
        blocks, "psl", mem_limit="2GB", method="full", epochs=2, batch_size=8, micro_batch_size=micro, lr=1e-3, shuffle=False,
        output_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    found = load_file(trainer.fit((x, y), (x, y)).weights)
    for name, tensor in plain(whole, x, y, batch=8, epochs=2).items():
        assert torch.equal(found[name], tensor) if micro == 8 else torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_loss_is_named_for_the_labels_that_it_can_judge_and_once():
    def refuses(kind, words, loss, labels):
        trainer = Trainer([nn.Linear(4, 3)], loss, mem_limit="2GB", method="full", quiet=True)
        with pytest.raises(kind, match=words):
            trainer.plan((torch.randn(12, 4), labels), (torch.randn(12, 4), labels))

    classes, floats = torch.arange(12) % 3, torch.rand(12)
    for loss in ("psl", "cross-entropy"):
        refuses(DataError, rf'loss="{loss}" needs classes \(integers\) as labels; found floats', loss, floats)
    refuses(DataError, 'loss="mse" needs floats as labels; found classes', "mse", classes)
    refuses(DataError, r"ends with outputs of shape \(3,\), and the labels have 4 classes", "psl", torch.arange(12) % 4)
    with pytest.raises(OptionError, match=r"loss: expected cross-entropy, psl, mse or bce.*found 'hinge'"):
        Trainer(None, "hinge", mem_limit="2GB", method="full")
    with pytest.raises(OptionError, match="loss: settings name one, psl"):
        Trainer(None, F.cross_entropy, settings=Settings(mem_limit="2GB", method="full", loss="psl"))


@pytest.mark.slow
def test_the_command_trains_verifies_and_refuses_by_the_name_of_the_loss(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = ["--mem-limit", "2GB", "--loss", "psl", "--width", "16", "--depth", "2", "--epochs", "2", "--lr", "1e-3"]
    ran = call(capsys, *job, "--method", "sil", "--partitions", "2", "--output-dir", "sil")
    assert ran.code == 0 and "test accuracy" in ran.out
    verified(["--mem-limit", "2GB", "--loss", "psl", "--width", "16", "--depth", "2", "--steps", "1", "--partitions", "2"])
    assert "bit for bit" in capsys.readouterr().out
    refused(call(capsys, *job[:4], "--model", "psnet", "--dry-run"), 2, "--model psnet takes images", "(64,)")
