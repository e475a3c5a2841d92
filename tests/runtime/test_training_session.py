"""A loop of one's own under the limit: `Trainer.session`."""

import contextlib
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from seqpart import Trainer
from seqpart.errors import DataError, OptionError
from seqpart.runtime.partition import Partition
from seqpart.runtime.weight_store import WeightStore
from tests.machine import SPEEDS, known_speeds
from tests.runtime.test_evaluate import alive, files
from tests.runtime.test_same_as_plain import OPTIMIZERS, data, network

WAYS = [
    {"method": "streamed", "partitions": 3}, {"method": "full"}, {"method": "checkpointed", "partitions": 3},
    {"method": "streamed", "partitions": 3, "micro_batch_size": 12}, {"method": "auto"},
]  # fmt: skip


def trainer(folder, model=None, loss=None, optimizer="adam", **options):
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 32, "micro_batch_size": 32, "lr": 1e-2, "seed": 5, **options}
    return Trainer(
        network() if model is None else model, loss, optimizer, offload_dir=folder / "homes", **{"quiet": True, **options}
    )  # fmt: skip


def plainly(batches, *, model=None, micro_batch=32, lr=lambda update: 1e-2, optimizer="adam"):
    """The losses and the weights of a plain loop."""
    chain, losses = (alive() if model is None else model).train(), []
    step = OPTIMIZERS[optimizer](list(chain.parameters()), 1e-2)
    for update, (x, y) in enumerate(batches):
        total = 0.0
        for group in step.param_groups:
            group["lr"] = lr(update)
        for at in range(0, len(x), micro_batch):
            rows = slice(at, at + micro_batch)
            value = F.cross_entropy(chain(x[rows]), y[rows])
            share = len(x[rows]) / len(x)
            (value if share == 1 else value * share).backward()
            total += value.item() * share
        step.step()
        step.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, chain.state_dict()


def loader(**options):
    """Three batches of 32 rows, and one of 24, in another order each time."""
    return DataLoader(TensorDataset(*data()), batch_size=32, shuffle=True, **options)


def same(found, expected):
    return [torch.equal(one, other) for one, other in zip(found.values(), expected.values(), strict=True)] == [True] * len(
        found
    )


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_the_steps_of_a_loop_have_the_bits_of_a_plain_one(options, tmp_path):
    batches = [batch for _ in range(3) for batch in loader()]
    with trainer(tmp_path, **options).session(data()) as session:
        losses = [session.step(batch) for batch in batches]
        found = session.state_dict()
        proof = session.proof()
    expected, weights = plainly(batches, micro_batch=options.get("micro_batch_size", 32))
    assert same(found, weights) and losses == pytest.approx(expected, rel=1e-6)
    assert proof.violations == 0 and proof.peak <= proof.limit
    assert files(tmp_path) == [], "nothing is left"


@pytest.mark.parametrize("options", WAYS[:2], ids=str)
def test_a_loop_inside_one_autocast_trains_by_the_weights_of_each_update(options, tmp_path):
    """torch keeps casts of weights until the outermost autocast ends: all updates had those of the first."""
    batches = [batch for _ in range(3) for batch in loader()]

    def stepped(inside, each):
        with trainer(tmp_path, **options).session(data()) as session, inside:
            for batch in batches:
                with each():
                    session.step(batch)
            return session.state_dict()

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    expected = stepped(contextlib.nullcontext(), autocast)
    assert same(stepped(autocast(), contextlib.nullcontext), expected)
    assert torch.is_autocast_cache_enabled()


def test_a_run_inside_an_autocast_has_the_bits_of_one_without_its_cache_of_casts(tmp_path):
    def trained(caches):
        one = trainer(tmp_path, epochs=2, shuffle=False, output_dir=tmp_path / str(caches))
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches):
            return one.fit(data()).state_dict()

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("options", WAYS[:2], ids=str)
def test_a_loop_may_stand_in_inference_mode(options, tmp_path):
    """The batch was copied into tensors that autograd could not save, and the session ended with torch's error."""
    batches = list(loader())
    with trainer(tmp_path, **options).session(data()) as session, torch.inference_mode():
        losses = [session.step(batch) for batch in batches]
        found, tested = session.state_dict(), session.evaluate(data()).loss
    expected, weights = plainly(batches)
    assert same(found, weights) and losses == pytest.approx(expected, rel=1e-6) and tested > 0


