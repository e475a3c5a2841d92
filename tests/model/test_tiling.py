"""Embeddings and linear layers too large for the limit, as tiles of their rows."""

import copy
import gc
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.device.limit import measure_runtime
from seqpart.device.pages import round_up
from seqpart.errors import DoesNotFit, OptionError
from seqpart.model.tiling import SIZES, Tiled, sizes_to_try, tiling
from seqpart.model.weight_files import parameters_on_meta
from seqpart.plan.plan import Plan
from seqpart.verify.verification import verify
from tests.exactly import FULL, HOWS, Trained, first_difference

VOCABULARY, WIDTH, POSITIONS, ROWS = 500, 16, 5, 22
TILE = 100 * WIDTH * 4


class LM(nn.Module):
    """A small language model whose output may share its embedding's weight."""

    def __init__(self, *, tied=False, vocabulary=VOCABULARY, width=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=3)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        return self.head(hidden + self.layers(hidden))


def made(*, tied=False, seed=1, **sizes):
    torch.manual_seed(seed)
    return LM(tied=tied, **sizes)


def data(vocabulary=VOCABULARY):
    torch.manual_seed(2)
    return torch.randint(vocabulary, (ROWS, POSITIONS)), torch.randint(vocabulary, (ROWS, POSITIONS))


def trainer(folder, model, **options):
    options = {
        "mem_limit": "3GB", "method": "streamed", "epochs": 2, "batch_size": 8, "lr": 1e-2, "partitions": 4, "shuffle": False,
        "tile": TILE, **options,
    }  # fmt: skip
    return Trainer(model, output_dir=folder / "run", quiet=True, **options)


