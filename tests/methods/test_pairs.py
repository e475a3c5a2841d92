"""`psl`: one pair of scores at a time makes the update of the whole network under the partially-separable loss."""

import contextlib
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.data.reader import windows
from seqpart.device.device import Device
from seqpart.device.pages import aligned
from seqpart.errors import DataError, DoesNotFit, Interrupted, ModelError, OptionError
from seqpart.methods.method import PartitionTraining, Workload
from seqpart.methods.separable import PSL
from seqpart.model import SeparableLinear
from seqpart.model.losses import element_pair, partially_separable
from seqpart.model.tiling import separating
from seqpart.schedule.progress import checked
from seqpart.schedule.steps import Position, Verb, steps_of, to_text
from seqpart.store.layout import Layout, TensorSpec
from seqpart.verify.verification import verify
from seqpart.zoo.models import psnet
from tests.command import run
from tests.exactly import split
from tests.resuming import Killed, Stopping, ended, interrupt, kill
from tests.schedule.parsing import parse

pytestmark = pytest.mark.usefixtures("known_machine")

ROWS, CLASSES, BATCH = 33, 3, 12


def images(classes=CLASSES, rows=ROWS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(classes, (rows,), generator=generator)
    return torch.randn(rows, 1, 16, 16, generator=generator, dtype=torch.float64).to(dtype), labels


def convolutional(classes=CLASSES, dtype=torch.float32):
    torch.manual_seed(2)
    return [block().to(dtype) for block in psnet((1, 16, 16), classes)]


def dense(classes=CLASSES, dtype=torch.float32):
    """A linear layer before the separable ones, a nested nn.Sequential, and no biases."""
    torch.manual_seed(2)
    head = [nn.Linear(24, 4 * classes, bias=False), nn.Tanh(), SeparableLinear(4 * classes, 2 * classes, classes, bias=False)]
    return [
        nn.Sequential(nn.Flatten(), nn.Linear(256, 24), nn.LayerNorm(24), nn.ReLU()).to(dtype),
        nn.Sequential(*head, nn.Sequential(nn.GELU(), SeparableLinear(2 * classes, classes, classes))).to(dtype),
    ]


def fit(folder, model, data, *, method="psl", resume=None, reporter=None, loss=None, **options):
    options = {"batch_size": BATCH, "epochs": 2, "lr": 1e-2, "optimizer": "sgd", "seed": 5, **options}
    if resume is None:
        options["output_dir"] = folder
    trainer = Trainer(model, loss or "psl", mem_limit="2GB", method=method, quiet=True, **options)
    rows = split("training", *data, data[0].dtype)
    return trainer.fit(rows, rows, resume=resume, reporter=reporter)


def order(rows, epoch, *, seed=5):
    """As rows come in an epoch."""
    (window,) = windows(rows, rows, (seed, "order", 0, epoch))
    return torch.from_numpy(window.rows)


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [convolutional, dense])
@pytest.mark.parametrize("micro", [12, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.few(1)
def test_training_in_pairs_is_that_of_the_whole_network_but_for_rounding(model, micro, optimizer, tmp_path):
    """In float64, where what the order of additions rounds off is 1e-13 of a weight, and adam divides by gradients of 1e-8."""
    data = images(dtype=torch.float64)
    options = {"optimizer": optimizer, "micro_batch_size": micro}
    whole, paired = (
        fit(tmp_path / method, model(dtype=torch.float64), data, method=method, **options) for method in ("full", "psl")
    )
    expected, found = load_file(whole.weights), load_file(paired.weights)
    assert list(found) == list(expected)
    started = nn.Sequential(*model(dtype=torch.float64)).state_dict()
    for name, tensor in expected.items():
        assert not torch.equal(started[name], tensor)
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(paired.train_losses, whole.train_losses, rtol=1e-6, atol=0)
    assert paired.test_loss == pytest.approx(whole.test_loss, rel=1e-6) and paired.accuracy == whole.accuracy


def lay_out(module):
    """Let its parameters lie as they do in a slot: matrix kernels round otherwise where memory is aligned otherwise."""
    named = dict(module.named_parameters())
    layout = Layout.of([TensorSpec(name=name, shape=tuple(p.shape), dtype=p.dtype) for name, p in named.items()])
    for name, view in layout.views(aligned(layout.padded_nbytes)).items():
        named[name].data = view.copy_(named[name].data)


def plain(model, data, *, micro, epochs=2, lr=1e-2):
    """A loop over pairs: (0, 1), (0, 2), ..., in each by micro-batches, of the rows that are labelled with one of the two."""
    with separating(model, Device(), 5) as separated:
        for part in (separated.common, *separated.scores):
            lay_out(part)
        step = torch.optim.SGD(separated.parameters(), lr=lr, fused=True)
        for epoch in range(1, epochs + 1):
            for update in order(len(data[0]), epoch).split(BATCH):
                for first, second in itertools.combinations(range(len(separated.scores)), 2):
                    for rows in update.split(micro):
                        x, y = data[0][rows], data[1][rows]
                        chosen = (y == first) | (y == second)
                        if not chosen.any():
                            continue
                        common = separated.common(x[chosen])
                        scores = [separated.scores[score](common) for score in (first, second)]
                        (element_pair(*scores, y[chosen] == first) / len(update)).backward()
                step.step()
                step.zero_grad()
    return nn.Sequential(*model).state_dict()


@pytest.mark.parametrize("model", [convolutional, dense])
@pytest.mark.parametrize("micro", [12, 5])
@pytest.mark.few(1)
def test_its_bits_are_those_of_a_plain_loop_over_pairs_in_the_order_that_is_documented(model, micro, tmp_path):
    data = images()
    found = load_file(fit(tmp_path / "run", model(), data, micro_batch_size=micro).weights)
    for name, tensor in plain(model(), data, micro=micro).items():
        assert torch.equal(found[name], tensor), name


@given(st.integers(2, 5), st.integers(1, 8), st.integers(0, 99))
def test_elements_of_all_pairs_add_up_to_the_loss(classes, rows, seed):
    torch.manual_seed(seed)
    scores, labels = 4 * torch.randn(rows, classes, dtype=torch.float64), torch.randint(classes, (rows,))
    total = sum(
        element_pair(scores[own, j : j + 1], scores[own, k : k + 1], labels[own] == j)
        for j, k in itertools.combinations(range(classes), 2)
        for own in [(labels == j) | (labels == k)]
    )
    torch.testing.assert_close(total / rows, partially_separable(scores, labels))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.few(1)
def test_factories_and_models_given_alive_begin_alike_and_alive_ones_have_their_trained_weights(classes, tmp_path):
    data = images(classes)
    alive = nn.Sequential(*(block() for block in psnet((1, 16, 16), classes)))
    for number, block in enumerate(psnet((1, 16, 16), classes)):
        Device().seed(5, "build", number)
        alive[number].load_state_dict(block().state_dict())
    factories = fit(tmp_path / "factories", psnet((1, 16, 16), classes), data)
    given = fit(tmp_path / "alive", alive, data)
    assert given.weights.read_bytes() == factories.weights.read_bytes()
    for name, tensor in load_file(given.weights).items():
        assert torch.equal(alive.state_dict()[name], tensor)


def test_weights_of_files_and_an_evaluation_are_those_of_the_whole_network(tmp_path):
    data = images()
    first = fit(tmp_path / "first", convolutional(), data)
    trainer = Trainer(psnet((1, 16, 16), CLASSES), "psl", mem_limit="2GB", method="psl", quiet=True, weights=first.weights)
    assert trainer.evaluate(data).loss == pytest.approx(first.test_loss, rel=1e-6)
    options = {"weights": first.weights, "seed": 9}
    whole, paired = (fit(tmp_path / m, psnet((1, 16, 16), CLASSES), data, method=m, **options) for m in ("full", "psl"))
    assert paired.test_loss == pytest.approx(whole.test_loss, rel=1e-5) and paired.test_loss != first.test_loss


def test_classes_without_rows_are_pushed_away_all_the_same(tmp_path):
    x, y = images()
    data = x[y != 1], y[y != 1]
    whole, paired = (load_file(fit(tmp_path / m, convolutional(), data, method=m).weights) for m in ("full", "psl"))
    for name, tensor in whole.items():
        torch.testing.assert_close(paired[name], tensor, rtol=1e-4, atol=1e-6)


# --- the schedule -----------------------------------------------------------------------------------------------------


def phases(classes, *, rows=12, batch=12, micro=12, epochs=1):
    training = PartitionTraining(epochs=epochs, batch_size=batch, micro_batch=micro)
    work = Workload(train_rows=rows, test_rows=5, shuffle=False, partitions=(training,) * (classes + 2), one_value=False)
    return PSL.phases(work)


def test_the_schedule_is_made_of_the_five_verbs():
    text = to_text(steps_of(phases(3)))
    assert text.startswith(
        "L0+ L1+ L2+ F0.0 F1.0 B2.0 B1.0 B0.0 D2+ L3+ F0.0 F1.0 B3.0 B1.0 B0.0 D3+ U1 D1 "
        "L2+ L3+ F0.0 F2.0 B3.0 B2.0 B0.0 U3 D3 U2 D2 U0 F0.0"
    )
    assert to_text(parse(text)) == text


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_each_pair_meets_once_in_an_update_and_three_partitions_are_on_the_device(classes, updates, parts, epochs):
    own = phases(classes, rows=12 * updates, micro=-(-12 // parts), epochs=epochs)
    loaded, met, most = set(), [], 0
    for step in checked(steps_of(own), at_once=3):
        if step.verb is Verb.LOAD:
            loaded.add(step.partition)
        elif step.verb is Verb.DROP:
            loaded.remove(step.partition)
        elif step.verb is Verb.BACKWARD and step.partition == max(loaded):
            met.append((*sorted(loaded - {0}), step.micro_batch))
        most = max(most, len(loaded))
    pairs = itertools.combinations(range(1, classes + 1), 2)
    micro_batches = range(own[0].updates * own[0].micro_batches_per_update)
    assert sorted(met) == sorted((*pair, m) for pair in pairs for m in micro_batches for _ in range(epochs)) and most == 3


def test_the_plan_shows_the_weights_of_a_pair_beside_the_whole():
    data = torch.randn(40, 3, 32, 32), torch.arange(40) % 10
    plan = Trainer(psnet((3, 32, 32), 10), mem_limit="2GB", method="psl", quiet=True).plan(data, data)
    assert "10 scores meet in 45 pairs: a pair has 19,998 of 81,750 weights on the device, 4,560 of them common" in plan.reasons
    assert [part.stays for part in plan.partitions] == [True, *[False] * 11]


@given(st.integers(5, 60), st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), st.booleans(), st.integers(0, 99))
def test_as_many_rows_pass_at_once_as_were_planned_for(rows, classes, batch, micro, shuffles, seed):
    torch.manual_seed(seed)
    x, y = torch.zeros(rows, 1), torch.cat([torch.arange(classes), torch.randint(classes, (rows,))])[:rows]
    own, key = split("training", x, y), (seed, "order") if shuffles else None
    found = PSL.rows_per_pass(partially_separable, (own, own), batch=batch, epochs=3, key=key)(min(micro, batch))
    most = 0
    for epoch in range(1, 4):
        order_of = order(rows, epoch, seed=seed) if shuffles else torch.arange(rows)
        for update in order_of.split(batch):
            for part in update.split(min(micro, batch)):
                counts = torch.bincount(y[part], minlength=classes).sort().values
                most = max(most, int(counts[-2:].sum()))
    assert found == most


@pytest.mark.slow
def test_the_peak_is_predicted_as_that_of_other_methods_is(tmp_path):
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (600, 3, 32, 32)).astype(np.uint8)
    np.savez(tmp_path / "some.npz", x_train=images, y_train=np.arange(600) % 10, x_test=images[:50], y_test=np.arange(50) % 10)
    words = ["--mem-limit", "2GB", "--method", "psl", "--model", "psnet", "--data", "npz:some.npz", "--batch-size", "300"]
    ran = run(tmp_path, *words, "--epochs", "2", "--output-dir", "run", "--save-every", "never")
    assert ran.code == 0, ran.err
    proof = json.loads((tmp_path / "run" / "result.json").read_text())["proof"]
    assert -0.01 <= proof["predicted"] / proof["peak"] - 1 <= 0.05


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_bits(tmp_path):
    data, options = images(), {"micro_batch_size": 6, "optimizer": "adam", "save_every": 1}
    reporter = Stopping()
    expected = ended(fit(tmp_path / "whole", psnet((1, 16, 16), CLASSES), data, reporter=reporter, **options))
    places = range(5, len(reporter.steps), 37)
    assert len(places) > 4
    for at, how in zip(places, itertools.cycle([kill, interrupt])):
        folder, stop = tmp_path / f"at-{at}", Stopping(at, how)
        with contextlib.suppress(Interrupted, Killed):
            fit(folder, psnet((1, 16, 16), CLASSES), data, reporter=stop, **options)
        result = fit(None, psnet((1, 16, 16), CLASSES), data, resume=folder, **options)
        assert ended(result) == expected, stop.steps[-1]


def test_memory_that_runs_out_in_an_update_is_planned_for_anew(tmp_path, monkeypatch):
    from seqpart.runtime.elements import Elements

    data, calls, real = images(), itertools.count(), Elements.backward

    def failing(*words):
        if next(calls) == 40:
            raise MemoryError("out of memory")
        return real(*words)

    expected = fit(tmp_path / "whole", convolutional(), data, micro_batch_size=4)
    monkeypatch.setattr(Elements, "backward", failing)
    monkeypatch.setattr(Device, "is_out_of_memory", lambda _, error: isinstance(error, MemoryError))
    found = fit(tmp_path / "failing", convolutional(), data, micro_batch_size=4)
    assert next(calls) > 40 and found.final_micro_batch == 2
    weights = load_file(found.weights)
    for name, tensor in load_file(expected.weights).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


def refusal(kind, words, model, data=None, **options):
    with pytest.raises(kind, match=words):
        Trainer(model, mem_limit="2GB", **{"method": "psl", "quiet": True, **options}).plan(*[data or images()] * 2)


def test_a_model_without_separable_layers_is_refused_in_words():
    cure = 'Use method="auto" loss="psl"'
    flat, last = nn.Sequential(nn.Flatten(), nn.Linear(256, 12)), SeparableLinear(12, 3, 3)
    refusal(ModelError, f"its last layer, 1, is a Linear.*{cure}", [flat, nn.Linear(12, 3)])
    refusal(ModelError, r"its last layer, 1\.1, is a Softmax", [flat, nn.Sequential(last, nn.Softmax(1))])
    refusal(ModelError, "has 6 outputs in 3 groups", [flat, SeparableLinear(12, 6, 3)])
    refusal(ModelError, "layer 1 has 6 groups, and the last one 3", [flat, SeparableLinear(12, 12, 6), last])
    fed = nn.Sequential(nn.Linear(16, 16), nn.Flatten(), nn.LayerNorm(256))
    refusal(ModelError, r"there is layer 0\.2, and it must be a plain nn.Conv2d", [fed, SeparableLinear(256, 2, 2)])
    refusal(
        ModelError, "a layer before it that all scores share", [nn.Linear(16, 16), nn.Flatten(), SeparableLinear(256, 2, 2)]
    )
    refusal(ModelError, r"layer 0\.1 is random", [nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 12)), last])
    norm = nn.Sequential(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(576, 12))
    refusal(ModelError, r"layer 0\.1 has buffers", [norm, last])

    class Whole(nn.Module):
        def forward(self, x):
            return x

    refusal(ModelError, "a Whole has a forward of its own", Whole())


