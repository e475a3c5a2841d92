"""An error names arguments in Python, and flags in the command: one message, written once."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, DoesNotFit, OptionError, SeqpartError, in_arguments, resuming
from seqpart.report.reporter import Reporter
from tests.runtime.test_failures import data

SAID = {
    "--epochs: expected whole numbers": "epochs: expected whole numbers",
    "Use --method auto.": 'Use method="auto".',
    "--kappa goes with --method sil only": 'kappa goes with method="sil" only',
    "--epochs 5,160 gives 2 values": "epochs=(5, 160) gives 2 values",
    "Give --mem-limit 623MB, or --micro-batch-size 12.": 'Give mem_limit="623MB", or micro_batch_size=12.',
    "a smaller --mem-limit, or --method streamed --partitions 2.": 'a smaller mem_limit, or method="streamed" partitions=2.',
    "(--save-every never).": '(save_every="never").',
    "go on with --resume runs/my--run/a.b and another --lr": 'go on with fit(..., resume="runs/my--run/a.b") and another lr',
    "by --resume DIR, or remove it": "by fit(..., resume=DIR), or remove it",
    "--device cuda:1: none": 'device="cuda:1": none',
    "--lr 1e-3, not --epochs all": 'lr=1e-3, not epochs="all"',
    "/my/--odd/place": "/my/--odd/place",
    "Give the same --data": "Give the same train",
    "--data folder:pics: no such directory": 'seqpart.zoo.datasets.load("folder:pics"): no such directory',
    "--image-size goes with --data folder:DIR.": 'image_size goes with seqpart.zoo.datasets.load("folder:DIR").',
}


@pytest.mark.parametrize("written", SAID)
def test_flags_are_arguments_in_python_and_stay_flags_in_the_command(written):
    error = SeqpartError(written)
    assert (str(error), error.with_flags) == (SAID[written], written)


def test_a_note_and_the_limit_that_would_do_speak_as_the_message_does():
    error = DoesNotFit("it needs more than --mem-limit 1GB", smallest=7, named="; give --mem-limit 2GB")
    error.add_note("or --method streamed")
    assert str(error) == 'it needs more than mem_limit="1GB"; give mem_limit="2GB"'
    assert error.__notes__ == ['or method="streamed"']
    assert error.notes_with_flags == ("or --method streamed",)


BLOCKS = [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 3)]
WRONG = {
    "epochs: expected": {"epochs": 0},
    "micro_batch_size=99 is more than the batch of 32": {"batch_size": 32, "micro_batch_size": 99},
    "partitions=3: the model has 2 blocks": {"partitions": 3},
    "mem_limit: expected a size": {"mem_limit": "much"},
    "warmup_updates=900: the run has": {"warmup_updates": 900},
    r"epochs=\(1, 2\): values for each partition go with method=\"sil\" only": {"epochs": (1, 2)},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_python_gets_wrong_is_said_in_its_own_names(words, tmp_path):
    options = {"mem_limit": "2GB", "method": "streamed", "output_dir": tmp_path / "run", **WRONG[words]}
    with pytest.raises(OptionError, match=words) as refused:
        Trainer(BLOCKS, **options).plan(data(), data(12, 1))
    assert "--" not in str(refused.value)


def test_a_sentence_that_ends_with_what_a_library_said_ends_once():
    """It said `Couldn't find any class folder in /data/ref..`: ours ended with its message, which ends with a stop."""
    assert DataError("expected a directory. Couldn't find any class folder in /data/ref..").with_flags.endswith("/data/ref.")
    assert str(OptionError('it says "no"..\n  Give another.')) == 'it says "no".\n  Give another.'
    for kept in ("found ..", "expected a path; found ../.. here", "block 0..3, and so on...", "Found ../"):
        assert OptionError(kept).with_flags == kept


@pytest.mark.parametrize("flags", [False, True])
def test_what_a_run_prints_speaks_as_its_errors_do(flags, capsys):
    """Reasons of plans, warnings and notes to errors of the user's own named flags in Python."""
    reporter = Reporter(flags=flags)
    reporter.say("offloaded graphs go with --method auto")
    reporter.add_note(mine := ZeroDivisionError(), "go on with --resume runs/mine")
    reporter.add_note(ours := SeqpartError("x"), "go on with --resume runs/mine")
    method, resumed = ("--method auto", "--resume runs/mine") if flags else ('method="auto"', 'fit(..., resume="runs/mine")')
    assert capsys.readouterr().out == f"offloaded graphs go with {method}\n"
    assert mine.__notes__ == [f"go on with {resumed}"]
    assert ours.notes_with_flags == ("go on with --resume runs/mine",)
    assert ours.__notes__ == ['go on with fit(..., resume="runs/mine")']


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\0"), min_size=1)


@given(st.lists(NAMES, min_size=1, max_size=3).map("/".join))
@example("out")
@example("my runs/it's, one")
@example("runs/--resume x")
@example("0/0")
def test_a_directory_of_any_name_is_given_to_a_shell_and_to_python_as_it_is(name):
    """`--resume out` was `resume out` in Python, since "out" might have been any word."""
    path = Path(name)
    written = resuming(path)
    assert shlex.split(written) == ["--resume", str(path)]
    said = re.fullmatch(r"go on with fit\(\.\.\., resume=(.*)\)\.", in_arguments(f"go on with {written}."))
    assert said is not None and ast.literal_eval(said[1]) == str(path)
