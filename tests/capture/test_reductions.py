"""Losses that do not count every row alike: an update is that of the whole batch, however it is divided."""

import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from seqpart import Trainer
from seqpart.errors import DataError, OptionError
from seqpart.model.loss_trials import reduction_of
from seqpart.model.reductions import BY_ROWS, Held, Kind
from tests.exactly import numbers, tokens

ROWS, BATCH = 24, 8
WEIGHT = torch.tensor([0.1, 1.0, 5.0, 0.5])

pytestmark = pytest.mark.usefixtures("known_machine")


def padded(ignored):
    """Rows of tokens of very different lengths: what stands behind a row's end does not count."""
    (x, y), (x_test, y_test) = ((rows, labels.clone()) for rows, labels in tokens(rows=ROWS))
    for labels in (y, y_test):
        for row in range(len(labels)):
            labels[row, 1 + (row * 5) % 6 :] = ignored
        labels[2:4] = ignored  # two rows side by side that count nothing at all
    return (x, y), (x_test, y_test)


def language_model():
    torch.manual_seed(3)
    return [nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 11)]


def classifier():
    torch.manual_seed(3)
    return [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)]


def by_position(loss):
    def judge(output, labels):
        return loss(output.flatten(0, 1), labels.flatten())

    return judge


def sum_and_count(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def masked(output, labels):
    each = F.cross_entropy(output.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    mask = (labels.flatten() != -100).float()
    return (each * mask).sum() / mask.sum()


class Declared:
    def __call__(self, output, labels):
        return masked(output, labels)

    def counts(self, labels):
        return (labels != -100).sum()


TOKENS = {
    "the default, -100 in the labels": (None, padded(-100), by_position(F.cross_entropy)),
    "sum and count": (sum_and_count, padded(-100), by_position(F.cross_entropy)),
    "a mask, with counts": (Declared(), padded(-100), by_position(F.cross_entropy)),
}
CLASSES = {
    "weights of classes": nn.CrossEntropyLoss(weight=WEIGHT),
    "an ignored class": nn.CrossEntropyLoss(ignore_index=2),
    "both, smoothed": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1, label_smoothing=0.1),
    "a partial function": functools.partial(F.cross_entropy, weight=WEIGHT),
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
    "a sum of one's own": lambda output, labels: F.cross_entropy(output, labels, reduction="sum"),
}
CASES = {name: (language_model, *case) for name, case in TOKENS.items()} | {
    name: (classifier, loss, tuple(numbers((6,), rows=ROWS)), loss) for name, loss in CLASSES.items()
}


def trained(folder, model, loss, data, **options):
    trainer = Trainer(
        model(), loss, mem_limit="2GB", batch_size=BATCH, epochs=2, lr=1e-2, optimizer="sgd", shuffle=False, quiet=True,
        output_dir=folder, **{"method": "full", **options},
    )  # fmt: skip
    return trainer.fit(*data)


def plain(model, loss, x, y):
    """Whole batches, as a plain PyTorch loop would train them."""
    network = nn.Sequential(*model())
    step = torch.optim.SGD(network.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            loss(network(x[start : start + BATCH]), y[start : start + BATCH]).backward()
            step.step()
            step.zero_grad()
    return network.state_dict()


def rows_of(split):
    return split if isinstance(split, tuple) else (split.open()[0].float(), split.labels)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(1)
def test_an_update_is_that_of_the_whole_batch_however_it_is_divided(name, tmp_path):
    """It was a mean of the micro-batches' means: what was learned depended on their size, and with that on the limit."""
    model, loss, data, same = CASES[name]
    expected = plain(model, same, *rows_of(data[0]))
    results = {size: trained(tmp_path / str(size), model, loss, data, micro_batch_size=size) for size in (BATCH, 3)}
    for size, result in results.items():
        found = load_file(result.weights)
        for key, tensor in expected.items():
            if size == BATCH:
                assert torch.equal(found[key], tensor), key
            else:  # the sums of 8 rows are added up in another order
                torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result.train_losses, results[BATCH].train_losses, rtol=1e-5, atol=0)
        assert result.test_loss == pytest.approx(results[BATCH].test_loss, rel=1e-5)
        assert result.accuracy == pytest.approx(results[BATCH].accuracy)


def test_a_session_counts_labels_that_its_example_has_not(tmp_path):
    """Micro-batches counted by rows, as those of the example's labels do, of which none was ignored."""
    (x, padded_y), _ = padded(-100)
    y = padded_y.clamp(min=0)
    plain_one, loss = nn.Sequential(*language_model()), by_position(F.cross_entropy)
    step = torch.optim.SGD(plain_one.parameters(), lr=1e-2, fused=True)
    trainer = Trainer(
        language_model(),
        optimizer="sgd",
        lr=1e-2,
        mem_limit="2GB",
        method="full",
        batch_size=BATCH,
        micro_batch_size=2,
        quiet=True,
    )
    with trainer.session((x[:BATCH], y[:BATCH])) as session:
        for labels in (y, padded_y, y, padded_y):
            for start in range(0, ROWS, BATCH):
                rows = slice(start, start + BATCH)
                expected = loss(plain_one(x[rows]), labels[rows])
                expected.backward()
                step.step()
                step.zero_grad()
                assert session.step((x[rows], labels[rows])) == pytest.approx(float(expected.detach()), rel=1e-5)
        found = session.evaluate((x, padded_y)).loss
        for key, tensor in session.state_dict().items():
            torch.testing.assert_close(tensor, plain_one.state_dict()[key], rtol=1e-4, atol=1e-6)
    assert found == pytest.approx(float(loss(plain_one(x), padded_y).detach()), rel=1e-5)


def test_a_stream_counts_labels_that_its_first_rows_have_not(tmp_path):
    (x, y), _ = padded(-100)
    x, y = x.repeat(50, 1), torch.cat([y.clamp(min=0).repeat(45, 1), y.repeat(5, 1)])

    class Rows(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    results = [
        trained(tmp_path / name, language_model, None, (data,), micro_batch_size=2)
        for name, data in {"kept": (x, y), "stream": DataLoader(Rows(), BATCH)}.items()
    ]
    for key, tensor in load_file(results[0].weights).items():
        torch.testing.assert_close(load_file(results[1].weights)[key], tensor, rtol=1e-4, atol=1e-6)


def test_a_session_refuses_labels_with_which_a_loss_adds_up_otherwise(tmp_path):
    """A loss of the user's was tried with the example's labels alone, and a mask or -100 that came later weighed by rows."""
    (x, y), _ = padded(-100)
    loss, whole = by_position(F.cross_entropy), y.clamp(min=0)
    options = {"mem_limit": "2GB", "method": "full", "batch_size": BATCH, "quiet": True}
    with Trainer(language_model(), loss, micro_batch_size=2, **options).session((x[:BATCH], whole[:BATCH])) as session:
        session.step((x[:BATCH], whole[:BATCH]))
        with pytest.raises(OptionError, match="as it was with the example's labels"):
            session.step((x[:BATCH], y[:BATCH]))
        session.step((x[:BATCH], whole[:BATCH]))
    with Trainer(language_model(), loss, micro_batch_size=BATCH, **options).session((x[:BATCH], whole[:BATCH])) as session:
        session.step((x[:BATCH], y[:BATCH]))


def test_a_session_refuses_such_labels_each_time_and_those_between_known_ones_too(tmp_path):
    x, _ = rows_of(numbers((6,), rows=ROWS)[0])
    loss = functools.partial(F.cross_entropy, weight=WEIGHT)
    own = Trainer(
        classifier(),
        lambda *given: loss(*given),
        mem_limit="2GB",
        batch_size=BATCH,
        micro_batch_size=2,
        quiet=True,
        method="full",
    )
    known, others = torch.tensor([0, 3] * 4), torch.tensor([0, 1, 2, 3] * 2)
    with own.session((x[:BATCH], torch.zeros(BATCH, dtype=torch.int64))) as session:
        for labels in (known, others, others):
            with pytest.raises(OptionError, match="as it was with the example's labels"):
                session.step((x[:BATCH], labels))


def test_a_sum_of_zeros_is_a_sum_still(tmp_path):
    x, _ = rows_of(numbers((6,), rows=ROWS)[0])
    options = {"mem_limit": "2GB", "batch_size": BATCH, "micro_batch_size": 2, "quiet": True, "method": "full"}
    with Trainer(nn.Linear(6, 4), lambda o, y: (o[:, 0] * y).sum(), **options).session(
        (x[:BATCH], torch.ones(BATCH))
    ) as session:
        assert session.step((x[:BATCH], torch.zeros(BATCH))) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_labels_that_have_no_order_are_tried(dtype, tmp_path):
    x, _ = rows_of(numbers((6,), rows=ROWS)[0])
    labels = {"y": torch.ones(len(x), 4), "m": torch.ones(len(x), 4, dtype=dtype)}
    trainer = Trainer(
        nn.Linear(6, 4),
        lambda o, y: ((o - y["y"]) ** 2 * y["m"].real).mean(),
        mem_limit="2GB",
        batch_size=8,
        quiet=True,
        method="full",
    )
    assert trainer.plan((x, labels))


def test_the_rows_of_least_labels_are_tried_where_a_row_has_several(tmp_path):
    """A mask that is shorter in one row of many was not among the few that were tried."""
    x, y, mask = torch.zeros(4000, 6, dtype=torch.int64), torch.zeros(4000, 6, dtype=torch.int64), torch.ones(4000, 6)
    mask[1234, 2:] = 0

    def loss(output, labels):
        each = F.cross_entropy(output.transpose(1, 2), labels["y"], reduction="none") * labels["mask"]
        return each.sum() / labels["mask"].sum()

    trainer = Trainer(language_model(), loss, mem_limit="2GB", method="full", batch_size=BATCH, quiet=True)
    with pytest.raises(OptionError, match="neither the mean of its parts' by their rows"):
        trainer.plan((x, {"y": y, "mask": mask}))


def balanced(output, labels):
    loss = F.cross_entropy(output, labels)
    return loss / loss.detach()


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


def normalised(output, labels):
    return F.cross_entropy(Normalised.apply(output), labels)


def hooked(output, labels):
    output.register_hook(torch.sign)
    return F.cross_entropy(output, labels)


@pytest.mark.parametrize("loss", [balanced, normalised, hooked])
def test_a_loss_whose_gradient_does_not_add_up_is_refused_though_its_value_does(loss):
    """It trained to weights that depended on the micro-batch, and so on the limit, in silence."""
    output, labels = torch.randn(8, 4), torch.arange(8) % 4
    with pytest.raises(OptionError, match="or its gradient is not"):
        reduction_of(loss, (4,), torch.float32, labels, labels[:0], batch=8)
    held = Held(2)
    held.add(output[:4], labels[:4])
    held.add(output[4:], labels[4:])
    assert not held.adds_up(loss, BY_ROWS)
    assert held.adds_up(F.cross_entropy, BY_ROWS)


def in_16_bits(output, labels):
    return F.cross_entropy(output.bfloat16().float(), labels)


def of_its_teacher(output, labels):
    """Its gradient is rounding alone."""
    return F.kl_div(F.log_softmax(output / 2, 1), F.softmax(output.detach() / 2, 1), reduction="batchmean")


@pytest.mark.parametrize("loss", [in_16_bits, of_its_teacher])
def test_a_gradient_that_differs_by_its_rounding_adds_up(loss):
    output, labels = torch.randn(9, 4), torch.arange(9) % 4
    assert reduction_of(loss, (4,), torch.float32, labels, labels[:0], batch=9).kind is Kind.ROWS
    held = Held(2)
    held.add(output[:5], labels[:5])
    held.add(output[5:], labels[5:])
    assert held.adds_up(loss, BY_ROWS)


def test_values_are_compared_where_gradients_cannot_be():
    """Huber's loss has none for outputs of 64 bits and labels of 32, as which they are compared."""

    def worst(output, labels):
        return F.huber_loss(output, labels, reduction="none").sort().values[:2].mean()

    held = Held(2)
    for part in (torch.arange(4.0), torch.arange(4.0, 8.0)):
        held.add(part, torch.zeros(4))
    assert not held.adds_up(worst, BY_ROWS) and held.adds_up(F.huber_loss, BY_ROWS)


def with_margin(output, labels):
    output[range(len(output)), labels] -= 0.5
    return F.cross_entropy(output, labels)


def of_probabilities(output, labels):
    return F.nll_loss(output.sigmoid_().log(), labels)


@pytest.mark.parametrize("loss", [with_margin, of_probabilities])
def test_a_loss_may_change_its_outputs_in_place(loss, tmp_path):
    """It was said to remember something from call to call, or that a leaf was changed in place."""
    x, y = torch.randn(BATCH, 6), torch.arange(BATCH) % 4
    model, plain = nn.Sequential(*classifier()), nn.Sequential(*classifier())
    Trainer(
        model, loss, lambda given: torch.optim.SGD(given, lr=0.1), mem_limit="2GB", method="full", batch_size=BATCH, epochs=1,
        shuffle=False, micro_batch_size=BATCH, output_dir=tmp_path, quiet=True,
    ).fit((x, y))  # fmt: skip
    loss(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_sessions_have_the_bits_of_rows_while_all_labels_count(tmp_path):
    (x, y), _ = tokens(rows=ROWS)
    options = {
        "optimizer": "sgd",
        "mem_limit": "2GB",
        "method": "full",
        "batch_size": BATCH,
        "micro_batch_size": 3,
        "quiet": True,
    }
    with Trainer(language_model(), **options).session((x[:BATCH], y[:BATCH])) as session:
        for start in range(0, ROWS, BATCH):
            session.step((x[start : start + BATCH], y[start : start + BATCH]))
        found = session.state_dict()
    kept = Trainer(language_model(), epochs=1, shuffle=False, output_dir=tmp_path, **options).fit((x, y))
    for key, tensor in load_file(kept.weights).items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("change", [{"weight": WEIGHT}, {"ignore_index": 1}, {"reduction": "sum"}], ids=str)
def test_what_the_user_sets_on_torchs_loss_counts_from_then_on(change, tmp_path):
    """Class weights for later epochs: losses had them, and micro-batches went on counting by rows."""
    data = tuple(numbers((6,), rows=ROWS))

    def found(size):
        loss = nn.CrossEntropyLoss()

        class Later:
            def on_epoch(self, event):
                vars(loss).update(change) if "weight" not in change else setattr(loss, "weight", WEIGHT)

        trainer = Trainer(
            classifier(), loss, mem_limit="2GB", batch_size=BATCH, micro_batch_size=size, epochs=2, lr=1e-2, optimizer="sgd",
            method="full", shuffle=False, quiet=True, output_dir=tmp_path / str(size),
        )  # fmt: skip
        return load_file(trainer.fit(*data, callbacks=[Later()]).weights)

    whole, divided = found(BATCH), found(3)
    for key, tensor in whole.items():
        torch.testing.assert_close(divided[key], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["the default, -100 in the labels", "sum and count"])
@pytest.mark.few(1)
def test_every_exact_method_weighs_micro_batches_alike_also_under_clipping(name, tmp_path):
    model, loss, data, _ = CASES[name]
    options = {"micro_batch_size": 3, "clip_grad_norm": 0.1}
    full = trained(tmp_path / "full", model, loss, data, **options)
    for method in ("streamed", "checkpointed"):
        other = trained(tmp_path / method, model, loss, data, method=method, partitions=3, **options)
        assert other.weights.read_bytes() == full.weights.read_bytes()
        assert other.train_losses == full.train_losses


def test_labels_that_do_not_count_are_in_no_accuracy(tmp_path):
    model, loss, data, _ = CASES["the default, -100 in the labels"]
    result = trained(tmp_path / "run", model, loss, data)
    network = nn.Sequential(*language_model())
    found = load_file(result.weights)
    network.load_state_dict(found)
    x, y = data[1]
    assert result.accuracy == pytest.approx(float((network(x).argmax(-1) == y)[y != -100].float().mean()))


def test_a_loss_whose_parts_do_not_add_up_is_refused_by_name_unless_the_batch_stays_whole(tmp_path):
    data = padded(-100)
    with pytest.raises(OptionError, match=r"loss masked: .*neither.*\(sum, count\).*counts.*micro_batch_size=8"):
        trained(tmp_path / "refused", language_model, masked, data)
    whole = trained(tmp_path / "whole", language_model, masked, data, micro_batch_size=BATCH)
    expected = plain(language_model, by_position(F.cross_entropy), *data[0])
    for key, tensor in load_file(whole.weights).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6)  # a mask, not `ignore_index`


def correlation(output, labels):
    return -torch.corrcoef(torch.stack([output[:, 0], labels.float()]))[0, 1]


LABELS = torch.arange(ROWS) % 4


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda o, y: F.cross_entropy(o, y), Kind.ROWS),
        (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1) + 0.01, Kind.ROWS),
        (lambda o, y: F.binary_cross_entropy(o[:, 0], (y > 1).float()), Kind.ROWS),  # takes probabilities
        (lambda o, y: F.nll_loss(o.log(), y), Kind.ROWS),
        (nn.MultiMarginLoss(), Kind.ROWS),
        (nn.MultiMarginLoss(reduction="sum"), Kind.SUM),
        (lambda o, y: F.cross_entropy(o, y, weight=WEIGHT), Kind.WHOLE),
        (lambda o, y: F.cross_entropy(o, y, ignore_index=3), Kind.WHOLE),
        (lambda o, y: F.cross_entropy(o, y).sqrt(), Kind.WHOLE),
        (correlation, Kind.WHOLE),
        (lambda o, y: (F.cross_entropy(o, y, reduction="sum"), len(y)), Kind.COUNTED),
    ],
)
def test_a_trial_finds_out_how_the_parts_of_a_batch_add_up(loss, kind):
    assert reduction_of(loss, (4,), torch.float32, LABELS, LABELS).kind is kind


