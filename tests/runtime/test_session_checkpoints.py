"""Checkpoints of a loop of one's own: `session.save()` and `Trainer.session(example, resume=DIR)`."""

import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import OptionError
from tests.runtime import test_turns as turns

WAYS = [{"method": "streamed", "partitions": 3}, {"method": "full"}, {"method": "auto"}]
UPDATES = 6


def network():
    torch.manual_seed(4)
    parts = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*parts)


def batches(count=UPDATES):
    numbers = torch.Generator().manual_seed(6)
    return [(torch.randn(12, 8, generator=numbers), torch.randint(0, 4, (12,), generator=numbers)) for _ in range(count)]


def session(folder, model, resume=None, **options):
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 12, "micro_batch_size": 12, "lr": 1e-2, **options}
    options = {"output_dir": folder / "run", "max_steps": UPDATES, "lr_schedule": "cosine", "quiet": True, **options}
    return Trainer(model, **options).session(batches(1)[0], resume=resume)


class Gone(Exception):
    pass


def same(found, expected):
    return [name for name, tensor in found.state_dict().items() if not torch.equal(tensor, expected.state_dict()[name])] == []


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_a_session_that_goes_on_from_its_checkpoint_has_the_bits_of_one_that_never_ended(options, tmp_path):
    whole, found, losses = network(), network(), []
    with session(tmp_path, whole, **{**options, "output_dir": None, "offload_dir": tmp_path / "homes"}) as steps:
        expected = [steps.step(batch) for batch in batches()]
    with pytest.raises(Gone), session(tmp_path, found, **options) as steps:
        losses = [steps.step(batch) for batch in batches()[:3]]
        steps.evaluate(batches(1)[0])
        assert steps.save() == tmp_path / "run"
        steps.step(batches()[3])  # is not saved
        raise Gone
    found = network()
    with session(tmp_path, found, tmp_path / "run", **options) as steps:
        assert steps.updates == 3
        losses += [steps.step(batch) for batch in batches()[3:]]
        steps.save()
    assert losses == expected and same(found, whole)
    previous = tmp_path / "run" / "checkpoint.previous.json"
    with session(tmp_path, again := network(), previous, **{**options, "output_dir": None}) as steps:
        assert [steps.updates, *(steps.step(batch) for batch in batches()[3:])] == [3, *expected[3:]]
        assert steps.save() == tmp_path / "run"
    assert same(again, whole)


LOOP = """
import json, os, signal, sys
import torch
from pathlib import Path
from tests.runtime.test_session_checkpoints import batches, network, session
folder, resume = Path(sys.argv[1]), sys.argv[2] == "resume"
model = network()
with session(folder, model, folder / "run" if resume else None, method="streamed", partitions=3) as steps:
    for number in range(steps.updates, 6):
        print(json.dumps([number, steps.step(batches()[number])]), flush=True)
        if number % 2:
            steps.save()
        if number == 4 and not resume:
            os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), folder / "found.pt")
"""


@pytest.mark.slow
def test_a_killed_session_goes_on_from_its_last_checkpoint_in_another_process(tmp_path):
    def run(how):
        done = subprocess.run([sys.executable, "-c", LOOP, str(tmp_path), how], capture_output=True, text=True, timeout=120)
        return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    killed, first = run("begin")
    assert killed.returncode == -signal.SIGKILL and [number for number, _ in first] == [0, 1, 2, 3, 4]
    done, then = run("resume")
    assert done.returncode == 0, done.stderr
    assert [number for number, _ in then] == [4, 5]
    with session(tmp_path / "whole", whole := network(), method="streamed", partitions=3) as steps:
        expected = [steps.step(batch) for batch in batches()]
    assert [loss for _, loss in first[:4] + then] == expected
    found = torch.load(tmp_path / "found.pt")
    assert [name for name, tensor in whole.state_dict().items() if not torch.equal(tensor, found[name])] == []


def test_networks_that_take_turns_go_on_in_the_middle_of_a_round(tmp_path):
    rounds, options = turns.batches(2), {"method": "streamed", "partitions": 2, "output_dir": tmp_path / "run"}
    _, expected = turns.plainly(rounds)
    with pytest.raises(Gone), turns.session(tmp_path, **options) as steps:
        steps.step("d", rounds[0])
        steps.step("d", rounds[0])
        steps.save()
        raise Gone
    both = turns.model()
    with turns.trainer(tmp_path, both, **options).session(rounds[1], learns=turns.LEARNS, resume=tmp_path / "run") as steps:
        assert steps.updates == 2
        for step, batch in [("g", rounds[0]), ("d", rounds[1]), ("d", rounds[1]), ("g", rounds[1])]:
            steps.step(step, batch)
    assert [name for name, tensor in both.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def test_what_a_checkpoint_cannot_do_is_refused_in_words(tmp_path):
    with session(tmp_path, network(), output_dir=None, offload_dir=tmp_path) as steps:
        with pytest.raises(OptionError, match=re.escape("save: expected a directory for checkpoints; found none")):
            steps.save()
        assert steps.step(batches()[0]) > 0
    with session(tmp_path, network()) as steps:
        steps.step(batches()[0])
        steps.save()
    with pytest.raises(OptionError, match="holds a run that was interrupted"):
        session(tmp_path, network()).__enter__()
    with pytest.raises(OptionError, match="holds another model"):
        session(tmp_path, network()[:5], tmp_path / "run").__enter__()
    with pytest.raises(OptionError, match=r"a checkpoint of a session\. Go on with Trainer\.session"):
        Trainer(network(), mem_limit="2GB", method="full", quiet=True).fit(batches()[0], resume=tmp_path / "run")
    options = {"mem_limit": "2GB", "method": "full", "quiet": True, "output_dir": tmp_path / "fit", "save_every": 1}

    class Ends:
        def on_step(self, event):
            raise Gone

    with pytest.raises(Gone):
        Trainer(network(), **options).fit(batches()[0], callbacks=[Ends()])
    with pytest.raises(OptionError, match=r"a checkpoint of a run by fit\. Go on with fit"):
        session(tmp_path, network(), tmp_path / "fit", output_dir=None).__enter__()
