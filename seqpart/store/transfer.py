"""Tensors on their way between their homes and the device."""

from collections.abc import Sequence
from concurrent.futures import Future, wait

from seqpart.device.device import Device, Event


class Transfer:
    """Tensors on their way between home and the device; `nbytes` of them by way of the disk."""

    def __init__(self, device: Device, parts: "Sequence[Future[Event]]" = (), nbytes: int = 0) -> None:
        self._device, self._parts, self.nbytes = device, parts, nbytes
        """Of each part the event behind it, once it was issued."""

    def wait(self) -> None:
        """Return when every part is over; raise the first error of any."""
        wait(self._parts)
        for part in self._parts:
            self._device.wait(part.result())

    def follow(self) -> None:
        """What is issued to the current stream from now on begins when every part is over; raise the first error of any.

        Returns when every part was issued: on the CPU it is over then, and so is what goes by way of the disk."""
        if not self._parts:
            return
        wait(self._parts)
        for part in self._parts:
            self._device.after(part.result())

    def settle(self) -> None:
        """Return when every part is over, however it ended: its error is told elsewhere."""
        wait(self._parts)
        for part in self._parts:
            if part.exception() is None:
                self._device.wait(part.result())

    def going_on(self) -> "Transfer":
        """What of it is not over, on the device too, or failed and has not been heard; its bytes were told before."""
        return Transfer(self._device, [part for part in self._parts if not self._is_over(part)])

    def _is_over(self, part: "Future[Event]") -> bool:
        return part.done() and part.exception() is None and self._device.is_over(part.result())

    def with_other(self, other: "Transfer") -> "Transfer":
        return Transfer(self._device, [*self._parts, *other._parts], self.nbytes + other.nbytes)
