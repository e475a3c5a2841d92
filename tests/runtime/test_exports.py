"""Weights that are exported while training goes on: --export-every and --keep-exports."""

import json
import re
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from seqpart import Interrupted, Trainer
from seqpart.errors import OptionError
from seqpart.runtime import exports
from tests.command import SMALL, call

ROWS, BATCH, EPOCHS = 40, 8, 3
WAYS = [{"method": "streamed", "partitions": 3}, {"method": "full"}, {"method": "auto"}]


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def rows(count=ROWS, seed=4):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=numbers), torch.randint(0, 3, (count,), generator=numbers)


def trainer(folder, model=None, **options):
    options = {"mem_limit": "2GB", "method": "full", "batch_size": BATCH, "micro_batch_size": BATCH, **options}
    options = {"epochs": EPOCHS, "lr": 1e-2, "shuffle": False, "output_dir": folder / "run", "quiet": True, **options}
    return Trainer(model or network(), **options)


def plainly():
    """The weights after each update of a plain loop."""
    (x, y), model, found = rows(), network(), []
    step = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(EPOCHS):
        for at in range(0, ROWS, BATCH):
            step.zero_grad()
            F.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            step.step()
            found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found


def exported(folder):
    listed = json.loads((folder / "run" / "exports" / "exports.json").read_text())
    files = {path.name for path in (folder / "run" / "exports").glob("*.safetensors")}
    assert files == {one["file"] for one in listed}
    return {one["update"]: load_file(folder / "run" / "exports" / one["file"]) for one in listed}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.few(1)
def test_exports_are_the_weights_of_a_plain_loop_after_these_updates_and_change_no_bit(how, tmp_path):
    model = network()
    trainer(tmp_path, model, export_every=4, **how).fit(rows(), rows(16, 5))
    found, expected = exported(tmp_path), plainly()
    assert list(found) == [4, 8, 12] and all(same(found[update], expected[update - 1]) for update in found)
    assert same(model.state_dict(), expected[-1])


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"export_every": "1 epoch"}, [5, 10, 15]),
        ({"export_every": "2epochs", "eval_every": 2}, [10]),
        ({"export_every": 2, "keep_exports": 3}, [10, 12, 14]),
        ({"export_every": "evaluation", "eval_every": "1 epoch"}, [5, 10, 15]),
    ],
    ids=str,
)
@pytest.mark.few(2)
def test_exports_come_as_often_as_asked_and_only_the_newest_stay(options, updates, tmp_path):
    trainer(tmp_path, **options).fit(rows(), rows(16, 5))
    expected, found = plainly(), exported(tmp_path)
    assert list(found) == updates and all(same(found[update], expected[update - 1]) for update in found)


def test_a_kill_while_an_old_export_is_removed_leaves_none_that_nobody_knows(tmp_path, monkeypatch):
    """The list was written before the old file was removed, so the file stayed for ever."""

    class Killed(BaseException):
        pass

    def killed(path):
        path.unlink()
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(exports, "remove", killed)
        trainer(tmp_path, export_every=2, keep_exports=2, save_every=1).fit(rows())
    trainer(tmp_path, export_every=2, keep_exports=2, save_every=1).fit(rows(), resume=tmp_path / "run")
    assert len(exported(tmp_path)) == 2


def test_where_all_partitions_stay_a_test_pass_may_be_the_first_to_load_them(tmp_path):
    """After an export it loaded them without their state, into each other's slots, and then training found none of its size;
    so did a run that was stopped where an evaluation was due, when it was resumed."""

    def made(name, **options):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 8), nn.Linear(8, 16), nn.Linear(16, 3))
        options = {"method": "checkpointed", "partitions": 4, "eval_every": 2, **options}
        return trainer(tmp_path / name, model, **options), model

    (plain, expected), (exporting, found) = made("plain"), made("exports", export_every=2)
    plain.fit(rows(), rows(16, 5))
    exporting.fit(rows(), rows(16, 5))
    assert same(found.state_dict(), expected.state_dict())

    class Stop:
        def on_step(self, event):
            if event.update == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        made("stopped")[0].fit(rows(), rows(16, 5), callbacks=[Stop()])
    again, resumed = made("stopped")
    again.fit(rows(), rows(16, 5), resume=tmp_path / "stopped" / "run")
    assert same(resumed.state_dict(), expected.state_dict())