def test_all_methods_have_the_same_bits_where_micro_batches_begin_between_lines_of_the_cache(tmp_path):
    """`full` read them as views of the batch, at addresses at which kernels round otherwise."""
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(21, 6, generator=numbers), torch.arange(21) % 5

    def stepped(method):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16)) for _ in range(3)]
        model = nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 5))
        one = trainer(tmp_path / method, model, method=method, batch_size=7, micro_batch_size=3)
        with one.session((x, y)) as session:
            return [session.step((x[at : at + 7], y[at : at + 7])) for at in (0, 7, 14)], session.state_dict()

    losses, weights = stepped("full")
    for other, found in map(stepped, ("streamed", "checkpointed")):
        assert other == losses and same(found, weights)


@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.few(1)
def test_evaluations_and_exports_in_between_change_nothing(options, tmp_path):
    batches, rows = [batch for _ in range(2) for batch in loader()], data(41, 1)
    found = []
    with trainer(tmp_path, **options).session(data()) as session:
        for batch in batches:
            session.step(batch)
            found.append(session.evaluate(rows, compute_metrics=lambda outputs, labels: {"rows": len(labels)}))
            session.export(tmp_path / "out" / "weights.safetensors")
        last = session.state_dict()
    _, weights = plainly(batches)
    assert same(last, weights)
    chain = alive().eval()
    chain.load_state_dict(last)
    expected = F.cross_entropy(chain(rows[0]), rows[1]).item()
    assert found[-1].loss == pytest.approx(expected, rel=1e-5) and 0 < found[-1].metrics["rows"] <= 41
    assert len({one.loss for one in found}) == len(found)


def test_factories_begin_anew_behind_a_loop_unless_its_export_is_given(tmp_path):
    """`evaluate` knows what `fit` trained, and nothing of a session: both the docstrings and docs/loop.md say so."""
    own, rows = trainer(tmp_path), data(41, 1)
    before = own.evaluate(rows).loss
    with own.session(data()) as session:
        for batch in loader():
            session.step(batch)
        after, kept = session.evaluate(rows).loss, session.export(tmp_path / "weights.safetensors")
    with own.session(data()) as session:
        assert session.evaluate(rows).loss == before == own.evaluate(rows).loss != after
    with trainer(tmp_path, weights=kept).session(data()) as session:
        assert session.evaluate(rows).loss == after == own.evaluate(rows, weights=kept).loss


@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.few(1)
def test_a_step_is_predicted_to_take_what_an_update_of_an_epoch_takes(options, tmp_path, capsys, monkeypatch):
    """A step is an epoch of one update, and counted what was loaded and written once for all steps: 0.7 s instead of 0.001,
    with any method, so that `auto` could not tell them apart."""
    known_speeds(monkeypatch, replace(SPEEDS, read=1e5, write=1e5))
    with trainer(tmp_path, **options, quiet=False).session(data()):
        pass
    predicted = float(capsys.readouterr().out.partition("predicted time")[2].partition("(")[2].split()[0])
    expected = trainer(tmp_path, **options).plan(data(128)).update_seconds
    assert predicted == pytest.approx(expected, rel=0.1, abs=0.1), "blocks are timed, and a busy machine takes longer"


def test_modules_given_alive_have_the_trained_weights_behind_the_loop_also_behind_an_error(tmp_path):
    """An error of the loop itself gave them their weights from before it, and nothing said so."""
    model, batches = alive(), list(loader())
    with trainer(tmp_path, model).session(data()) as session:
        for batch in batches:
            session.step(batch)
    assert same(model.state_dict(), plainly(batches)[1])
    model = alive()
    with pytest.raises(ZeroDivisionError), trainer(tmp_path, model).session(data()) as session:
        session.step(batches[0])
        raise ZeroDivisionError
    assert same(model.state_dict(), plainly(batches[:1])[1]) and files(tmp_path) == []


def test_learning_rates_follow_a_schedule_where_the_number_of_updates_is_known(tmp_path):
    batches = [batch for _ in range(2) for batch in loader()]
    with trainer(tmp_path, lr_schedule="linear", max_steps=8).session(data()) as session:
        for batch in batches:
            session.step(batch)
        found = session.state_dict()
        with pytest.raises(OptionError, match=r"max_steps.8: all of them are done"):
            session.step(batches[0])
    assert same(found, plainly(batches, lr=lambda update: 1e-2 * (1 - update / 8))[1])


