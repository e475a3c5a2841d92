"""An error names arguments in Python, and flags in the command: one message, written once."""

import pytest
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, DoesNotFit, OptionError, SeqpartError
from tests.test_failures import data

SAID = {
    "--epochs: expected whole numbers": "epochs: expected whole numbers",
    "Use --method auto.": 'Use method="auto".',
    "--kappa goes with --method sil only": 'kappa goes with method="sil" only',
    "--epochs 5,160 gives 2 values": "epochs=(5, 160) gives 2 values",
    "Give --mem-limit 623MB, or --micro-batch-size 12.": 'Give mem_limit="623MB", or micro_batch_size=12.',
    "a smaller --mem-limit, or --method streamed --partitions 2.": 'a smaller mem_limit, or method="streamed" partitions=2.',
    "(--save-every never).": '(save_every="never").',
    "go on with --resume runs/my--run/a.b and another --lr": 'go on with resume="runs/my--run/a.b" and another lr',
    "--resume them, or remove them": "resume them, or remove them",
    "--device cuda:1: none": 'device="cuda:1": none',
    "--lr 1e-3, not --epochs all": 'lr=1e-3, not epochs="all"',
    "/my/--odd/place": "/my/--odd/place",
    "Give the same --data": "Give the same train",
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
