"""Weights of safetensors files that a model begins with, and models that never exist whole."""

import json
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.device.limit import measure_runtime
from seqpart.errors import CorruptFile, ModelError, OptionError
from seqpart.model.weight_files import WeightFiles, matched, parameters_on_meta
from seqpart.profile.initial_weights import untie
from seqpart.verify.verification import verify
from tests.choice import in_turn

ROWS, WIDTH, CLASSES = 40, 12, 3


class Net(nn.Module):
    """A skip, a weight that is used twice, buffers that a state_dict has and one that it leaves out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1, WIDTH), persistent=False)

    def forward(self, x):
        x = x + torch.relu(self.norm(self.first(x))) * self.scale
        return self.head(self.tied(x + torch.relu(self.second(x))))


def sequential():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def factories():
    return [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.BatchNorm1d(WIDTH), nn.Tanh, lambda: nn.Linear(WIDTH, CLASSES)]


def made(kind, seed=1):
    torch.manual_seed(seed)
    return {"traced": Net, "sequential": sequential, "factories": sequential}[kind]()


def empty(kind):
    """The same model without values."""
    if kind == "factories":
        return factories()
    with parameters_on_meta():
        return made(kind)


def data():
    torch.manual_seed(2)
    return torch.randn(ROWS, WIDTH), torch.arange(ROWS) % CLASSES


def trainer(folder, model, **options):
    options = {"mem_limit": "3GB", "method": "streamed", "epochs": 2, "batch_size": 16, "lr": 1e-2, "partitions": 3, **options}
    return Trainer(model, output_dir=folder / "run", quiet=True, **options)


def saved(path, model, **changed):
    """Its state_dict without the names that a file need not have: each tensor once."""
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    save_file({name: tensor.clone() for name, tensor in once.values()} | changed, path)
    return path


def sharded(folder, model):
    folder.mkdir()
    names = dict.fromkeys(load_file(saved(folder / "whole.safetensors", model)))
    tensors, where = load_file(folder / "whole.safetensors"), {}
    (folder / "whole.safetensors").unlink()
    for number, name in enumerate(names):
        where[name] = f"model-{number % 3}.safetensors"
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# --- training from files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shards"), in_turn(["traced", "sequential", "factories"], [False, True]))
@pytest.mark.few(1)
def test_a_model_without_memory_trains_to_the_bits_of_the_one_that_the_files_hold(kind, shards, tmp_path):
    whole, x = made(kind), data()
    weights = sharded(tmp_path / "shards", whole) if shards else saved(tmp_path / "some.safetensors", whole)
    model = empty(kind)
    expected = trainer(tmp_path / "1", whole).fit(x, x)
    run = trainer(tmp_path / "2", model, weights=weights)
    found = run.fit(x, x)
    assert_equal(found.state_dict(), expected.state_dict())
    assert found.test_loss == expected.test_loss
    if kind != "factories":
        assert all(parameter.is_meta for parameter in model.parameters()), "it is what it was"
    assert run.evaluate(x).loss == pytest.approx(found.test_loss, rel=1e-6), "the trained weights are judged"


def test_before_any_fit_a_model_without_memory_is_judged_by_its_files(tmp_path):
    whole, x = made("traced"), data()
    found = trainer(tmp_path, empty("traced"), weights=saved(tmp_path / "some.safetensors", whole)).evaluate(x)
    expected = nn.functional.cross_entropy(whole.eval()(x[0]), x[1]).item()
    assert found.loss == pytest.approx(expected, rel=1e-5)


def test_weights_take_the_place_of_those_that_a_module_came_with_and_an_early_end_leaves_these(tmp_path):
    there, came, x = made("sequential", 1), made("sequential", 7), data()
    weights, before = saved(tmp_path / "some.safetensors", there), {k: v.clone() for k, v in came.state_dict().items()}

    class Enough(Exception):
        pass

    def end(*_):
        raise Enough

    with pytest.raises(Enough):
        trainer(tmp_path / "1", came, weights=weights).fit(x, x, before_update=end)
    assert_equal(dict(came.state_dict()), before)
    result = trainer(tmp_path / "2", came, weights=weights).fit(x, x)
    expected = trainer(tmp_path / "3", there).fit(x, x)
    assert_equal(result.state_dict(), expected.state_dict())
    assert_equal(dict(came.state_dict()), expected.state_dict())


def test_what_a_user_changes_behind_a_fit_is_judged_and_not_the_file_of_the_fit(tmp_path):
    model, x = made("sequential"), data()
    run = trainer(tmp_path, model)
    result = run.fit(x, x)
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.zero_()
    result.weights.unlink()
    assert run.evaluate(x).loss == pytest.approx(torch.tensor(float(CLASSES)).log().item(), rel=1e-5)


def test_a_model_without_memory_is_verified_bit_for_bit(tmp_path):
    weights = saved(tmp_path / "some.safetensors", made("traced"))
    found = verify(
        empty("traced"), data(), mem_limit="3GB", partitions=3, batch_size=16, weights=weights, offload_dir=tmp_path / "scratch"
    )
    assert found.tensors > 20


def test_bfloat16_files_fill_float32_parameters_and_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    long = {"0.weight": torch.randn(2000, 1100), "0.bias": torch.randn(2000)}  # more than is converted at a time
    for kind, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        save_file({name: tensor.to(kind) for name, tensor in long.items()}, tmp_path / "some.safetensors")
        files = WeightFiles(tmp_path / "some.safetensors")
        for name, tensor in long.items():
            view = torch.empty(tensor.shape, dtype=other)
            files.read(name, view)
            assert torch.equal(view, tensor.to(kind).to(other))
    columns = torch.empty(1100, 2000).t()
    files.read("0.weight", columns)
    assert torch.equal(columns, long["0.weight"])


def test_a_run_goes_on_where_its_weights_are_gone(tmp_path):
    """It was asked for --weights that the checkpoint had replaced long ago."""
    x, weights = data(), saved(tmp_path / "some.safetensors", made("traced"))
    expected = trainer(tmp_path / "1", empty("traced"), weights=weights).fit(x, x)

    class Enough(Exception):
        pass

    seen = []

    def end(*_):
        seen.append(1)
        if len(seen) > 9:
            raise Enough

    with pytest.raises(Enough):
        trainer(tmp_path / "2", empty("traced"), weights=weights, save_every=2).fit(x, x, before_update=end)
    weights.unlink()
    again = trainer(tmp_path / "2", empty("traced"), save_every=2).fit(x, x, resume=tmp_path / "2" / "run")
    assert_equal(again.state_dict(), expected.state_dict())


@pytest.mark.own_process
def test_weights_larger_than_the_limit_are_trained_inside_it(tmp_path):
    width, count = 1000, 24
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(WIDTH, width), *(nn.Linear(width, width) for _ in range(count)), nn.Linear(width, 3))
    tensors = {name: torch.randn(tensor.shape) / 40 for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "some.safetensors")
    del tensors
    limit = measure_runtime(Device()) + (80 << 20)
    run = trainer(
        tmp_path, model, weights=tmp_path / "some.safetensors", mem_limit=f"{limit >> 20}MB", partitions="auto", epochs=1,
        optimizer="sgd", batch_size=40,
    )  # fmt: skip
    found = run.fit(data(), data())
    assert found.proof.violations == 0 and found.proof.peak - found.proof.runtime < 80 << 20 < 4 * count * width * width


# --- what does not fit together ---------------------------------------------------------------------------------------


def test_names_that_are_missing_or_unknown_are_refused_with_some_of_them_and_nothing_is_written(tmp_path):
    whole, x = made("traced"), data()
    tensors = load_file(saved(tmp_path / "all.safetensors", whole))
    tensors["foreign.weight"] = tensors.pop("second.weight")
    save_file(tensors, tmp_path / "some.safetensors")
    with pytest.raises(ModelError, match=r"missing: second\.weight; not in the model: foreign\.weight.*weights_partial"):
        trainer(tmp_path, empty("traced"), weights=tmp_path / "some.safetensors").fit(x, x)
    assert not (tmp_path / "run").exists()
    partial = {"weights": tmp_path / "some.safetensors", "weights_partial": True}
    with pytest.raises(ModelError, match=r"no values.*second\.weight"):
        trainer(tmp_path, empty("traced"), **partial).fit(x, x)


@pytest.mark.parametrize(("kind", "shards"), [(empty, False), (made, True)])
@pytest.mark.few(1)
def test_two_values_for_names_of_one_parameter_are_refused_and_the_cure_trains_both(kind, shards, tmp_path):
    """One of the two was taken and the other lost, without a word: flan-T5's checkpoints, whose configuration ties."""
    whole, x = made("traced"), data()
    whole.tied.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
    weights = sharded(tmp_path / "shards", whole) if shards else saved(tmp_path / "some.safetensors", whole)
    expected = trainer(tmp_path / "1", whole).fit(x, x)
    model = kind("traced")
    with pytest.raises(ModelError, match=r"first\.weight and tied\.weight are one parameter .* other values") as told:
        trainer(tmp_path / "2", model, weights=weights).fit(x, x)
    cure = str(told.value).partition("Give each its own: ")[2].partition(". Or take")[0]
    exec(cure, {"model": model, "torch": torch})
    assert_equal(trainer(tmp_path / "3", model, weights=weights).fit(x, x).state_dict(), expected.state_dict())


