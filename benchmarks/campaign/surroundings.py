"""What lies around a run and must stay as it is: other runs that can go on, files of the user's, and links that lead to them.

DESK/around/runs/out           the run under test; `runs-link` leads to `runs`
DESK/around/runs/own           a killed run with a checkpoint
DESK/around/runs/elsewhere     another, whose homes are in DESK/around/offload
DESK/around/precious/moved     a third, moved away from its place; its homes are in DESK/around/offload too
DESK/around/precious           the user's files, under names like ours; links in `runs` and `offload` lead there
DESK/elsewhere                 an empty directory; DESK/place is the working directory
"""

import hashlib
import json
import os
import shutil
import signal
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.campaign import faults
from benchmarks.campaign.jobs import MODULE, words
from benchmarks.campaign.program import lead
from benchmarks.campaign.starting import Order, Starter

NEIGHBOUR = [
    "--data", f"{MODULE}:features_150", "--model", f"{MODULE}:normed_32_3", "--method", "streamed", "--mem-limit", "450MB",
    "--partitions", "2", "--epochs", "1", "--batch-size", "25", "--save-every", "1",
]  # fmt: skip
DIED = 0.6
"""The share of its changes of files after which a neighbour is killed: it has two checkpoints then."""
LIKE_OURS = (
    "block-00000.1.safetensors",
    "block-00000.1.sums.json",
    "train-00000.1.safetensors",
    "notes.part",
    "thesis.safetensors",
)
MARKER = {"made by": "seqpart", "state": "failed", "pid": 1, "time": "2026-01-01 00:00:00"}


