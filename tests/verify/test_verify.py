"""`seqpart verify`: proof where both ways agree, the first tensor where they do not, and a check that is not blind."""

import random
import sys

import pytest
import torch
from torch import nn

from seqpart.__main__ import console
from seqpart.device.device import Device
from seqpart.device.usage import MemoryUsage
from seqpart.errors import DoesNotFit, OptionError, VerifyMismatch
from seqpart.runtime.compute import Compute
from seqpart.verify import verification
from seqpart.verify.answers import Digests, Key
from tests import forced
from tests.given import write_own
from tests.runtime.test_failures import REFUSAL
from tests.verifying import MODELS, check, normal, numbers, tokens


@pytest.fixture(autouse=True)
def surroundings(known_machine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_further_runs(monkeypatch):
    """The limited run, the control, the reference and the plain loop alone: half the time."""
    monkeypatch.setattr(verification, "_other_cuts", lambda *_: ())
    monkeypatch.setattr(verification, "_other_micro_batches", lambda *_: "")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale(), None


class Meddling(nn.Module):
    """Scales gradients by a number that torch does not know of; of outputs a plan would notice it."""

    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        return Scaled.apply(self.linear(x), self.scale)


class Calls:
    """1, 1/2, 1/3 ...: a pass that is done again gives something else."""

    count = 0

    def __call__(self):
        self.count += 1
        return 1 / self.count


def meddling(scale):
    return lambda: nn.Sequential(nn.Linear(8, 8), Meddling(scale), nn.Linear(8, 8), nn.Linear(8, 4))


# --- proof ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("mlp", "streamed"),
        pytest.param("batch norm and dropout", "checkpointed", marks=pytest.mark.slow),
        pytest.param("gpt", "streamed", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_proven_to_train_the_same_both_ways(name, method):
    found = check(*MODELS[name], method=method, partitions=3, clip_grad_norm=1.0, steps=2)
    assert (found.method, found.reference, found.steps, len(found.plan.partitions)) == (method, "full", 2, 3)
    assert found.comparisons > 2 * found.tensors * 0.9  # nearly all are seen before every update, and again at the end
    assert found.caught not in ("", "the loss")  # a gradient of the first update, or a statistic of its replay
    assert f"proof: {method} in 3 partitions" in str(found)
    assert len(found.cuts) == 2, "it was cut elsewhere too"
    alike = "micro-batches of 2 and 1 give the same losses within 0.001 (sums are added in another order)" in str(found)
    assert alike is (name != "batch norm and dropout")


@pytest.mark.slow
def test_the_digest_is_the_same_for_every_way_and_another_for_another_seed():
    ways = [{"partitions": 4}, {"method": "checkpointed", "partitions": 3}]
    digests = {check(*MODELS["batch norm and dropout"], **way).digest for way in ways}
    assert len(digests) == 1
    assert check(*MODELS["batch norm and dropout"], partitions=2, seed=1).digest not in digests


@pytest.mark.slow
def test_two_ways_that_need_less_memory_can_be_compared_with_each_other():
    assert check(*MODELS["gpt"], method="streamed", reference="checkpointed", partitions=3).reference == "checkpointed"


@pytest.mark.slow
def test_all_updates_of_a_training_can_be_verified():
    found = check(*MODELS["mlp"], partitions=2, epochs=2, steps=6, optimizer="sgd", momentum=0.9)
    assert found.steps == 6


@pytest.mark.usefixtures("no_further_runs")
def test_a_model_that_was_given_alive_keeps_its_weights_and_no_file_stays(tmp_path):
    model = normal()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(lambda: model, numbers(8), partitions=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("no_further_runs")
def test_its_files_are_in_a_directory_that_is_new_and_private_and_goes_with_them(tmp_path):
    """A name of time and process can be predicted, and what lay there under it was removed with all that was in it."""
    seen = set()

    class Looking(nn.Linear):
        def forward(self, x):
            if type(x) is torch.Tensor:
                seen.update((folder.name, folder.stat().st_mode & 0o777) for folder in (tmp_path / "homes").iterdir())
            return super().forward(x)

    check(lambda: nn.Sequential(Looking(8, 8), nn.Linear(8, 4)), numbers(8), partitions=2, steps=1, offload_dir="homes")
    assert {mode for _, mode in seen} == {0o700}
    assert len(seen) == 1
    assert not list((tmp_path / "homes").iterdir())


def test_tied_weights_and_frozen_blocks_are_proven_too():
    model = normal()
    model[0].requires_grad_(False)
    model[2].layers[0].weight = model[1].layers[0].weight
    assert check(lambda: model, numbers(8), partitions=3, steps=2).caught


# --- what differs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["streamed", "checkpointed"])
@pytest.mark.few(1)
def test_a_block_that_counts_its_calls_is_caught_and_the_first_tensor_is_named(method):
    with pytest.raises(VerifyMismatch) as caught:
        check(meddling(Calls()), numbers(8), method=method, partitions=4)
    assert caught.value.exit_code == 5
    assert f"{method} and full differ, first in" in str(caught.value)
    assert "in update 1 of 3:" in str(caught.value)
    assert "the model is not deterministic" in str(caught.value)


def test_random_numbers_that_are_not_torch_s_are_caught():
    with pytest.raises(VerifyMismatch, match=r"elements, by at most .*\n.*random numbers that are not torch's"):
        check(meddling(random.Random(3).random), numbers(8), partitions=2)


def test_a_way_that_is_wrong_by_one_element_of_one_gradient_is_caught_and_measured(monkeypatch):
    def wrong(self, step, root, right=Compute._propagate):
        right(self, step, root)
        if step.partition == 1 and step.micro_batch == 3:
            next(iter(self.loaded[1].trainable.values())).grad.view(-1)[0] += 0.25

    monkeypatch.setattr(Compute, "_propagate", wrong)
    with pytest.raises(VerifyMismatch) as caught:
        check(MODELS["mlp"][0], numbers(8), partitions=(0, 2, 4), optimizer="sgd")
    said = str(caught.value)
    assert "first in the gradient of 2." in said
    assert "in update 2 of 3: 1 of 16 elements, by at most 0.25.\n" in said
    assert "gave the same bits when it was run again" in said


def test_what_differs_in_an_update_is_ordered_as_it_comes_about():
    keys = [Key(0, 0, 5, "5.weight"), Key(0, 3, 0, ""), Key(0, 4, -5, "5.weight"), Key(0, 4, -1, "1.weight"), Key(1, 0, 0, "0")]
    assert sorted([*keys[3:], *keys[:3]]) == keys


def test_zeros_of_two_signs_and_tensors_that_are_missing_differ():
    seen = Digests(1)
    for name, tensor in (("a", torch.tensor([0.0, 1.0])), ("b", torch.ones(2)), ("c", None)):
        seen.see(Key(0, 4, 0, name), tensor)
    for name, tensor in (("a", torch.tensor([-0.0, 1.0])), ("b", torch.ones(1, 2)), ("b", None), ("c", torch.zeros(0))):
        other = Digests(1, expected=seen.seen)
        other.see(Key(0, 4, 0, name), tensor)
        assert other.first == Key(0, 4, 0, name)
    other = Digests(1, expected=seen.seen)
    other.miss()
    assert other.first == Key(0, 4, 0, "a")


# --- the control ------------------------------------------------------------------------------------------------------


def frozen_but_the_last():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return model


@pytest.mark.usefixtures("no_further_runs")
@pytest.mark.parametrize(
    ("model", "data", "partitions"),
    [
        (frozen_but_the_last, numbers(8), (0, 1)),  # a normalization takes a common factor back
        (lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), tokens(), (0, 1)),
    ],
    ids=["frozen", "tokens"],
)
def test_a_wrong_replay_is_noticed_whatever_is_replayed(model, data, partitions):
    assert check(model, data, partitions=partitions).caught


@pytest.mark.slow
def test_a_wrong_replay_is_noticed_where_no_graph_is_kept(monkeypatch):
    forced.unspent(monkeypatch)
    report = check(*MODELS["mlp"], partitions=3)
    assert report.caught and not report.plan.keeps


def test_a_check_that_does_not_notice_a_wrong_replay_says_that_it_is_blind(monkeypatch):
    monkeypatch.setattr(Compute, "_falsified", lambda _, handed: handed)
    with pytest.raises(VerifyMismatch, match="the check is blind: streamed was run once more") as caught:
        check(*MODELS["mlp"], partitions=2)
    assert caught.value.exit_code == 5


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "sil"}, 'method="sil" is approximate'),
        ({"method": "full"}, "is what the others are compared with"),
        ({"method": "auto"}, "as one partition, which is full training already"),
        ({"method": "streamed", "reference": "streamed"}, 'reference="streamed" is what is to be verified'),
        ({"reference": "sil"}, "reference: expected one of full, checkpointed, streamed; found 'sil'"),
        ({"steps": 0}, "steps: expected a number of updates from 1 up; found 0"),
        ({"steps": 10}, "steps=10: training has 9 update"),
        ({"output_dir": "here"}, "verify keeps no results"),
    ],
    ids=str,
)
def test_what_cannot_be_verified_is_refused_in_words(options, words):
    with pytest.raises(OptionError, match=words):
        check(*MODELS["mlp"], **options)


