"""tools/write_optimizers.py: the table of docs/optimizers.md says what is so."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import write_optimizers

TABLE = write_optimizers.table()
FIRST_OF_ITS_KIND = list(
    {(row.nbytes.partition(".")[0], row.words): row.name for row in reversed(TABLE.values()) if row.held}.values()
)


def test_no_optimizer_of_the_table_differs_from_a_plain_loop():
    assert len(TABLE) > 200
    known = "same bits", "refused", "not in a plain loop"
    assert [row.name for row in TABLE.values() if "OTHER" in row.words or not any(words in row.words for words in known)] == []
    assert sum("streamed: same bits" in row.words for row in TABLE.values()) >= 180


@pytest.mark.own_process  # the tool forks, for which a process that ran other tests is not fit
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("name", ["torch.optim.NAdam", "timm.optim.Adan", "bitsandbytes.optim.AdamW8bit"])
@pytest.mark.few(1)
def test_the_table_says_what_a_run_finds(name):
    assert write_optimizers.apart(partial(write_optimizers.row_of, name)) == TABLE[name]


@pytest.mark.slow
@pytest.mark.own_process  # the tool forks, for which a process that ran other tests is not fit
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("name", FIRST_OF_ITS_KIND)
def test_the_table_says_what_runs_find(name):
    """One of those with as many whole bytes and the same words; the tool, which writes the table, runs all of them."""
    pytest.importorskip(name.partition(".")[0])
    assert write_optimizers.apart(partial(write_optimizers.row_of, name)) == TABLE[name]
