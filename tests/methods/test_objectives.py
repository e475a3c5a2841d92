"""What an inner partition of `sil` learns: synthetic labels drawn by a key, on vectors, convolutions and tokens."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.config import Config
from seqpart.errors import OptionError
from seqpart.methods import objectives
from seqpart.methods.method import Targets
from seqpart.methods.objectives import OBJECTIVES, SyntheticLabels
from seqpart.model.losses import token_cross_entropy
from seqpart.profile.blocks import measure_loss
from seqpart.zoo.models import gpt
from tests.runtime.test_same_as_plain import assert_equal, plain_modules, row_order, train_plainly

CPU = torch.device("cpu")
LAST = 1 << 64


def drawn(key=7, classes=6, size=5, *, normal=False, orthogonal=False, most=1 << 20, finish=id):
    return SyntheticLabels(key, classes, size, normal=normal, orthogonal=orthogonal, finish=finish, most=most, device=CPU)


def split_mix(state):
    """SplitMix64's finalizer in whole numbers, from the paper."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % LAST
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % LAST
    return state ^ (state >> 31)


@given(key=st.integers(0, (1 << 63) - 1), chosen=st.integers(0, 70_000), size=st.integers(1, 9))
def test_every_number_is_split_mix_of_its_class_and_place(key, chosen, size):
    found = drawn(key, 70_001, size, most=4).of(torch.tensor([chosen]))[0]
    for place in range(size):
        bits = split_mix((((chosen << 32) + place) * 0x9E3779B97F4A7C15 + key) % LAST)
        assert float(found[place]) == ((bits >> 41) + 0.5) / (1 << 23)


@given(
    key=st.integers(0, 1 << 62), classes=st.integers(1, 40), size=st.integers(1, 60), most=st.integers(0, 3000),
    normal=st.booleans(),
)  # fmt: skip
def test_rows_that_are_drawn_when_needed_are_the_rows_that_would_be_kept(key, classes, size, most, normal):
    kept = drawn(key, classes, size, normal=normal).kept
    few = drawn(key, classes, size, normal=normal, most=most)
    assert (few.kept is None) == (4 * classes * size > max(most, 4 * size * (classes == 1)))
    assert few.nbytes <= max(most, 4 * size)
    assert torch.equal(torch.cat([few.of(part) for part in few.parts()]), kept)
    assert max(len(part) for part in few.parts()) * 4 * size <= max(most, 4 * size)


def test_rows_longer_than_what_is_drawn_at_once_are_the_same_rows(monkeypatch):
    whole = drawn(size=100).kept
    monkeypatch.setattr(objectives, "_AT_ONCE", 7)
    assert torch.equal(drawn(size=100).kept, whole)


def test_uniform_and_normal_numbers_are_spread_as_they_should_be():
    uniform, normal = drawn(classes=50, size=4000).kept, drawn(classes=50, size=4000, normal=True).kept
    counts = torch.histc(uniform, 20, 0, 1) / uniform.numel()
    assert float(uniform.min()) > 0 and float(uniform.max()) < 1 and float((counts - 0.05).abs().max()) < 0.003
    inside = [float((normal.abs() < bound).float().mean()) for bound in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.004)
    assert float(torch.corrcoef(normal).fill_diagonal_(0).abs().max()) < 0.09  # 5.7 deviations of chance


@pytest.mark.parametrize(("classes", "size"), [(6, 20), (47, 60), (60, 60), (256, 256), (90, 64)])
def test_orthogonal_directions_are_orthogonal_or_a_tight_frame_and_near_what_was_drawn(classes, size):
    made, plain = (drawn(classes=classes, size=size, normal=True, orthogonal=way).kept for way in (True, False))
    least = min(classes, size)
    product = made @ made.T if classes <= size else made.T @ made
    torch.testing.assert_close(product, torch.eye(least), atol=1e-5, rtol=0)
    assert torch.equal(made, drawn(classes=classes, size=size, normal=True, orthogonal=True, most=0).kept)  # whatever the limit
    assert (F.cosine_similarity(made, plain) > 0).all()


def test_directions_too_many_to_be_made_orthogonal_stay_as_they_are_drawn():
    plain = drawn(classes=20, size=4000, normal=True).kept
    assert torch.equal(drawn(classes=20, size=4000, normal=True, orthogonal=True).kept, plain)
    assert drawn(classes=20, size=4000, normal=True, orthogonal=True, most=0).kept is None


def test_orthogonal_directions_have_length_one_where_classes_are_more_than_dimensions():
    directions = loss("orthogonal", (8,), classes=30)._directions.kept
    torch.testing.assert_close(torch.linalg.vector_norm(directions, dim=1), torch.ones(30))


