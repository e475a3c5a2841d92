"""Which step ran when: written by the process that trains, read by the one that watches it. One clock for both."""

import time
from dataclasses import dataclass
from pathlib import Path

TRAIN, OTHER = "train", "other"


@dataclass(frozen=True)
class Ran:
    """One step: seconds of the machine's monotonic clock, what it was for, its name (`B1.0`)."""

    began: float
    ended: float
    kind: str
    label: str


class StepLog:
    """Lines of `began ended kind label`. A step of training begins where the one before ended: waiting counts too."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w")  # noqa: SIM115 (closed by close)
        self.last = time.monotonic()
        self.training = 0.0
        """Seconds of training steps so far."""

    def start(self) -> None:
        """What went before is nobody's time."""
        self.last = time.monotonic()

    def note(self, label: str, *, trains: bool) -> None:
        """A step has ended now."""
        now = time.monotonic()
        if trains:
            self.training += now - self.last
        self._file.write(f"{self.last:.6f} {now:.6f} {TRAIN if trains else OTHER} {label}\n")
        self.last = now

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[Ran]:
    """The steps in order; a last line that was cut short by the process's end is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 4:
            found.append(Ran(float(words[0]), float(words[1]), words[2], words[3]))
    return found
