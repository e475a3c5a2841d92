"""The console script `seqpart`, also `python -m seqpart`: says how it is used without loading torch."""

import sys
from difflib import get_close_matches

from seqpart.errors import BadInput, StoreError
from seqpart.interrupts import nothing_begun_yet
from seqpart.report.terminal import lasting_output

COMMANDS = {
    "train": "train a model under a memory limit: seqpart train --mem-limit 2GB",
    "plan": "print the plan of that and train nothing",
    "verify": "compare training under the limit with full training, every bit",
    "report": "the directory of a run as one HTML page: seqpart report DIR",
    "doctor": "what this machine offers: device, limits, tiers, disk speed, versions",
}
PLANNING = ("train", "plan", "verify")
"""Those that make a plan, which depends on the heap."""


def console() -> None:
    """`seqpart train`, `plan` (a dry run), `verify`, `report` or `doctor`. Leaves with the exit code."""
    command, *arguments = sys.argv[1:] or [""]
    if command in COMMANDS:
        nothing_begun_yet()
        from seqpart.launch.process import prepare_command

        prepare_command(plans=command in PLANNING)
        from seqpart.train import run_command

        sys.exit(run_command(command, arguments))
    asked = command in ("-h", "--help")
    usage = [f"usage: seqpart {{{','.join(COMMANDS)}}} [options]", ""]
    usage += [f"  {name:<8}{does}" for name, does in COMMANDS.items()]
    usage += ["", "seqpart COMMAND --help shows the options of each."]
    if command and not asked:
        near = get_close_matches(command.lower(), COMMANDS, 1) or ["train"] * command.startswith("-")
        message = f"found {command} where a command belongs." if command.startswith("-") else f"unknown command {command!r}."
        usage = [f"{message} Did you mean {near[0]}?" if near else message, "", *usage]
    with lasting_output() as output:
        print("\n".join(usage), file=sys.stdout if asked else sys.stderr)
        output.flush()
    sys.exit(BadInput.exit_code if not asked else StoreError.exit_code if output.lost else 0)


if __name__ == "__main__":
    console()
