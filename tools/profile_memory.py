"""Train one job by several methods, each in a fresh process watched from outside, and compare memory, time and result.

    python tools/profile_memory.py --mem-limit 620MB --width 1024 --depth 8 --batch-size 256
    python tools/profile_memory.py --mem-limit 300MB --data text:FILE --model gpt --methods full,checkpointed,streamed

All options of `python -m seqpart.train` that describe a job go along (`--model`, `--data`, `--epochs`, `--lr`, ...); every
method gets the same model, initial weights, rows and order. `full`, `checkpointed` (torch.utils.checkpoint, every block) and
`save_on_cpu` are plain PyTorch programs with PyTorch's own settings and no limit: they fit if their peak is below it. On a
GPU they are held to the limit first, and run again without it if that fails, to learn what they ask for.

Writes profile.json (with memory over time and the step that was running), profile.csv, profile.md and profile.png to --out.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling import answer, tables
from profiling.figures import Figures, Run, of_run
from profiling.picture import draw
from profiling.question import Question, Way, asked
from profiling.trace import read as read_steps
from profiling.watching import Gpu, Watched, watched
from rich.console import Console

from seqpart.errors import BadInput, OptionError, SeqpartError

TOOLS = Path(__file__).parent
_TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1073741824"}


class Children:
    """Starts children, one at a time, each in a scratch folder of its own that is removed behind it."""

    def __init__(self, question: Question, folder: Path) -> None:
        self._question, self._folder = question, folder
        self._gpu: Gpu | None = None

    def survey(self) -> dict[str, Any]:
        """What the job is, and what this machine can do. Raises OptionError with the child's words."""
        place, found = self._run(["profiling.survey"], {})
        said = answer.read(place / "answer.json")
        if said.get("status") != answer.DONE:
            raise OptionError(said.get("message") or f"the job cannot be looked at:\n{found.errors}")
        self.knows(said)
        return said

    def knows(self, facts: dict[str, Any]) -> None:
        """What a survey has found, here or in another's hands."""
        self._gpu = Gpu() if facts["device"] == "cuda" else None

    def run(self, way: Way, facts: dict[str, Any]) -> Run:
        """One process of `way`. On a GPU a plain one that fails under the limit is run again without it."""
        if not way.plain:
            return self._one(way, ["profiling.ours", way.name])
        capped = facts["device"] == "cuda"
        run = self._one(way, ["profiling.plain", way.name], str(facts["limit"]) if capped else "none")
        if capped and run.status == answer.OUT_OF_MEMORY:
            free = self._one(way, ["profiling.plain", way.name], "none")
            return free if free.peak > facts["limit"] else run  # only the limit kept it from running
        return run

    def _one(self, way: Way, command: list[str], *more: str) -> Run:
        place, found = self._run(command, _TRIMMED if way.trim else {}, *more)
        return of_run(way, found, answer.read(place / "answer.json"), read_steps(place / "steps.log"))

    def _run(self, command: Sequence[str], settings: dict[str, str], *more: str) -> tuple[Path, Watched]:
        shutil.rmtree(self._folder / "child", ignore_errors=True)
        place = self._folder / "child"
        place.mkdir()
        paths = [str(TOOLS), str(TOOLS.parent), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        module, *words = command
        offload = [] if self._question.job.offload_dir else [f"--offload-dir={place}"]
        if self._gpu is not None:
            self._gpu.start()
        return place, watched(
            [sys.executable, "-m", module, *words, str(place), *more, *self._question.arguments, *offload],
            environment=environment, folder=place, gpu=self._gpu,
        )  # fmt: skip


def profile(question: Question, console: Console) -> list[Figures]:
    """All runs, in turn: a machine that grows slower for a while slows all methods."""
    try:
        question.out.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=question.out, prefix=".work-")
    except OSError as error:
        raise OptionError(f"--out: cannot write to {question.out}: {error.strerror}.") from None
    with scratch as folder:
        children = Children(question, Path(folder))
        facts = children.survey()
        runs: dict[str, list[Run]] = {way.name: [] for way in question.ways}
        for repeat in range(question.repeats):
            for way in question.ways:
                run = children.run(way, facts)
                runs[way.name].append(run)
                console.print(f"{way.name} {repeat + 1}/{question.repeats}: {run.status}, {run.seconds:.1f} s", markup=False)
    return [Figures(way, runs[way.name], facts) for way in question.ways]


def write(found: list[Figures], out: Path, console: Console) -> None:
    (out / "profile.json").write_text(json.dumps(tables.as_json(found)) + "\n")
    (out / "profile.csv").write_text(tables.as_csv(found))
    (out / "profile.md").write_text(tables.markdown(found))
    console.print(tables.terminal(found))
    for note in tables.notes_of(found):
        console.print(note, markup=False)
    drawn = draw(found, out / "profile.png")
    picture = "profile.png" if drawn else 'no picture: pip install -e ".[plot]" brings matplotlib'
    console.print(f"in {out}: profile.json, profile.csv, profile.md, {picture}", markup=False)


def main() -> int:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width; the table needs this much
    try:
        question = asked(sys.argv[1:], __doc__)
        found = profile(question, console)
        write(found, question.out, console)
    except SeqpartError as error:
        print(f"{type(error).__name__}: {error.with_flags}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing was written.", file=sys.stderr)
        return 130
    died = [row.way.name for row in found if row.first.status == "died"]
    return BadInput.exit_code if died else 0


if __name__ == "__main__":
    sys.exit(main())
