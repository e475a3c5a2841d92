"""One case: a job, a fault, what goes on from it, and the checks. And what all cases of a job share: the undisturbed run."""

import dataclasses
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.campaign import faults, judging, lies, program
from benchmarks.campaign.faults import AFTER_A_KILL, DAMAGE, KINDS, AtTime, Fault
from benchmarks.campaign.jobs import TOO_SMALL, Job
from benchmarks.campaign.starting import COMMAND, Ended, Order, Starter, imports_peak, run_fresh
from benchmarks.campaign.surroundings import Desk
from benchmarks.peers.cell import Cgroup
from seqpart.checkpoint.marker import LOCK, MARKER
from seqpart.store.scratch import PLAN

MOST_STARTS = 6
IMPORTS = 3.0
"""Seconds that a start of its own takes longer, about."""
REFERENCE = "benchmarks.campaign.reference"


@dataclass
class Record:
    """What is kept of a case."""

    case: int
    job: int
    fault: str
    arguments: list[str]
    start: str = "forked"
    struck: bool = False
    outcome: str = ""
    bits: str = ""
    violations: list[str] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    traits: list[str] = field(default_factory=list)


@dataclass
class Undisturbed:
    """What a job ends with when it is left alone. `place` holds its weights, and the plain loops' when they are there."""

    job: Job
    place: Path
    seconds: float
    counts: dict[str, int]
    micro_batch: int
    cut: tuple[Any, ...]
    results: dict[str, Any]
    plain: dict[tuple[int, ...], list[Path]] = field(default_factory=dict)

    @property
    def weights(self) -> Path:
        return self.place / "model.safetensors"