class Thrice(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def heard(layer):
    layer.register_forward_hook(lambda _, __, output: 5 * output)
    return layer


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        # Of a linear layer over positions a flattened row has position after position, and not unit after unit.
        ([nn.Linear(16, 16), nn.Linear(16, 6), nn.Flatten(), SeparableLinear(96, 3, 3)], "layer 0.2 moves the outputs"),
        ([nn.Linear(16, 16), nn.Linear(16, 6), nn.MaxPool2d(2), nn.Flatten(), SeparableLinear(24, 3, 3)], "layer 0.2 moves"),
        ([nn.Identity(), nn.Conv2d(1, 3, 5), nn.Flatten(2), SeparableLinear(144, 3, 3)], r"there is no nn\.Flatten\(1\)"),
        ([nn.Identity(), nn.Conv2d(1, 3, 5), nn.ReLU(), SeparableLinear(12, 3, 3)], r"there is no nn\.Flatten\(1\)"),
        # Copies of rows do what the type does, and nobody hears of them.
        ([nn.Flatten(), Thrice(256, 12), SeparableLinear(12, 3, 3)], "layer 0.1 is a Thrice with hooks, or of a kind"),
        ([nn.Flatten(), heard(nn.Linear(256, 12)), SeparableLinear(12, 3, 3)], "layer 0.1 is a Linear with hooks"),
        ([nn.Flatten(), nn.Linear(256, 12), heard(nn.ReLU()), SeparableLinear(12, 3, 3)], "layer 0.2 is a ReLU with hooks"),
        (
            [nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(256, 12)), SeparableLinear(12, 3, 3)],
            "layer 0.1 is a ParametrizedLinear",
        ),
    ],
)
def test_a_head_that_is_not_what_its_rows_say_is_refused(layers, words):
    """They trained another network, without a word."""
    refusal(ModelError, words, nn.Sequential(nn.Sequential(*layers)))


