"""The faults: what each does to a run, drawn from the seed, and what is promised about it.

Faults of single operations come from faults.c, compiled with `cc` at start and loaded before the C library.
"""

import ctypes
import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.campaign.starting import Process
from benchmarks.peers.cell import Cgroup, NoCgroup

SOURCE = Path(__file__).with_name("faults.c")
GOES_ON = "`--resume` reaches the bits of the undisturbed run"
NAMED = "exit code 6 that names the file, and nothing is trained on it; where the file is not needed, the same bits"


@dataclass(frozen=True)
class Kind:
    """`codes` are the exit codes that a run may end with; with -9 and the like the fault itself ends it."""

    what: str
    promise: str
    codes: tuple[int, ...]
    share: int
    """How often it is drawn."""


KINDS = {
    "none": Kind("nothing", "exit code 0, and all checks below", (0,), 0),
    "kill": Kind("SIGKILL at some time, up to three times in a row", GOES_ON, (-signal.SIGKILL, 0), 3),
    "kill at a change": Kind("SIGKILL before the K-th change of a file", GOES_ON, (-signal.SIGKILL, 0), 4),
    "torn write": Kind("of the K-th write a part reaches the file, then SIGKILL", GOES_ON, (-signal.SIGKILL, 0), 4),
    "SIGTERM": Kind("at some time", f"exit code 130, saved; {GOES_ON}", (130, 0), 2),
    "SIGINT": Kind("at some time", f"exit code 130, saved; {GOES_ON}", (130, 0), 2),
    "SIGHUP": Kind("at some time", f"ends as when killed, or exit code 130; {GOES_ON}", (-signal.SIGHUP, 130, 0), 2),
    "SIGSTOP": Kind("stopped at some time, continued half a second later", "as if nothing had happened", (0,), 1),
    "bit flip": Kind("killed, then one bit of one of its files changed", NAMED, (0, 6), 4),
    "truncation": Kind("killed, then one of its files cut short", NAMED, (0, 6), 3),
    "lost file": Kind("killed, then one of its files removed", NAMED, (0, 6), 2),
    "full disk": Kind("ENOSPC from the K-th change that takes room on", f"exit code 6; {GOES_ON}", (0, 6), 4),
    "small disk": Kind(
        "the run directory is a file system that is too small, and later is not", f"exit code 6; {GOES_ON}", (0, 6), 2
    ),
    "EIO on a change": Kind("the K-th change of a file fails", f"exit code 6; {GOES_ON}", (0, 6), 3),
    "EIO on a read": Kind("the K-th read of a file fails", f"exit code 6; {GOES_ON}", (0, 6), 3),
    "slow disk": Kind("0.2 to 5 ms more for every operation on a file", "as if nothing had happened", (0,), 1),
    "clock jump": Kind("the wall clock jumps by up to ten years, ahead or back", "as if nothing had happened", (0,), 2),
    "neighbour": Kind("another process takes 1.5 GB and writes to it all the time", "as if nothing had happened", (0,), 1),
    "working directory": Kind(
        "at the K-th update the program goes into another directory; half of them are killed later",
        f"as if nothing had happened, though its places are named from the first; {GOES_ON}", (-signal.SIGKILL, 0), 2,
    ),
    "link led elsewhere": Kind(
        "at the K-th update the links above its directories lead to the user's files; half of them are killed later",
        f"as if nothing had happened, and nothing there is touched; {GOES_ON}", (-signal.SIGKILL, 0), 2,
    ),
    "second fit": Kind(
        "at the K-th update another thread calls `fit`",
        "refused in words, the run as if nothing had happened, and RLIMIT_DATA as before at its end", (0,), 2,
    ),
    "cgroup": Kind(
        "a memory cgroup of 93 to 115 % of a limit that just fits",
        "refused in words (exit code 2 or 3), or as if there was none; the kernel kills nothing", (0, 2, 3), 3,
    ),
    "changed value": Kind(
        "killed, then one value of its checkpoint, plan, marker or sums of rows changed, with right checksums",
        "exit code 6 or 2, and with the true file it goes on; or the bits of the undisturbed run", (-signal.SIGKILL, 0), 4,
    ),
    "changed plan": Kind(
        "one value changed in the plan that `--plan` gives",
        "refused in words (exit code 2 or 3), or carried out under the limit to the bits of a plain loop", (0, 2, 3), 2,
    ),
    "failed allocation": Kind(
        "the K-th allocation of 64 KiB or more fails",
        "half the micro-batch, or exit code 4 (3 while it is planned); a library's kernel that does not look whether it was "
        f"given memory may end the process; {GOES_ON}", (0, 3, 4, -signal.SIGSEGV), 3,
    ),
}  # fmt: skip
DAMAGE = ("bit flip", "truncation", "lost file")
AFTER_A_KILL = (*DAMAGE, "changed value")
OF_A_PROGRAM = {"working directory": "chdir", "link led elsewhere": "lead", "second fit": "second"}
"""fault: what a callback does, in program.py"""
SIGNALS = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGHUP}
JUMPS = (-315_360_000, -86_400, -3_600, -30, 30, 3_600, 86_400, 315_360_000)
_LIBRARY = {
    # fault: kind in faults.c, the counter that its K is drawn from
    "kill at a change": ("kill", "changes"), "torn write": ("torn", "writes"), "full disk": ("full", "room"),
    "EIO on a change": ("change", "changes"), "EIO on a read": ("read", "reads"), "slow disk": ("slow", None),
    "clock jump": ("clock", "clocks"), "failed allocation": ("memory", "larges"),
}  # fmt: skip
COUNTERS = ("changes", "room", "writes", "reads", "clocks", "larges", "struck")


