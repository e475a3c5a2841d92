"""Several runs in one process: what belongs to the process (its limit, signal handlers, random numbers) is put back, whoever
ends first, and a run beside one of another thread is refused."""

import contextlib
import itertools
import resource
import threading

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import OptionError

ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 8
BATCH = ROWS[0][:16], ROWS[1][:16]


def trainer(**options):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    return Trainer(model, mem_limit="4GB", method="full", batch_size=16, quiet=True, **options)


def soft():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


@pytest.fixture(autouse=True)
def limits():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


class During:
    def __init__(self, do):
        self.do = do

    def on_step(self, event):
        if event.update == 1:
            self.do()


def test_a_run_beside_one_of_another_thread_is_refused_and_changes_nothing(tmp_path):
    """The first to end lifted the limit of the other, which left its own behind for good."""
    limits, refused = [], []

    def others():
        """In another thread, while the first one trains."""
        limits.append(soft())
        for begin in (lambda: trainer(output_dir=tmp_path / "b").fit(ROWS), lambda: trainer().plan(ROWS)):
            with pytest.raises(OptionError, match="another thread of this program is in a fit") as error:
                begin()
            refused.append(error)
        with pytest.raises(OptionError, match="another thread"), trainer().session(BATCH):
            pass
        limits.append(soft())

    def run():
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()

    trainer(output_dir=tmp_path / "a", epochs=2).fit(ROWS, callbacks=[During(run)])
    assert len(refused) == 2 and limits[0] == limits[1] != resource.RLIM_INFINITY


def test_runs_of_several_threads_one_after_the_other_are_no_matter(tmp_path):
    done, lock = [], threading.Lock()

    def run(number):
        with lock:
            done.append(trainer(output_dir=tmp_path / str(number), epochs=1).fit(ROWS).proof.violations)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [0, 0, 0]


def test_after_a_run_that_failed_another_thread_may_begin_one(tmp_path):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(output_dir=tmp_path / "a").fit(ROWS, callbacks=[During(fail)])
    done = []
    thread = threading.Thread(target=lambda: done.append(trainer(output_dir=tmp_path / "b").fit(ROWS)))
    thread.start()
    thread.join()
    assert done


def test_in_a_callback_another_model_may_be_evaluated_under_both_limits(tmp_path):
    other, found = trainer(), []
    trainer(output_dir=tmp_path / "a", epochs=1).fit(ROWS, callbacks=[During(lambda: found.append(other.evaluate(ROWS)))])
    assert found


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.few(2)
def test_sessions_that_end_in_any_order_leave_the_limit_of_those_that_are_left(order):
    before, sessions = soft(), [contextlib.ExitStack() for _ in range(3)]
    loops = [stack.enter_context(trainer().session(BATCH)) for stack in sessions]
    for number in order:
        assert soft() != before
        loops[number].step(BATCH)
        sessions[number].close()
    assert soft() == before
