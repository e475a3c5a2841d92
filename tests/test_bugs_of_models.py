"""Past bugs that an unusual model or optimizer brought to light, one test and one story each."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import DoesNotFit, Interrupted, ModelError, OptionError
from seqpart.model.optimizers import describe
from tests.exactly import FULL, How, Trained, first_difference, numbers, tokens
from tests.resuming import Stopping

HOWS = [How(), How(slots=2, keeps=0), How(method="checkpointed"), How(boundary_tier="disk")]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    return lambda model, data, **options: Trained(monkeypatch, tmp_path, model, data, **options)


def rows(count=24, width=12):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator), torch.arange(count) % 4


def fit(model, tmp_path, data=None, optimizer="sgd", **options):
    data = data or rows()
    options = {"mem_limit": "2GB", "method": "streamed", "epochs": 1, "batch_size": 8, "quiet": True, **options}
    return Trainer(model, None, optimizer, output_dir=tmp_path / "run", **options).fit(data, data)


def language():
    """A head that is nothing but the embedding's weight."""
    torch.manual_seed(0)
    first, last = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    last.weight = first.weight
    return [first, nn.Sequential(nn.Linear(8, 8), nn.ReLU()), last]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_partition_whose_only_weight_is_borrowed_hands_its_gradient_on(how, trained):
    """It had no parameter of its own, counted as frozen, and the head's part of the shared gradient was missing."""
    arms = trained(language, tokens(), partitions=(0, 1, 2))
    assert first_difference(arms.run(how), arms.run(FULL)) is None


class Half(nn.Module):
    """The second half of its columns: a view that begins anywhere."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x):
        return self.linear(x)[:, -x.shape[1] :]


class WithoutFirst(nn.Module):
    """Tokens without the first: a view with gaps, off a cache line."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)[:, 1:]


