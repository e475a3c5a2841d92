"""Runs that were copied or moved go on, and what they were copied from is as it was, whatever their checkpoints name."""

import os
import shutil

import pytest

from seqpart.checkpoint.leftovers import unknown
from seqpart.checkpoint.marker import locked
from seqpart.errors import CorruptFile, DirectoryUnusable
from seqpart.store.atomic import checked_body, with_checksum
from seqpart.store.scratch import CHECKPOINT, PREVIOUS
from tests.checkpoint.test_leftovers import tree
from tests.exactly import How, numbers
from tests.resuming import Arm, Killed, Stopping, ended, kill
from tests.runtime.test_exact import dropping, fresh


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def arm(monkeypatch, tmp_path, known):
    return Arm(
        monkeypatch, tmp_path, How(), fresh(dropping), numbers((12,)), partitions=(0, 1, 3), save_every="1",
        offload_dir=tmp_path / "fast", known=known,
    )  # fmt: skip


def halfway(arm, name="stopped", **options):
    """A killed run with two checkpoints."""
    with pytest.raises(Killed):
        arm.fit(name, reporter=Stopping(70, kill), **options)
    assert (arm.folder / name / PREVIOUS).exists()
    return arm.folder / name


def edited(path, **changes):
    body = checked_body("checkpoint", path.read_text())
    path.write_text(with_checksum("checkpoint", body | changes))


def link_tree(source, target):
    shutil.copytree(source, target, copy_function=os.link)


@pytest.mark.parametrize("copied", [pytest.param(shutil.copytree, marks=pytest.mark.slow), link_tree])
def test_a_copy_of_a_run_goes_on_and_the_original_too(arm, copied):
    """The copy took the original's homes over, wrote over them and removed them at its end."""
    whole, _ = arm.whole()
    root = halfway(arm)
    copied(root, arm.folder / "copy")
    before = tree(root), tree(arm.folder / "fast")
    for checkpoint in (CHECKPOINT, PREVIOUS):
        assert ended(arm.fit(resume=arm.folder / "copy" / checkpoint)) == whole
        assert (tree(root), tree(arm.folder / "fast")) == before
        shutil.rmtree(arm.folder / "copy")
        copied(root, arm.folder / "copy")
    assert ended(arm.fit(resume=root)) == whole
    assert tree(arm.folder / "fast") == {}


def test_a_copy_that_is_stopped_and_goes_on_has_homes_of_its_own(arm):
    whole, _ = arm.whole()
    root = halfway(arm)
    shutil.copytree(root, arm.folder / "copy")
    before = tree(root)
    for steps in (1, 40, 1):
        with pytest.raises(Killed):
            arm.fit(resume=arm.folder / "copy", reporter=Stopping(steps, kill))
    assert ended(arm.fit(resume=root)) == whole
    assert tree(root) != before
    assert ended(arm.fit(resume=arm.folder / "copy")) == whole
    assert tree(arm.folder / "fast") == {}


def test_homes_within_the_run_s_directory_that_were_copied_as_links_are_not_written_over(arm):
    whole, _ = arm.whole()
    root = halfway(arm, offload_dir=None)
    link_tree(root, arm.folder / "copy")
    before = tree(root)
    assert ended(arm.fit(resume=arm.folder / "copy", offload_dir=None)) == whole
    assert tree(root) == before
    assert ended(arm.fit(resume=root, offload_dir=None)) == whole


def test_a_run_that_was_moved_goes_on_and_what_it_leaves_is_told(arm):
    whole, _ = arm.whole()
    halfway(arm).rename(arm.folder / "moved")
    before, reporter = tree(arm.folder / "fast"), Stopping()
    assert ended(arm.fit(resume=arm.folder / "moved", reporter=reporter)) == whole
    assert tree(arm.folder / "fast") == before
    (old,) = unknown(arm.folder / "fast")
    assert any(text.startswith(f"{old.path} (") and "is kept" in text for text in reporter.said)


def test_a_checkpoint_that_names_another_run_s_directory_leaves_that_as_it_is(arm):
    """That run's homes went as leftovers, with its checkpoint."""
    whole, _ = arm.whole()
    victim, root = halfway(arm, "victim", offload_dir=None), halfway(arm)
    for place in (victim, *(arm.folder / "fast").iterdir()):
        shutil.rmtree(arm.folder / "attack", ignore_errors=True)
        shutil.copytree(root, arm.folder / "attack")
        for name in (CHECKPOINT, PREVIOUS):
            edited(arm.folder / "attack" / name, scratch=str(place))
        before = tree(victim), tree(arm.folder / "fast")
        assert ended(arm.fit(resume=arm.folder / "attack")) == whole  # of the same job, so that they serve
        assert (tree(victim), tree(arm.folder / "fast")) == before
        with pytest.raises(Killed):
            arm.fit("attack", overwrite=True, reporter=Stopping(1, kill))
        assert (tree(victim), tree(arm.folder / "fast")) == before
    assert ended(arm.fit(resume=victim)) == whole


def test_a_checkpoint_that_names_no_run_s_directory_is_refused_by_the_missing_file(arm):
    root = halfway(arm)
    before = tree(arm.folder / "fast")
    for scratch in ("/", "..", "../../nowhere", "/proc/self"):
        edited(root / CHECKPOINT, scratch=scratch)
        with pytest.raises(CorruptFile, match="is missing"):
            arm.fit(resume=root)
        assert tree(arm.folder / "fast") == before, scratch


def test_homes_that_a_live_run_uses_are_not_taken_from_it(arm):
    root = halfway(arm)
    shutil.copytree(root, arm.folder / "copy")
    (homes,) = (arm.folder / "fast").iterdir()
    lock = locked(homes)
    with pytest.raises(DirectoryUnusable, match=f"{homes} is in use by another run"):
        arm.fit(resume=arm.folder / "copy")
    os.close(lock)


def test_a_checkpoint_that_names_files_which_are_none_of_ours_is_refused(arm):
    root = halfway(arm)
    words = r"checkpoint\.json is no checkpoint that seqpart wrote.*checkpoint\.previous\.json"
    for name in ("../../fast/x.safetensors", "/etc/passwd", "notes.txt", "block-00000.1.safetensors/.."):
        edited(root / CHECKPOINT, homes={"block-00000": {"file": name, "header": "0"}})
        before = tree(arm.folder)
        with pytest.raises(CorruptFile, match=words):
            arm.fit(resume=root)
        assert tree(arm.folder) == before, name


@pytest.mark.parametrize("what", ["homes", "rows"])
def test_folders_of_a_run_that_are_links_are_refused(arm, what):
    root = halfway(arm, offload_dir=None)
    (root / what).rename(arm.folder / "theirs")
    (root / what).symlink_to(arm.folder / "theirs")
    before = tree(arm.folder / "theirs")
    with pytest.raises(DirectoryUnusable, match=f"{what} is a link"):
        arm.fit(resume=root)
    assert tree(arm.folder / "theirs") == before


def test_what_lies_under_a_shared_parent_is_for_nobody_else_to_read(arm):
    halfway(arm)
    halfway(arm, "own", offload_dir=None)
    (homes,) = (arm.folder / "fast").iterdir()
    assert homes.stat().st_mode & 0o777 == 0o700
    for place in (homes, arm.folder / "own"):
        for folder in ("homes", "rows"):
            assert (place / folder).stat().st_mode & 0o777 == 0o700
            modes = {path.stat().st_mode & 0o777 for path in (place / folder).iterdir()}
            assert modes == {0o600}