class Named(nn.Module):
    """Takes two tensors by name, and says its loss itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, input_ids, attention_mask, labels=None):
        scores = self.head(self.embed(input_ids) * attention_mask[..., None])
        if labels is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def test_x_and_y_as_two_arguments_are_told_to_be_one(tmp_path):
    x, y = data()
    with trainer(tmp_path).session((x[:32], y[:32])) as session:
        with pytest.raises(DataError, match=r"Give x and y as one: step\(\(x, y\)\)"):
            session.step(x[:32], y[:32])
        session.step((x[:32], y[:32]))


def test_batches_may_be_dicts_with_labels(tmp_path):
    torch.manual_seed(3)
    rows = {
        "input_ids": torch.randint(0, 11, (8, 6)),
        "attention_mask": torch.ones(8, 6),
        "labels": torch.randint(0, 11, (8, 6)),
    }
    model, plain = Named(), Named()
    plain.load_state_dict(model.state_dict())
    options = {"batch_size": 8, "micro_batch_size": 8}
    with trainer(
        tmp_path, model, lambda scores, labels: F.cross_entropy(scores.flatten(0, 1), labels.flatten()), **options
    ).session(rows) as session:
        losses = [session.step(rows) for _ in range(3)]
    step = OPTIMIZERS["adam"](list(plain.parameters()), 1e-2)
    for found in losses:
        loss = plain(**rows)[0]
        loss.backward()
        step.step()
        step.zero_grad(set_to_none=True)
        assert found == pytest.approx(loss.item(), rel=1e-6)
    assert same(model.state_dict(), plain.state_dict())


def test_random_numbers_of_the_loop_are_left_alone(tmp_path):
    def drawn(step):
        torch.manual_seed(1)
        found = []
        for batch in loader():
            step(batch)
            found += [batch[1].clone(), torch.rand(2)]
        return found

    model = [lambda: nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5)), lambda: nn.Linear(8, 5)]
    with trainer(tmp_path, model).session(data()) as session:
        assert all(torch.equal(one, other) for one, other in zip(drawn(session.step), drawn(lambda batch: None), strict=True))


def test_an_allocation_that_fails_is_planned_for_and_the_bits_stay(tmp_path, monkeypatch):
    batches, calls, real = list(loader()), [], Partition.forward

    def failing(partition, *arguments, **named):
        calls.append(partition.number)
        if len(calls) == 8:
            raise MemoryError
        return real(partition, *arguments, **named)

    monkeypatch.setattr(Partition, "forward", failing)
    with trainer(tmp_path, method="streamed", partitions=3).session(data()) as session:
        for batch in batches:
            session.step(batch)
        found = session.state_dict()
    assert len(calls) > 12 and same(found, plainly(batches)[1])


def test_a_batch_that_cannot_be_taken_is_refused_in_words_and_the_session_goes_on(tmp_path):
    refused = [
        (data(33), "the batch has 33 rows, and the plan has room for 32"),
        (
            (torch.zeros(8, 13), torch.zeros(8, dtype=torch.long)),
            r"the batch: expected rows as the example has, \(12,\) float32; found \(13,\) float32",
        ),
        ((torch.zeros(8, 12), torch.zeros(8)), "the batch: expected labels as the example has"),
        ((torch.full((8, 12), float("nan")), data(8)[1]), "NaN or infinity"),
        ({"x": torch.zeros(8, 12)}, "the batch: expected a dict with labels .*; found x. Name them labels"),
        (torch.zeros(8, 12), "the batch: expected a pair .* found a Tensor alone"),
        ({"x": torch.zeros(8, 12), "labels": data(8)[1]}, r"found a dict of x \(12,\) float32"),
    ]
    with trainer(tmp_path).session(data()) as session:
        for batch, words in refused:
            with pytest.raises(DataError, match=words):
                session.step(batch)
        assert session.step(data(32)) > 0


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_a_batch_that_cannot_be_taken_leaves_the_session_as_it_was_before_it(options, tmp_path):
    """It ended the session, and with it all that had been trained."""
    batches, size = list(loader()), options.get("micro_batch_size", 32)
    x, y = batches[0]
    with trainer(tmp_path, **options).session(data()) as session:
        losses = []
        for batch in batches:
            with pytest.raises(DataError, match="NaN"):
                session.step((torch.full_like(x, float("nan")), y))
            with pytest.raises(DataError, match="out of bounds"):
                session.step((x, y + 100))
            losses.append(session.step(batch))
            with pytest.raises(DataError, match="out of bounds"):
                session.evaluate((x, y + 100))
        weights = session.state_dict()
    expected = plainly(batches, micro_batch=size)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert session.updates == 4 and same(weights, expected[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "sil"}, 'method="sil": a loop of your own takes exact methods'),
        ({"method": "ist", "subnets": 2}, "a loop of your own takes exact methods"),
        ({"method": "psl"}, "a loop of your own takes exact methods"),
        ({"epochs": 2}, "epochs: a loop of your own decides that itself"),
        ({"eval_every": 5, "keep_best": True}, "eval_every, keep_best: a loop of your own decides"),
        ({"log": "tensorboard", "trace": "trace.json"}, "trace, log: a loop of your own decides"),
        ({"save_every": 100}, "save_every: a loop of your own decides"),
        ({"lr_schedule": "cosine"}, "lr_schedule cosine needs to know how many updates"),
    ],
    ids=str,
)
def test_settings_that_only_fit_knows_are_refused(options, words, tmp_path):
    with pytest.raises(OptionError, match=words), trainer(tmp_path, **options).session(data()):
        pass


def test_a_session_may_be_opened_with_rows_of_which_none_counts(tmp_path):
    """`fit` trained on these rows, and a session refused them as an example."""
    x, y = data()
    with trainer(tmp_path).session((x, torch.full_like(y, -100))) as session:
        assert session.step((x[:32], y[:32])) == plainly([(x[:32], y[:32])])[0][0]


def test_an_example_that_is_smaller_than_a_batch_is_refused_and_steps_end_with_the_block(tmp_path):
    with pytest.raises(DataError, match=r"the example has 8 rows, and a batch may have 32\. Give batch_size=8"):
        trainer(tmp_path).session(data(8)).__enter__()
    with trainer(tmp_path).session(data()) as session:
        session.step(data(32))
    with pytest.raises(OptionError, match="session: it has ended"):
        session.step(data(32))


@pytest.fixture
def signalled(monkeypatch):
    """`signalled(*numbers)`: they come in the midst of the next step, behind its first update of a partition."""

    def of(*numbers):
        real, waiting = Partition.update, list(numbers)

        def update(*arguments, **options):
            done = real(*arguments, **options)
            while waiting:
                signal.raise_signal(waiting.pop())
            return done

        monkeypatch.setattr(Partition, "update", update)

    return of


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.few(1)
def test_a_signal_waits_for_the_end_of_the_step_and_leaves_the_session_as_it_is(number, options, tmp_path, signalled):
    """It ended the step half-way, and the session with it: everything that the loop had trained was lost."""
    batches = list(loader())
    with trainer(tmp_path, **options).session(data()) as session:
        session.step(batches[0])
        signalled(number)
        with pytest.raises(KeyboardInterrupt, match=r"the step is done.*export\(FILE\) and state_dict\(\) give") as stopped:
            session.step(batches[1])
        assert (type(stopped.value), session.updates) == (KeyboardInterrupt, 2)
        found = session.state_dict()
        session.step(batches[2])
        last = session.state_dict()
    assert same(found, plainly(batches[:2])[1]) and same(last, plainly(batches[:3])[1])


def test_an_error_that_ended_the_session_says_that_the_weights_are_those_from_before_it(tmp_path, signalled):
    model, batches = alive(), list(loader())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt) as stopped, trainer(tmp_path, model).session(data()) as session:
        session.step(batches[0])
        signalled(signal.SIGINT, signal.SIGINT)
        session.step(batches[1])
    assert stopped.value.__notes__ == ["Modules passed to the session have the weights from before it."]
    assert same(model.state_dict(), before) and files(tmp_path) == []


def test_a_second_signal_ends_the_step_at_once_and_the_session_with_it(tmp_path, signalled):
    with pytest.raises(OptionError, match="it has ended"), trainer(tmp_path).session(data()) as session:
        signalled(signal.SIGINT, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            session.step(data(32))
        assert session.updates == 0
        session.state_dict()
    assert files(tmp_path) == []


def test_a_signal_while_the_loop_ends_leaves_the_trained_weights_in_the_model(tmp_path, monkeypatch):
    """They had been trained and were thrown away."""
    model, batches, give_back = alive(), list(loader()), WeightStore.give_back
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(WeightStore, "give_back", lambda homes: (signal.raise_signal(signal.SIGTERM), give_back(homes)))
        with trainer(tmp_path, model).session(data()) as session:
            session.step(batches[0])
    assert same(model.state_dict(), plainly(batches[:1])[1])