@pytest.mark.parametrize("by", ["loss", "accuracy"])
@pytest.mark.few(1)
def test_the_best_evaluations_stay(by, tmp_path):
    seen = []

    class Sees:
        def on_eval(self, event):
            seen.append((getattr(event, by), event.update))

    trainer(tmp_path, export_every="evaluation", eval_every=2, keep_exports=2, best_by=by).fit(
        rows(), rows(32, 5), callbacks=[Sees()]
    )
    best = sorted(seen, key=lambda one: one[0], reverse=by == "accuracy")[:2]
    listed = json.loads((tmp_path / "run" / "exports" / "exports.json").read_text())
    assert len(seen) == 8 and {one["update"] for one in listed} == {update for _, update in best}
    assert sorted(one["value"] for one in listed) == pytest.approx(sorted(value for value, _ in best))
    exported(tmp_path)


def test_a_resumed_run_makes_what_was_exported_after_its_checkpoint_again_and_misses_none(tmp_path):
    class Ends:
        def __init__(self, update):
            self.update = update

        def on_step(self, event):
            if event.update == self.update:
                raise ZeroDivisionError  # saves at this update, before the export of it

    options = {"export_every": 3, "save_every": 4}
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, **options).fit(rows(), callbacks=[Ends(6)])
    assert list(exported(tmp_path)) == [3]
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, **options).fit(rows(), resume=tmp_path / "run", callbacks=[Ends(11)])
    assert list(exported(tmp_path)) == [3, 6, 9]
    trainer(tmp_path, **options).fit(rows(), resume=tmp_path / "run" / "checkpoint.previous.json")
    found, expected = exported(tmp_path), plainly()
    assert list(found) == [3, 6, 9, 12, 15] and all(same(found[update], expected[update - 1]) for update in found)


@pytest.mark.parametrize("every", [2, "1 epoch"], ids=str)
@pytest.mark.few(1)
def test_a_run_that_is_stopped_exports_nothing_after_its_last_update(every, tmp_path):
    """It went to the evaluation at its end, which was taken for the end of all updates."""

    class Stops:
        def on_step(self, event):
            if event.update == 7:
                event.stop("enough")

    trainer(tmp_path, export_every=every).fit(rows(), rows(16, 5), callbacks=[Stops()])
    listed = json.loads((tmp_path / "run" / "exports" / "exports.json").read_text())
    expected = [(5, 1.0)] if every == "1 epoch" else [(2, 0.4), (4, 0.8), (6, 1.2)]
    assert [(one["update"], one["epoch"]) for one in listed] == expected


@pytest.mark.own_process
def test_an_export_keeps_the_limit_and_the_predicted_peak(tmp_path):
    """A frozen layer takes more than all that trains: an export reads it whole, and nothing else is there then."""
    wide = [partial(nn.Linear, *kind) for kind in ((6, 2000), (2000, 2000), (2000, 3))]
    options = {"method": "streamed", "export_every": 5, "freeze": "0.*,1.*"}
    plan = trainer(tmp_path, wide, **options).plan(rows())
    result = trainer(tmp_path, wide, **options, mem_limit=plan.peak * 108 // 100).fit(rows())
    assert result.proof.violations == 0 and result.proof.peak <= result.proof.predicted * 1.02
    assert list(exported(tmp_path)) == [5, 10, 15]


def test_the_command_exports_too(tmp_path, capsys):
    found = call(
        capsys, *SMALL, "--method", "full", "--epochs", "1", "--export-every", "10", "--output-dir", tmp_path / "run"
    )  # fmt: skip
    assert found.code == 0, found.err
    assert list(exported(tmp_path)) == [10, 20]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"export_every": "often"}, "or epochs ('2 epochs'), or evaluation; found 'often'"),
        ({"keep_exports": 2}, "keep_exports: nothing is exported. Give export_every"),
        ({"export_every": "evaluation"}, "export_every evaluation needs evaluations: give eval_every"),
        ({"export_every": 5, "method": "sil"}, 'export_every goes with exact methods; found method="sil"'),
    ],
    ids=["often", "nothing", "no evaluations", "sil"],
)  # fmt: skip
def test_exports_that_cannot_be_are_refused_in_words(options, words, tmp_path):
    with pytest.raises(OptionError, match=re.escape(words)):
        trainer(tmp_path, **options)