# --- losses -----------------------------------------------------------------------------------------------------------


def targets(objective, shape, *, label_shape=(), classes=6, most=1 << 20):
    return Targets(
        partition=0, partitions=2, output_shape=shape, label_shape=label_shape, classes=classes, seed=3, most=most, device=CPU,
        final_loss=F.cross_entropy, config=Config(mem_limit="1GB", method="sil", objective=objective),
    )  # fmt: skip


def loss(objective, shape, **others):
    return OBJECTIVES[objective](targets(objective, shape, **others))


def case(shape, label_shape=(), rows=9, classes=6):
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(rows, *shape, generator=generator, requires_grad=True)
    return output, torch.randint(0, classes, (rows, *label_shape), generator=generator)


SHAPES = [((20,), ()), ((8, 4, 4), ()), ((5, 12), ()), ((5, 12), (5,))]
ODD = ((3, 7, 5), ())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("shape", "label_shape"), [*SHAPES, ODD])
def test_labels_that_are_never_whole_give_the_same_loss_and_gradient(objective, shape, label_shape):
    values = []
    for most in (1 << 20, 300):
        output, labels = case(shape, label_shape)
        value = loss(objective, shape, label_shape=label_shape, most=most)(output, labels)
        value.backward()
        values.append((value.detach(), output.grad))
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("shape", "label_shape"), [*SHAPES, ODD])
def test_the_ideal_output_is_what_the_loss_asks_for(objective, shape, label_shape):
    judge = loss(objective, shape, label_shape=label_shape)
    output, labels = case(shape, label_shape)
    ideal = judge.ideal(labels)
    assert ideal.shape == output.shape
    scores, of = judge.scores(ideal, labels)
    assert torch.equal(scores.argmax(1), of)
    least = float(judge(ideal, labels))
    assert least < (1e-9 if objective == "mse" else 0.2)
    assert least + 1 < float(judge(output.detach(), labels))


@pytest.mark.parametrize("space", [(4, 4), (7, 5), (1, 3), (3, 4, 5)])
def test_directions_judge_a_convolution_by_its_channels_averaged_over_the_halves_of_every_axis(space):
    output, labels = case((8, *space))
    fields = [output]
    for axis, size in enumerate(space, 2):
        middle = (size + 1) // 2
        ends = [(0, middle), (middle, size)] if size > 1 else [(0, 1)]
        fields = [field.narrow(axis, first, last - first) for field in fields for first, last in ends]
    means = torch.stack([field.flatten(2).mean(2) for field in fields], 2).flatten(1)
    assert means.shape[1] == 8 * (2 if 1 in space else 2 ** len(space))
    torch.testing.assert_close(
        loss("prototype", (8, *space))(output, labels), loss("prototype", means.shape[1:])(means, labels)
    )


def test_the_papers_regression_takes_all_of_a_convolution():
    output, labels = case((8, 4, 4))
    assert torch.equal(loss("mse", (8, 4, 4))(output, labels), loss("mse", (128,))(output.flatten(1), labels))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_position_of_a_token_model_is_judged_as_a_row_is(objective):
    output, labels = case((5, 12), (5,))
    tokens = loss(objective, (5, 12), label_shape=(5,))
    assert torch.equal(tokens(output, labels), loss(objective, (12,))(output.flatten(0, 1), labels.flatten()))
    scores, of = tokens.scores(output, labels)
    assert scores.shape == (45, 6) and torch.equal(of, labels.flatten())


def test_labels_of_50000_classes_take_a_tenth_of_the_limit_and_no_more():
    # 50,000 x 512 x 4 bytes = 102 MB whole; a tenth of a limit of 100 MB is 10 MB. Counted on fake tensors.
    most, classes, rows = 10_000_000, 50_000, 64
    labels = torch.zeros(rows, dtype=torch.int64)

    def bytes_with(allowed, objective):
        def judged(output):
            return OBJECTIVES[objective](targets(objective, (512,), classes=classes, most=allowed))(output, labels)

        return measure_loss(judged, (512,), rows)

    logits = rows * classes * 4
    assert bytes_with(1 << 30, "prototype") > classes * 512 * 4
    # Beside logits, their softmax and gradients: pieces of labels, of which few are alive at once.
    assert bytes_with(most, "prototype") < 5 * logits + 3 * most
    assert bytes_with(most, "mse") < most


# --- runs -------------------------------------------------------------------------------------------------------------


