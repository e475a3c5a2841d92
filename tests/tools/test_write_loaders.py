"""tools/write_loaders.py: the table of docs/data.md says what is so."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import write_loaders

LINES = write_loaders.TARGET.read_text().partition(write_loaders.MARKS[0])[2].partition(write_loaders.MARKS[1])[0].splitlines()
CASES = {f"{case.library}, {case.what}": case for case in write_loaders.CASES}


def test_no_row_of_the_table_differs_but_where_the_order_is_of_the_clock_or_of_a_count():
    assert sum("| the same | the same |" in line for line in LINES) >= 25
    assert [line for line in LINES if ("OTHERS" in line or "ERROR" in line) and "shuffle`" not in line] == []


@pytest.mark.own_process  # the tool forks, for which a process that ran other tests is not fit
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("name", ["numpy, memory-mapped arrays", "torch, `DataLoader`: a map, `DistributedSampler`"])
@pytest.mark.few(1)
def test_the_table_says_what_runs_find(name):
    case = CASES[name]
    row = write_loaders.apart(partial(write_loaders.row_of, case), 600)
    assert f"| `{case.library}` | {case.what} | {row} |" in LINES
