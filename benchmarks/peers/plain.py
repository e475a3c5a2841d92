"""Plain PyTorch: everything in memory, blocks checkpointed, or saved tensors on the CPU.

full           nothing spared; also the arm that the operating system's paging is measured with
checkpointed   torch.utils.checkpoint around every block
save_on_cpu    torch.autograd.graph.save_on_cpu: without a GPU it copies every saved tensor within the same memory
--segments N   torch's checkpoint_sequential in so many segments
"""

import contextlib
import time

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.peers.common import mean_loss, parser, task_of, train
from benchmarks.peers.networks import build_all


def main() -> None:
    began = time.perf_counter()
    made = parser(__doc__)
    made.add_argument("--way", choices=["full", "checkpointed", "save_on_cpu"], default="full")
    made.add_argument("--segments", type=int)
    made.add_argument("--device", default="cpu")
    options = made.parse_args()
    task = task_of(options)
    model = torch.nn.Sequential(*build_all(task.blocks, options.seed)).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate, fused=True)
    saved = torch.autograd.graph.save_on_cpu if options.way == "save_on_cpu" else contextlib.nullcontext

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.to(options.device)
        if options.segments and torch.is_grad_enabled():
            return checkpoint_sequential(model, options.segments, x, use_reentrant=False)  # type: ignore[no-any-return]
        for block in model:
            x = checkpoint(block, x, use_reentrant=False) if options.way == "checkpointed" else block(x)
        return x

    def update(x: torch.Tensor, y: torch.Tensor) -> float:
        with saved():
            loss = mean_loss(forward(x), y.to(options.device))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    train(task, update, lambda x: forward(x).cpu(), began)


if __name__ == "__main__":
    main()