class Worker:
    """Carries out cases one after the other on a desk of its own. `show` prints what every start printed."""

    def __init__(self, root: Path, library: Path, *, show: bool = False) -> None:
        self._library, self._show = library, show
        self.starter = Starter(library)
        self.desk = Desk(root, self.starter)
        self._kept = root.with_name(f"{root.name}-kept")
        try:
            self.desk.lay_out()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        faults.take_away(self.desk.out)
        self.starter.close()

    def neighbours_go_on(self) -> list[str]:
        """The names of runs beside the cases that were lost, and why."""
        self.desk.clear()
        return self.desk.neighbours_go_on()

    # --- starts ---------------------------------------------------------------------------------------------------

    def _start(
        self,
        record: Record,
        job: Job,
        arguments: list[str],
        *,
        line: str | None = None,
        at_time: AtTime | None = None,
        words: list[str] | None = None,
        group: Cgroup | None = None,
        what: str = "goes on",
    ) -> Ended:
        """words: for program.py, beside those of the job."""
        words = [*job.program, *(words or [])]
        order = Order(
            main=program.MODULE if words else COMMAND, arguments=[*words, "--", *arguments] if words else arguments,
            place=self.desk.place, fault=line, preload=self._library, at_sample=at_time, threads=job.threads, group=group,
        )  # fmt: skip
        ended = run_fresh(order) if record.start == "fresh" else self.starter.run(order)
        record.starts.append(
            {"what": what, "code": ended.code, "peak": ended.watched.peak, "seconds": ended.watched.seconds}
            | ({"said": judging.last_words(ended)} if ended.code > 0 else {})
        )
        if self._show:
            print(f"$ python -m {order.main} {' '.join(order.arguments)}    [{what}; {line or 'no fault in the library'}]")
            print(ended.said + ended.complained + f"[exit code {ended.code}, {ended.watched}]", flush=True)
        return ended

    def _arguments(self, job: Job, fault: str = "none") -> list[str]:
        runs, offload = self.desk.runs, self.desk.offload
        if fault == "working directory":
            runs, offload = (Path(os.path.relpath(folder, self.desk.place)) for folder in (runs, offload))
        return dataclasses.replace(job, linked=job.linked or fault == "link led elsewhere").arguments(runs, offload)

    def _way_on(self, job: Job) -> list[str]:
        """A run that was killed before it had written down its options is given them again."""
        written = any((self.desk.out / name).exists() for name in ("job.json", "job.json.seqpart-new"))
        return ["--resume", str(self.desk.out)] if written else self._arguments(job)

    # --- the undisturbed run ----------------------------------------------------------------------------------------

    def settle(self, job: Job, record: Record) -> Undisturbed | None:
        """Find the job's limit, run it undisturbed, and hold it against the plain loop. None where it cannot be run."""
        self.desk.clear()
        refused = self._start(record, job, self._arguments(job), what=f"under {TOO_SMALL}")
        smallest = judging.smallest_named(refused.complained)
        if refused.code != 3 or smallest is None:
            record.outcome = f"refused with exit code {refused.code}"
            record.violations += judging.ending(refused, (2, 3), begun=True)
            if refused.code == 3:
                record.violations.append(f"named limit: the refusal names none: {judging.last_words(refused)}")
            return None
        job = job.under(smallest)
        record.arguments, record.struck = self._arguments(job), True
        self.desk.clear()
        line = faults.counting(self.desk.ledger, self.desk.around)
        ended = self._start(record, job, record.arguments, line=line, what="undisturbed")
        record.violations += judging.memory(ended, job.limit or 0, job.ram_bytes)
        if ended.code == 2:  # a job that cannot be: one partition and recovery, say
            record.outcome = "refused with exit code 2"
            record.violations += judging.ending(ended, (2,), begun=True)
            return None
        if ended.code:
            record.outcome = "did not end"
            record.violations += judging.ending(ended, (0,), begun=True)
            record.violations.append(f"named limit: exit code {ended.code} at {job.limit}, the refusal had named {smallest}")
            return None
        return self._keep(job, record, ended)

    def _keep(self, job: Job, record: Record, ended: Ended) -> Undisturbed:
        out, place = self.desk.out, self._kept
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name in ("model.safetensors", "plan.json"):
            shutil.copy(out / name, place)
        result = json.loads((out / "result.json").read_text())
        base = Undisturbed(
            job, place, ended.watched.seconds, faults.read_ledger(self.desk.ledger), result["final_micro_batch"],
            judging.cut(judging.plan_of(out)), judging.results(out),
        )  # fmt: skip
        self._check_done(record, base, ended, whole=True)
        self._check_around(record, finished=True)
        record.outcome = "done"
        return base

    # --- a case -------------------------------------------------------------------------------------------------------

    def carry_out(self, base: Undisturbed, fault: Fault, record: Record) -> None:
        self.desk.clear()
        if fault.kind == "cgroup":
            base = self._alone(base, record)
        first = (
            dataclasses.replace(fault, kind="kill at a change", at=0.25 + 0.74 * fault.at)
            if fault.kind in AFTER_A_KILL
            else fault
        )
        ended = self._disturb(record, base, first)
        begun = (self.desk.out / MARKER).exists()
        kind = KINDS[first.kind]
        finished = (self.desk.out / "result.json").exists()
        codes = (*kind.codes, -signal.SIGTERM, -signal.SIGINT) if finished else kind.codes
        record.violations += judging.memory(ended, base.job.limit or 0, base.job.ram_bytes)
        record.violations += judging.ending(ended, codes, begun)
        record.outcome = "went on" if ended.code else ("unharmed" if record.struck else "not struck")
        damaged = self._damage(record, fault) if ended.code and fault.kind in DAMAGE else None
        lie = lies.tell(fault.seed, self.desk.out, self._files()) if ended.code and fault.kind == "changed value" else None
        if fault.kind == "small disk":
            faults.enlarge(self.desk.out)
        done: Ended | None = ended
        if ended.code > 0 and fault.kind in ("cgroup", "changed plan"):
            record.outcome, done = "refused in words", None
        elif ended.code and not ended.hung and lie is not None:
            done = self._go_on_with_a_lie(record, base, lie)
        elif ended.code and not ended.hung:
            done = self._go_on(record, base, list(fault.again), damaged)
        if done is not None and not done.hung:
            self._check_done(record, base, done, whole=len(record.starts) == 1)
        # The change that failed may have been the removal of its homes: the next run does it.
        # Whose homes they are is not known without the marker: they are kept, and told.
        known = MARKER not in {damaged and damaged.name, lie and lie.path.name}
        cleaned = done is not None and not done.code and fault.kind != "EIO on a change" and known
        self.desk.lead_links_back()
        self._check_around(record, finished=cleaned)

    def _disturb(self, record: Record, base: Undisturbed, fault: Fault) -> Ended:
        line = fault.line(base.counts, self.desk.ledger, self.desk.around)
        seconds = base.seconds + (IMPORTS if record.start == "fresh" else 0)
        at_time = AtTime(fault.kind, fault.at * seconds) if fault.kind in (*faults.SIGNALS, "SIGSTOP") else None
        words = fault.words(base.job.updates, *self._targets(fault.kind))
        arguments, what = self._arguments(base.job, fault.kind), line or " ".join([fault.kind, *words])
        record.struck = True
        if fault.kind == "small disk":
            size = int(fault.at * 14 * base.weights.stat().st_size) + 65536
            record.struck = faults.put_disk(self.desk.out, size)
            record.notes.append(f"a disk of {size} bytes" if record.struck else "this machine lets nobody mount")
        if fault.kind == "changed plan":
            text, said = lies.lying_plan(fault.seed, (base.place / "plan.json").read_text())
            arguments = self._with_plan(base.job, text)
            record.notes.append(said)
        with ExitStack() as stack:
            if fault.kind == "neighbour":
                stack.enter_context(faults.neighbour())
            group = stack.enter_context(self._cgroup(fault, base, record)) if fault.kind == "cgroup" else None
            ended = self._start(record, base.job, arguments, line=line, at_time=at_time, words=words, group=group, what=what)
            if group is not None and group.kills:
                record.violations.append(f"cgroup: the kernel killed {group.kills} times")
        (self.desk.place / PLAN).unlink(missing_ok=True)
        if line is not None:
            record.struck = bool(faults.read_ledger(self.desk.ledger)["struck"])
        elif at_time is not None:
            record.struck = at_time.struck
        return ended

    def _targets(self, kind: str) -> list[Path]:
        """What a callback does it with."""
        around = self.desk.around
        return {
            "working directory": [self.desk.root / "elsewhere"], "link led elsewhere": [self.desk.precious, *self.desk.links],
            "second fit": [around / "second"],
        }.get(kind, [])  # fmt: skip

    def _alone(self, base: Undisturbed, record: Record) -> Undisturbed:
        """Under about the smallest limit of a process of its own, which holds less than one that was forked."""
        job = dataclasses.replace(base.job, limit=imports_peak())
        needed = judging.needed(self._start(record, job, self._arguments(job), what="under what importing takes").complained)
        return base if needed is None else dataclasses.replace(base, job=dataclasses.replace(job, limit=needed * 11 // 10))

    @contextmanager
    def _cgroup(self, fault: Fault, base: Undisturbed, record: Record) -> Iterator[Cgroup | None]:
        # One in which not even torch can be imported ends as everything does there.
        size = max(imports_peak() * 107 // 100, (base.job.limit or 0) * fault.value // 100)
        with faults.cgroup(size) as group:
            record.struck = group is not None
            record.notes.append(f"a cgroup of {size} bytes, {fault.value} %" if group else "this machine lets nobody make one")
            yield group

    def _with_plan(self, job: Job, plan: str) -> list[str]:
        """Arguments that carry it out."""
        (self.desk.place / PLAN).write_text(plan)
        words = self._arguments(job)
        for option in ("--partitions", "--micro-batch-size"):
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
        return [*words, "--plan", PLAN]

    def _damage(self, record: Record, fault: Fault) -> Path | None:
        """Of the files that the killed run has left, its homes elsewhere included."""
        desk, files = self.desk, self._files()
        if (desk.out / "result.json").exists():  # a finished run's results are the user's, and no start looks at them again
            files = [path for path in files if path.name not in judging.RESULTS]
        path = faults.damage(fault, files)
        record.struck = path is not None
        record.notes.append(f"damaged {path.relative_to(desk.around)}" if path is not None else "nothing to damage")
        return path

    def _files(self) -> list[Path]:
        folders = [self.desk.out, *self.desk.homes_elsewhere()]
        return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != LOCK]

    def _go_on_with_a_lie(self, record: Record, base: Undisturbed, lie: lies.Lie) -> Ended | None:
        """Where it is refused, the true file is put there again, and all must be as it was."""
        record.notes.append(lie.said)
        ended = self._start(record, base.job, self._way_on(base.job), what="goes on with the changed value")
        record.violations += judging.memory(ended, base.job.limit or 0, base.job.ram_bytes)
        record.violations += judging.ending(ended, (0, 2, 6), begun=True)
        if ended.code <= 0:
            return ended
        record.outcome = "refused in words, then went on"
        lie.put_right()
        return self._go_on(record, base, [], None)

    def _go_on(self, record: Record, base: Undisturbed, kills: list[float], damaged: Path | None) -> Ended | None:
        """Start until it is done; None where it is lost, which only named damage may bring about.

        A run that was killed when its results were there already says so, with exit code 2.
        """
        arguments = self._way_on(base.job)
        if damaged is not None and damaged.name.startswith("job.json"):
            arguments = ["--resume", str(self.desk.out)]
        had_results = (self.desk.out / "result.json").exists()  # killed behind them
        for _ in range(MOST_STARTS):
            at_time = AtTime("kill", kills.pop() * base.seconds) if kills else None
            ended = self._start(record, base.job, arguments, at_time=at_time)
            record.violations += judging.memory(ended, base.job.limit or 0, base.job.ram_bytes)
            if ended.code == 0:
                return ended
            if ended.code == 2 and "is finished" in ended.complained and (self.desk.out / "result.json").exists():
                record.outcome = "had finished"
                return ended
            if at_time is not None and at_time.struck and ended.code == -signal.SIGKILL and not ended.hung:
                arguments = self._way_on(base.job)
                continue
            if ended.code == 2 and "Start without --resume" in ended.complained and "--resume" in arguments:
                record.notes.append("nothing was saved: begun anew")
                self.desk.lead_links_back()
                arguments = self._arguments(base.job)
                continue
            unmarked = damaged is not None and damaged.name == MARKER
            if unmarked and "files that seqpart did not make" in ended.complained:  # without it nobody can know whose they are
                record.outcome = "refused, nothing touched"
                return None
            if damaged is None or ended.code != 6:
                record.outcome = "did not go on"
                record.violations.append(f"going on: exit code {ended.code}: {judging.last_words(ended)}")
                return None
            record.violations += self._named(ended, damaged, had_results)
            if "Nothing was saved there yet" in ended.complained and "--resume" in arguments:
                record.outcome, arguments = "named, begun anew", self._arguments(base.job)
                continue
            advised = re.search(r"--resume (\S+checkpoint\S*\.json)", ended.complained)
            if advised is None or advised[1].rstrip(".") in arguments:
                record.outcome = "named, its results were there" if had_results else "named, lost"
                return None
            record.outcome = "named, the checkpoint before served"
            arguments = ["--resume", advised[1].rstrip(".")]
        record.violations.append(f"going on: not done after {MOST_STARTS} starts")
        return None

    def _named(self, ended: Ended, damaged: Path, had_results: bool) -> list[str]:
        found = (
            [] if damaged.name in ended.complained else [f"message: {damaged.name} is not named: {judging.last_words(ended)}"]
        )
        if (self.desk.out / "result.json").exists() and not had_results:
            found.append(f"bits: trained on in spite of damage in {damaged.name}")
        return found + (["message: a traceback"] if "Traceback" in ended.complained else [])

    # --- checks of a run that is done -----------------------------------------------------------------------------------

    def _check_done(self, record: Record, base: Undisturbed, ended: Ended, *, whole: bool) -> None:
        out = self.desk.out
        halved = judging.halvings(out)
        if halved:
            record.notes.append(f"went on with micro-batch {halved}")
        if not ended.code:
            found = judging.figures(out, ended, imports_peak() if record.start == "fresh" else 0)
            record.figures = dataclasses.asdict(found)
            problems = judging.proof(found, whole=whole and not halved)
            # A plan that was changed predicts what it says.
            record.violations += [text for text in problems if record.fault != "changed plan" or text.startswith("proof")]
            record.violations += judging.leftovers(out) if record.fault != "EIO on a change" else []
        record.bits, differs = self._bits(record, base, halved)
        record.violations += [f"bits: {text}" for text in differs]

    def _check_around(self, record: Record, *, finished: bool) -> None:
        record.violations += [f"around: {text}" for text in self.desk.changes(finished=finished)[:8]]

    def _bits(self, record: Record, base: Undisturbed, halved: list[int]) -> tuple[str, list[str]]:
        """(what it was compared with, differences)."""
        out = self.desk.out
        final = json.loads((out / "result.json").read_text())["final_micro_batch"]
        if base.job.method == "sil":
            return self._bits_of_sil(record, base, halved)
        sizes = (base.micro_batch, *halved) if halved else (final,)
        if final != sizes[-1]:
            sizes = (*sizes, final)
        differences = [judging.same_tensors(out / "model.safetensors", path) for path in self._plain(base, sizes)]
        problems = []
        if not differences:
            problems.append("no plain loop to compare with: it failed")
        elif all(differences):
            problems.append(f"not those of a plain loop with micro-batch {', then '.join(map(str, sizes))}: {differences[0]}")
        if sizes == (base.micro_batch,):
            problems += self._same_file(base.weights, base.results)
        return "plain loop", problems

    def _same_file(self, weights: Path, results: dict[str, Any]) -> list[str]:
        out = self.desk.out
        problems = []
        if (out / "model.safetensors").read_bytes() != weights.read_bytes():
            problems.append("the weights file is not that of the undisturbed run")
        if (found := judging.results(out)) != results:
            problems.append(f"losses or accuracy are not those of the undisturbed run: {found} and {results}")
        return problems

    def _bits_of_sil(self, record: Record, base: Undisturbed, halved: list[int]) -> tuple[str, list[str]]:
        out = self.desk.out
        if halved:
            return "not compared: the micro-batch was halved on the way", []
        if record.fault == "none":
            return "", []
        if judging.cut(plan := judging.plan_of(out)) == base.cut:
            return "undisturbed run", self._same_file(base.weights, base.results)
        # Measured anew, the runtime was a little larger or smaller: the same plan, undisturbed.
        mine = self._kept / "another"
        shutil.rmtree(mine, ignore_errors=True)
        shutil.move(out, mine)
        self._start(record, base.job, self._with_plan(base.job, json.dumps(plan)), what="undisturbed, with the same plan")
        (self.desk.place / PLAN).unlink()
        same = (out / "model.safetensors").exists() and (
            (out / "model.safetensors").read_bytes() == (mine / "model.safetensors").read_bytes()
        )
        return "undisturbed run of the same plan", [] if same else ["not those of an undisturbed run of the same plan"]

    def _plain(self, base: Undisturbed, sizes: tuple[int, ...]) -> list[Path]:
        """Weights of plain loops: made once for each list of micro-batches."""
        if sizes not in base.plain:
            stem = "-".join(map(str, sizes))
            target, words = base.place / f"plain-{stem}", ",".join(map(str, sizes))
            order = Order(
                arguments=[str(target), words, *base.job.program, "--", *base.job.options, "--mem-limit", "2GB"],
                place=self.desk.place, main=REFERENCE, threads=base.job.threads,
            )  # fmt: skip
            ended = self.starter.run(order)
            if self._show:
                print(f"[plain loop, micro-batch {words}: exit code {ended.code} {ended.complained}]", flush=True)
            found = sorted(base.place.glob(f"plain-{stem}-*.safetensors")) if not ended.code else []
            base.plain[sizes] = found
        return base.plain[sizes]


def drawn_start(seed: int, case: int, fault: Fault) -> str:
    """One in eight is a process of its own, as a user starts it, and each in a cgroup, which is charged what it imports. But
    imports allocate, and theirs are not to fail."""
    fresh = Random(f"{seed} start {case}").random() < 1 / 8 and fault.kind != "failed allocation"
    return "fresh" if fresh or fault.kind == "cgroup" else "forked"
