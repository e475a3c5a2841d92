"""Reads the text of a schedule, as `to_text` writes it."""

import re

from seqpart.errors import ScheduleError
from seqpart.schedule.phase import PhaseKind
from seqpart.schedule.steps import Step, Verb, refuse_misspelt

_WORD = re.compile(rf"\[(?:{'|'.join(kind.value for kind in PhaseKind)}) \d+(?:-\d+)?(?:\.\d+)?\]|\S+")


def parse(text):
    """Returns its steps; phase names count the phases. Raises ScheduleError on any other word."""
    steps, phase = [], -1
    for word in _WORD.findall(text):
        if " " in word:  # only a phase's name has one
            phase += 1
            continue
        match = re.fullmatch(rf"([{''.join(verb.value for verb in Verb)}])(\d+)(?:\.(\d+))?(\+?)", word)
        if not match:
            raise ScheduleError(f"expected a step such as L0, L0+, F0.1, B0.1, U0 or D0; found {word!r}")
        micro_batch = None if match[3] is None else int(match[3])
        steps.append(Step(Verb(match[1]), int(match[2]), micro_batch, max(phase, 0), bool(match[4])))
        refuse_misspelt(steps[-1])
    return steps