class Scaled(nn.Module):
    """Writes into its input, which is such a view."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x.mul_(0.5))


MISALIGNED = {
    "columns": (lambda: [lambda: Half(13), lambda: Half(13), lambda: nn.Linear(13, 4)], (13,)),
    "written into": (lambda: [lambda: Half(13), lambda: Scaled(13), lambda: nn.Linear(13, 4)], (13,)),
    "tokens": (
        lambda: [lambda: WithoutFirst(7), lambda: WithoutFirst(7), lambda: nn.Sequential(nn.Flatten(), nn.Linear(7 * 3, 4))],
        (5, 7),
    ),
}


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("name", MISALIGNED)
def test_a_boundary_that_begins_off_a_cache_line_comes_back_lying_as_it_did(name, how, trained):
    """Matrix kernels round differently by where their input begins; on disk it came back at the start of new memory."""
    model, shape = MISALIGNED[name]
    arms = trained(model, numbers(shape), partitions=(0, 1, 2))
    found, expected = arms.run(how), arms.run(FULL)
    for record in (found, expected):
        del record["end", "loss", "test"]  # rows of the cache lie in a row: README, Limits
    assert first_difference(found, expected) is None


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1 + group.setdefault("steps", 0))
            group["steps"] += 1
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter) + parameter.detach())
            self.state[parameter]["step"] = self.state[parameter].get("step", torch.zeros(())) + 1
            if int(self.state[parameter]["step"]) % 3 == 0:
                slow += 0.5 * (parameter.detach() - slow)
                parameter.data.copy_(slow)


@pytest.mark.parametrize("kind", [CountsInItsGroup, Lookahead])
def test_an_optimizer_that_knows_more_than_its_state_of_zeros_is_refused(kind):
    """One trial step looked all right; weights were others from the second or third update on, in all methods alike."""
    with pytest.raises(OptionError, match="is not a step from a state of zeros"):
        describe(kind.__name__, lambda parameters: kind(parameters, lr=0.1))


@pytest.mark.parametrize("build", [lambda p: torch.optim.SGD(p, lr=-1.0), lambda p: torch.optim.SparseAdam(p)])
def test_what_an_optimizer_itself_refuses_is_an_option_error(build):
    """ValueError and RuntimeError came through as tracebacks."""
    with pytest.raises(OptionError, match="a trial step failed"):
        describe("theirs", build)


class Moving(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(12, 12), nn.Parameter(torch.zeros(12), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        return self.linear(x - self.mean)


def normed():
    return nn.Embedding(9, 4, max_norm=1.0)


@pytest.mark.parametrize("first", [Moving, normed])
def test_a_forward_pass_that_changes_a_parameter_is_refused(first, tmp_path):
    """The change was lost when the partition left, or made twice when the pass was done again."""
    tokens = torch.arange(24).view(12, 2) % 9
    width, data = (12, rows()) if first is Moving else (4, (tokens, tokens))
    with pytest.raises(ModelError, match="changes parameter"):
        fit([first, lambda: nn.Linear(width, 9)], tmp_path, data)


class Table(nn.Module):
    """Makes its table when it is first called, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.cache = nn.Linear(12, 12), None, {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(12).float()
        scale = self.cache.setdefault(x.shape[1], torch.full((12,), 0.1))
        return self.linear(x) * self.table * scale


def test_a_module_given_alive_does_not_keep_the_fake_tensors_it_was_measured_with(tmp_path):
    """They stayed in its attributes, and the first real step ended in a DataDependentOutputException."""
    model = [Table(), nn.Linear(12, 4)]
    fit(model, tmp_path)
    assert type(model[0].table) is torch.Tensor and type(model[0].cache[12]) is torch.Tensor


def test_a_model_given_in_eval_mode_comes_back_in_eval_mode(tmp_path):
    """Measuring had set it to training mode before anybody noted how it came."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.BatchNorm1d(12), nn.Dropout()), nn.Linear(12, 4))
    model.eval()
    model[1][1].train()
    fit(model, tmp_path)
    assert [part.training for part in model.modules()] == [False, False, False, False, True, False]


class Keeps(nn.Module):
    """Remembers its last input's product in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x):
        self.last = self.linear(x)
        return torch.relu(self.last.detach()) + self.linear(x)


def test_tensors_in_plain_attributes_are_counted_for_every_block_of_the_chain(tmp_path):
    """Nobody frees them when their partition leaves: memory grew with the number of blocks, and ran out inside the limit."""
    data = torch.randn(4096, 512), torch.arange(4096) % 4
    needs = []
    for keeps in (Keeps, lambda: nn.Linear(512, 512)):
        with pytest.raises(DoesNotFit) as refused:
            fit(
                [*[keeps] * 10, lambda: nn.Linear(512, 4)],
                tmp_path,
                data,
                mem_limit="300MB",
                batch_size=4096,
                micro_batch_size=4096,
            )
        needs.append(refused.value.smallest)
    assert needs[0] - needs[1] > 9 * 4096 * 512 * 4


def test_a_run_does_not_go_on_with_another_optimizer_or_loss_function(tmp_path):
    """Functions are no settings, so nobody compared them: moments were misread, or another rate was taken silently."""

    def trainer(rate=0.1, loss=None, of=torch.optim.SGD, momentum=0.9):
        return Trainer(
            [lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 4)], loss,
            lambda parameters: of(parameters, lr=rate, momentum=momentum), mem_limit="2GB", method="streamed",
            partitions=2, epochs=2, batch_size=8, quiet=True,
        )  # fmt: skip

    first = trainer()
    first.settings = replace(first.settings, output_dir=tmp_path / "run")
    with pytest.raises(Interrupted):
        first.fit(rows(), rows(), reporter=Stopping(12))
    for other in ({"of": torch.optim.RMSprop}, {"momentum": 0.5}):
        with pytest.raises(OptionError, match="was trained with optimizer"):
            trainer(**other).fit(rows(), rows(), resume=tmp_path / "run")
    with pytest.raises(OptionError, match="was trained with loss"):
        trainer(loss=nn.functional.multi_margin_loss).fit(rows(), rows(), resume=tmp_path / "run")
    reporter = Stopping()
    assert trainer(rate=0.01).fit(rows(), rows(), resume=tmp_path / "run", reporter=reporter).weights.exists()
    assert any("the optimizer's options were" in text and "0.01" in text for text in reporter.said)
