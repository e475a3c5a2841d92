"""The console script `seqpart`, also `python -m seqpart`: says how it is used without loading torch."""

import sys

from seqpart.errors import BadInput

COMMANDS = ("train", "plan", "verify", "report", "doctor")


def console() -> None:
    """`seqpart train`, `plan` (a dry run), `verify`, `report` or `doctor`. Leaves with the exit code."""
    command, *arguments = sys.argv[1:] or [""]
    if command in COMMANDS:
        from seqpart.train import run_command

        sys.exit(run_command(command, arguments))
    asked = command in ("-h", "--help")
    usage = f"usage: seqpart {{{','.join(COMMANDS)}}} [options]; seqpart train --help shows them"
    print(usage, file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else BadInput.exit_code)


if __name__ == "__main__":
    console()
