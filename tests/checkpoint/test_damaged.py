"""Damaged files of a checkpoint are named and the checkpoint before it serves; full disks leave both as they were."""

import errno
import itertools
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.checkpoint import manifest as manifests
from seqpart.errors import CorruptFile, DiskFull, StoreError
from seqpart.methods.ist.moving import Parting
from seqpart.model import SeparableLinear
from seqpart.store.scratch import CHECKPOINT, PREVIOUS, has_checkpoint
from seqpart.store.store import RetainedFiles
from tests.choice import in_turn, only_quick
from tests.exactly import How, numbers, split
from tests.given import classified
from tests.resuming import Arm, Killed, Stopping, ended, flip, kill
from tests.runtime.test_exact import dropping, fresh

SEED = 5
WAYS = {
    "streamed": {"how": How(slots=2), "optimizer": "adam"},
    "in host memory": {"how": How(slots=2, boundary_tier="host"), "momentum": 0.9},
    "sil": {"how": How(method="sil"), "momentum": 0.9},
}


@pytest.fixture
def arms(monkeypatch, tmp_path):
    def of(how, **options):
        options = {"partitions": (0, 1, 3), "save_every": "1", **options}
        return Arm(monkeypatch, tmp_path, how, fresh(dropping), numbers((12,)), **options)

    return of


def halfway(arm):
    """A run that was killed when it had two checkpoints, in `kept`. Returns what it would have ended with."""
    whole, steps = arm.whole()
    with pytest.raises(Killed):
        arm.fit("kept", reporter=Stopping(int(0.6 * len(steps)), kill))
    return whole


def files_of(root, name):
    """Paths of the files that the checkpoint `name` is made of."""
    found = manifests.load(root / name)
    named = {*(f"homes/{file}" for file in found.home_files), *(f"rows/{file}" for file in found.row_files), name}
    return {Path(path) for path in named}


def flipped(path, chance):
    flip(path, chance.randrange(min(path.stat().st_size, 4200)), chance.randrange(8))


def halved(path, chance):
    os.truncate(path, chance.randrange(path.stat().st_size))


def refused(arm, path, damage, chance):
    """What is said of the killed run when one of its files is damaged."""
    shutil.rmtree(arm.root, ignore_errors=True)
    shutil.copytree(arm.folder / "kept", arm.root)
    damage(arm.root / path, chance)
    with pytest.raises(CorruptFile) as refusal:
        arm.fit(resume=arm.root)
    assert refusal.value.exit_code == 6
    assert refusal.value.with_flags.startswith(f"{arm.root / path} "), "it names the file"
    return refusal.value.with_flags


@pytest.mark.slow
@pytest.mark.parametrize("way", only_quick(["streamed", "sil"], ["streamed"]))
def test_each_damaged_file_is_named_and_the_checkpoint_before_goes_on_to_the_same_bits(way, arms):
    """A file that both checkpoints need is lost, unless the data give it again, and that is said."""
    arm, chance = arms(**WAYS[way]), random.Random(f"{SEED} {way}")
    whole, kept = halfway(arm), arm.folder / "kept"
    shared = files_of(kept, CHECKPOINT) & files_of(kept, PREVIOUS)
    lost = {path for path in shared if path.parts[0] == "homes" or "-00000." not in path.name}
    if way != "sil":
        names = {path.name.split(".")[0] for path in lost}
        assert names == {"block-00002"}, "all changes in each update but the data, and a block without weights"
    for path in sorted(files_of(kept, CHECKPOINT)):
        said = refused(arm, path, chance.choice([flipped, halved]), chance)
        assert ("which needs it too. Start again" in said) == (path in lost), (SEED, path)
        if path not in lost:
            assert f"--resume {arm.root / PREVIOUS}" in said
            assert ended(arm.fit(resume=arm.root / PREVIOUS)) == whole, (SEED, path)


def first_bytes(path, chance):
    flip(path, chance.randrange(8), chance.randrange(8))


def made_a_directory(path, chance):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [first_bytes, made_a_directory])
@pytest.mark.few(1)
def test_damage_of_any_kind_advises_no_checkpoint_that_needs_the_same_file(damage, arms):
    """A home whose first 8 bytes were damaged was not recognized in the message, and advised to take the one before."""
    arm, chance = arms(**WAYS["sil"]), random.Random(SEED)
    whole, kept = halfway(arm), arm.folder / "kept"
    latest, before = files_of(kept, CHECKPOINT), files_of(kept, PREVIOUS)
    shared = min(path for path in latest & before if path.parts[0] == "homes")
    assert "which needs it too. Start again" in refused(arm, shared, damage, chance)
    only = {path.suffix: path for path in sorted(latest - before) if path != Path(CHECKPOINT)}
    for path in only.values():
        assert f"--resume {arm.root / PREVIOUS}" in refused(arm, path, damage, chance)
        assert ended(arm.fit(resume=arm.root / PREVIOUS)) == whole, path


