"""`--test-every`: passes over the test rows between epochs, which change nothing of the training."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.report.reporter import Reporter
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import PhaseDone
from tests.exactly import FULL, How, numbers
from tests.resuming import Arm, ended
from tests.runtime.test_exact import fresh, statistics

PASS, TEST = (Phase(kind=kind, partition=0, rows=1, batch=1, micro_batch=1) for kind in (PhaseKind.TRAIN, PhaseKind.TEST))


@given(passes=st.integers(0, 40), every=st.one_of(st.none(), st.integers(1, 50)))
def test_the_test_rows_come_behind_every_nth_pass_and_behind_the_last_once(passes, every):
    found = list(Phases([Epochs(train=PASS, epochs=passes, following=(TEST,), every=every)]))
    assert [phase.epoch for phase in found if phase is not TEST] == list(range(1, passes + 1)) and found[-1] is TEST
    behind = [at - found[:at].count(TEST) for at, phase in enumerate(found) if phase is TEST]
    assert behind == sorted({*(range(every, passes, every) if every else ()), passes})


class Losses(Reporter):
    """Keeps what every pass over the test rows found at the network's end."""

    def __init__(self):
        super().__init__(quiet=True)
        self.losses = []

    def listen(self, event):
        if isinstance(event, PhaseDone) and event.phase.kind is PhaseKind.TEST and event.loss is not None:
            self.losses.append(event.loss)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (FULL, {}),
        (How(method="checkpointed"), {"partitions": (0, 2, 4)}),
        (How(slots=2), {"partitions": (0, 2, 4)}),
        (How(method="sil"), {"partitions": (0, 2), "recovery_epochs": 2}),
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_training_ends_with_the_same_bits_and_the_last_test_is_the_result(how, options, monkeypatch, tmp_path):
    arm = Arm(monkeypatch, tmp_path, how, fresh(statistics), numbers((12,)), epochs=3, **options)
    alone = ended(arm.fit("alone"))
    tests = Losses()
    result = arm.fit("between", test_every=1, reporter=tests)
    assert ended(result) == alone
    assert tests.losses[-1] == result.test_loss and len(set(tests.losses)) == len(tests.losses) >= 3
