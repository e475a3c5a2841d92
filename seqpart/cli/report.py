"""`seqpart report DIR`: the directory of a run as one HTML page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from seqpart.errors import OptionError
from seqpart.report.page import document
from seqpart.report.page_data import read_run
from seqpart.store.atomic import write_text
from seqpart.text import refuse_unusable

PAGE = "report.html"


def reported(arguments: Sequence[str]) -> None:
    """Write one HTML page about a run: its plan, memory over time against the limit, losses, where the time went, the proof.

    Of a run that is finished, under way, interrupted or killed. Raises OptionError for what is no run's directory, StoreError
    where the page cannot be written.
    """
    about = (reported.__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog="seqpart report", description=about)
    parser.add_argument("directory", type=Path, help="the directory of a run, such as one under runs/")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"where to write it (default: DIR/{PAGE})")
    options = parser.parse_args(arguments)
    page = options.output or options.directory / PAGE
    refuse_unusable("--output", page)
    run = read_run(options.directory)
    if page.is_dir():
        raise OptionError(f"--output: {page} is a directory. Give the name of a file.")
    if not page.parent.is_dir():
        raise OptionError(f"--output: {page.parent} is not a directory. Make it, or give another --output.")
    write_text(page, document(run))
    sys.stdout.write(f"{page}: the run is {run.said}\n")
    for words in run.missing:
        sys.stdout.write(f"not there: {words}\n")