def test_what_does_not_go_with_pairs_is_refused_by_its_name():
    model = psnet((1, 16, 16), CLASSES)
    for option in ({"clip_grad_norm": 1.0}, {"partitions": 3}, {"tile": "16MB"}):
        refusal(OptionError, f'{next(iter(option))} does not go with method="psl"', model, **option)
    refusal(OptionError, 'method="psl" trains by loss="psl"; found loss="cross-entropy"', model, loss="cross-entropy")
    refusal(OptionError, "leave out the other loss", model, loss=nn.CrossEntropyLoss())
    x, y = images()
    refusal(DataError, "needs one class for each row", model, (x, torch.where(y == 1, -100, y)))
    refusal(DataError, 'loss="psl" needs classes', model, (x, y.float()))
    refusal(DataError, r"the labels have 3 classes", psnet((1, 16, 16), 2))
    with pytest.raises(OptionError, match="adds up gradients pair by pair"):
        verify(model, images(), method="psl", mem_limit="2GB")
    with pytest.raises(DoesNotFit, match="method psl needs"):
        Trainer(model, mem_limit="100MB", method="psl", quiet=True).plan(images(), images())


def test_a_run_from_another_position_begins_with_an_update():
    (first, *_) = steps_of(phases(3, rows=36), Position(0, 2))
    assert str(first) == "L0+"