def test_equal_values_under_both_names_stay_one_parameter(tmp_path):
    whole, x = made("traced"), data()
    expected = trainer(tmp_path / "1", made("traced")).fit(x, x)
    weights = saved(tmp_path / "some.safetensors", whole, **{"tied.weight": whole.tied.weight.detach().clone()})
    model = empty("traced")
    untie(model, WeightFiles(weights))
    assert model.tied.weight is model.first.weight
    assert_equal(trainer(tmp_path / "2", model, weights=weights).fit(x, x).state_dict(), expected.state_dict())


def test_of_two_shards_with_a_tensor_the_index_says_whose_it_is(tmp_path):
    """That of the file whose name came last was taken."""
    folder = sharded(tmp_path / "shards", made("traced"))
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    right = load_file(folder / where["head.bias"])["head.bias"]
    for file in set(where.values()) - {where["head.bias"]}:
        save_file(load_file(folder / file) | {"head.bias": right + 1}, folder / file)
    files, found = WeightFiles(folder), torch.empty(CLASSES)
    files.read("head.bias", found)
    assert torch.equal(found, right)


def test_partial_weights_leave_the_rest_as_it_is_initialized_and_say_which(tmp_path, capsys):
    whole, came, x = made("traced", 1), made("traced", 7), data()
    tensors = load_file(saved(tmp_path / "all.safetensors", whole))
    del tensors["second.weight"]
    save_file(tensors, tmp_path / "some.safetensors")
    expected = made("traced", 1)
    with torch.no_grad():
        expected.second.weight.copy_(came.second.weight)
    run = Trainer(
        came, mem_limit="3GB", method="streamed", partitions=2, batch_size=16, epochs=1, weights=tmp_path / "some.safetensors",
        weights_partial=True, output_dir=tmp_path / "run",
    )  # fmt: skip
    found = run.fit(x, x).state_dict()
    assert "as initialized, since they are not there: second.weight" in capsys.readouterr().out
    plain = Trainer(
        expected,
        mem_limit="3GB",
        method="streamed",
        partitions=2,
        batch_size=16,
        epochs=1,
        output_dir=tmp_path / "2",
        quiet=True,
    )
    assert_equal(found, plain.fit(x, x).state_dict())


