"""The strongest simple rival: weights and both moments in shared file mappings, which the kernel writes and drops as it likes.

Blocks are checkpointed, and every parameter is updated as soon as its gradient is there, which is then freed at once. Plain
PyTorch otherwise, so that any user could write it. How it is tuned is said by the constants.
"""

import ctypes
import functools
import gc
import mmap
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.common import Task, mean_loss, parser, task_of, train
from benchmarks.peers.networks import build

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


class Home:
    """One block's weights and moments, one behind the other in a file that is mapped whole."""

    def __init__(self, path: Path, block: torch.nn.Module, rate: float) -> None:
        self.block = block
        path.unlink(missing_ok=True)  # moments begin as zeros
        parameters = list(block.parameters())
        self.count = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.from_file(str(path), shared=True, size=3 * self.count, dtype=torch.float32)
        self.file = open(path, "rb")  # noqa: SIM115 (as long as the process)
        at = 0
        for parameter in parameters:
            parts = [
                self.flat[share + at :][: parameter.numel()].view_as(parameter) for share in (0, self.count, 2 * self.count)
            ]
            parts[0].copy_(parameter.data)
            parameter.data = parts[0]
            parameter.register_post_accumulate_grad_hook(functools.partial(_updated, _adam(parameter, rate, *parts[1:])))
            at += parameter.numel()

    def expect(self, whole: bool) -> None:
        """Have the kernel read it while others compute: the weights, or all that an update needs."""
        nbytes = self.flat.nbytes if whole else self.flat.nbytes // 3
        _libc.madvise(ctypes.c_void_p(self.flat.data_ptr()), ctypes.c_size_t(nbytes), mmap.MADV_WILLNEED)

    def begin_writing(self) -> None:
        """Have the kernel write it now: pages that wait for the disk when memory is wanted are what costs most."""
        _libc.sync_file_range(self.file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def _adam(parameter: torch.nn.Parameter, rate: float, first: torch.Tensor, second: torch.Tensor) -> torch.optim.Adam:
    """An optimizer of one parameter, its moments where they are given (files begin as zeros)."""
    adam = torch.optim.Adam([parameter], lr=rate, fused=True)
    adam.state[parameter] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
    return adam


def _updated(adam: torch.optim.Adam, parameter: torch.Tensor) -> None:
    adam.step()
    parameter.grad = None


def homes_of(task: Task) -> list[Home]:
    """Block by block, so that no two exist outside their files."""
    made = []
    for number, factory in enumerate(task.blocks):
        made.append(Home(task.options.folder / f"block-{number}", build(factory, number, task.options.seed), task.rate))
        made[-1].begin_writing()
        gc.collect()
    return made


class Chain:
    def __init__(self, homes: list[Home], ahead: bool, write: bool) -> None:
        self.homes, self.ahead, self.write = homes, ahead, write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.homes)):
            run = functools.partial(self._run, number)
            x = checkpoint(run, x, use_reentrant=False) if torch.is_grad_enabled() else run(x)
        return x

    def _run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Forward, and again in the backward pass, where the next one is the one before."""
        again = torch._C._current_graph_task_id() != -1
        if again and self.write and number + 1 < len(self.homes):
            self.homes[number + 1].begin_writing()
        following = number - 1 if again else number + 1
        if self.ahead and 0 <= following < len(self.homes):
            self.homes[following].expect(whole=again)
        return self.homes[number].block(x)


def main() -> None:
    began = time.perf_counter()
    made = parser(__doc__)
    made.add_argument("--ahead", action="store_true", help="madvise(WILLNEED) one block ahead")
    made.add_argument("--write", action="store_true", help="begin to write every block that was updated")
    options = made.parse_args()
    task = task_of(options)
    chain = Chain(homes_of(task), options.ahead, options.write)

    def update(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = mean_loss(chain.forward(x), y)
        loss.backward()
        return loss.item()

    train(task, update, chain.forward, began)


if __name__ == "__main__":
    main()
