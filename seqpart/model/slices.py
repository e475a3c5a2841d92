"""Work on large tensors a slice at a time, shared by some threads that meet only at the end.

torch shares each operation on a slice between threads, which wait for each other after every one. A step in 8 bits or with
rounding makes dozens of operations: where other programs use the cores, it took ten times as long.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from seqpart.store.movers import movers

Room = TypeVar("Room")


def most_threads() -> int:
    return min(4, torch.get_num_threads())  # Python's lock lets no more of them work


def room_of_slices(each: int, numbers: int, size: int) -> int:
    """Most bytes that work on `numbers` numbers in slices of `size` takes, with room for `each` bytes per number."""
    return each * min(numbers, size * most_threads())


def share_slices(
    numbers: int, size: int, device: torch.device, make_room: Callable[[int], Room],
    work: Callable[[Room, Iterable[int]], None],
) -> None:  # fmt: skip
    """Calls `work(room, starts)` in each of some threads; together they get the start of every slice of `size` of `numbers`.

    make_room: makes the memory that a thread works in, for so many numbers, so that none is mapped anew for each slice.
    """
    starts, before = range(0, numbers, size), torch.get_num_threads()
    threads = min(most_threads() if device.type == "cpu" else 1, len(starts))
    rooms = [make_room(min(size, numbers)) for _ in range(threads)]
    if threads < 2:
        for room in rooms:
            work(room, starts)
        return
    is_inference = torch.is_inference_mode_enabled()  # modes are a thread's own

    def in_thread(room: Room, own: Iterable[int]) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(is_inference), torch.no_grad():
            work(room, own)

    try:
        with movers(threads, "seqpart-slices") as pool:
            deque(pool.map(in_thread, rooms, (starts[number::threads] for number in range(threads))), maxlen=0)
    finally:
        torch.set_num_threads(before)  # a thread that begins takes the last number that any thread has set