def test_a_head_for_other_classes_stays_as_it_is_initialized_with_partial_weights_and_is_refused_without(tmp_path, capsys):
    """To begin with what somebody else trained to 1,000 classes the head had to be taken out of the file by hand."""
    whole, came, x = made("traced", 1), made("traced", 7), data()
    weights = saved(tmp_path / "some.safetensors", whole, **{"head.weight": torch.zeros(CLASSES + 1, WIDTH)})
    with pytest.raises(ModelError, match=r"head\.weight is of shape \(3, 12\), and of \(4, 12\) there\. With weights_partial"):
        trainer(tmp_path, made("traced"), weights=weights).fit(x, x)
    expected = made("traced", 1)
    with torch.no_grad():
        expected.head.weight.copy_(came.head.weight)
    found = Trainer(
        came, mem_limit="3GB", method="streamed", epochs=2, batch_size=16, lr=1e-2, partitions=3, weights=weights,
        weights_partial=True, output_dir=tmp_path / "1",
    ).fit(x, x)  # fmt: skip
    said = capsys.readouterr().out
    assert "as initialized, since they have another shape there: head.weight is of shape (3, 12), and of (4, 12) there" in said
    assert_equal(found.state_dict(), trainer(tmp_path / "2", expected).fit(x, x).state_dict())
    with pytest.raises(ModelError, match=r"no values, and .* has none for them: head\.weight"):
        trainer(tmp_path, empty("traced"), weights=weights, weights_partial=True).fit(x, x)


