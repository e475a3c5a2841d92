"""Models whose tensors do not each lie row by row in memory of their own: trained as a plain loop does, or refused by name."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqpart import Trainer
from seqpart.errors import ModelError
from seqpart.model.blocks import as_chain
from seqpart.profile.blocks import measure_chain
from tests import given
from tests.exactly import FULL, How, Trained, first_difference, numbers, tokens

ROWS = 16

pytestmark = pytest.mark.usefixtures("known_machine")


def trainer(model, folder, **options):
    return Trainer(
        model, mem_limit="2GB", batch_size=8, epochs=2, lr=1e-2, shuffle=False, quiet=True, output_dir=folder,
        **{"method": "streamed", "partitions": 2, **options},
    )  # fmt: skip


def data(*shape):
    x = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(ROWS) % 4


class Turned(nn.Module):
    """A weight that was made by transposing another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 128).t() * 0.1)

    def forward(self, x):
        return x.flatten(1) @ self.weight


def convolutions():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 8, 2), nn.ReLU(), Turned()
    ).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("how", ["full", "streamed", "streamed, clipped"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.few(1)
def test_weights_that_do_not_lie_row_by_row_train_to_the_bits_of_a_plain_loop(how, optimizer, tmp_path):
    """They were laid row by row: kernels of channels_last add in another order, and `full` differed from a plain loop."""
    (x, y), plain = data(3, 8, 8), convolutions()
    x = x[:, :, :7, :7]
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    step = kind(plain.parameters(), lr=1e-2, fused=True)
    clip = 0.1 if "clipped" in how else None
    for _ in range(2):
        for start in range(0, ROWS, 8):
            F.cross_entropy(plain(x[start : start + 8]), y[start : start + 8]).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            step.step()
            step.zero_grad()
    model = convolutions()
    options = {"method": how.split(",")[0], "partitions": "auto" if how == "full" else 3}
    result = trainer(model, tmp_path / "run", optimizer=optimizer, clip_grad_norm=clip, **options).fit((x, y), (x, y))
    found = load_file(result.weights)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found[name], tensor), name
        assert model.state_dict()[name].stride() == tensor.stride()


class Two(nn.Module):
    """Two tensors `a` and `b`, made by the function that a test gives."""

    def __init__(self, kind, make):
        super().__init__()
        for name, tensor in zip("ab", make(), strict=True):
            if kind == "parameters":
                setattr(self, name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x) + self.a.sum() + self.b.sum()


def parts(pick):
    def make():
        whole = torch.randn(8, 8)
        return pick(whole)

    return make


@pytest.mark.parametrize("as_factory", [False, True])
@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_tensors_that_overlap_are_refused_by_their_names(kind, as_factory, tmp_path):
    """Each got a home of its own: what a plain loop changes in both was changed in one of them."""
    block = lambda: Two(kind, parts(lambda whole: (whole, whole[:3])))  # noqa: E731
    with pytest.raises(ModelError, match=r"share memory without being one: 0\.a and 0\.b"):
        trainer([block if as_factory else block(), nn.Linear(4, 4)], tmp_path / "run").plan(data(8), data(8))


@pytest.mark.parametrize("kind", ["parameters", "buffers"])
@pytest.mark.parametrize("pick", [lambda w: (w[:4], w[4:]), lambda w: tuple(w.clone().unbind()[:2])], ids=["halves", "rows"])
def test_pieces_of_one_memory_that_do_not_overlap_are_trained(kind, pick, tmp_path):
    model = nn.Sequential(Two(kind, parts(pick)), nn.Linear(4, 4))
    assert len(trainer(model, tmp_path / "run").plan(data(8), data(8)).partitions) == 2


def test_columns_of_one_matrix_are_no_overlap_as_buffers_of_whole_numbers(tmp_path):
    model = nn.Sequential(Two("buffers", parts(lambda w: (w.int()[:, 0], w.int()[:, 1]))), nn.Linear(4, 4))
    assert trainer(model, tmp_path / "run").plan(data(8), data(8)).partitions


def across():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight.data = first.weight.data
    return [first, second]


def remembered():
    linear = nn.Linear(8, 8)
    linear.half = linear.weight.data[:2]
    return [linear]


def with_gaps():
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(torch.randn(8, 16)[:, :8])
    return [linear]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (across, r"1\.weight and 0\.weight.*let both names be one parameter"),
        (remembered, r"0\.half and 0\.weight"),
        (with_gaps, r"0\.weight has shape \(8, 8\) and strides \(16, 1\).*contiguous"),
        (lambda: [Two("parameters", lambda: (torch.zeros(1).expand(3), torch.zeros(1)))], r"0\.a has shape \(3,\)"),
    ],
    ids=["across blocks", "in a plain attribute", "with gaps", "expanded"],
)
def test_memory_that_no_home_can_keep_is_refused(blocks, words, tmp_path):
    first = blocks()
    ends = 4 if isinstance(first[-1], Two) else 8
    with pytest.raises(ModelError, match=f"(?is){words}"):
        trainer(nn.Sequential(*first, nn.Linear(ends, 4)), tmp_path / "run").plan(data(8), data(8))


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        return self.linear(x).chunk(2, 1)[0]


