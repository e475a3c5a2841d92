"""PyTorch FSDP2: fully_shard around every block, CPUOffloadPolicy, one process; on a GPU where there is one, else on gloo."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks.peers.common import Chain, mean_loss, one_process, parser, refuse, task_of, train
from benchmarks.peers.networks import build


def main() -> None:
    began = time.perf_counter()
    options = parser(__doc__).parse_args()
    task = task_of(options)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    one_process()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (1,))
    policy = CPUOffloadPolicy(pin_memory=kind == "cuda")
    blocks = []
    try:
        for number, factory in enumerate(task.blocks):
            blocks.append(build(factory, number, options.seed))
            fully_shard(blocks[-1], mesh=mesh, offload_policy=policy)
        model = fully_shard(Chain(blocks), mesh=mesh, offload_policy=policy)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        refuse(f"FSDP2 on {kind}: {str(error).splitlines()[0]}")
    adam = torch.optim.Adam(model.parameters(), lr=task.rate, fused=kind == "cpu")

    def update(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = mean_loss(model(x.to(kind)), y.to(kind))
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    train(task, update, lambda x: model(x.to(kind)).cpu(), began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
