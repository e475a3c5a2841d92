"""`psl` with what a user may add: frozen layers, autocast, a plan that is carried out again, a run that goes on."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.plan.plan import Plan
from tests.checkpoint.test_killed import ended, laid_out, to_go_on, whole_run
from tests.command import run
from tests.methods.test_pairs import convolutional, fit, images, plain, split

pytestmark = pytest.mark.usefixtures("known_machine")

FROZEN = {
    "a common layer": ["0.0."],
    "all that feeds the scores": ["0.", "1."],
    "one layer of every score": ["2.0."],
    "every score": ["1.", "2.", "3.", "4."],
    "all but the last layer": ["0.", "1.", "2.", "3."],
}


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.few(1)
def test_frozen_layers_stay_and_the_others_learn_as_in_the_whole_network(name, tmp_path):
    """In float64, where the order of additions does not show."""
    data = images(dtype=torch.float64)

    def model():
        blocks = nn.Sequential(*convolutional(dtype=torch.float64))
        for path, parameter in blocks.named_parameters():
            parameter.requires_grad_(not any(path.startswith(prefix) for prefix in FROZEN[name]))
        return blocks

    options = {"optimizer": "adam", "micro_batch_size": 5}
    expected = load_file(fit(tmp_path / "full", model(), data, method="full", **options).weights)
    found = load_file(fit(tmp_path / "psl", model(), data, **options).weights)
    before = model()
    for path, parameter in before.named_parameters():
        torch.testing.assert_close(found[path], expected[path], rtol=1e-9, atol=1e-10)
        assert torch.equal(found[path], parameter) is not parameter.requires_grad, path


@pytest.mark.parametrize("micro", [12, 5])
@pytest.mark.few(1)
def test_under_autocast_its_bits_are_those_of_the_plain_loop_under_autocast(micro, tmp_path):
    data = images()
    found = load_file(fit(tmp_path / "run", convolutional(), data, micro_batch_size=micro, dtype="bf16").weights)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = plain(convolutional(), data, micro=micro)
    without = load_file(fit(tmp_path / "fp32", convolutional(), data, micro_batch_size=micro).weights)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(found[name], tensor) for name, tensor in without.items())


def test_a_plan_that_is_carried_out_again_gives_the_same_bits(tmp_path):
    data, options = images(), {"batch_size": 12, "lr": 1e-2, "seed": 5, "epochs": 2, "quiet": True, "micro_batch_size": 6}
    rows = split("training", *data, data[0].dtype)
    first = Trainer(convolutional(), mem_limit="2GB", method="psl", output_dir=tmp_path / "first", **options)
    expected = first.fit(rows, rows)
    saved = Plan.from_json(expected.plan.to_json(), "plan.json")
    again = Trainer(
        convolutional(), mem_limit="2GB", method="psl", output_dir=tmp_path / "again", **{**options, "micro_batch_size": None}
    )
    found = again.fit(rows, rows, reuse=saved)
    assert found.weights.read_bytes() == expected.weights.read_bytes()
    assert found.plan.micro_batch == 6 and found.plan.starts == saved.starts


# --- as commands ------------------------------------------------------------------------------------------------------------

MODEL = """
    from torch import nn

    from seqpart.model import SeparableLinear

    def net():
        first = lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        second = lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU())
        return [first, second, lambda: SeparableLinear(24, 12, 4), lambda: SeparableLinear(12, 4, 4)]

    def other():
        return [lambda: nn.Linear(12, 4)]
"""
COMMON = [
    "--model", "net:net", "--data", "npz:rows.npz", "--mem-limit", "2GB", "--epochs", "2", "--batch-size", "16", "--method",
    "psl", "--lr", "1e-2", "--save-every", "2", "--output-dir", "out",
]  # fmt: skip


@pytest.fixture
def here(tmp_path):
    return laid_out(tmp_path, MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--dtype", "bf16", "--micro-batch-size", "5", "--lr-schedule", "cosine"]], ids=str)
def test_a_run_that_is_killed_goes_on_to_the_bits_of_one_that_nobody_killed(options, processes, here):
    arguments = [*COMMON, *options]
    whole, counts, _ = whole_run(processes, here, arguments)
    for place in ("update", "write", "load", "save"):
        call = max(1, counts[place] // 5)
        assert processes.run(here, to_go_on(here, arguments), at=(place, call))[0] < 0, (here / "said").read_text()
    assert processes.run(here, to_go_on(here, arguments))[0] == 0, (here / "said").read_text()
    assert ended(here) == whole


@pytest.mark.slow
def test_what_a_resumed_run_may_change_and_what_it_may_not(processes, here):
    assert processes.run(here, COMMON, at=("update", 60))[0] < 0
    assert processes.run(here, ["--resume", "out", "--loss", "cross-entropy"])[0] == 2
    assert "psl" in (here / "said").read_text()
    assert processes.run(here, ["--resume", "out", "--lr", "1e-3", "--epochs", "3"])[0] == 0, (here / "said").read_text()
    assert json.loads((here / "out" / "result.json").read_text())["train_losses"][-1] > 0


@pytest.mark.slow
def test_the_command_writes_a_plan_takes_it_again_and_refuses_that_of_another_model(here):
    plan = ["--plan", "plan.json"]
    assert run(here, *COMMON, "--dry-run", "--plan-out", "plan.json").code == 0
    ran = run(here, *COMMON, *plan)
    assert ran.code == 0 and "violations 0" in ran.out, ran.err
    other = run(here, *(word.replace("net:net", "net:other") for word in COMMON), *plan, "--overwrite")
    assert other.code == 2 and "SeparableLinear" in other.err
