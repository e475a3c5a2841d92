"""Optimizer steps computed on the host, where weights and optimizer state rest, beside the work of the device.

    gradients --copied down--> a room in host memory --step, in a thread--> weights and state at home --> the next load

On the CPU the device's memory is the host's: a step takes the gradients where they are, and is over at once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from seqpart.device.device import DOWN, Device, Event
from seqpart.store.store import Transfer


class HostSteps:
    """The thread that makes the steps of all partitions in order, and the `rooms` through which gradients come to it."""

    def __init__(self, device: Device, rooms: Sequence[torch.Tensor]) -> None:
        self._device, self._rooms = device, [(room, Transfer(device)) for room in rooms]
        """(room, the last step that reads it)."""
        self._left: Event = None
        self._leaving: tuple[int, list[torch.Tensor]] = (-1, [])
        """(partition, its gradients that are on their way to the host), and the event after their copies."""
        self._thread = None if device.shares_memory else ThreadPoolExecutor(1, thread_name_prefix="seqpart-step")

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._leaving = -1, []

    def free_gradients(self, p: int) -> None:
        """Frees the gradients of partition p on the device, if they were the last to leave, once they have left."""
        if p == self._leaving[0]:
            self._device.wait(self._left)
            self._leaving = -1, []

    def bring(
        self, p: int, gradients: Sequence[torch.Tensor], into: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:  # fmt: skip
        """Starts to copy gradients of partition p to the host. Returns them there: on the CPU the same.

        into: gives their places in a room.
        """
        if self._thread is None:
            return list(gradients)
        self.free_gradients(self._leaving[0])
        (room, used), *others = self._rooms
        used.wait()
        self._rooms = [*others, (room, used)]
        places, computed = list(into(room)), self._device.mark()
        with self._device.copying(DOWN):
            self._device.after(computed)
            for gradient, place in zip(gradients, places, strict=True):
                self._device.copy(gradient, place)
            self._left = self._device.mark()
        self._leaving = p, list(gradients)
        return places

    def begin(self, step: Callable[[], object]) -> Transfer:
        """Makes a step once the gradients that were brought last are there. It counts as a transfer of weights."""
        left = self._left

        def work() -> Event:
            with self._device.at_work():
                self._device.wait(left)
                step()
            return left

        if self._thread is not None:
            made = Transfer(self._device, [self._thread.submit(work)])
            self._rooms[-1:] = [(room, made) for room, _ in self._rooms[-1:]]
            return made
        step()
        return Transfer(self._device)
