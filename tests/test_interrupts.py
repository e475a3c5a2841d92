"""Signals wait for a safe point while they must, and are handled as ever otherwise."""

import signal
import threading

import pytest

from seqpart.interrupts import Interrupts


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