def test_rows_of_the_data_that_are_made_again_are_told_and_must_be_the_same(arms):
    arm, chance = arms(How()), random.Random(SEED)
    whole = halfway(arm)
    (rows,) = (path for path in files_of(arm.folder / "kept", PREVIOUS) if path.match("train-00000.*.safetensors"))
    refused(arm, rows, halved, chance)
    data, train = arm.data, arm.data[0]
    others = split("training", train.open()[0] + 1, train.labels)
    arm.data = replace(others, some=tuple), data[1]  # rows that nothing is known of before they are read
    with pytest.raises(CorruptFile, match=r"The data have changed, so it could not be made again\. Start again"):
        arm.fit(resume=arm.root / PREVIOUS)
    arm.data, reporter = data, Stopping()
    assert ended(arm.fit(resume=arm.root / PREVIOUS, reporter=reporter)) == whole
    assert [text for text in reporter.said if text.startswith(f"{arm.root / rows} ") and "made again from the data" in text]


@pytest.mark.parametrize("way", ["streamed", "in host memory"])
@pytest.mark.few(1)
def test_a_home_that_could_not_be_written_is_no_part_of_what_is_saved(way, arms, monkeypatch):
    """The write of a partition failed while the partition was already on its way back. The failure was forgotten, the run was
    saved as if the home were whole, and ended elsewhere: with other bits, or where no state had been, by a refusal."""
    arm, real = arms(**WAYS[way], save_every="2"), os.pwritev
    whole, _ = arm.whole()
    stopped, at = True, 3
    while stopped:
        calls, stopped = itertools.count(1), False

        def failing(*arguments, calls=calls, at=at):
            if next(calls) == at:
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments)

        shutil.rmtree(arm.root, ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing)
            try:
                arm.fit()
            except StoreError:
                stopped = True
        if stopped:
            assert ended(arm.fit(resume=arm.root)) == whole, at
        at += 60