def plain(model, x, y, *, epochs=2, batch=8):
    """A loop of PyTorch's own, over the same tiles."""
    with tiling(model, TILE) as tiled:
        optimizer = torch.optim.Adam(tiled.parameters(), lr=1e-2, fused=True)
        for _ in range(epochs):
            for ids, labels in zip(x.split(batch), y.split(batch), strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(tiled(ids).flatten(0, 1), labels.flatten()).backward()
                optimizer.step()
    return model


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# --- the layers -------------------------------------------------------------------------------------------------------


@given(
    st.integers(2, 300), st.integers(1, 5), st.integers(4, 400), st.none() | st.integers(0, 299),
    st.lists(st.integers(0, 299), min_size=1, max_size=30), st.integers(0, 9),
)  # fmt: skip
def test_a_tiled_embedding_has_the_bits_of_the_whole_and_so_have_its_gradients(rows, width, nbytes, padding, ids, seed):
    torch.manual_seed(seed)
    whole = nn.Embedding(rows, width, padding_idx=None if padding is None else padding % rows)
    holder, ids = nn.Sequential(copy.deepcopy(whole)), torch.tensor(ids) % rows
    weights = torch.randn(len(ids), width)
    (whole(ids) * weights).sum().backward()
    with tiling(holder, nbytes) as tiled:
        found = tiled(ids)
        (found * weights).sum().backward()
        gradient = torch.cat([parameter.grad for parameter in tiled.parameters()])
        sizes = [parameter.numel() for parameter in tiled.parameters()]
    assert 4 * max(sizes) <= max(nbytes, round_up(-(-rows // 128), 32) * width * 4)
    # torch's fused Adam rounds the last numbers of a tensor otherwise, those that are no whole vector: 23 of a weight differed.
    assert all(size % 32 == 0 for size in sizes[:-1])
    assert torch.equal(found, whole(ids))
    assert torch.equal(gradient, whole.weight.grad)
    assert torch.equal(holder[0].weight, whole.weight)


@pytest.mark.parametrize("ids", [[-1], [VOCABULARY]])
def test_an_id_that_no_tile_has_is_refused_as_by_the_whole(ids):
    with tiling(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH)), TILE) as tiled, pytest.raises(IndexError):
        tiled(torch.tensor(ids))


@given(st.integers(2, 300), st.integers(1, 40), st.integers(4, 4000), st.booleans())
def test_a_tiled_linear_layer_computes_what_the_whole_does(outputs, inputs, nbytes, bias):
    torch.manual_seed(0)
    whole = nn.Linear(inputs, outputs, bias=bias)
    holder, x = nn.Sequential(copy.deepcopy(whole)), torch.randn(7, inputs, requires_grad=True)
    expected = torch.autograd.grad(whole(x).square().sum(), [x, *whole.parameters()])
    with tiling(holder, nbytes) as tiled:
        (got,) = torch.autograd.grad(tiled(x).square().sum(), [x])
        ragged = [parameter for parameter in tiled.parameters() if parameter.numel() % 32]
        assert len(ragged) <= 1 + bias, "only the last tile may have numbers that are no whole vector"
    torch.testing.assert_close(got, expected[0])
    assert_equal(values(holder[0]), values(whole))


def test_what_a_tile_could_not_do_as_well_stays_whole():
    def listened(layer):
        layer.register_forward_hook(lambda *_: None)
        return layer

    def hooked(layer):  # tiles have none, and trained with other gradients
        layer.bias.register_hook(lambda gradient: gradient / 2)
        return layer

    class Own(nn.Linear):
        pass

    shared = nn.Linear(WIDTH, VOCABULARY)
    user = nn.Bilinear(1, 1, 1)
    user.weight = shared.weight
    layers = [
        listened(nn.Linear(WIDTH, VOCABULARY)), hooked(nn.Linear(WIDTH, VOCABULARY)), Own(WIDTH, VOCABULARY),
        nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0),
        nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True),
        parametrize.register_parametrization(nn.Linear(WIDTH, VOCABULARY), "weight", nn.Identity()), nn.Conv1d(16, 500, 1),
        nn.Sequential(shared, user),
    ]  # fmt: skip
    for layer in layers:
        with tiling(nn.Sequential(layer), 64) as model:
            assert not any(isinstance(module, Tiled) for module in model.modules()), layer
    unlike = nn.Linear(3, 3, bias=False)
    unlike.weight = nn.Parameter(torch.eye(3).to_sparse())
    for odd in (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), [unlike], [nn.Identity, nn.Linear(2, 2)], None):
        assert sizes_to_try(odd) == (0,), "what cannot be trained is refused elsewhere, in words"
    with tiling(nn.Linear(WIDTH, VOCABULARY), 64) as model:
        assert isinstance(model, nn.Linear), "it is the model, and nobody holds it"


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["traced", "list"])
@pytest.mark.few(1)
def test_a_model_in_tiles_has_the_bits_of_a_plain_loop_over_the_same_tiles(tied, kind, tmp_path):
    model, x = made(tied=tied), data()
    if kind == "list":
        if tied:
            pytest.skip("a list of these layers calls nothing twice")
        model = nn.Sequential(model.embedding, *model.layers, model.head)
    expected, parameters = plain(copy.deepcopy(model), *x), dict(model.named_parameters())
    given_model = list(model) if kind == "list" else model
    result = trainer(tmp_path, given_model).fit(x, x)
    assert result.plan.tile == TILE and any("in tiles" in reason for reason in result.plan.reasons)
    assert_equal(values(model), values(expected))
    assert_equal(result.state_dict(), values(expected))
    assert {name: id(own) for name, own in model.named_parameters()} == {name: id(own) for name, own in parameters.items()}
    assert tied is (kind == "traced" and model.head.weight is model.embedding.weight)
    with torch.no_grad():
        assert model(x[0])[..., 3].isfinite().all() if kind == "traced" else True


def test_tiles_change_the_result_by_rounding_alone(tmp_path):
    model, whole, x = made(), made(), data()
    found, expected = trainer(tmp_path / "1", model).fit(x, x), trainer(tmp_path / "2", whole, tile="never").fit(x, x)
    assert expected.plan.tile == 0 and found.test_loss == pytest.approx(expected.test_loss, rel=1e-4)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-2, atol=1e-3)