def plainly(modules, starts, x, y, judge_of, *, seed, synthetic=False):
    """The algorithm as the paper writes it, partition after partition: 2 epochs at 0.01, in batches of 20."""
    for p, (first, last) in enumerate(itertools.pairwise([*starts, len(modules)])):
        part = modules[first:last]
        with torch.no_grad():
            judge = judge_of(p, tuple(nn.Sequential(*part).eval()(x[:1]).shape[1:]))
        order = row_order(x, True, seed, p)
        chain = train_plainly(
            part, x, y, judge, optimizer="sgd", lr=1e-2, epochs=2, batch=20, micro_batch=20, order=order
        )  # fmt: skip
        if last < len(modules):
            with torch.no_grad():
                x = judge.ideal(y) if synthetic else torch.cat([chain(rows) for rows in x.split(20)])


def convolutional():
    return [
        lambda: nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6)),
    ]


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(60, 1, 8, 8, generator=generator), torch.randint(0, 6, (60,), generator=generator)


def sentences():
    tokens = torch.randint(0, 6, (60, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("inputs", ["cached", "synthetic"])
@pytest.mark.parametrize(
    ("network", "data", "starts", "final"),
    [
        (convolutional, images, [0, 1, 2], F.cross_entropy),
        (lambda: gpt(6, 8, width=12, depth=2, heads=2), sentences, [0, 2, 3], token_cross_entropy),
    ],
    ids=["convolution", "tokens"],
)
@pytest.mark.few(2)
def test_a_run_on_images_and_on_tokens_equals_the_algorithm_written_plainly(
    objective, inputs, network, data, starts, final, tmp_path
):
    """Synthetic inputs are figure 5 of the paper: later partitions never see what the one before gives."""
    (x, y), seed = data(), 5
    result = Trainer(
        network(), method="sil", mem_limit="2GB", objective=objective, partitions=starts, optimizer="sgd",
        momentum=0.9, lr=1e-2, epochs=2, batch_size=20, shuffle=True, seed=seed, sil_inputs=inputs, quiet=True,
        output_dir=tmp_path / "run",
    ).fit((x, y), (x[:20], y[:20]))  # fmt: skip

    def judge_of(p, shape):
        if p == len(starts) - 1:
            return final
        wanted = targets(objective, shape, label_shape=tuple(y.shape[1:]))
        return OBJECTIVES[objective](replace(wanted, partition=p, seed=seed))

    modules = plain_modules(network(), seed)
    plainly(modules, starts, x, y, judge_of, seed=seed, synthetic=inputs == "synthetic")
    assert_equal(result.weights, modules)


class Merged(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 6 * 8)

    def forward(self, x):
        return self.linear(x).unflatten(1, (8, 6))


def without_positions(tmp_path, **options):
    blocks = [*gpt(6, 8, width=12, depth=2, heads=2)[:-1], Merged, Spread]
    trainer = Trainer(blocks, method="sil", mem_limit="2GB", output_dir=tmp_path / "run", quiet=True, **options)
    return trainer.fit(sentences(), sentences())


def test_a_cut_where_positions_are_gone_is_refused_in_words(tmp_path):
    expected = r"block 3 \(Merged\) returns rows of shape \(12,\), and labels stand for \(8,\) positions.*Cut elsewhere"
    with pytest.raises(OptionError, match=expected):
        without_positions(tmp_path, partitions=(0, 4))


def test_a_plan_cuts_where_positions_are(tmp_path):
    assert without_positions(tmp_path, partitions=3).plan.starts == (0, 1, 2)
    with pytest.raises(OptionError, match="3 blocks at which a partition can begin; it cannot be cut into 4"):
        without_positions(tmp_path / "four", partitions=4)


def test_partitions_have_prototype_scales_of_their_own(tmp_path):
    """Those of the plan's losses are what was asked for, in turn; what no inner partition uses is said."""
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    blocks = [lambda: nn.Linear(8, 12), lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 3)]
    options = {"mem_limit": "2GB", "method": "sil", "quiet": True, "batch_size": 20}

    def losses(first, second, **more):
        trainer = Trainer(blocks, partitions=4, prototype_scale=[first, second], **options, **more)
        made = trainer.prepare(*trainer.rows(rows, rows)).planned()
        output = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))
        return [float(made.loss(p)(output, rows[1][:20])) for p in range(3)]

    other, same = losses(16, 4), losses(4, 4)
    assert other[0] != same[0] and other[1:] == same[1:]
    plan = Trainer(blocks, partitions=2, prototype_scale=(16, 4, 2), **options).plan(rows, rows)
    assert "--prototype-scale: the last 2 without effect on 1 inner partition(s)" in plan.reasons