@dataclass
class Desk:
    """A worker's own directory: made once, looked at after every case."""

    root: Path
    starter: Starter | None
    was: dict[str, str] = field(default_factory=dict)
    _weights: bytes = b""
    _dies_at: int = 0

    @property
    def _starter(self) -> Starter:
        assert self.starter is not None
        return self.starter

    @property
    def place(self) -> Path:
        return self.root / "place"

    @property
    def around(self) -> Path:
        return self.root / "around"

    @property
    def runs(self) -> Path:
        return self.around / "runs"

    @property
    def offload(self) -> Path:
        return self.around / "offload"

    @property
    def precious(self) -> Path:
        return self.around / "precious"

    @property
    def out(self) -> Path:
        return self.runs / "out"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    def lay_out(self) -> None:
        self.make_folders()
        self._whole_neighbour()
        for name in ("own", "elsewhere", "moved"):
            self._neighbour(name)
        (self.runs / "moved").rename(self.precious / "moved")
        self.lay_out_files()
        self.was = self.state()

    def make_folders(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        for folder in (self.place, self.runs, self.offload, self.precious):
            folder.mkdir(parents=True)
        (self.place / "words.txt").write_text(words(0))
        (self.root / "elsewhere").mkdir()
        for link, target in self.links.items():
            link.symlink_to(target)

    @property
    def links(self) -> dict[Path, str]:
        return {self.around / f"{name}-link": name for name in ("runs", "offload")}

    def lead_links_back(self) -> None:
        for link, target in self.links.items():
            lead([link], target)

    def _whole_neighbour(self) -> None:
        """What a neighbour ends with that nobody kills, and its changes of files."""
        arguments = [*NEIGHBOUR, "--output-dir", str(self.out)]
        line = faults.counting(self.ledger, self.around)
        ended = self._starter.run(Order(arguments=arguments, place=self.place, fault=line))
        if ended.code:
            raise RuntimeError(f"the neighbour did not train: {ended.code} {ended.complained}")
        self._weights = (self.out / "model.safetensors").read_bytes()
        self._dies_at = int(DIED * faults.read_ledger(self.ledger)["changes"])
        shutil.rmtree(self.out)

    def _neighbour(self, name: str) -> None:
        offload = [] if name == "own" else ["--offload-dir", str(self.offload)]
        order = Order(
            arguments=[*NEIGHBOUR, "--output-dir", str(self.runs / name), *offload], place=self.place,
            fault=f"kill {self._dies_at} 0 {self.ledger} {self.around}",
        )  # fmt: skip
        ended = self._starter.run(order)
        if ended.code != -signal.SIGKILL or not (self.runs / name / "checkpoint.json").exists():
            raise RuntimeError(f"the neighbour {name} did not die with a checkpoint: {ended.code} {ended.complained}")

    def lay_out_files(self) -> None:
        """The user's files, markers that we did not make, and links."""
        for name in LIKE_OURS:
            (self.precious / name).write_text(f"the user's {name}\n")
        for parent in (self.runs, self.offload):
            # Whoever made this marker, what lies beside it is not ours; a link is never followed.
            for name, marker in (("lure", {}), ("seqpart-lure", {}), ("seqpart-marked", MARKER)):
                (parent / name).mkdir()
                (parent / name / "seqpart-run.json").write_text(json.dumps(marker))
                (parent / name / "homes").symlink_to(self.precious)
                (parent / name / "rows").mkdir()
                (parent / name / "rows" / "thesis.safetensors").write_text("the user's\n")
            (parent / "notes.txt").write_text("the user's\n")
            (parent / "weights.safetensors").symlink_to(self.precious / "thesis.safetensors")
            old = parent / ".probe-report"
            old.write_text("the user's\n")
            os.utime(old, (time.time() - 3600,) * 2)
            for pid in (os.getpid(), 1):
                (parent / f".probe-{pid}").symlink_to(self.precious / "thesis.safetensors")

    def state(self) -> dict[str, str]:
        """What every path is that a run must leave alone: type, mode, size, time of the last change, content or target."""
        ours = {self.out, self.place / "said", self.place / "complained", self.ledger}
        found = {}
        for folder, names, files in os.walk(self.root):
            here = Path(folder)
            names[:] = [name for name in names if here / name not in ours]
            for name in (*names, *files):
                path = here / name
                if path not in ours:
                    found[str(path.relative_to(self.root))] = _state_of(path)
        return found

    def homes_elsewhere(self) -> list[Path]:
        """Directories of the run under test in `offload`."""
        return [path for path in self.offload.iterdir() if str(path.relative_to(self.root)) not in self.was]

    def changes(self, *, finished: bool = True) -> list[str]:
        """What has changed since `lay_out`. A run that has not finished may have its homes in `offload`."""
        now = self.state()
        if not finished:
            own = [str(path.relative_to(self.root)) for path in self.homes_elsewhere() if path.name.startswith("seqpart-")]
            now = {path: state for path, state in now.items() if not path.startswith(tuple(own))} if own else now
        # A start that was killed the moment it had made its directory leaves it empty: nobody can say whose that is.
        elsewhere = [path for path in self.homes_elsewhere() if path.is_dir()]
        bare = {str(path.relative_to(self.root)) for path in elsewhere if not any(path.iterdir())}
        gone = [f"{path} is gone" for path in self.was if path not in now]
        new = [f"{path} is new" for path in now if path not in self.was and path not in bare]
        return gone + new + [f"{path} changed" for path, state in now.items() if self.was.get(path, state) != state]

    def clear(self) -> None:
        """Remove the run under test; after a change lay everything out anew."""
        self.lead_links_back()
        faults.take_away(self.out)
        shutil.rmtree(self.out, ignore_errors=True)
        for path in self.homes_elsewhere():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self.changes():
            self.lay_out()

    def neighbours_go_on(self) -> list[str]:
        """Resume the three neighbours at the end: names of those that do not reach the bits of one that was left alone."""
        lost = []
        for run in (self.runs / "own", self.runs / "elsewhere", self.precious / "moved"):
            ended = self._starter.run(Order(arguments=["--resume", str(run)], place=self.place))
            weights = run / "model.safetensors"
            if ended.code or not weights.exists() or weights.read_bytes() != self._weights:
                lost.append(f"{run.name}: exit code {ended.code} {ended.complained.strip()}")
        return lost


def _state_of(path: Path) -> str:
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        return f"link to {path.readlink()}"
    if stat.S_ISDIR(about.st_mode):
        return f"directory {oct(about.st_mode)}"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"file {oct(about.st_mode)} {about.st_size} {about.st_mtime_ns} {digest}"
