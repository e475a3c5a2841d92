"""What test_shards.py runs in two ranks: a model of FSDP takes our weights, and leaves its own as parts in files."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

WIDTH, CLASSES = 12, 3


def network(seed=1):
    """Tensors that two ranks share evenly, unevenly, and not at all, running statistics, and a number among them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.PReLU(init=0.3), nn.Linear(7, 8), nn.Linear(8, CLASSES))


def main(folder):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(network(seed=rank), mesh=mesh)
    state = model.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "given")))
    given = load_file(folder / "given" / "model.safetensors")
    for name, tensor in state.items():
        found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(found, given[name]), name
    state["3.weight"] = distribute_tensor(given["3.weight"], mesh, [Shard(1)])
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / "parts"), save_distributed=True))
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}  # torch puts no others together
    writer = HuggingFaceStorageWriter(str(folder / "whole"), save_distributed=True, enable_consolidation=True)
    dcp.save(floats, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # torch 2.14's FSDP sometimes aborts on a busy machine, as a thread of its own is left at the very end