def test_a_home_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    """It ended a run with a traceback."""

    def broken(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("seqpart.store.store.remove", broken)
    with pytest.raises(StoreError, match=r"block-00000\.0\.safetensors failed: Input/output error"):
        RetainedFiles(tmp_path).remove("block-00000.0.safetensors")


def test_a_home_that_is_damaged_while_the_run_lives_ends_it_with_the_way_on(arms):
    arm = arms(How())
    _, steps = arm.whole()
    second = 1 + next(number for number, step in enumerate(steps) if str(step) == "F0.3")  # the others are at home

    def damage():
        for home in (arm.root / "homes").glob("block-00001.[0-9]*"):
            flip(home)

    with pytest.raises(CorruptFile, match=r"block-00001\..*is damaged") as ending:
        arm.fit(reporter=Stopping(second, damage))
    assert f"--resume {arm.root} goes on, or says" in ending.value.notes_with_flags[-1]


# --- Full disks ------------------------------------------------------------------------------------------------------


def fill(monkeypatch, name, call):
    """From the `call`-th call of os.`name` on, the disk is full."""
    real, calls = getattr(os, name), iter(range(1, 1 << 30))

    def filling_up(*arguments, **named):
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(os, name, filling_up)


@pytest.mark.parametrize(("failing", "call"), in_turn(["pwritev", "fsync", "replace", "write"], [1, 4]))
@pytest.mark.parametrize("way", only_quick(["in host memory", "sil"], ["in host memory"]))
@pytest.mark.few(2)
def test_a_disk_that_is_full_ends_the_run_with_a_clear_error_and_the_checkpoint_goes_on(way, failing, call, arms, monkeypatch):
    """With homes in host memory nothing is written but by saves."""
    arm = arms(**WAYS[way], epochs=1)
    whole, steps = arm.whole()
    with monkeypatch.context() as patched, pytest.raises(DiskFull, match=r"the disk is full: could not write .*Free") as ending:
        arm.fit(reporter=Stopping(len(steps) // 2, lambda: fill(patched, failing, call)))
    assert ending.value.exit_code == 6
    assert f"go on with --resume {arm.root}" in ending.value.notes_with_flags[-1]
    assert not list(arm.root.rglob("checkpoint*.part"))
    assert ended(arm.fit(resume=arm.root)) == whole


def test_a_disk_that_is_full_at_the_first_save_leaves_nothing_and_promises_nothing(arms, monkeypatch):
    arm = arms(How(boundary_tier="host", slots=2))
    with monkeypatch.context() as patched, pytest.raises(DiskFull) as ending:
        arm.fit(reporter=Stopping(1, lambda: fill(patched, "pwritev", 1)))
    assert not [note for note in ending.value.notes_with_flags if "--resume" in note]
    assert not has_checkpoint(arm.root)
    assert not list(arm.root.rglob("*.safetensors"))


def test_a_damaged_home_of_a_live_model_is_told_with_its_cure(tmp_path):
    """The weights could not be given back either, and that second error hid the first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 16, "save_every": "1", "output_dir": tmp_path, "quiet": True}
    with pytest.raises(Killed):
        Trainer(model, **options).fit(classified(64, (8,)), classified(9, (8,)), reporter=Stopping(6, kill))
    (entry,) = [entry for name, entry in manifests.load(tmp_path).homes.items() if name == "block-00001"]
    flip(tmp_path / "homes" / entry["file"])
    with pytest.raises(CorruptFile, match=r"resume=.*checkpoint\.previous\.json"):
        Trainer(model, **options).fit(classified(64, (8,)), classified(9, (8,)), resume=tmp_path)


# --- Homes of subnets, and of scores ---------------------------------------------------------------------------------


def divided(method, folder, *, resume=None, reporter=None):
    """A run of a network that can be divided into subnets, and into scores."""
    torch.manual_seed(3)
    model = [
        nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU()), nn.Sequential(nn.Linear(16, 12), nn.Tanh()),
        nn.Sequential(SeparableLinear(12, 6, 3), nn.ReLU()), SeparableLinear(6, 3, 3),
    ]  # fmt: skip
    options = {"epochs": 2, "batch_size": 8, "lr": 1e-2, "seed": SEED, "save_every": 1, "quiet": True}
    options |= {"subnets": 3, "local_steps": 1} if method == "ist" else {}
    options |= {} if resume else {"output_dir": folder}
    trainer = Trainer(model, "psl", "adam", mem_limit="2GB", method=method, **options)
    return trainer.fit(classified(48, (6,)), classified(12, (6,)), resume=resume, reporter=reporter)


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("method", ["ist", "psl"])
def test_a_damaged_home_of_a_subnet_or_a_score_is_named_and_the_checkpoint_before_goes_on_to_the_same_bits(method, tmp_path):
    """`psl` kept no checkpoint before the latest: no loss had ever been seen to come of one."""
    reporter, chance, root = Stopping(), random.Random(SEED), tmp_path / "stopped"
    whole = ended(divided(method, tmp_path / "whole", reporter=reporter))
    with pytest.raises(Killed):
        divided(method, tmp_path / "kept", reporter=Stopping(int(0.6 * len(reporter.steps)), kill))
    latest, before = (files_of(tmp_path / "kept", name) for name in (CHECKPOINT, PREVIOUS))
    homes = sorted(path for path in latest - before if path.parts[0] == "homes")
    assert len(homes) > 2
    for path in chance.sample(homes, 2):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", root)
        chance.choice([flipped, halved])(root / path, chance)
        with pytest.raises(CorruptFile) as refusal:
            divided(method, None, resume=root)
        assert refusal.value.with_flags.startswith(f"{root / path} "), "it names the file"
        assert f"--resume {root / PREVIOUS}" in refusal.value.with_flags
        assert ended(divided(method, None, resume=root / PREVIOUS)) == whole, path


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("verb", ["split", "merge"])
def test_a_disk_that_is_full_as_homes_are_cut_or_put_back_ends_the_run_and_the_checkpoint_goes_on(verb, tmp_path, monkeypatch):
    whole = ended(divided("ist", tmp_path / "whole"))
    real, rounds = getattr(Parting, verb), itertools.count(1)
    with monkeypatch.context() as patched:

        def filling_up(*arguments):
            if next(rounds) == 2:
                fill(patched, "pwritev", 2)
            real(*arguments)

        patched.setattr(Parting, verb, filling_up)
        with pytest.raises(DiskFull, match=r"the disk is full: could not write .*Free") as ending:
            divided("ist", tmp_path / "run")
    assert ending.value.exit_code == 6
    assert f"go on with --resume {tmp_path / 'run'}" in ending.value.notes_with_flags[-1]
    assert ended(divided("ist", None, resume=tmp_path / "run")) == whole
