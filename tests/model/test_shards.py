"""Weights go to and come from torch.distributed.checkpoint's safetensors files, as torchtitan and users of FSDP have them."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from seqpart import Trainer
from seqpart.errors import CorruptFile, OptionError
from seqpart.model.weight_files import WeightFiles
from tests.model import shard_runs
from tests.runtime.test_ranks import torchrun

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
X = torch.randn(24, shard_runs.WIDTH, generator=torch.Generator().manual_seed(2))
Y = torch.arange(24) % shard_runs.CLASSES


def fitted(folder, model, **options):
    options = {"mem_limit": "2GB", "method": "streamed", "partitions": 2, "epochs": 1, "batch_size": 8, **options}
    return Trainer(model, optimizer="adam", lr=1e-2, seed=0, output_dir=folder, quiet=True, **options).fit((X, Y))


def read(folder):
    files = WeightFiles(folder)
    found = {name: torch.empty(stored.spec.shape, dtype=stored.spec.dtype) for name, stored in files.tensors.items()}
    for name, tensor in found.items():
        files.read(name, tensor)
    return found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a run's result in given/, and what two ranks of FSDP that loaded it have saved."""
    folder = tmp_path_factory.mktemp("shards")
    fitted(folder / "run", shard_runs.network()).save_pretrained(folder / "given")
    torchrun(shard_runs.__file__, folder)
    return folder


def test_what_two_ranks_of_fsdp_saved_in_parts_is_trained_on_as_the_whole_weights_are(saved, tmp_path):
    assert sorted(path.name.partition("-model")[0] for path in (saved / "parts").iterdir()) == ["shard-00001", "shard-00002"]
    assert_equal(read(saved / "parts"), load_file(saved / "given" / "model.safetensors"))
    one, other = (
        fitted(tmp_path / name, shard_runs.network(seed=5), weights=saved / name).state_dict() for name in ("given", "parts")
    )
    assert_equal(one, other)


def test_what_torch_has_put_together_beside_its_parts_is_read(saved):
    floats = {name: tensor for name, tensor in read(saved / "parts").items() if tensor.is_floating_point()}
    assert (saved / "whole" / "sharded").is_dir()
    assert_equal(read(saved / "whole"), floats)


@ALONE
def test_one_process_writes_with_dcp_and_reads_what_a_run_leaves(tmp_path):
    state = shard_runs.network().state_dict()
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "dcp")))
    result = fitted(tmp_path / "run", shard_runs.network(seed=5), weights=tmp_path / "dcp")
    assert_equal(result.state_dict(), fitted(tmp_path / "other", shard_runs.network()).state_dict())
    result.save_pretrained(tmp_path / "given")
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "given")))
    assert_equal(found, result.state_dict())


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_any_part_of_a_tensor_in_any_boxes_is_that_of_the_whole(data, dtype, tmp_path_factory):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3), label="shape")
    cuts = [[0, *sorted(data.draw(st.sets(st.integers(1, n), max_size=2))), n] for n in shape]
    tensor, folder = torch.randn(shape).mul(9).to(dtype), tmp_path_factory.mktemp("boxes")
    for number, box in enumerate(itertools.product(*(itertools.pairwise(places) for places in cuts))):
        piece = tensor[tuple(slice(*side) for side in box)].contiguous()
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [side[0] for side in box]}})}
        save_file({"w": piece}, folder / f"shard-{number:05}-model-00001-of-00001.safetensors", info)
    skip = data.draw(st.integers(0, tensor.numel()), label="skip")
    view = torch.empty(data.draw(st.integers(0, tensor.numel() - skip), label="count"), dtype=torch.float32)
    files = WeightFiles(folder)
    files.read("w", view, skip)
    assert files.tensors["w"].spec.shape == tensor.shape
    assert torch.equal(view, tensor.view(-1)[skip : skip + view.numel()].float())


def _of_rows(first):
    return {"DCP_SHARDING_INFO": json.dumps({"0.weight": {"saved_offsets": [first, 0]}})}


def test_parts_of_which_one_is_not_there_or_of_another_save_are_refused(saved, tmp_path):
    first, second = sorted((saved / "parts").iterdir())
    shutil.copy(second, tmp_path)
    with pytest.raises(CorruptFile, match=r"the 1 part\(s\) of .* do not make a tensor of shape .* all the files of one save"):
        WeightFiles(tmp_path)
    shutil.copy(first, tmp_path)
    whole = load_file(saved / "given" / "model.safetensors")["0.weight"]
    save_file({"0.weight": whole[2:3].clone()}, tmp_path / "shard-00003-model-00001-of-00001.safetensors", _of_rows(2))
    with pytest.raises(CorruptFile, match=r"the 3 part\(s\) of 0\.weight do not make a tensor of shape \(7, 12\)"):
        WeightFiles(tmp_path)
    save_file({"0.weight": whole[4:6].clone()}, tmp_path / "shard-00003-model-00001-of-00001.safetensors", _of_rows(4))
    save_file({"0.weight": whole[6:].clone()}, tmp_path / "shard-00004-model-00001-of-00001.safetensors", _of_rows(6))
    with pytest.raises(CorruptFile, match=r"the 4 part\(s\) of 0\.weight"):  # of four ranks before: a mixture fitted together
        WeightFiles(tmp_path)
    for wrong in ('{"0.weight": {}}', '{"0.weight": {"saved_offsets": [1]}}', "no JSON"):
        save_file({"0.weight": whole}, tmp_path / "some.safetensors", {"DCP_SHARDING_INFO": wrong})
        with pytest.raises(CorruptFile, match=r"DCP_SHARDING_INFO does not say where its tensors belong"):
            WeightFiles(tmp_path / "some.safetensors")


@ALONE
def test_a_checkpoint_of_dcp_s_own_form_is_refused_with_the_writer_to_take(tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=str(tmp_path))
    with pytest.raises(OptionError, match=r"HuggingFaceStorageWriter"):
        WeightFiles(Path(tmp_path))