def test_a_machine_that_cannot_hold_full_training_is_told_so_before_anything_is_trained(monkeypatch):
    """What tests before left in this process is freed while it is planned, and would be room for training then."""
    monkeypatch.setattr(Device, "free_memory", lambda self: (1 << 20) - MemoryUsage(self).read())  # all in all 1 MB
    monkeypatch.setattr("seqpart.verify.variant.Variant.run", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(DoesNotFit, match=r'compares with full training, which needs .* and has .*reference="checkpointed"'):
        check(*MODELS["mlp"], partitions=2)


# --- runs that do more than train --------------------------------------------------------------------------------------


class FailsOnce(torch.autograd.Function):
    """One allocation fails in a backward pass."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        FailsOnce.calls += type(gradient) is torch.Tensor
        if FailsOnce.calls == 10:  # in the second update of the limited run
            FailsOnce.calls += 1
            raise RuntimeError(REFUSAL)
        return gradient


class Failing(nn.Linear):
    def forward(self, x):
        return FailsOnce.apply(super().forward(x))


@pytest.mark.usefixtures("no_further_runs")
def test_a_run_that_goes_on_without_its_heap_is_compared_update_by_update_all_the_same():
    """An update that was undone half-way was counted for the partitions that had made it."""
    assert check(lambda: nn.Sequential(Failing(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)), numbers(8), partitions=2).caught
    assert FailsOnce.calls > 10


@pytest.mark.slow
def test_passes_over_the_test_rows_between_epochs_are_no_updates():
    assert check(*MODELS["mlp"], partitions=2, epochs=3, test_every=1, steps=4).steps == 4


# --- the command ------------------------------------------------------------------------------------------------------


def command(monkeypatch, capsys, *arguments):
    """(exit code, output, errors) of `seqpart verify ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["seqpart", "verify", *arguments])
    with pytest.raises(SystemExit) as exit:
        console()
    said = capsys.readouterr()
    return exit.value.code, " ".join(said.out.split()), " ".join(said.err.split())


SMALL = ["--mem-limit", "2GB", "--partitions", "2", "--steps", "1"]


def test_the_command_prints_each_run_and_the_proof(monkeypatch, capsys, tmp_path):
    code, out, err = command(monkeypatch, capsys, "--width", "16", "--depth", "2", *SMALL)
    assert (code, err) == (0, "")
    for word in ("limited streamed", "control streamed", "noticed in", "reference full", "proof: streamed in 2 partitions"):
        assert word in out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command_ends_with_5_where_the_two_ways_differ(monkeypatch, capsys, tmp_path):
    write_own(tmp_path, "verified_models")
    with open(tmp_path / "verified_models.py", "a") as file:
        file.write("calls = []\nclass Noisy(nn.Linear):\n    def forward(self, x):\n")
        file.write("        y = super().forward(x)\n")
        file.write("        if y.requires_grad: y.register_hook(lambda gradient: calls.append(0) or gradient / len(calls))\n")
        file.write("        return y\n")
        file.write("def noisy(): return chain(middle=Noisy(32, 32))\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = command(monkeypatch, capsys, "--model", "verified_models:noisy", *SMALL)
    assert code == 5
    assert "VerifyMismatch: streamed and full differ, first in " in err
    assert "Traceback" not in err


def test_the_command_refuses_what_only_training_has(monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, *SMALL, "--dry-run", "--overwrite")
    assert code == 2
    assert "--dry-run, --overwrite: verify trains a few updates and keeps nothing" in err


def test_the_help_says_what_verify_does_and_that_streamed_is_its_method(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "--help")
    assert code == 0
    assert "--steps" in out
    assert "default: streamed" in out


# --- evaluation, other cuts, another micro-batch -----------------------------------------------------------------------


class LooksBack(nn.Module):
    """Does something else where a partition begins with it: its input was made by no ordinary operation then."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * (2.0 if "Entry" in type(x.grad_fn).__name__ else 1.0)


def test_a_block_that_looks_at_where_its_input_comes_from_is_found_by_another_cut():
    """Where the plan did not cut before it, verify agreed, and training under another limit learned something else."""

    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), LooksBack(), nn.Linear(8, 8), nn.Linear(8, 4))

    with pytest.raises(VerifyMismatch, match=r"in 2 partitions and in 5 differ.*grad_fn"):
        check(model, numbers(8), partitions=(0, 1))


class LooksAtGradMode(nn.Module):
    """Does something else where no gradients are wanted, as in a pass that is computed a second time it might be."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * (2.0 if torch.is_grad_enabled() and x.requires_grad else 1.0)


@pytest.mark.parametrize("method", ["streamed", "checkpointed"])
@pytest.mark.few(1)
def test_a_block_that_looks_at_grad_mode_finds_the_same_in_every_pass(method):
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), LooksAtGradMode(), nn.Linear(8, 4))

    assert check(model, numbers(8), method=method, partitions=2, steps=1).cuts == (4,)


class EvaluatesByCalls(nn.Module):
    """In evaluation it remembers how often it was asked."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += not self.training
        return self.linear(x) * (1.0 if self.training else 1.0 + self.calls)


def test_evaluations_are_compared_too():
    def model():
        return nn.Sequential(nn.Linear(8, 8), EvaluatesByCalls(), nn.Linear(8, 4))

    with pytest.raises(VerifyMismatch, match="train alike, and their evaluations differ"):
        check(model, numbers(8), partitions=2)


def test_first_losses_that_are_close_by_chance_do_not_make_statistics_a_mismatch():
    """Within 1e-3 they were taken for equal, and the second loss for a wrong weight."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), Small(), nn.Linear(8, 4))

    found = check(model, numbers(8), partitions=2, steps=2, lr=1.0)
    assert "micro-batches of 2 are not compared: a block takes statistics" in found.divided


class Small(nn.Module):
    """Leaves so little of the difference that the first losses are within 1e-3 of each other."""

    def forward(self, x):
        return x * 1e-3


def test_another_micro_batch_is_not_compared_where_a_block_takes_statistics():
    found = check(*MODELS["batch norm and dropout"], partitions=3, steps=1)
    assert found.cuts == (2, 4)
    assert "micro-batches of 2 are not compared: a block takes statistics" in found.divided


# --- a plain loop -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers of two types, and a number before them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList([nn.Linear(13, 17), nn.Linear(17, 17).double(), nn.Linear(17, 5)])

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh().float()
        return x


class SeesItsPlace(nn.Linear):
    """As a kernel that rounds otherwise where its weights begin off a cache line; those of this machine may not."""

    def forward(self, x):
        place = self.weight.data_ptr() if type(self.weight) is nn.Parameter else 0
        return super().forward(x) * (1.0 if place % 64 == 0 else 1.0 + 2**-20)


def odd_rows():
    return torch.randn(33, 13), torch.arange(33) % 5


@pytest.mark.usefixtures("no_further_runs")
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}, {"lr_schedule": "cosine", "micro_batch_size": 5}], ids=str)
@pytest.mark.few(1)
def test_a_plain_loop_has_the_same_bits(options):
    found = check(Mixed, odd_rows(), partitions=2, batch_size=16, lr=0.01, epochs=2, **options)
    assert found.unlike == "" and "a plain loop has the same bits" in str(found)


def halve(weight):
    weight.grad.mul_(0.5)


def hooked(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 13), nn.ReLU(), nn.Linear(13, 13), nn.Linear(13, 5))
    if "of two layers" in kind:
        model[2].weight = model[0].weight
    if "accumulated" in kind:
        model[0].weight.register_post_accumulate_grad_hook(halve)
    else:
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model


HOOKED = [
    ("gradient", 2), ("accumulated", 2), ("gradient of two layers", (0, 3)), ("gradient of two layers", (0, 2)),
    ("gradient of two layers", 3), ("accumulated gradient of two layers", (0, 2)),
]  # fmt: skip


@pytest.mark.usefixtures("no_further_runs")
@pytest.mark.parametrize(("kind", "partitions"), HOOKED)
def test_a_plain_loop_has_the_hooks_of_parameters(kind, partitions):
    """A copy of a model has none, so a model that trained as it should was said to differ from a plain loop; then the copy had
    those of a shared weight twice, and training called them in each partition that used it."""
    rows = torch.randn(32, 13), torch.arange(32) % 5
    assert check(lambda: hooked(kind), rows, batch_size=16, epochs=2, partitions=partitions).unlike == ""


GIVEN = {
    "modules": lambda: nn.Sequential(nn.Linear(13, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)),
    "a list": lambda: [nn.Linear(13, 9), nn.Linear(9, 5)],
    "factories": lambda: [lambda: nn.Linear(13, 9), lambda: nn.Linear(9, 5)],
}


@pytest.mark.usefixtures("no_further_runs")
@pytest.mark.parametrize("model", GIVEN.values(), ids=GIVEN)
@pytest.mark.few(1)
def test_a_plain_loop_is_made_of_whatever_the_model_is_given_as(model):
    rows = torch.randn(32, 13), torch.arange(32) % 5
    assert check(model, rows, batch_size=16, epochs=2, partitions=2).unlike == ""


def test_norms_that_are_a_millionth_off_are_noticed(monkeypatch):
    """`full` has the same fault: it was no fault to verify. (An order of its own gives the right norm on some processors.)"""
    import seqpart.runtime.executor as executor

    right = executor.total_norm
    monkeypatch.setattr(executor, "total_norm", lambda norms: right(norms) * 1.000001)
    with pytest.raises(VerifyMismatch, match=r"have the same bits, and a plain PyTorch loop over the same batches has others"):
        check(Mixed, odd_rows(), partitions=2, batch_size=16, lr=0.01, epochs=2, clip_grad_norm=0.05)


@pytest.mark.usefixtures("no_further_runs")
def test_weights_that_begin_off_a_cache_line_are_noticed(monkeypatch):
    from seqpart.model import tensors

    def model():
        return nn.Sequential(nn.Linear(13, 13), nn.Sequential(nn.Linear(13, 3), SeesItsPlace(3, 5)))

    assert check(model, odd_rows(), batch_size=16, epochs=2, partitions=2).unlike == ""
    monkeypatch.setattr(tensors, "ALIGNMENT", 1)
    with pytest.raises(VerifyMismatch, match=r"a plain PyTorch loop over the same batches has others, first in"):
        check(model, odd_rows(), batch_size=16, epochs=2, partitions=2)


@pytest.mark.usefixtures("no_further_runs")
def test_what_a_plain_loop_does_otherwise_is_said_and_not_compared():
    def model():
        return nn.Sequential(nn.Linear(13, 9), nn.Dropout(), nn.Linear(9, 5))

    found = check(model, odd_rows(), batch_size=16, epochs=2, partitions=2)
    assert "draws random numbers" in found.unlike and f"a plain loop is not compared: {found.unlike}" in str(found)


@pytest.mark.slow
def test_a_reference_that_is_cut_leaves_no_room_for_a_plain_loop():
    assert (
        "--reference full" in check(Mixed, odd_rows(), partitions=2, reference="checkpointed", batch_size=16, epochs=2).unlike
    )
