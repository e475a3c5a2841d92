"""Runs of ist that are killed with SIGKILL as they cut, train, and put back, go on to the bits of one that nobody killed."""

import random
import signal

import pytest

from tests.checkpoint.test_killed import ended, laid_out, to_go_on, whole_run

MODEL = """
    from torch import nn

    def net():
        def hidden(inputs, width):
            return lambda: nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))
        return [hidden(12, 24), hidden(24, 20), hidden(20, 16), lambda: nn.Linear(16, 4)]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(4, 4, 3, padding=1))

        def residual_branch(self):
            return "inner"

        def forward(self, x):
            return x + self.inner(x)

    def residual():
        first = lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1))
        return [first, *[Block] * 5, lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(48, 4))]
"""
COMMON = [
    "--data", "npz:rows.npz", "--mem-limit", "1GB", "--epochs", "3", "--batch-size", "8",
    "--method", "ist", "--subnets", "3", "--local-steps", "2", "--lr", "1e-2", "--save-every", "3", "--output-dir", "out",
]  # fmt: skip
NET = ["--model", "net:net"]
CASES = {
    "moments kept, cut in three": [*NET, "--partitions", "0,1,3", "--micro-batch-size", "4", "--test-every", "1"],
    "residual blocks dealt out": ["--model", "net:residual", "--partitions", "0,2,4", "--clip-grad-norm", "0.5"],
    "moments zero, in host memory": [*NET, "--subnet-moments", "zero", "--subnet-rows", "all", "--ram-limit", "20MB"],
    "sgd, elsewhere": [*NET, "--optimizer", "sgd", "--momentum", "0.9", "--offload-dir", "fast", "--clip-grad-norm", "0.5"],
}
MIDST = ["split", "write", "merge", "update", "save", "write"]


@pytest.fixture
def here(tmp_path):
    return laid_out(tmp_path, MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_as_it_cuts_trains_and_puts_back_ends_with_the_bits_of_one_that_nobody_killed(name, processes, here):
    arguments, chance, history = [*COMMON, *CASES[name]], random.Random(name), []
    whole, counts, _ = whole_run(processes, here, arguments)
    assert counts["split"] == counts["merge"] > 4
    for place in MIDST:
        call = chance.randint(1, max(1, counts[place] // len(MIDST)))
        status, *_ = processes.run(here, to_go_on(here, arguments), at=(place, call))
        history.append(f"{place} {call}: {status}")
        assert status == -signal.SIGKILL, (history, (here / "said").read_text())
    status, *_ = processes.run(here, to_go_on(here, arguments))
    assert status == 0, (history, (here / "said").read_text())
    assert ended(here) == whole, history


@pytest.mark.slow
def test_another_number_of_epochs_is_refused_and_another_learning_rate_is_not(processes, here):
    assert processes.run(here, [*NET, *COMMON], at=("merge", 2))[0] == -signal.SIGKILL
    assert processes.run(here, ["--resume", "out", "--epochs", "4"])[0] == 2
    said = (here / "said").read_text()
    assert "epochs was 3, not 4" in said and "--lr," in said
    assert processes.run(here, ["--resume", "out", "--lr", "1e-3"])[0] == 0, (here / "said").read_text()
