"""Peers that need a GPU: torchao's CPUOffloadOptimizer, and accelerate's cpu_offload. Without one: exit code 3.

torchao     weights on the GPU; gradients go to the CPU, where Adam runs
accelerate  weights on the CPU, and each on the GPU while it computes. Made for inference: it is told here whether training
            changes the weights at all
"""

import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.common import mean_loss, parser, refuse, task_of, train
from benchmarks.peers.networks import build_all


def torchao(blocks: list[torch.nn.Module], rate: float) -> Any:
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as missing:
        refuse(f"{missing}; make the environment with environment.sh gpu")
    parameters = [parameter for block in blocks for parameter in block.cuda().parameters()]
    return CPUOffloadOptimizer(parameters, torch.optim.Adam, offload_gradients=True, lr=rate, fused=True)


def accelerate(blocks: list[torch.nn.Module], rate: float) -> Any:
    try:
        from accelerate import cpu_offload
    except ImportError as missing:
        refuse(f"{missing}; make the environment with environment.sh gpu")
    adam = torch.optim.Adam([parameter for block in blocks for parameter in block.parameters()], lr=rate)
    for block in blocks:
        cpu_offload(block, torch.device("cuda"))
    return adam


def main() -> None:
    began = time.perf_counter()
    made = parser(__doc__)
    made.add_argument("--way", choices=["torchao", "accelerate"], required=True)
    options = made.parse_args()
    if not torch.cuda.is_available():
        refuse(f"{options.way} offloads from a GPU, and none was found")
    task = task_of(options)
    blocks = build_all(task.blocks, options.seed)
    adam = {"torchao": torchao, "accelerate": accelerate}[options.way](blocks, task.rate)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.cuda()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x

    def update(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = mean_loss(forward(x), y.cuda())
        loss.backward()
        if options.way == "accelerate" and all(p.grad is None for block in blocks for p in block.parameters()):
            refuse("accelerate's cpu_offload gave no parameter a gradient: nothing would be learned")
        adam.step()
        adam.zero_grad()
        return loss.item()

    train(task, update, lambda x: forward(x).cpu(), began)


if __name__ == "__main__":
    main()
