"""tools/write_optimizers.py: the table of docs/optimizers.md says what is so."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytorch_optimizer")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import write_optimizers

LINES = write_optimizers.TARGET.read_text().partition(write_optimizers.MARKS[0])[2].partition(write_optimizers.MARKS[1])[0]
TABLE = {name: tuple(rest) for name, *rest in re.findall(r"^\| `(.+?)` \| (.*?) \| (.+) \|$", LINES, re.MULTILINE)}
KINDS = dict(write_optimizers.kinds())
FIRST_OF_ITS_KIND = list(
    {(nbytes.partition(".")[0], words): name for name, (nbytes, words) in reversed(TABLE.items())}.values()
)


def test_no_optimizer_of_the_table_differs_from_a_plain_loop():
    assert len(TABLE) > 120
    assert [name for name, (_, words) in TABLE.items() if "same bits" not in words and "refused" not in words] == []
    assert sum("streamed: same bits" in words for _, words in TABLE.values()) >= 100


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("name", ["torch.optim.NAdam", "pytorch_optimizer.ScheduleFreeSGD", "pytorch_optimizer.Prodigy"])
@pytest.mark.few(1)
def test_the_table_says_what_a_run_finds(name):
    assert write_optimizers.verdict(write_optimizers.built_of(KINDS[name])) == TABLE[name]


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("name", FIRST_OF_ITS_KIND)
def test_the_table_says_what_runs_find(name):
    """One of those with as many whole bytes and the same words; the tool, which writes the table, runs all of them."""
    assert write_optimizers.verdict(write_optimizers.built_of(KINDS[name])) == TABLE[name]