def test_the_default_counts_by_rows_where_nothing_is_left_out():
    assert reduction_of(F.cross_entropy, (4,), torch.float32, LABELS, LABELS).kind is Kind.ROWS
    found = reduction_of(F.cross_entropy, (4,), torch.float32, LABELS, LABELS - 100)
    assert (found.kind, found.of_tests.kind) == (Kind.ROWS, Kind.COUNTED)
    assert reduction_of(F.cross_entropy, (4,), torch.float32, LABELS - 100, LABELS).kind is Kind.COUNTED


def test_large_outputs_are_tried_at_fewer_positions():
    labels = torch.arange(6).repeat(40, 100) % 5
    seen = []

    def loss(output, labels):
        seen.append(output.nbytes)
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    assert reduction_of(loss, (600, 30000), torch.float32, labels, labels).kind is Kind.ROWS
    assert max(seen) <= 4 << 20


def miscounted(output, labels):
    return F.cross_entropy(output, labels, weight=WEIGHT)


miscounted.counts = len


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (miscounted, "`counts`.*did not add up"),
        (lambda o, y: (F.cross_entropy(o, y), len(y)), "one of them is not the sum"),
        (lambda o, y: F.cross_entropy(o + torch.randn_like(o), y), "random numbers.*`counts`"),
    ],
    ids=["wrong counts", "a mean as a sum", "random"],
)
def test_what_a_loss_says_of_itself_is_checked(loss, words):
    with pytest.raises(OptionError, match=words):
        reduction_of(loss, (4,), torch.float32, LABELS, LABELS, batch=8)


