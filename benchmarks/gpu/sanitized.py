"""The command `seqpart` under PyTorch's CUDA sanitizer, also in the threads that copy.

    python -m benchmarks.gpu.sanitized verify --device cuda --mem-limit 1.5GB

It tells of two kernels or copies on different streams that touch the same memory of the GPU and are not ordered by an event.
TORCH_CUDA_SANITIZER=1 alone sees the operations of the first thread only, and nearly all our copies are issued by others.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.cuda import _gpu_trace, _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

from seqpart.__main__ import console
from seqpart.device.cuda import CudaDevice


class _Elsewhere(TorchDispatchMode):
    """The sanitizer's own mode in a thread beside the first: one object is in one thread's stack of modes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _sanitizer.cuda_sanitizer.dispatch.__torch_dispatch__(func, types, args, kwargs)


_LOCK = threading.RLock()


def _in_turn(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Its notes of who touched what are Python's, and threads would write them at the same time."""

    def locked(*arguments: Any) -> Any:
        with _LOCK:
            return handle(*arguments)

    return locked


def watch_all_threads() -> None:
    """From now on, in this thread and wherever copies are issued."""
    if not _sanitizer.cuda_sanitizer.enabled:
        _sanitizer.enable_cuda_sanitizer()
    handler = _sanitizer.cuda_sanitizer.dispatch.event_handler
    handler._handle_kernel_launch = _in_turn(handler._handle_kernel_launch)  # type: ignore[method-assign]
    for registry in vars(_gpu_trace).values():  # of allocations, streams and events
        if isinstance(registry, _gpu_trace.CallbackRegistry):
            registry.callback_list[:] = map(_in_turn, registry.callback_list)
    copying, is_over = CudaDevice.copying, CudaDevice.is_over

    @contextmanager
    def watched(self: CudaDevice, way: str) -> Iterator[None]:
        first = threading.current_thread() is threading.main_thread()
        with copying(self, way):
            if first:
                yield
            else:
                with _Elsewhere():
                    yield

    def synchronized(self: CudaDevice, event: Any) -> bool:
        """The sanitizer does not see `Event.query`, so that what follows a true answer would look unordered."""
        over = is_over(self, event)
        if over:
            self.wait(event)
        return over

    CudaDevice.copying, CudaDevice.is_over = watched, synchronized  # type: ignore[method-assign]


if __name__ == "__main__":
    print(f"torch {torch.__version__}, CUDA sanitizer in all threads", flush=True)
    watch_all_threads()
    console()