NOT_ALLOWED = {
    "what was saved": (nn.Sigmoid(),),
    "through a view": (nn.ReLU(), nn.Flatten()),
    "one of several views": (Halved(),),
}


@pytest.mark.parametrize("name", NOT_ALLOWED)
@pytest.mark.parametrize("method", ["streamed", "full"])
def test_a_block_that_overwrites_what_another_needs_is_refused_as_pytorch_does(name, method, tmp_path):
    """Cut between the two, a copy was overwritten: what no plain loop trains was trained without a word."""
    model = nn.Sequential(nn.Linear(8, 8), *NOT_ALLOWED[name], nn.ReLU(inplace=True), nn.Linear(8, 4))
    with pytest.raises(RuntimeError, match="modified"):
        model(data(8)[0]).sum().backward()
    with pytest.raises(ModelError, match=r"\(ReLU\) changes its input in place, which PyTorch does not allow after"):
        trainer(model, tmp_path / "run", method=method, partitions=2 if method == "streamed" else "auto").plan(data(8), data(8))


def test_a_block_that_overwrites_what_nobody_needs_is_trained(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 4))
    assert trainer(model, tmp_path / "run").plan(data(8), data(8)).partitions


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def test_planning_leaves_the_statistics_of_a_checkpointed_block_as_they_are(tmp_path):
    """Backward runs such a block again, outside of where fake tensors stood in for its own: its counters went up."""
    model = nn.Sequential(Checkpointed(), nn.Linear(8, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer(model, tmp_path / "run").plan(data(8), data(8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("as_factory", [False, True])
def test_a_batch_norm_with_an_average_over_all_batches_is_trained(as_factory, tmp_path):
    """Given alive it was refused: planning had no value of the counter that it divides by."""

    def build():
        torch.manual_seed(4)
        return nn.BatchNorm1d(8, momentum=None)

    x, y = data(8)
    result = trainer([build if as_factory else build(), nn.Linear(8, 4)], tmp_path / "run").fit((x, y), (x, y))
    assert load_file(result.weights)["0.num_batches_tracked"] == 4
    plain = build()
    for _ in range(2):
        for start in range(0, ROWS, 8):
            plain(x[start : start + 8])
    assert torch.equal(load_file(result.weights)["0.running_var"], plain.running_var)


def test_parameters_of_a_module_given_alive_learn_or_not_as_they_did_before(tmp_path):
    """The pass over the test rows wants no gradients, and left all of the user's own parameters frozen."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].requires_grad_(False)
    trainer(model, tmp_path / "run").fit(data(8), data(8))
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]


def test_a_block_that_writes_into_its_input_is_no_user_s_mistake(tmp_path):
    """Its cost was found on a leaf, which must not be written into: Linear, ReLU(inplace=True) was refused as a model."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    in_place = measure_chain(as_chain(model), (4,), 2)[1]
    assert (in_place.saved, in_place.saved_alone, in_place.inference_peak) == (0, 0, 0)
    assert given.trained(tmp_path, model, (4,), partitions=(0, 2)).accuracy is not None


HOWS = [How(), How(slots=2, keeps=0), How(method="checkpointed"), How(boundary_tier="disk")]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    return lambda model, data, **options: Trained(monkeypatch, tmp_path, model, data, **options)


def language():
    """A head that is nothing but the embedding's weight."""
    torch.manual_seed(0)
    first, last = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    last.weight = first.weight
    return [first, nn.Sequential(nn.Linear(8, 8), nn.ReLU()), last]


def three_uses():
    """One weight in three blocks, and between them others."""
    torch.manual_seed(0)
    first, middle, last = nn.Embedding(11, 11), nn.Linear(11, 11), nn.Linear(11, 11, bias=False)
    middle.weight = last.weight = first.weight
    return [first, nn.Sequential(nn.Linear(11, 11), nn.ReLU()), middle, nn.Tanh(), nn.Linear(11, 11), last]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("partitions", [(0, 1, 2, 4, 5), (0, 2), (0, 1)], ids=str)
@pytest.mark.few(1)
def test_a_weight_of_three_blocks_learns_from_all_of_them_in_the_order_of_whole_training(how, partitions, trained):
    """More than two were refused: T5 uses one embedding three times."""
    arms = trained(three_uses, tokens(), partitions=partitions)
    assert first_difference(arms.run(how), arms.run(FULL)) is None


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.few(1)
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
@pytest.mark.few(1)
def test_a_boundary_that_begins_off_a_cache_line_comes_back_lying_as_it_did(name, how, trained):
    """Matrix kernels round differently by where their input begins; on disk it came back at the start of new memory."""
    model, shape = MISALIGNED[name]
    arms = trained(model, numbers(shape), partitions=(0, 1, 2))
    found, expected = arms.run(how), arms.run(FULL)
    for record in (found, expected):
        del record["end", "loss", "test"]  # rows of the cache lie in a row: README, Limits
    assert first_difference(found, expected) is None


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
    width, data = (12, given.classified(24, (12,), 4)) if first is Moving else (4, (tokens, tokens))
    with pytest.raises(ModelError, match="changes parameter"):
        given.trained(
            tmp_path, [first, lambda: nn.Linear(width, 9)], data=data, method="streamed", optimizer="sgd", batch_size=8
        )