class Remembers(nn.Module):
    """A weight that grows from call to call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, labels):
        self.calls += 1
        return F.cross_entropy(output, labels) + min(1, self.calls / 1000) * output.pow(2).mean()


class Centers(nn.Module):
    """A running mean, changed in place, and one that is another tensor each time."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("center", torch.zeros(5))

    def forward(self, output, labels):
        loss, mean = F.cross_entropy(output - self.center, labels), output.detach().mean(0)
        if self.in_place:
            self.center.mul_(0.9).add_(mean)
        else:
            self.center = 0.9 * self.center + mean
        return loss


class Notes(nn.Module):
    """What it remembers is for its user alone."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, labels):
        self.calls += 1
        self.latest = F.cross_entropy(output, labels)
        return self.latest


def drawing_in_python(output, labels):
    return F.cross_entropy(output, labels) * (1 + random.random())


def drawing_in_numpy(output, labels):
    return F.cross_entropy(output, labels[np.random.permutation(len(labels))])


@pytest.mark.parametrize("loss", [drawing_in_python, drawing_in_numpy])
def test_a_loss_that_draws_elsewhere_remembers_nothing_and_its_generators_are_left_alone(loss):
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert reduction_of(loss, (5,), torch.float32, torch.arange(8) % 5, torch.arange(8) % 5).kind is Kind.WHOLE
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("loss", [Remembers(), Centers(True), Centers(False)], ids=["a count", "in place", "a new tensor"])
@pytest.mark.parametrize("batch", [None, 8], ids=["whole", "divided"])
def test_a_loss_that_remembers_is_refused_and_one_that_keeps_notes_is_not(loss, batch):
    """Trials called it 23 times before training began, a checkpoint had no word of it, and it "draws random numbers"."""
    with pytest.raises(OptionError, match="have another loss when it is called again"):
        reduction_of(loss, (5,), torch.float32, torch.arange(8) % 5, torch.arange(8) % 5, batch=batch)
    assert reduction_of(Notes(), (5,), torch.float32, torch.arange(8) % 5, torch.arange(8) % 5, batch=batch).kind is Kind.ROWS


def test_a_loss_that_draws_random_numbers_is_taken_at_its_word():
    def noisy(output, labels):
        return F.cross_entropy(output + torch.randn_like(output), labels)

    noisy.counts = len
    assert reduction_of(noisy, (4,), torch.float32, LABELS, LABELS).counts is len


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="none"), lambda o, y: o])
def test_a_loss_of_several_numbers_is_refused(loss):
    with pytest.raises(DataError, match=r"returned shape.*expected one number.*\(sum, count\)"):
        reduction_of(loss, (4,), torch.float32, LABELS, LABELS, batch=8)


def hardest(output, labels):
    return F.cross_entropy(output, labels, reduction="none").topk(BATCH).values.mean()


def of_whole_batches(output, labels):
    return F.cross_entropy(output.view(BATCH, 4), labels)


def noisy(output, labels):
    return F.cross_entropy(output + torch.randn_like(output), labels)


@pytest.mark.parametrize("loss", [hardest, of_whole_batches, noisy])
def test_a_loss_that_cannot_be_tried_judges_batches_that_are_not_divided(loss):
    """They failed on the six rows of a trial, also where the batch stayed whole."""
    assert reduction_of(loss, (4,), torch.float32, LABELS, LABELS).kind is Kind.WHOLE
    with pytest.raises((DataError, OptionError), match="tried"):
        reduction_of(loss, (4,), torch.float32, LABELS, LABELS, batch=BATCH)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.L1Loss()])
def test_labels_that_lack_a_dimension_of_the_outputs_are_refused_with_what_gives_it(loss):
    """torch compares each output with the labels of all rows, and says so in a warning at most: six of them were seen."""
    labels = torch.rand(ROWS)
    with pytest.raises((DataError, OptionError), match=r"each with those of all rows\. Give .* labels\.view\(-1, 1\)\.$"):
        reduction_of(loss, (1,), torch.float32, labels, labels, batch=8)


def test_sil_wants_a_class_in_every_label(tmp_path):
    with pytest.raises(DataError, match="sil needs a class in every label"):
        trained(tmp_path / "run", language_model, None, padded(-100), method="sil")


# --- Losses that look at their outputs -------------------------------------------------------------------------------


def hardest_few(output, labels):
    """Of online hard example mining, with a least number of rows."""
    each = F.cross_entropy(output, labels, reduction="none")
    return each.topk(min(len(each), 6)).values.mean()


def of_the_unsure(output, labels):
    each = F.cross_entropy(output, labels, reduction="none")
    counts = (output.softmax(-1).amax(-1) < 0.99).float()
    return (each * counts).sum() / counts.sum().clamp(min=1)


def sum_of_the_unsure(output, labels):
    each = F.cross_entropy(output, labels, reduction="none")
    counts = (output.softmax(-1).amax(-1) < 0.99).float()
    return (each * counts).sum(), counts.sum()


def focal(output, labels):
    each = F.cross_entropy(output, labels, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


ODD = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(2)), torch.arange(ROWS) % 4


@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.few(1)
def test_a_loss_that_chooses_rows_by_their_outputs_is_refused_in_the_first_update(method, micro, tmp_path):
    """The six rows of a trial were all among the hardest six: it trained to other weights with every other micro-batch, and so
    with every other limit, in silence."""
    options = {"method": method, "micro_batch_size": micro, "partitions": 2 if method == "streamed" else 1}
    with pytest.raises(OptionError, match=r"not that of its micro-batches added up.*Give micro_batch_size=8"):
        trained_on_odd(tmp_path / "run", hardest_few, **options)
    cured = trained_on_odd(tmp_path / "cured", hardest_few, **{**options, "micro_batch_size": BATCH})
    whole = trained_on_odd(tmp_path / "whole", hardest_few, micro_batch_size=BATCH)
    assert cured == whole


def trained_on_odd(folder, loss, **options):
    return trained(folder, classifier, loss, (ODD,), **options).weights.read_bytes()


@pytest.mark.parametrize("loss", [of_the_unsure])
def test_a_mask_of_the_outputs_is_found_by_a_trial_with_confident_ones(loss):
    """Random outputs were all below the threshold, where it is a mean of all."""
    with pytest.raises(OptionError, match="neither the mean of its parts' by their rows nor their sum"):
        reduction_of(loss, (4,), torch.float32, LABELS, LABELS, batch=8)
    assert reduction_of(sum_of_the_unsure, (4,), torch.float32, LABELS, LABELS, batch=8).kind is Kind.COUNTED


@pytest.mark.parametrize(
    "loss", [focal, sum_of_the_unsure, nn.SmoothL1Loss(), lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)]
)
@pytest.mark.few(2)
def test_what_adds_up_is_left_alone(loss, tmp_path):
    data = (ODD[0], torch.randn(ROWS, 4)) if isinstance(loss, nn.SmoothL1Loss) else ODD
    whole, parts = (trained(tmp_path / str(micro), classifier, loss, (data,), micro_batch_size=micro) for micro in (BATCH, 2))
    assert parts.train_losses == pytest.approx(whole.train_losses, rel=1e-4)


class Uncertain(nn.Module):
    """Returns scores, and the logarithm of their variance, which is learned (https://arxiv.org/abs/1705.07115)."""

    def __init__(self):
        super().__init__()
        self.layers, self.variance = nn.Sequential(*classifier()), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.layers(x), self.variance


def weighed(found, labels):
    scores, variance = found
    return F.cross_entropy(scores, labels) * torch.exp(-variance) + variance


def test_a_learned_number_that_the_model_returns_adds_up_over_micro_batches(tmp_path):
    """Its gradient was compared row by row, and lies in the first row of each micro-batch: the loss was refused."""
    whole, parts = (trained(tmp_path / str(micro), Uncertain, weighed, (ODD,), micro_batch_size=micro) for micro in (BATCH, 2))
    assert parts.train_losses == pytest.approx(whole.train_losses, rel=1e-4)
    one, other = whole.state_dict()["variance"], parts.state_dict()["variance"]
    assert float(one) == pytest.approx(float(other), rel=1e-4) and float(one) != pytest.approx(0.3)


def test_probabilities_count_by_rows_whatever_the_weights_of_classes(tmp_path):
    """They were taken for indices of the weights: IndexError at the first update."""
    x, y = ODD
    soft = F.one_hot(y, 4) * 0.7 + F.one_hot(y.roll(1), 4) * 0.3
    module = trained(tmp_path / "module", classifier, nn.CrossEntropyLoss(weight=WEIGHT), ((x, soft),), micro_batch_size=4)
    function = trained(tmp_path / "function", classifier, by_rows, ((x, soft),), micro_batch_size=4)
    assert module.weights.read_bytes() == function.weights.read_bytes()
    tested = trained(tmp_path / "tested", classifier, nn.CrossEntropyLoss(weight=WEIGHT), ((x, soft), ODD), micro_batch_size=4)
    network = nn.Sequential(*classifier())
    network.load_state_dict(tested.state_dict())
    assert tested.test_loss == pytest.approx(float(F.cross_entropy(network(x).detach(), y, weight=WEIGHT)), rel=1e-5)
    assert tested.accuracy == pytest.approx(float((network(x).argmax(1) == y).float().mean()))


def by_rows(output, labels):
    return F.cross_entropy(output, labels, weight=WEIGHT)


def from_one_on(output, labels):
    labels -= 1
    return F.cross_entropy(output, labels)


def test_a_loss_that_writes_into_its_labels_has_a_batch_of_its_own(tmp_path):
    """A trial handed the same ones over twice, and said that the loss remembers."""
    x, y = ODD
    written = trained(tmp_path / "written", classifier, from_one_on, ((x, y + 1),), micro_batch_size=4)
    plain = trained(
        tmp_path / "plain", classifier, lambda output, labels: F.cross_entropy(output, labels), (ODD,), micro_batch_size=4
    )
    assert written.weights.read_bytes() == plain.weights.read_bytes()
    assert y.min() == 0
