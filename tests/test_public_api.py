"""The names that others may rely on."""

import importlib.metadata
import inspect
from pathlib import Path

import seqpart
from seqpart import errors


def test_the_public_names_are_few_sorted_and_there():
    assert seqpart.__all__ == sorted(seqpart.__all__)
    assert seqpart.__all__ == [
        "BadInput", "DoesNotFit", "Evaluation", "Interrupted", "LimitExceeded", "OutOfMemory", "Padding", "Result",
        "SeqpartError", "Settings", "StoreError", "Trainer", "VerifyMismatch", "packed",
        "parameters_in_file",
        "parameters_on_meta",
    ]  # fmt: skip
    assert all(hasattr(seqpart, name) for name in seqpart.__all__)


def test_everything_that_the_package_defines_at_its_top_is_public():
    own = {
        name for name, value in vars(seqpart).items()
        if not name.startswith("_") and not inspect.ismodule(value) and getattr(value, "__module__", "").startswith("seqpart")
    }  # fmt: skip
    assert own == set(seqpart.__all__)


def test_every_public_name_says_what_it_is():
    for name in seqpart.__all__:
        assert inspect.getdoc(getattr(seqpart, name)), name


def test_every_error_is_in_the_tree_that_the_docstring_draws():
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, BaseException):
            assert issubclass(kind, errors.SeqpartError | errors.Interrupted)
            assert name in errors.__doc__


def test_an_interrupted_run_is_no_error_and_passes_handlers_of_errors_by():
    assert issubclass(errors.Interrupted, KeyboardInterrupt)
    assert not issubclass(errors.Interrupted, Exception)
    interrupted = errors.Interrupted(Path("runs/mine"))
    assert interrupted.directory == Path("runs/mine")
    assert 'fit(..., resume="runs/mine")' in str(interrupted)


def test_each_branch_of_the_tree_has_its_exit_code():
    codes = {name: kind.exit_code for name, kind in vars(errors).items() if isinstance(kind, type) and "exit_code" in dir(kind)}
    assert codes == {
        "SeqpartError": 1, "ScheduleError": 1, "OtherRank": 1,
        "BadInput": 2, "OptionError": 2, "ModelError": 2, "DataError": 2, "Diverged": 2,
        "DoesNotFit": 3,
        "LimitExceeded": 4, "OutOfMemory": 4,
        "VerifyMismatch": 5,
        "StoreError": 6, "CorruptFile": 6, "DiskFull": 6, "DirectoryUnusable": 6,
    }  # fmt: skip


def test_the_installed_package_brings_the_command_and_its_types():
    found = importlib.metadata.distribution("seqpart")
    assert [entry.value for entry in found.entry_points if entry.name == "seqpart"] == ["seqpart.__main__:console"]