@dataclass(frozen=True)
class Fault:
    kind: str
    at: float
    """Where: a share of the run's time, or of the operations that the undisturbed run counted."""
    value: int = 0
    again: tuple[float, ...] = ()
    """Shares of the run's time at which what goes on is killed again."""
    seed: int = 0
    """For what is drawn when the files are known."""

    def line(self, counts: dict[str, int], ledger: Path, under: Path) -> str | None:
        """For faults.c."""
        if self.kind not in _LIBRARY:
            return None
        kind, counter = _LIBRARY[self.kind]
        at = 1 + int(self.at * counts[counter]) if counter else 1
        return f"{kind} {at} {self.value} {ledger} {under}"

    def words(self, updates: int, *targets: Path) -> list[str]:
        """For program.py, of a run of so many updates: what is done at one of them, and perhaps a kill at that or a later one.

        targets: what it is done with.
        """
        if self.kind not in OF_A_PROGRAM:
            return []
        at, random = 1 + int(self.at * updates), Random(self.seed)
        killed = [f"kill={random.randint(at, updates)}"] if self.kind != "second fit" and random.random() < 0.5 else []
        return [":".join([f"{OF_A_PROGRAM[self.kind]}={at}", *map(str, targets)]), *killed]


def counting(ledger: Path, under: Path) -> str:
    return f"count 0 0 {ledger} {under}"


def read_ledger(path: Path) -> dict[str, int]:
    return dict(zip(COUNTERS, struct.unpack(f"{len(COUNTERS)}q", path.read_bytes()), strict=True))


def draw(random: Random, kinds: list[str] | None = None) -> Fault:
    names = kinds or [name for name in KINDS if name != "none"]
    kind = random.choices(names, [KINDS[name].share or 1 for name in names])[0]
    values = {
        "torn write": random.randrange(1000), "full disk": errno.ENOSPC,
        "EIO on a change": errno.EIO, "EIO on a read": errno.EIO,
        "slow disk": random.choice([200, 1000, 5000]), "clock jump": random.choice(JUMPS),
        "cgroup": random.choice([93, 97, 99, 100, 101, 105, 115]),
    }  # fmt: skip
    again = tuple(random.random() for _ in range(random.choice([0, 0, 1, 2]))) if kind.startswith(("kill", "torn")) else ()
    return Fault(kind, random.random(), values.get(kind, 0), again, random.randrange(1 << 30))


def compiled(folder: Path) -> Path:
    """The library, made anew. Raises OSError where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang): the faults of single operations need one.")
    target = folder / "faults.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(target), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{compiler} could not make the library of faults: {done.stderr}")
    ctypes.CDLL(str(target))
    return target


def put_disk(folder: Path, size: int) -> bool:
    """A file system of `size` bytes at `folder`, in memory; whether this machine lets us make one."""
    folder.mkdir(parents=True, exist_ok=True)
    return _mounted(["-t", "tmpfs", "-o", f"size={size},mode=755", "campaign", str(folder)])


def enlarge(folder: Path) -> None:
    _mounted(["-o", "remount,size=1g", str(folder)])


def take_away(folder: Path) -> None:
    """Unmount what `disk` made, if it did."""
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def _mounted(words: list[str]) -> bool:
    return (
        shutil.which("mount") is not None and not subprocess.run(["mount", *words], capture_output=True, check=False).returncode
    )


class AtTime:
    """Sends the fault's signal `seconds` after the start."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds, self._stopped = name, seconds, False
        self.struck = False

    def __call__(self, process: Process, seconds: float) -> None:
        if seconds >= self._seconds and not self.struck:
            self.struck = True
            self._stopped = self._name == "SIGSTOP"
            os.kill(process.pid, signal.SIGSTOP if self._stopped else SIGNALS[self._name])
        if self._stopped and seconds >= self._seconds + 0.5:
            self._stopped = False
            os.kill(process.pid, signal.SIGCONT)


_NEIGHBOUR = """
import os, sys, time
taken = bytearray(1_500_000_000)
print(flush=True)
while True:
    for page in range(0, len(taken), 4096):
        taken[page] = 1
        if not page % (1 << 24):
            time.sleep(0.002)
            if os.getppid() != int(sys.argv[1]):
                sys.exit()
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that takes memory while the run lasts."""
    command = [sys.executable, "-c", _NEIGHBOUR, str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


@contextmanager
def cgroup(size: int) -> Iterator[Cgroup | None]:
    """None where this machine lets us make none."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(Cgroup(size))
        except NoCgroup:
            group = None
        yield group


def damage(fault: Fault, files: list[Path]) -> Path | None:
    """Damage one of a run's files; which one, and where, is drawn. Returns it."""
    random = Random(fault.seed)
    candidates = sorted(path for path in files if path.stat().st_size)
    if not candidates:
        return None
    path = random.choice(candidates)
    size = path.stat().st_size
    if fault.kind == "lost file":
        path.unlink()
    elif fault.kind == "truncation":
        os.truncate(path, random.choice([0, random.randrange(size), size - 1]))
    else:
        # A third of the flips near the beginning, where lengths and headers are.
        at = random.randrange(min(size, 64)) if random.random() < 1 / 3 else random.randrange(size)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))
    return path
