"""Signals wait for a safe point while they must, and are handled as ever otherwise."""

import signal
import threading

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.interrupts import Interrupts, put_off


def send(number=signal.SIGINT):
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_waits_for_the_next_safe_point():
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        send()
        done.append("the step goes on")
        interrupts.check()
        done.append("never")
    assert done == ["the step goes on"]


def test_without_a_signal_a_safe_point_does_nothing():
    with Interrupts() as interrupts:
        interrupts.check()
    interrupts.check()


def test_a_signal_without_a_safe_point_behind_it_is_handled_at_the_end():
    with pytest.raises(KeyboardInterrupt), Interrupts():
        send()


def test_a_second_signal_does_not_wait():
    with pytest.raises(KeyboardInterrupt), Interrupts():
        send()
        send()
        raise AssertionError("it waited")


def test_an_error_of_the_step_is_told_and_not_the_signal():
    with pytest.raises(ValueError, match="the step failed"), Interrupts():
        send()
        raise ValueError("the step failed")


def test_a_signal_that_python_does_not_handle_is_left_to_the_system():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_same_object_serves_one_loop_after_another():
    interrupts = Interrupts()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), interrupts:
            send()
            interrupts.check()


def test_outside_the_main_thread_nothing_is_touched():
    found = []

    def work():
        with Interrupts() as interrupts:
            found.append(signal.getsignal(signal.SIGINT))
            interrupts.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_signal_while_a_lock_is_taken_does_not_hang_the_run():
    """KeyboardInterrupt between taking the reader's lock and noting it left the lock taken: the clean-up waited forever."""
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)  # anywhere in a step
        reached = True
        interrupts.check()
    assert reached


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_put_off_comes_at_the_end_however_many_signals_there_were_and_whatever_failed(fails):
    done = []
    with pytest.raises(KeyboardInterrupt), put_off():
        with put_off():
            send()
            send()
        done.append("the inner end is not the end")
        if fails:
            raise ValueError("a look that failed, as some may")
    assert done


SEEN = []
"""What a module keeps itself is put back behind a look."""


class Signalled(nn.Module):
    """Its forward pass is looked at while a plan is made, on fake tensors and then for real: one of these is interrupted."""

    def __init__(self, at):
        super().__init__()
        self.inner, self.at = nn.Linear(8, 8), at

    def forward(self, x):
        SEEN.append("begun")
        if len(SEEN) == self.at:
            send()
        y = self.inner(x)
        SEEN.append("over")
        return y


@pytest.mark.parametrize("at", [1, 5, 9, 13])
def test_ctrl_c_while_a_model_is_looked_at_waits_for_the_end_of_the_look(at):
    """KeyboardInterrupt out of C++ that called Python aborted the interpreter (exit 134), once in 26 tries."""
    SEEN.clear()
    model = nn.Sequential(Signalled(at), nn.Linear(8, 3))
    rows = torch.randn(16, 8), torch.arange(16) % 3
    with pytest.raises(KeyboardInterrupt):
        Trainer(model, mem_limit="2GB", method="streamed", batch_size=8, quiet=True).plan(rows)
    assert len(SEEN) > at and SEEN[-1] == "over"
    assert all(parameter.numel() and not parameter.is_meta for parameter in model.parameters())