def test_an_evaluation_takes_the_tiles_and_the_trained_weights(tmp_path):
    model, x = made(), data()
    run = trainer(tmp_path, model)
    found = run.fit(x, x)
    assert run.evaluate(x).loss == pytest.approx(found.test_loss, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.few(1)
def test_weights_of_files_go_to_tiles_of_a_model_without_memory(tied, tmp_path):
    whole, x = made(tied=tied), data()
    tensors = values(whole)
    if tied:
        del tensors["head.weight"]
    save_file(tensors, tmp_path / "some.safetensors")
    with parameters_on_meta():
        model = made(tied=tied)
    run = trainer(tmp_path / "1", model, weights=tmp_path / "some.safetensors")
    found = run.fit(x, x)
    assert_equal(found.state_dict(), values(plain(whole, *x)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert run.evaluate(x).loss == pytest.approx(found.test_loss, rel=1e-6)


class Enough(Exception):
    pass


def ending(behind):
    """Ends a run in the update behind so many."""
    seen = []

    def end(*_):
        seen.append(1)
        if len(seen) > behind:
            raise Enough

    return end


def test_a_run_goes_on_with_the_tiles_that_it_had(tmp_path):
    x, expected, model = data(), plain(made(), *data()), made()
    with pytest.raises(Enough):
        trainer(tmp_path, model, save_every=2).fit(x, x, before_update=ending(9))
    assert_equal(values(model), values(made()))
    with pytest.raises(OptionError, match="tile was 6400, not never"):
        trainer(tmp_path, made(), save_every=2, tile="never").fit(x, x, resume=tmp_path / "run")
    again = trainer(tmp_path, made(), save_every=2).fit(x, x, resume=tmp_path / "run")
    assert_equal(again.state_dict(), values(expected))


@pytest.mark.slow
def test_a_plan_that_was_saved_brings_its_tiles(tmp_path):
    x = data()
    plan = trainer(tmp_path, made()).plan(x, x)
    saved = Plan.from_json(plan.to_json(), "a file")
    assert saved.tile == TILE
    with pytest.raises(OptionError, match=r"has tiles of 6\.4 KB"):
        trainer(tmp_path, made(), tile="never", partitions="auto").fit(x, x, reuse=saved)
    with pytest.raises(OptionError, match=r"has tiles of 6\.4 KB"):
        verify(made(), x, reuse=saved, mem_limit="3GB", batch_size=8, tile="never", offload_dir=tmp_path / "scratch")
    found = trainer(tmp_path, made(), tile="auto", partitions="auto").fit(x, x, reuse=saved)
    assert found.plan.starts == plan.starts and found.plan.tile == TILE


@pytest.mark.slow
def test_a_model_in_tiles_is_verified(tmp_path):
    found = verify(
        made(tied=True), data(), mem_limit="3GB", batch_size=8, partitions=4, tile=TILE, offload_dir=tmp_path / "scratch"
    )
    assert found.tensors > 20 and found.plan.tile == TILE


def test_a_plan_alone_leaves_the_model_as_it_came(tmp_path):
    model = made(tied=True)
    before, memory = values(model), model.embedding.weight.data_ptr()
    trainer(tmp_path, model).plan(data(), data())
    assert_equal(values(model), before)
    assert model.head.weight is model.embedding.weight and type(model.head) is nn.Linear
    assert memory, "it had memory, and has again"


# --- when nothing fits otherwise --------------------------------------------------------------------------------------

LARGE = {"vocabulary": 70_000, "width": 256}


def limit_above_runtime(nbytes):
    """What tests before left in this process counts too."""
    gc.collect()
    return f"{(measure_runtime(Device()) + nbytes) >> 20}MB"


@pytest.mark.slow
@pytest.mark.own_process
def test_a_vocabulary_larger_than_the_limit_is_trained_in_tiles_without_being_asked(tmp_path):
    with parameters_on_meta():
        model = made(tied=True, **LARGE)
    tensors = {name: torch.randn(own.shape) / 50 for name, own in model.state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "some.safetensors")
    del tensors
    (x, y), options = data(LARGE["vocabulary"]), {"batch_size": 4, "epochs": 1, "partitions": "auto"}
    x, y = x[:8], y[:8]
    options |= {"mem_limit": limit_above_runtime(190 << 20), "weights": tmp_path / "some.safetensors"}
    with pytest.raises(DoesNotFit, match="smallest limit that fits"):
        trainer(tmp_path / "1", model, tile="never", **options).fit((x, y), (x, y))
    with pytest.raises(Enough):
        trainer(tmp_path / "2", model, tile="auto", save_every=1, **options).fit((x, y), (x, y), before_update=ending(1))
    found = trainer(tmp_path / "2", model, tile="auto", **options).fit((x, y), (x, y), resume=tmp_path / "2" / "run")
    assert found.proof.violations == 0 and found.plan.tile in SIZES
    small = options | {"mem_limit": limit_above_runtime(60 << 20)}
    with pytest.raises(DoesNotFit) as refusal:
        trainer(tmp_path / "3", model, tile="auto", **small).plan((x, y), (x, y))
    smallest = int(re.search(r"smallest limit that fits: (\d+)MB", str(refusal.value))[1])
    assert smallest < (found.proof.runtime >> 20) + 190, "it is named for the smallest tiles"
    assert found.proof.peak - found.proof.runtime < 190 << 20 < 4 * 70_000 * 256 * 4


def test_nothing_is_tiled_unasked_where_that_could_change_more_than_rounding(tmp_path):
    with parameters_on_meta():
        model = made(**LARGE)
    assert sizes_to_try(model) == (0, *SIZES)
    assert trainer(tmp_path, model, tile="auto").tiles() == (0, *SIZES)
    assert trainer(tmp_path, model, tile="auto", method="auto").tiles() == (0, *SIZES)
    assert trainer(tmp_path, model, tile="auto", method="sil").tiles() == (0,), "a cut there may pass one value alone"
    for method in ("full", "checkpointed"):
        held = trainer(tmp_path, model, tile="auto", method=method, partitions="auto")
        assert held.tiles() == (0,), "all its weights are there at once"
    own = Trainer(model, None, lambda parameters: torch.optim.Adam(parameters), mem_limit="3GB", method="streamed", quiet=True)
    assert own.tiles() == (0,), "it may look at a weight as a whole"
    assert trainer(tmp_path, made(), tile="auto").tiles() == (0,), "its layers are small"


@pytest.mark.parametrize("size", ["12 furlongs", "-1MB", "0.5", ""])
def test_a_size_that_is_none_is_refused(size, tmp_path):
    with pytest.raises(OptionError, match="tile: expected a size such as 16MB, never or auto; found"):
        trainer(tmp_path, made(), tile=size)


def test_tiles_of_layers_that_do_not_exist_yet_are_refused(tmp_path):
    """They were passed over in silence."""
    with pytest.raises(OptionError, match="built block by block"):
        trainer(tmp_path, [lambda: nn.Linear(64, 64), lambda: nn.Linear(64, 10)], tile="1KB").tiles()


# --- every way --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        x, y = data()
        rows = ((x, y), (x[:5], y[:5]))
        return Trained(patch, tmp_path_factory.mktemp("full"), lambda: made(tied=True), rows, tile=TILE).run(FULL)


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.few(1)
def test_every_way_gives_the_bits_of_whole_training_over_the_same_tiles(how, full, monkeypatch, tmp_path):
    """More pieces enter the last partition than boundaries on the disk have buffers."""
    x, y = data()
    rows = ((x, y), (x[:5], y[:5]))
    arms = Trained(monkeypatch, tmp_path, lambda: made(tied=True), rows, tile=TILE, partitions=(0, 3, 6, 9, 12))
    assert first_difference(arms.run(how), full) is None


@pytest.mark.slow
@pytest.mark.own_process
def test_scores_are_gone_when_the_head_learns_as_the_plan_has_it(tmp_path):
    """The executor held the output while its gradient and that of the head's weight were there: 122 MB beyond a plan."""
    vocabulary = 16_000
    x = torch.randint(vocabulary, (8, 256)), torch.randint(vocabulary, (8, 256))
    model = made(tied=True, vocabulary=vocabulary, width=1024)
    options = {"partitions": (0, 1, 4), "epochs": 1, "batch_size": 4, "tile": "never"}
    result = trainer(tmp_path, model, mem_limit=limit_above_runtime(560 << 20), **options).fit(x, x)
    assert not result.plan.heap and result.plan.micro_batch == 4
    assert result.proof.peak <= 1.01 * result.plan.peak