def test_tensors_of_other_kinds_and_files_with_nothing_of_the_model_are_refused_even_as_partial_weights(tmp_path):
    weights = saved(tmp_path / "some.safetensors", made("traced"), **{"head.bias": torch.zeros(CLASSES, dtype=torch.int64)})
    with pytest.raises(ModelError, match=r"head\.bias is of type torch\.float32"):
        trainer(tmp_path, made("traced"), weights=weights, weights_partial=True).fit(data(), data())
    save_file({"w": torch.zeros(3), "v": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ModelError, match=r"foreign\.safetensors has no tensor of this model: it has v, w\."):
        trainer(tmp_path, made("traced"), weights=tmp_path / "foreign.safetensors", weights_partial=True).fit(data(), data())


def test_a_model_on_meta_without_weights_is_refused_in_words(tmp_path):
    for kind in ("traced", "sequential"):
        with pytest.raises(ModelError, match=r"on the meta device and has no values.*or weights for one on meta"):
            trainer(tmp_path, empty(kind)).fit(data(), data())
    with pytest.raises(OptionError, match="weights_partial goes with weights"):
        trainer(tmp_path, made("traced"), weights_partial=True)


# --- files ------------------------------------------------------------------------------------------------------------


def wrong_files(folder):
    some = {"w": torch.zeros(100)}
    for name in ("nothing", "pickled", "two", "lacks", "outside"):
        (folder / name).mkdir()
    torch.save(some, folder / "pickled" / "pytorch_model.bin")
    for name in ("a", "b"):
        save_file(some, folder / "two" / f"{name}.safetensors")
    index = "model.safetensors.index.json"
    (folder / "lacks" / index).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    (folder / "outside" / index).write_text(json.dumps({"weight_map": {"w": "../two/a.safetensors"}}))
    whole = (folder / "two" / "a.safetensors").read_bytes()
    (folder / "short").write_bytes(whole[:-8])
    (folder / "header").write_bytes(whole[:20])
    (folder / "text").write_text("no weights at all")
    head = json.dumps(
        {name: {"dtype": "F32", "shape": [4], "data_offsets": [at, at + 16]} for name, at in (("w", 0), ("b", 8))}
    )
    (folder / "over").write_bytes(len(head).to_bytes(8, "little") + head.encode() + bytes(24))
    save_file({"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}, folder / "eight")
    yield "gone", OptionError, "does not exist"
    yield "nothing", OptionError, "has no safetensors file"
    yield "pickled", OptionError, "is a pickle, which runs what is in it"
    yield "pickled/pytorch_model.bin", OptionError, "is a pickle"
    yield "two", OptionError, "which of them are meant is not known"
    yield "lacks", OptionError, "names model-1.safetensors, which is not beside it"
    yield "outside", CorruptFile, "do not lie beside it"
    yield "short", CorruptFile, "ends before its last tensor"
    yield "over", CorruptFile, "has tensors that lie over each other"
    yield "header", CorruptFile, "is not a whole safetensors file"
    yield "text", CorruptFile, "is not a whole safetensors file"
    yield "eight", ModelError, "tensors of type F8_E4M3, which cannot be stored"


def test_files_that_cannot_be_used_are_refused_in_words(tmp_path):
    for name, kind, words in wrong_files(tmp_path):
        with pytest.raises(kind, match=words):
            WeightFiles(tmp_path / name)


def test_links_are_followed_as_caches_of_downloads_have_them(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    view = torch.zeros(3)
    WeightFiles(tmp_path).read("w", view)
    assert view.tolist() == [1, 1, 1]


NAMES = st.sets(st.lists(st.sampled_from(["a", "b", "weight", "0", "1"]), min_size=1, max_size=4).map(".".join), min_size=1)


@given(NAMES, st.sampled_from(["", "model.", "module."]), st.booleans())
def test_names_are_matched_one_to_one_whoever_has_the_prefix(names, prefix, in_file):
    longer = [prefix + name for name in names]
    wanted, stored = (list(names), longer) if in_file else (longer, list(names))
    match = matched(wanted, stored)
    assert not match.missing and not match.unexpected
    assert sorted(match.found) == sorted(wanted) and sorted(match.found.values()) == sorted(stored)


# --- results ----------------------------------------------------------------------------------------------------------


def test_save_pretrained_writes_the_weights_once_more_and_replaces_no_others(tmp_path):
    model, x = made("traced"), data()
    result = trainer(tmp_path, model).fit(x, x)
    result.save_pretrained(tmp_path / "out")
    fresh = Net()
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    with pytest.raises(OptionError, match=r"holds weights already: model\.safetensors"):
        result.save_pretrained(tmp_path / "out")


def test_blocks_of_bfloat16_are_run_with_the_rows_of_the_last_batch_too():
    """oneDNN made kernels for 49 rows when the run was under way, failed inside the limit, and from then on always."""

    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4).bfloat16()

        def forward(self, x):
            return self.linear(x.bfloat16()).float()

    x = torch.randn(8, 4), torch.arange(8) % 4
    for layer, expected in ((Short(), {49, 8}), (nn.Linear(4, 4), set())):
        trainer = Trainer([layer], mem_limit="3GB", method="full", batch_size=4)
        with closing(trainer.prepare(*trainer.rows(x, x), dry=True)) as prepared:
            assert prepared.trials.last_rows([64], [64, 49, 200]) == expected
